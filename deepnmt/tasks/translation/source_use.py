"""How much a model uses its source, measured on some validation sentences.

A deep model can learn the target language alone: its encoder then puts out one common vector at every position, which
cross-attention can only average. Four figures show that:

    source_gain              plain loss with another sentence's source less that with its own, in nats a target token;
                             0: the source is not used
    encoder_common           the share of one common vector in the encoder's output, ‖mean‖² / mean ‖vector‖² over
                             tokens; 1: every token has the same vector
    decoder_common           the same of the decoder's output
    cross_attention_entropy  the entropy of cross-attention divided by log S, its largest value, the mean over layers,
                             heads and target tokens; 1: every source token gets the same weight

The engine runs the sentences as in any validation, and hooks on its modules collect sums. So it works in every layout
without the whole model in one process. No random number is drawn.

`B` sentences, `S` source length, `T` target length, `D` width, `H` heads.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass, fields
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from deepnmt.batch import Batch
from deepnmt.config import Recipe
from deepnmt.data.batching import collate, plan_eval
from deepnmt.data.prepared import PreparedData, Split
from deepnmt.model.attention_weights import AttentionHook
from deepnmt.model.blocks import SIDES, Side
from deepnmt.model.hooks import hooks
from deepnmt.model.sublayers import CrossAttention
from deepnmt.parallel.engine import Engine
from deepnmt.processes.ranks import Ranks
from deepnmt.tokens import PAD

GAIN = 0.2  # nats: over 12 tokens the right source makes a sentence exp(2.4) = 11 times as likely as a wrong one
SENTENCES = 128  # at most, of a validation text
LEAST = 32  # sentences; and a validation takes no more than a sixteenth of its text, so that it costs little
BATCH = 2048  # tokens of a micro-batch


@dataclass(frozen=True)
class SourceUse:
    """The figures above."""

    source_gain: float
    encoder_common: float
    decoder_common: float
    cross_attention_entropy: float

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> SourceUse | None:
        """The figures in a record of a validation; None if it has none, as those of older runs."""
        names = [field.name for field in fields(cls)]
        if not all(name in record for name in names):
            return None
        return cls(*(float(record[name]) for name in names))

    @classmethod
    def mean(cls, uses: Collection[SourceUse]) -> SourceUse | None:
        """The mean of several texts' figures; None of none."""
        if not uses:
            return None
        return cls(*(sum(column) / len(uses) for column in zip(*map(astuple, uses), strict=True)))

    def __str__(self) -> str:
        return (f"{100 * self.encoder_common:.0f} % of the encoder's output is one vector, and another sentence's "
                f"source costs {round(self.source_gain, 2) + 0.0:.2f} nats a target token")


