"""Engines over a tiny model, and micro-batches for them, for tests that compare layouts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from deepnmt.batch import Batch
from deepnmt.config import Recipe, check_recipe
from deepnmt.parallel.build import start_engine
from deepnmt.parallel.engine import Engine
from deepnmt.parallel.settings import layout_of
from deepnmt.ranks import Ranks
from deepnmt.tokens import PAD

ROOT = Path(__file__).resolve().parents[1]
VOCAB = 40


def parallel(layout: str, stages: int = 0) -> dict[str, Any]:
    """The recipe's section for "local", or for a file of ds_configs and a precision, such as "zero3_offload_bf16"."""
    zero, _, precision = layout.rpartition("_")
    if layout == "local":
        return {"ds_config": None}
    return {"ds_config": str(ROOT / "ds_configs" / f"{zero}.json"), "precision": precision, "pipeline_stages": stages}


def options(layout: str, stages: int = 0) -> tuple[str, ...]:
    """The same on the command line."""
    return tuple(f"parallel.{name}={'null' if value is None else value}"
                 for name, value in parallel(layout, stages).items())


def recipe_of(
    layout: str, accumulation: int = 1, stages: int = 0, loss_scale: dict[str, float] | None = None, **train: Any
) -> Recipe:
    """`layout`: see `parallel`. The FFN's 25 are no multiple of 2 or 4 processes."""
    return check_recipe({
        "run": "unused", "seed": 3,
        "data": {"folder": "unused", "src_lang": "a", "trg_lang": "b", "train": {"tsv": "x"}, "valid": {"tsv": "x"}},
        "batch": {"accumulation": accumulation},
        "model": {"width": 16, "heads": 2, "ffn": 25, "dropout": 0.2,
                  "encoder": {"block": "admin", "layers": 2}, "decoder": {"block": "b2t", "layers": 2}},
        "train": {"updates": 100, **train},
        "parallel": parallel(layout, stages),
        "loss_scale": loss_scale or {},
    }, "test")


def build(recipe: Recipe, ranks: Ranks) -> Engine:
    return start_engine(recipe, layout_of(recipe, ranks.world), (VOCAB, VOCAB), ranks)


def batch_of(src: Tensor, lengths: Tensor, trg_in: Tensor, trg_out: Tensor, key: int = 0) -> Batch:
    """A micro-batch of translation, its tokens counted."""
    return Batch((src, lengths, trg_in, trg_out), key, int((trg_out != PAD).sum()))


def batches(update: int, count: int) -> list[Batch]:
    """`count` micro-batches of unequal sizes, lengths and token counts."""
    made = []
    for number in range(count):
        draw = torch.Generator().manual_seed(100 * update + number)
        rows, source, target = 1 + number % 5, 5 + 2 * (number % 3), 9 - number
        src = torch.randint(4, VOCAB, (rows, source), generator=draw)
        trg = torch.randint(4, VOCAB, (rows, target + 1), generator=draw)
        lengths = torch.full((rows,), source)
        trg_out = trg[:, 1:].clone()
        if rows > 1:
            lengths[0], src[0, 3:], trg_out[0, 1:] = 3, 3, 3
        made.append(batch_of(src, lengths, trg[:, :-1], trg_out, 1000 * update + number))
    return made


def step(engine: Engine, plan: list[Batch], ranks: Ranks, rate: float = 1e-2) -> tuple[float, float, float, bool]:
    """One update on `plan`, shared by the processes: loss a token, gradient norm, loss scale, whether applied."""
    tokens = sum(batch.tokens for batch in plan)
    stats = engine.train_step(plan[engine.data_rank :: engine.data_world], tokens, rate)
    return ranks.sum([stats.loss / tokens])[0], stats.grad_norm, stats.loss_scale, stats.applied
