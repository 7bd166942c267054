"""Language models of 6 and 16 layers by Post-LN, Pre-LN and B2T, beside a plain PyTorch loop of nanoGPT's shape.

All read the same blocks in the same order, and so the same number of tokens. Each run is a line of a file; a run that
is there is not made again. The papers' own comparison is B2T's table 3.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from deepnmt.batch import Batch
from deepnmt.config import Recipe, check_recipe
from deepnmt.data.batching import START, plan_eval
from deepnmt.files import drop_partial_line, table
from deepnmt.model.loss import LossSums
from deepnmt.optim.schedules import learning_rate
from deepnmt.parallel.build import start_engine
from deepnmt.parallel.settings import Layout
from deepnmt.processes.ranks import Ranks
from deepnmt.tasks.language_model.task import figures
from deepnmt.tasks.language_model.text import BlockStream, PreparedText, blocks_of, open_text, prepare_text
from deepnmt.tokens import PAD

DEPTHS, SYSTEMS, PLAIN = (6, 16), ("post_ln", "pre_ln", "b2t"), "nanogpt"
WIDTH, HEADS, BLOCK, VOCAB = 128, 4, 128, 4000
CLIP = 1.0


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
    stream = BlockStream(blocks_of(recipe, data, "train"), recipe.batch.tokens, recipe.seed)
    position = START
    while True:
        update = stream.update(position, 1, 0, 1, torch.device("cpu"))
        yield update.batches[0]
        position = update.next


def measure(recipe: Recipe, system: str) -> dict[str, Any]:
    """Trains one model; returns its figures on the validation text."""
    data = open_text(recipe)
    batches, size, began = _batches(recipe, data), data.vocab.size, time.monotonic()
    step, losses = (_plain if system == PLAIN else _ours)(recipe, size)
    tokens, diverged = 0, False
    for update in range(1, recipe.train.updates + 1):
        batch = next(batches)
        rate = learning_rate(recipe.optimizer.lr, recipe.schedule, update, recipe.train.updates)
        diverged = not math.isfinite(step(batch, rate))
        tokens += batch.tokens
        if diverged:
            break
    blocks = blocks_of(recipe, data, "valid")
    plan = plan_eval(blocks.src_lengths, blocks.trg_lengths, recipe.batch.tokens)
    nll = sum(losses(blocks.batch(plan[index], 0, torch.device("cpu"))) for index in range(len(plan)))
    return {"system": system, "layers": recipe.model.decoder.layers, "seed": recipe.seed, "tokens": tokens,
            "updates": recipe.train.updates, "rate": recipe.optimizer.lr, "diverged": diverged,
            "seconds": round(time.monotonic() - began, 1), **figures(nll, data.counts("valid"))}


Step = Callable[[Batch, float], float]
Losses = Callable[[Batch], float]


def _ours(recipe: Recipe, vocab: int) -> tuple[Step, Losses]:
    """An update, which returns the norm of its gradient, and the plain loss of a micro-batch."""
    engine = start_engine(recipe, Layout(), (vocab, vocab), Ranks.alone())

    def step(batch: Batch, rate: float) -> float:
        return engine.train_step([batch], batch.tokens, rate).grad_norm

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
        (model(batch).loss / batch.tokens).backward()
        norm = float(nn.utils.clip_grad_norm_(model.parameters(), CLIP))
        optimizer.step()
        return norm

    @torch.no_grad()
    def losses(batch: Batch) -> float:
        model.eval()
        return float(model(batch).nll)

    return step, losses


def study(train: str, valid: str, output: Path, updates: int, seeds: int, depths: list[int], rate: float,
          seconds: float) -> str:
    """Makes the runs that are not in `output` yet, and returns the table of all that it has.

    Args:
        train, valid: text files.
        seconds: after which no run is started.
    """
    output.parent.mkdir(parents=True, exist_ok=True)
    drop_partial_line(output)
    began = time.monotonic()
    for seed in range(1, seeds + 1):
        for layers in depths:
            for system in (*SYSTEMS, PLAIN):
                recipe = recipe_of(output.parent / "lm_depth", train, valid, system, layers, seed, updates, rate)
                key = {"system": system, "layers": layers, "seed": seed, "updates": updates, "rate": rate}
                if any(key.items() <= record.items() for record in _records(output)):
                    continue
                if time.monotonic() - began > seconds:
                    return _table(output)
                prepare_text(recipe)
                with output.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(measure(recipe, system)) + "\n")
    return _table(output)


def _records(output: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in output.read_text(encoding="utf-8").splitlines()] if output.exists() else []


def _table(output: Path) -> str:
    """Bits a byte of each run, seed by seed."""
    found: dict[tuple[str, int, int], list[str]] = {}
    for record in _records(output):
        key = record["system"], record["layers"], record["tokens"]
        said = "diverged" if record["diverged"] else f"{record['bits_per_byte']:.4f}"
        found.setdefault(key, []).append(said)
    rows = [("system", "layers", "tokens", "bits a byte")]
    rows += [(system, str(layers), f"{tokens:,}", ", ".join(each)) for (system, layers, tokens), each in found.items()]
    return table(rows)
