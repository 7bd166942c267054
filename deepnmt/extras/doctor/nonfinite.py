"""Locates the first non-finite number in a model's forward and backward pass, and explains it to the user of the run.

`B` sentences, `S` source length, `T` target length.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from deepnmt.batch import Batch
from deepnmt.config import Recipe, with_settings
from deepnmt.config.choices import BLOCKS
from deepnmt.model.blocks import set_clock
from deepnmt.model.hooks import hooks
from deepnmt.model.transformer import Transformer
from deepnmt.parallel.engine import Engine
from deepnmt.processes.ranks import Ranks

KINDS = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
What = Literal["weight", "input", "output", "loss", "gradient of the output", "gradient"]


@dataclass(frozen=True)
class NonFinite:
    """The first tensor that holds infinities or NaN, in the order of computation.

    what: of the module or parameter `name` ("loss" has no name). If an input is not finite, but the output before it
        was, the number arose between two modules: in the attention, or in a block's sum.
    largest: the largest magnitude in the tensor before it; 0 if there was none.
    """

    what: What
    name: str
    largest: float

    def __str__(self) -> str:
        return f"the {self.what} of {self.name}" if self.name else f"the {self.what}"


def first_non_finite(model: Transformer, batches: Sequence[Batch], factor: float = 1.0) -> NonFinite | None:
    """Checks the weights, then each batch's pass in training mode; None if every number is finite.

    Args:
        model: a plain one, outside any process group; its gradients are cleared and all hooks removed.
        batches: on the model's device.
        factor: multiplies each loss sum before the backward pass; includes the loss scale.
    """
    first: NonFinite | None = None
    largest = 0.0

    def check(what: What, name: str, tensor: Any) -> None:
        """Called in the order of computation; ignores what is not a floating-point tensor."""
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
            check("input", name, item)

    def after(name: str, _module: nn.Module, _inputs: Any, output: Any) -> None:
        check("output", name, output)
        if isinstance(output, Tensor) and output.requires_grad:
            output.register_hook(partial(check, "gradient of the output", name))

    for name, parameter in model.named_parameters():
        check("weight", name, parameter)
    was_training = model.training
    with hooks() as handles:
        for name, module in model.named_modules():
            if name:
                handles += [module.register_forward_pre_hook(partial(before, name)),
                            module.register_forward_hook(partial(after, name))]
        handles.extend(p.register_hook(partial(check, "gradient", name)) for name, p in model.named_parameters())
        model.train()
        for batch in batches:
            if first is not None:
                break
            model.zero_grad(set_to_none=True)
            loss = model(batch).loss
            check("loss", "", loss)
            if first is None:
                (loss * factor).backward()
    model.zero_grad(set_to_none=True)
    model.train(was_training)
    return first


@dataclass(frozen=True)
class RankReport:
    """What one process has seen.

    Attributes:
        kind: the float type of training.
        tensor: the first non-finite tensor in that type.
        largest: the largest magnitude in the tensor before it.
        fp32: the first non-finite tensor of the same pass in fp32.
        enough_memory: whether there was memory for the check.
    """

    kind: str
    tensor: str | None = None
    largest: float = 0.0
    fp32: str | None = None
    enough_memory: bool = True


def explain(
    recipe: Recipe, engine: Engine, ranks: Ranks, batches: Sequence[Batch], factor: float, scale: float
) -> list[str]:
    """Recomputes the last batches on a plain copy of the model; returns where a number stopped being finite and what to
    try, on the first process (nothing on the others). Collective.

    Args:
        batches: this process's micro-batches of the last update.
        factor: multiplied their loss sums, apart from the loss scale `scale`.
    """
    kind = KINDS[next(engine.module.parameters()).dtype]
    try:
        current = engine.gather_model()
    except torch.OutOfMemoryError:  # raised on all processes
        return advise(RankReport(kind, enough_memory=False), recipe)
    try:
        model = engine.build(lambda part: None)
        copy_weights(model, current)
        set_clock(model, engine.optimizer_step + 1)
        report = RankReport(kind)
        first = first_non_finite(model, batches, factor * scale)
        if first is not None:
            report = RankReport(kind, str(first), first.largest)
            if kind != "fp32":
                wider = first_non_finite(model.float(), batches, factor)
                if wider is not None:
                    report = replace(report, fp32=str(wider))
        del model
    except torch.OutOfMemoryError:
        report = RankReport(kind, enough_memory=False)
    del current  # gathering the reports needs memory, too
    data = ranks.gather_bytes(json.dumps(asdict(report)).encode())
    if data is None:
        return []
    reports = [RankReport(**json.loads(each)) for each in data]
    for report in reports:
        if report.tensor:
            return advise(report, recipe)
    return advise(reports[0], recipe)


def advise(report: RankReport, recipe: Recipe) -> list[str]:
    """Where the numbers stopped being finite, and what to try: a sentence each."""
    where = f"First non-finite in {report.kind}: {report.tensor}; the tensor before it reached {report.largest:.3g}."
    if not report.enough_memory:
        where = "There was not enough memory left to recompute the batch and locate the first non-finite number."
    elif report.tensor is None:
        where = (f"Recomputed one by one in {report.kind}, each micro-batch of the last update is finite. Either only "
                 "their sum is not, or the error does not repeat.")
    elif report.fp32 is not None:
        where += f" fp32 fails too, first in {report.fp32}, so 16-bit precision is not the cause."
    elif report.kind != "fp32":
        where += f" In fp32 the same batch is finite: {report.kind} is too narrow for this model."
    rate = (f"a lower optimizer.lr (now {recipe.optimizer.lr:g}), a longer schedule.warmup "
            f"(now {recipe.schedule.warmup}) or train.clip (now {recipe.train.clip:g}; 0: no clipping)")
    if report.kind == "fp16" and report.tensor is not None and report.fp32 is None:
        return [where, f"Try parallel.precision=bf16 or fp32, or {rate}."]
    deep = [block for block in BLOCKS.where(lambda block: block.made_for_depth) if _can_have(recipe, block)]
    if deep and any(recipe.model.stack(side).facts.unstable_deep for side in recipe.model.sides):
        rate += f", or, in a new run, a block made for depth ({', '.join(sorted(deep))})"
    return [where, f"Try {rate}. If the first updates failed already, check the data."]


def _can_have(recipe: Recipe, block: str) -> bool:
    """Whether another run may have this block: the task and the other settings allow it, and it begins anew."""
    changes: dict[str, Any] = {}
    for side in recipe.model.sides:
        for name, value in recipe.model.stack(side).changes_for(block).items():
            changes[f"model.{side}.{name}"] = value
    try:
        with_settings(recipe, changes)
    except ValueError:
        return False
    return recipe.train.init_from is None


def copy_weights(model: nn.Module, source: nn.Module) -> None:
    """Gives `model` copies of the parameters of `source`, a model of the same shape, in their type and on their device;
    the buffers are shared."""
    for ours, theirs in zip(model.parameters(), source.parameters(), strict=True):
        ours.data = theirs.detach().clone()
    for part, other in zip(model.modules(), source.modules(), strict=True):
        for name, buffer in other.named_buffers(recurse=False):
            setattr(part, name, buffer)
