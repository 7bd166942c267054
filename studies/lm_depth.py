"""Language models of 6 and 16 layers by Post-LN, Pre-LN and B2T, beside a plain PyTorch loop of nanoGPT's shape.

All read the same blocks in the same order, and so the same number of tokens. Each run is a line of a file; a run that
is there is not made again. The papers' own comparison is B2T's table 3.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from deepnmt.batch import Batch
from deepnmt.config import Recipe, check_recipe
from deepnmt.data.batching import START, plan_eval
from deepnmt.data.examples import ExampleStream
from deepnmt.files import make_parent_folder, markdown_table
from deepnmt.model.loss import LossSums
from deepnmt.optim.schedules import learning_rate
from deepnmt.parallel.build import start_engine
from deepnmt.parallel.ds_config import Layout
from deepnmt.processes.ranks import Ranks
from deepnmt.tasks.language_model.task import figures
from deepnmt.tasks.language_model.text import PreparedText, blocks_of
from deepnmt.tokens import PAD
from studies.plots import Panel, plot_study
from studies.runs import Record, fingerprint_of, make_missing

SYSTEMS, PLAIN = ("post_ln", "pre_ln", "b2t"), "nanogpt"
WIDTH, HEADS, BLOCK, VOCAB = 128, 4, 128, 4000
CLIP = 1.0
POINTS = 20  # of a curve, each the mean training loss since the one before
NAMES = {"post_ln": "Post-LN", "pre_ln": "Pre-LN", "b2t": "B2T", PLAIN: "plain PyTorch"}


class NanoGPT(nn.Module):
    """Pre-LN, GELU, learned positions, one table for input and output, normal initial weights of 0.02, those of the
    outputs of sub-layers divided by √(2L): the choices of nanoGPT, in PyTorch's own layers."""

    def __init__(self, vocab: int, layers: int, dropout: float) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocab, WIDTH), nn.Embedding(BLOCK, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, dropout, "gelu", batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, layers, nn.LayerNorm(WIDTH), enable_nested_tensor=False)
        self.dropout = nn.Dropout(dropout)
        for name, weight in self.named_parameters():
            if weight.ndim > 1:
                deep = name.endswith(("out_proj.weight", "linear2.weight"))
                nn.init.normal_(weight, std=0.02 / (math.sqrt(2 * layers) if deep else 1))

    def forward(self, batch: Batch) -> LossSums:
        given, targets = batch["trg_in"], batch["trg_out"]
        x = self.dropout(self.tokens(given) + self.positions.weight[: given.size(1)])
        mask = nn.Transformer.generate_square_subsequent_mask(given.size(1))
        hidden: Tensor = self.layers(x, mask=mask, is_causal=True)
        loss = F.cross_entropy(F.linear(hidden, self.tokens.weight).flatten(0, 1), targets.flatten(), ignore_index=PAD,
                               reduction="sum")
        return LossSums(loss, loss.detach())


