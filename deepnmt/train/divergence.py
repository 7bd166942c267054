"""The end of a run whose gradients stay non-finite: when to give up, which layer it was, and what to try.

A few dropped updates are no reason to stop. Many in a row at one and the same loss scale are: above its floor the scale
halves each time, and at the floor, or without a scale, nothing changes that could help.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from deepnmt.batch import Batch
from deepnmt.checkpoint.checkpoint import list_checkpoints
from deepnmt.config import Recipe
from deepnmt.doctor.nonfinite import first_non_finite
from deepnmt.errors import UserError
from deepnmt.model.blocks import BLOCKS, PostLN
from deepnmt.model.transformer import Transformer
from deepnmt.parallel.engine import Engine
from deepnmt.parallel.tensors import take_over
from deepnmt.ranks import Ranks

LIMIT = 25  # dropped updates in a row, at one loss scale

_KIND = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


class Diverged(UserError):  # noqa: N818 (a state of the run, not of the program)
    """Training cannot go on; the message says where it broke and what to try. The first process has it whole."""


class Drops:
    """Counts dropped updates in a row that were computed with the same loss scale."""

    def __init__(self) -> None:
        self.count = 0
        self._scale = 0.0

    def add(self, scale: float) -> bool:
        """One more, computed with `scale`; returns whether that is enough."""
        self.count = self.count + 1 if scale == self._scale else 1
        self._scale = scale
        return self.count >= LIMIT

    def clear(self) -> None:
        """An update was applied."""
        self.count = 0


def diverged(
    recipe: Recipe,
    vocabs: tuple[int, int],
    engine: Engine,
    ranks: Ranks,
    micro_batches: Sequence[Batch],
    factor: float,
    scale: float,
) -> Diverged:
    """Computes the last batches again on a plain copy of the model, and puts what was seen into words. Collective.

    Args:
        vocabs: source and target vocabulary sizes.
        micro_batches: this process's of the last update; `factor`: what their loss sums were multiplied by, without the
            loss scale `scale`.
    """
    kind = _KIND[next(engine.module.parameters()).dtype]
    try:
        current = engine.gather_model()
    except torch.OutOfMemoryError:  # on all processes: each says so
        return _diverged(Seen(kind, room=False), recipe, scale)
    model = Transformer(recipe.model, *vocabs, recipe.seed, recipe.train.label_smoothing)
    try:
        take_over(model, current)
        report = _look(model, micro_batches, factor, scale)
    except torch.OutOfMemoryError:
        report = Seen(kind, room=False)
    del model, current  # the reports need room, too
    reports = ranks.gather_bytes(json.dumps(asdict(report)).encode())
    if reports is None:
        silent = Diverged("gradients stay non-finite; the first process says where and what to try")
        silent.reported = True
        return silent
    seen = [Seen(**json.loads(report)) for report in reports]
    return _diverged(next((each for each in seen if each.place), seen[0]), recipe, scale)


@dataclass(frozen=True)
class Seen:
    """What a process saw. kind: the float type of training. place: the first non-finite tensor in it. largest: in the
    tensor before that one. fp32: the first non-finite tensor of the same pass in fp32. room: whether there was memory
    to look."""

    kind: str
    place: str | None = None
    largest: float = 0.0
    fp32: str | None = None
    room: bool = True


def _look(model: Transformer, micro_batches: Sequence[Batch], factor: float, scale: float) -> Seen:
    """Where these batches break, in the model's float type and, where that has 16 bits, in fp32."""
    dtype = next(model.parameters()).dtype
    place = first_non_finite(model, micro_batches, factor * scale)
    if place is None:
        return Seen(_KIND[dtype])
    wider = None if dtype == torch.float32 else first_non_finite(model.float(), micro_batches, factor)
    return Seen(_KIND[dtype], str(place), place.largest, None if wider is None else str(wider))


def _diverged(worst: Seen, recipe: Recipe, scale: float) -> Diverged:
    """What is said of the process that saw most; `scale` is the loss scale."""
    return Diverged("\n  ".join([
        f"{LIMIT} updates in a row were dropped because their gradients were not finite, so the run ends"
        + (f" (loss scale {scale:g}, its floor)" if worst.kind == "fp16" else "") + ".",
        _where(worst), _advice(worst, recipe), _remains(Path(recipe.run) / "checkpoints"),
    ]))


def _where(seen: Seen) -> str:
    if not seen.room:
        return "There was no memory left to compute the batch again and to find the place."
    if seen.place is None:
        return (f"Computed again one by one in {seen.kind}, each micro-batch of the last update is finite; their sum "
                "is not, or it was chance.")
    text = f"First non-finite in {seen.kind}: {seen.place}; the tensor before it reached {seen.largest:.3g}."
    if seen.kind == "fp32":
        return text
    if seen.fp32 is None:
        return f"{text} In fp32 the same batch is finite: 16 bits are too narrow for this model."
    return f"{text} In fp32 too, first {seen.fp32}: it is not the 16 bits."


def _advice(seen: Seen, recipe: Recipe) -> str:
    rate = (f"a lower optimizer.lr (now {recipe.optimizer.lr:g}), a longer schedule.warmup "
            f"(now {recipe.schedule.warmup}), train.clip (now {recipe.train.clip:g}; 0 is none)")
    if seen.kind == "fp16" and seen.place is not None and seen.fp32 is None:
        return f"Try parallel.precision=bf16 or fp32, or {rate}."
    deep = ", ".join(sorted(name for name, block in BLOCKS.items() if block.made_for_depth))
    post = PostLN in (BLOCKS[recipe.model.encoder.block], BLOCKS[recipe.model.decoder.block])
    other = f", or, in a new run, a block made for depth ({deep})" if post else ""
    return f"Try {rate}{other}. If it broke at once, look at the data."


def _remains(checkpoints: Path) -> str:
    found = list_checkpoints(checkpoints)
    if not found:
        return "No checkpoint was written yet; start again."
    return (f"{found[-1]} is untouched: the same command with the changed setting goes on from it. If it breaks again "
            "soon, the weights had gone astray before: move the newest checkpoints out of that folder.")