def measure_validation_text(
    recipe: Recipe, data: PreparedData, engine: Engine, ranks: Ranks, sentences: int | None = None
) -> dict[str, SourceUse]:
    """The figures of each corpus of the validation text, by name. Sources are shuffled within a corpus, because the tag
    of another language would tell by itself. Collective.

    Args:
        sentences: at most so many of all corpora together (None: as a validation has them).
    """
    split = data.split("valid").truncated(recipe.model.max_length)
    corpora = rows_of_corpora(data)
    if sentences is None:
        sentences = min(SENTENCES, max(LEAST, len(split) // 16))
    each = max(2, sentences // len(corpora))
    return {name: measure_source_use(engine, recipe, split, rows, ranks, each)
            for name, rows in corpora.items() if len(rows) > 1}


def rows_of_corpora(data: PreparedData) -> dict[str, range]:
    """The sentences of each corpus of the validation text, by name."""
    rows: dict[str, range] = {}
    begin = 0
    for name, size in data.corpora("valid").items():
        rows[name] = range(begin, begin + size)
        begin += size
    return rows


def measure_source_use(
    engine: Engine, recipe: Recipe, split: Split, rows: range, ranks: Ranks, sentences: int = SENTENCES
) -> SourceUse:
    """The figures of an engine's present weights on up to `sentences` of these sentences, of which there are two or
    more. The same on every process. Collective."""
    own, shuffled = paired_batches(split, rows, sentences, BATCH, ranks.device)
    mine = own[engine.data_rank::engine.data_world]
    mine_shuffled = shuffled[engine.data_rank::engine.data_world]
    spare = []
    if len(mine) < math.ceil(len(own) / engine.data_world):  # all processes pass equally many
        spare = own[:1]
    with _watching(engine.module, mine) as sums:
        results = engine.evaluate([*mine, *spare])
    shuffled_results = engine.evaluate([*mine_shuffled, *spare])
    losses = [sum(nll for _, nll in results[:len(mine)]), sum(nll for _, nll in shuffled_results[:len(mine)])]
    return _figures(sums, losses, {side: recipe.model.shape(side).width for side in SIDES}, ranks)


def paired_batches(
    split: Split, rows: range, sentences: int, tokens: int, device: torch.device
) -> tuple[list[Batch], list[Batch]]:
    """Micro-batches of up to `sentences` of these sentences, spread evenly over their lengths; and the same targets
    with shuffled sources: each sentence gets that of its neighbour in the order of length.

    Args:
        tokens: about so many, on the longer side, in a micro-batch.
    """
    plan = plan_eval(split.src_lengths[rows.start:rows.stop], split.trg_lengths[rows.start:rows.stop], tokens)
    chosen = np.linspace(0, len(plan.order) - 1, min(sentences, len(plan.order))).astype(np.int64)
    order = rows.start + plan.order[chosen]
    before = np.roll(order, 1)
    own, shuffled = [], []
    start = 0
    while start < len(order):
        longest = max(int(split.src_lengths[order[start]]), int(split.trg_lengths[order[start]]))
        end = start + max(1, tokens // longest)
        batch = collate(split, order[start:end], 0, device)
        neighbours = collate(split, before[start:end], 0, device)
        own.append(batch)
        shuffled.append(batch.with_tensors(src=neighbours["src"], src_lengths=neighbours["src_lengths"]))
        start = end
    return own, shuffled


@contextmanager
def _watching(module: nn.Module, batches: Sequence[Batch]) -> Iterator[dict[str, Tensor]]:
    """Sums over the tokens of these micro-batches, the next that the module runs, as far as it holds the layers."""
    sums: dict[str, Tensor] = {}

    def add(name: str, value: Tensor) -> None:
        if name in sums:
            value = sums[name] + value
        sums[name] = value

    def see_output(side: Side, turns: Iterator[Batch], _module: nn.Module, _inputs: Any, output: Tensor) -> None:
        batch = next(turns, None)
        if batch is not None:
            vectors = output[_tokens(batch, side)].double()  # [N, D]
            add(f"{side} vectors", vectors.sum(0))
            add(f"{side} squares", vectors.square().sum())
            add(f"{side} tokens", vectors.new_full((), len(vectors)))

    def see_scores(turns: Iterator[Batch], scores: Tensor) -> None:
        batch = next(turns, None)
        if batch is not None:
            lengths = batch["src_lengths"]
            counted = _tokens(batch, "decoder") & (lengths > 1)[:, None]  # log 1 is 0
            entropy = torch.special.entr(scores.softmax(3)).sum(3).mean(1) / lengths.log()[:, None]  # [B, T]
            add("entropy", entropy[counted].double().sum())
            add("attentions", counted.sum().double())

    parts = dict(module.named_modules())
    with hooks() as handles:
        for side in SIDES:
            if f"{side}.norm" in parts:
                handles.append(parts[f"{side}.norm"].register_forward_hook(partial(see_output, side, iter(batches))))
        for part in parts.values():
            if isinstance(part, CrossAttention):
                handles += AttentionHook(partial(see_scores, iter(batches))).attach(part)
        yield sums


def _tokens(batch: Batch, side: Side) -> Tensor:
    """Where a side has tokens, not padding: boolean [B, S] or [B, T]."""
    src, lengths = batch["src"], batch["src_lengths"]
    if side == "decoder":
        return batch["trg_out"] != PAD
    return torch.arange(src.size(1), device=src.device) < lengths[:, None]


def _figures(sums: dict[str, Tensor], losses: Sequence[float], widths: dict[Side, int], ranks: Ranks) -> SourceUse:
    """The figures from all processes' sums; a process without a layer has none of it."""
    none = torch.zeros((), dtype=torch.float64)
    singles = ["decoder tokens", "encoder tokens", "encoder squares", "decoder squares", "entropy", "attentions"]
    values = [*losses, *(float(sums.get(name, none)) for name in singles)]
    for side in SIDES:
        values += sums.get(f"{side} vectors", none.expand(widths[side])).tolist()
    own, shuffled, *values = ranks.sum(values)
    total = dict(zip(singles, values))
    vectors = np.split(np.array(values[len(singles):]), [widths["encoder"]])
    shares = []
    for side, vector in zip(SIDES, vectors, strict=True):
        shares.append(_share(float(vector @ vector), total[f"{side} tokens"] * total[f"{side} squares"]))
    gain = (shuffled - own) / total["decoder tokens"]
    return SourceUse(gain, shares[0], shares[1], _share(total["entropy"], total["attentions"]))


def _share(part: float, whole: float) -> float:
    return part / whole if whole else math.nan