def recipe_of(folder: Path, train: str, valid: str, system: str, layers: int, seed: int, updates: int, rate: float
              ) -> Recipe:
    """A run's recipe; that of the plain loop says the text and the schedule."""
    block = "pre_ln" if system == PLAIN else system
    return check_recipe({
        "run": str(folder / "run"), "seed": seed, "task": "language_model",
        "data": {"folder": str(folder / "prepared"), "train": [train], "valid": [valid], "block": BLOCK},
        "vocab": {"kind": "bpe", "size": VOCAB}, "batch": {"tokens": 16 * BLOCK},
        "model": {"width": WIDTH, "heads": HEADS, "ffn": 4 * WIDTH, "dropout": 0.1, "max_length": BLOCK,
                  "encoder": None, "decoder": {"block": block, "layers": layers}},
        "optimizer": {"lr": rate}, "schedule": {"name": "inverse_sqrt", "warmup": max(1, updates // 10)},
        "train": {"updates": updates, "clip": CLIP}, "parallel": {"ds_config": None}}, "the study")


def _batches(recipe: Recipe, data: PreparedText) -> Iterator[Batch]:
    stream = ExampleStream(blocks_of(recipe, data, "train"), recipe.batch.tokens, recipe.seed)
    position = START
    while True:
        update = stream.update(position, 1, 0, 1, torch.device("cpu"))
        yield update.batches[0]
        position = update.next


def measure(recipe: Recipe, system: str) -> dict[str, Any]:
    """Trains one model; returns its curve, and its figures on the validation text."""
    data = PreparedText.open(recipe)
    batches, size, began = _batches(recipe, data), data.vocab.size, time.process_time()
    step, losses = (_plain if system == PLAIN else _ours)(recipe, size)
    every = max(1, recipe.train.updates // POINTS)
    tokens, diverged, recent, curve = 0, False, [], []
    for update in range(1, recipe.train.updates + 1):
        batch = next(batches)
        loss = step(batch, learning_rate(recipe.optimizer.lr, recipe.schedule, update, recipe.train.updates))
        diverged = not math.isfinite(loss)
        tokens += batch.tokens
        if diverged:
            break
        recent.append(loss / batch.tokens)
        if update % every == 0:
            curve.append((update, round(fmean(recent), 4)))
            recent = []
    blocks = blocks_of(recipe, data, "valid")
    plan = plan_eval(blocks.src_lengths, blocks.trg_lengths, recipe.batch.tokens)
    nll = sum(losses(blocks.batch(plan[index], 0, torch.device("cpu"))) for index in range(len(plan)))
    return {"system": system, "layers": recipe.model.decoder.layers, "seed": recipe.seed, "tokens": tokens,
            "updates": recipe.train.updates, "rate": recipe.optimizer.lr, "diverged": diverged,
            "curve": curve, "cpu_seconds": round(time.process_time() - began, 1), **figures(nll, data.counts("valid"))}


Step = Callable[[Batch, float], float]
Losses = Callable[[Batch], float]


def _ours(recipe: Recipe, vocab: int) -> tuple[Step, Losses]:
    """An update and the plain loss of a micro-batch. Both return a sum over tokens, in nats."""
    engine = start_engine(recipe, Layout(), (vocab, vocab), Ranks.alone())

    def step(batch: Batch, rate: float) -> float:
        stats = engine.train_step([batch], batch.tokens, rate)
        return stats.loss if stats.applied else math.inf

    return step, lambda batch: engine.evaluate([batch])[0][1]


def _plain(recipe: Recipe, vocab: int) -> tuple[Step, Losses]:
    torch.manual_seed(recipe.seed)
    model = NanoGPT(vocab, recipe.model.decoder.layers, recipe.model.dropout)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.1)

    def step(batch: Batch, rate: float) -> float:
        model.train()
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.zero_grad()
        loss = model(batch).loss
        (loss / batch.tokens).backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        return float(loss.detach())

    @torch.no_grad()
    def losses(batch: Batch) -> float:
        model.eval()
        return float(model(batch).nll)

    return step, losses


def study(train: str, valid: str, output: Path, updates: int, seeds: int, depths: list[int], rate: float,
          seconds: float) -> str:
    """Makes the runs that are not in `output` yet, and returns the table of all that it has of this text.

    Args:
        train, valid: text files.
        seconds: after which no run is started.
    """
    runs: list[Record] = []
    for seed in range(1, seeds + 1):
        for layers in depths:
            for system in (*SYSTEMS, PLAIN):
                runs.append({"system": system, "layers": layers, "seed": seed, "updates": updates, "rate": rate})
    make_parent_folder(output, "--output")
    in_folder = partial(recipe_of, output.parent / "lm_depth", train, valid)
    first = in_folder(**runs[0])
    PreparedText.prepare(first)
    varied = ("model.decoder.block", "model.decoder.layers", "train.updates", "optimizer.lr", "schedule.warmup")
    fingerprint = fingerprint_of(first, PreparedText.open(first).fingerprint, varied)
    return _table(make_missing(output, runs, lambda run: measure(in_folder(**run), run["system"]), fingerprint, seconds,
                               "--output"))


def _records(output: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in output.read_text(encoding="utf-8").splitlines()] if output.exists() else []


def _table(runs: Sequence[Record]) -> str:
    """Bits a byte of the seeds, in Markdown."""
    groups: dict[tuple[str, int, int, float], list[dict[str, Any]]] = {}
    for record in runs:
        key = record["system"], record["layers"], record["updates"], record["rate"]
        groups.setdefault(key, []).append(record)
    rows = [("system", "layers", "rate", "tokens", "bits a byte, by seed", "mean ± sd", "CPU seconds a run")]
    for (system, layers, _, rate), records in groups.items():
        ended = [record["bits_per_byte"] for record in records if not record["diverged"]]
        by_seed = ["diverged" if record["diverged"] else f"{record['bits_per_byte']:.3f}" for record in records]
        spread = f" ± {stdev(ended):.3f}" if len(ended) > 1 else ""
        mean = f"{fmean(ended):.3f}{spread}" if ended else ""
        tokens = round(fmean(record["tokens"] for record in records))
        rows.append((NAMES[system], str(layers), f"{rate:g}", f"{tokens:,}", ", ".join(by_seed), mean,
                     f"{fmean(record['cpu_seconds'] for record in records):.0f}"))
    return markdown_table(rows)


def plot(output: Path, picture: Path) -> None:
    """Draws the training losses of the first seed, a panel for each depth."""
    panels = []
    records = [record for record in _records(output) if record["seed"] == 1]
    for layers in sorted({record["layers"] for record in records}):
        group = {NAMES[record["system"]]: record for record in records if record["layers"] == layers}
        panels.append(Panel(f"{layers} layers", {name: record["curve"] for name, record in group.items()},
                            {name: f"{record['bits_per_byte']:.2f} bits a byte" for name, record in group.items()}, {}))
    plot_study(panels, picture, "Language models: training loss and bits a byte of other text")
