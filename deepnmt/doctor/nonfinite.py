"""Where a number first stops being finite: a forward and backward pass of a model under hooks, on batches that failed.
And what a run that breaks there says at its end.

`B` sentences, `S` source length, `T` target length.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from deepnmt.batch import Batch
from deepnmt.config import Recipe
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
        was arises between two modules: in the attention, or in a rule's sum.
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
    watch = _Watch()
    for name, parameter in model.named_parameters():
        watch.see(parameter, "weight", name)
    if watch.found is not None:
        return watch.found
    was_training = model.training
    model.train()
    hooks = watch.attach(model)
    try:
        for batch in batches:
            model.zero_grad(set_to_none=True)
            sums = model(*batch.tensors, batch.key)
            watch.see(sums.loss, "loss", "")
            if watch.found is None:
                (sums.loss * factor).backward()
            if watch.found is not None:
                break
    finally:
        for hook in hooks:
            hook.remove()
        model.zero_grad(set_to_none=True)
        model.train(was_training)
    return watch.found


class _Watch:
    """Remembers the first non-finite tensor that it sees."""

    def __init__(self) -> None:
        self.found: NonFinite | None = None
        self._largest = 0.0

    def see(self, tensor: Tensor, what: What, name: str) -> None:
        """Looks at one tensor, in the order of computation."""
        if self.found is not None or not tensor.is_floating_point() or tensor.numel() == 0:
            return
        top = float(tensor.detach().abs().max())  # NaN where there is one
        if top < float("inf"):
            self._largest = top
        else:
            self.found = NonFinite(what, name, self._largest)

    def attach(self, model: nn.Module) -> list[Any]:
        """Hooks on every module's inputs and outputs, their gradients and those of the parameters."""
        hooks: list[Any] = []
        for name, module in model.named_modules():
            if name:
                hooks.append(module.register_forward_pre_hook(self._before(name)))
                hooks.append(module.register_forward_hook(self._after(name)))
        for name, parameter in model.named_parameters():
            hooks.append(parameter.register_hook(self._gradient("gradient", name)))
        return hooks

    def _before(self, name: str) -> Callable[[nn.Module, tuple[Any, ...]], None]:
        def look(module: nn.Module, inputs: tuple[Any, ...]) -> None:
            for item in inputs:
                if isinstance(item, Tensor):
                    self.see(item, "input", name)

        return look

    def _after(self, name: str) -> Callable[[nn.Module, tuple[Any, ...], Any], None]:
        def look(module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
            if isinstance(output, Tensor):
                self.see(output, "output", name)
                if output.requires_grad:
                    output.register_hook(self._gradient("gradient of the output", name))

        return look

    def _gradient(self, what: What, name: str) -> Callable[[Tensor], None]:
        def look(gradient: Tensor) -> None:
            self.see(gradient, what, name)

        return look


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
        report = _look(model, batches, factor, scale)
        del model
    except torch.OutOfMemoryError:
        report = RankReport(kind, room=False)
    del current  # the reports need room, too
    data = ranks.gather_bytes(json.dumps(asdict(report)).encode())
    reports = [RankReport(**json.loads(each)) for each in data or ()]
    return _sentences(next((each for each in reports if each.place), reports[0]), recipe) if reports else []


def _look(model: Transformer, batches: Sequence[Batch], factor: float, scale: float) -> RankReport:
    """Where these batches break, in the model's float type and, where that has 16 bits, in fp32."""
    dtype = next(model.parameters()).dtype
    place = first_non_finite(model, batches, factor * scale)
    if place is None:
        return RankReport(KINDS[dtype])
    wider = None if dtype == torch.float32 else first_non_finite(model.float(), batches, factor)
    return RankReport(KINDS[dtype], str(place), place.largest, None if wider is None else str(wider))


def _sentences(worst: RankReport, recipe: Recipe) -> list[str]:
    """What is said of the process that saw most."""
    return [_where(worst), _advice(worst, recipe)]


def _where(seen: RankReport) -> str:
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


def _advice(seen: RankReport, recipe: Recipe) -> str:
    rate = (f"a lower optimizer.lr (now {recipe.optimizer.lr:g}), a longer schedule.warmup "
            f"(now {recipe.schedule.warmup}), train.clip (now {recipe.train.clip:g}; 0 is none)")
    if seen.kind == "fp16" and seen.place is not None and seen.fp32 is None:
        return f"Try parallel.precision=bf16 or fp32, or {rate}."
    deep = ", ".join(sorted(name for name, block in BLOCKS.items() if block.made_for_depth))
    post = PostLN in (BLOCKS[recipe.model.encoder.block], BLOCKS[recipe.model.decoder.block])
    other = f", or, in a new run, a block made for depth ({deep})" if post else ""
    return f"Try {rate}{other}. If it broke at once, look at the data."


def take_over(model: nn.Module, source: nn.Module) -> None:
    """Gives `model` the buffers of `source`, built alike, and copies of its parameters, in their type and place."""
    for ours, theirs in zip(model.parameters(), source.parameters(), strict=True):
        ours.data = theirs.detach().clone()
    for part, other in zip(model.modules(), source.modules(), strict=True):
        for name, buffer in other.named_buffers(recurse=False):
            setattr(part, name, buffer)
