"""Where a number first stops being finite: a forward and backward pass of a model under hooks, on batches that failed.
And what a run that breaks there says at its end.

`B` sentences, `S` source length, `T` target length.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from deepnmt.batch import Batch
from deepnmt.config import Recipe
from deepnmt.doctor.probes import hooks
from deepnmt.model.blocks import BLOCKS, PostLN
from deepnmt.model.transformer import Transformer
from deepnmt.parallel.engine import Engine
from deepnmt.ranks import Ranks

KINDS = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
What = Literal["weight", "input", "output", "loss", "gradient of the output", "gradient"]


@dataclass(frozen=True)
class NonFinite:
    """The first tensor that holds infinities or NaN, in the order of computation.

    what: of the module or parameter `name` ("loss" has no name). An input that is not finite where the output before it
        was arises between two modules: in the attention, or in a block's sum.
    largest: the largest magnitude in the tensor looked at before; 0 if there was none.
    """

    what: What
    name: str
    largest: float

    def __str__(self) -> str:
        return f"the {self.what} of {self.name}" if self.name else f"the {self.what}"


def first_non_finite(model: Transformer, batches: Sequence[Batch], factor: float = 1.0) -> NonFinite | None:
    """Looks at the weights, then at each batch's pass in training mode; None where every number is finite.

    Args:
        model: its gradients are lost, and no process group may hang on them; its hooks are taken off again.
        batches: on the model's device.
        factor: what each loss sum is multiplied by before the backward pass, the loss scale included.
    """
    first: NonFinite | None = None
    largest = 0.0

    def see(what: What, name: str, tensor: Any) -> None:
        """Looks at what may be a tensor, in the order of computation."""
        nonlocal first, largest
        if first is not None or not isinstance(tensor, Tensor) or not tensor.is_floating_point() or not tensor.numel():
            return
        top = float(tensor.detach().abs().max())  # NaN where there is one
        if top < math.inf:
            largest = top
        else:
            first = NonFinite(what, name, largest)

    def before(name: str, _module: nn.Module, inputs: tuple[Any, ...]) -> None:
        for item in inputs:
            see("input", name, item)

    def after(name: str, _module: nn.Module, _inputs: Any, output: Any) -> None:
        see("output", name, output)
        if isinstance(output, Tensor) and output.requires_grad:
            output.register_hook(partial(see, "gradient of the output", name))

    for name, parameter in model.named_parameters():
        see("weight", name, parameter)
    was_training = model.training
    with hooks() as handles:
        for name, module in model.named_modules():
            if name:
                handles += [module.register_forward_pre_hook(partial(before, name)),
                            module.register_forward_hook(partial(after, name))]
        handles.extend(p.register_hook(partial(see, "gradient", name)) for name, p in model.named_parameters())
        model.train()
        for batch in batches:
            if first is not None:
                break
            model.zero_grad(set_to_none=True)
            loss = model(*batch.tensors, batch.key).loss
            see("loss", "", loss)
            if first is None:
                (loss * factor).backward()
    model.zero_grad(set_to_none=True)
    model.train(was_training)
    return first


@dataclass(frozen=True)
class RankReport:
    """What a process saw. kind: the float type of training. place: the first non-finite tensor in it. largest: in the
    tensor before that one. fp32: the first non-finite tensor of the same pass in fp32. room: whether there was memory
    to look."""

    kind: str
    place: str | None = None
    largest: float = 0.0
    fp32: str | None = None
    room: bool = True


def explain(
    recipe: Recipe, engine: Engine, ranks: Ranks, batches: Sequence[Batch], factor: float, scale: float
) -> list[str]:
    """Computes the last batches again on a plain copy of the model: on the first process, where it broke and what to
    try. Collective.

    Args:
        batches: this process's of the last update; `factor`: what their loss sums were multiplied by, without the loss
            scale `scale`.
    """
    kind = KINDS[next(engine.module.parameters()).dtype]
    try:
        current = engine.gather_model()
    except torch.OutOfMemoryError:  # on all processes
        return _sentences(RankReport(kind, room=False), recipe)
    try:
        vocabs = (current.table("src").num_embeddings, current.table("trg").num_embeddings)
        model = Transformer(recipe.model, *vocabs, recipe.seed, recipe.train.label_smoothing)
        take_over(model, current)
        report = RankReport(kind)
        if place := first_non_finite(model, batches, factor * scale):
            wider = None if kind == "fp32" else first_non_finite(model.float(), batches, factor)
            report = RankReport(kind, str(place), place.largest, None if wider is None else str(wider))
        del model
    except torch.OutOfMemoryError:
        report = RankReport(kind, room=False)
    del current  # the reports need room, too
    data = ranks.gather_bytes(json.dumps(asdict(report)).encode())
    reports = [RankReport(**json.loads(each)) for each in data or ()]
    return _sentences(next((each for each in reports if each.place), reports[0]), recipe) if reports else []


def _sentences(worst: RankReport, recipe: Recipe) -> list[str]:
    """Where the process that saw most saw it break, and what to try."""
    where = f"First non-finite in {worst.kind}: {worst.place}; the tensor before it reached {worst.largest:.3g}."
    if not worst.room:
        where = "There was no memory left to compute the batch again and to find the place."
    elif worst.place is None:
        where = (f"Computed again one by one in {worst.kind}, each micro-batch of the last update is finite; their sum "
                 "is not, or it was chance.")
    elif worst.fp32 is not None:
        where += f" In fp32 too, first {worst.fp32}: it is not the 16 bits."
    elif worst.kind != "fp32":
        where += " In fp32 the same batch is finite: 16 bits are too narrow for this model."
    rate = (f"a lower optimizer.lr (now {recipe.optimizer.lr:g}), a longer schedule.warmup "
            f"(now {recipe.schedule.warmup}), train.clip (now {recipe.train.clip:g}; 0 is none)")
    if worst.kind == "fp16" and worst.place is not None and worst.fp32 is None:
        return [where, f"Try parallel.precision=bf16 or fp32, or {rate}."]
    deep = ", ".join(sorted(name for name, block in BLOCKS.items() if block.made_for_depth))
    post = PostLN in (BLOCKS[recipe.model.encoder.block], BLOCKS[recipe.model.decoder.block])
    other = f", or, in a new run, a block made for depth ({deep})" if post else ""
    return [where, f"Try {rate}{other}. If it broke at once, look at the data."]


def take_over(model: nn.Module, source: nn.Module) -> None:
    """Gives `model` the buffers of `source`, built alike, and copies of its parameters, in their type and place."""
    for ours, theirs in zip(model.parameters(), source.parameters(), strict=True):
        ours.data = theirs.detach().clone()
    for part, other in zip(model.modules(), source.modules(), strict=True):
        for name, buffer in other.named_buffers(recurse=False):
            setattr(part, name, buffer)
