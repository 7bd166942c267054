"""Layer dependency: how much of what enters a sub-layer comes from each earlier branch.

Liu et al. 2020 (Admin), section 4.1 and figures 7 and 8: with x̂_i the normalised input of branch i + 1 and â_j the
normalised output of branch j, x̂_i = Σ_{j≤i} β_ij â_j. Here the sum is exact, not estimated: while every LayerNorm
keeps the variance it had on the batch, a residual rule is an affine map of the layer's input and its branches, so x_i
splits into one part for each branch (and one for the stack's input), and β_ij = std(part_ij) / std(x_i).

`P` parts followed so far, `B` sentences, `T` length, `D` width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from deepnmt.batch import Batch
from deepnmt.doctor.probes import hooks, layers_of, real_positions
from deepnmt.model.blocks import Block, Side, Stream
from deepnmt.model.transformer import Transformer

Norms = list[tuple[nn.LayerNorm, Tensor]]  # the LayerNorms of a module and what each took in the real forward pass


@torch.no_grad()
def dependency(model: Transformer, batch: Batch, side: Side) -> list[list[float]]:
    """β of a stack with n sub-layers on a batch, in evaluation mode: rows i = 0 … n, columns j = 0 … i.

    Row i is what enters branch i + 1 (row n: the stack's output), column 0 the stack's own input, column j branch j.
    β_ij is a ratio of standard deviations over all elements at real positions.
    """
    was_training = model.training
    model.eval()
    seen = _forward(model, batch, side)
    model.train(was_training)
    real = real_positions(batch)[side]
    rows: list[list[float]] = []
    parts = [part[None] for part in _tensors(seen.inputs[0])]  # of every tensor of the stream, [P, B, T, D]
    for index, layer in enumerate(layers_of(model, side)):
        rule = layer.get_submodule("rule")
        assert isinstance(rule, Block)
        entering, parts = _split(rule, parts, seen.branches[index], seen.inputs[index], real)
        rows += entering
    top = model.get_submodule(f"{side}.norm")
    with _frozen(_norms_during(top, lambda: top(seen.last))):
        nothing = [torch.zeros_like(part[:1]) for part in parts]
        whole = top(_stream(parts)) - top(_stream(nothing))
    return [*rows, _shares(whole, seen.top, real)]


class _Seen:
    """A stack's forward pass: inputs and branch outputs of its layers, the last stream, and the output on top."""

    def __init__(self) -> None:
        self.inputs: list[Stream] = []
        self.branches: list[list[Tensor]] = []
        self.last: Stream
        self.top: Tensor


def _forward(model: Transformer, batch: Batch, side: Side) -> _Seen:
    seen = _Seen()
    (src, lengths, trg_in, _), key = batch.tensors, batch.key

    def enter(_module: nn.Module, inputs: Any) -> None:
        seen.inputs.append(inputs[0])
        seen.branches.append([])

    def leave(_module: nn.Module, _inputs: Any, output: Any) -> None:
        seen.last = output

    with hooks() as handles:
        for layer in layers_of(model, side):
            handles.append(layer.register_forward_pre_hook(enter))
            handles.append(layer.register_forward_hook(leave))
            for add in layer.get_submodule("rule.adds").children():
                handles.append(add.register_forward_hook(lambda _m, _i, out: seen.branches[-1].append(out)))
        seen.top = model.encode(src, lengths, key)
        if side == "decoder":
            seen.top = model.decode(trg_in, seen.top, lengths, key)
    return seen


def _split(
    rule: Block, parts: list[Tensor], branches: list[Tensor], entering: Stream, real: Tensor
) -> tuple[list[list[float]], list[Tensor]]:
    """Takes the parts of a layer's input through its rule, adding its branches' parts one by one.

    Returns:
        The rows of β for the inputs of the layer's branches, and the parts of its output [P + branches, B, T, D] (of
        each tensor of its stream).
    """
    wholes: list[Tensor] = []
    norms = _norms_during(rule, lambda: wholes.extend(_run(rule, entering, branches)[0]))
    zero = torch.zeros_like(branches[0])
    none, nothing = [zero] * len(branches), _stream([torch.zeros_like(part[:1]) for part in parts])
    with _frozen(norms):
        followed = [_run(rule, _stream(parts), none)]  # what came from below
        for index, branch in enumerate(branches):
            followed.append(_run(rule, nothing, [*none[:index], branch, *none[index + 1:]]))
        offset_inputs, offset = _run(rule, nothing, none)  # a rule's own constants, such as a norm's bias
    rows = []
    for index, whole in enumerate(wholes):
        reached = torch.cat([inputs[index] for inputs, _ in followed[: index + 1]]) - offset_inputs[index]
        rows.append(_shares(reached, whole, real))
    outputs = [torch.cat(tensors) - constant for *tensors, constant in
               zip(*(_tensors(output) for _, output in followed), _tensors(offset), strict=True)]
    return rows, outputs


def _run(rule: Block, x: Stream, branches: Sequence[Tensor]) -> tuple[list[Tensor], Stream]:
    """What a rule gives its branches to work on, and its output, when they answer with these."""
    inputs: list[Tensor] = []

    def branch(index: int) -> Callable[[Tensor], Tensor]:
        def run(h: Tensor) -> Tensor:
            inputs.append(h)
            return branches[index].expand_as(h)
        return run

    output = rule(x, [branch(index) for index in range(len(branches))])
    return inputs, output


def _norms_during(module: nn.Module, forward: Callable[[], object]) -> Norms:
    """The LayerNorms of a module, with what each of them takes while `forward` runs."""
    found: Norms = []

    def taken(norm: nn.Module, inputs: Any) -> None:
        assert isinstance(norm, nn.LayerNorm)
        found.append((norm, inputs[0]))

    with hooks() as handles:
        for each in module.modules():
            if isinstance(each, nn.LayerNorm):
                handles.append(each.register_forward_pre_hook(taken))
        forward()
    return found


@contextmanager
def _frozen(norms: Norms) -> Iterator[None]:
    """While it lasts, each norm is γ (c - mean c) / σ + ν with the σ of what it took [B, T, D]: affine in c."""
    with hooks() as handles:
        for norm, taken in norms:
            gain = (taken.var(-1, correction=0, keepdim=True) + norm.eps).rsqrt() * norm.weight
            handles.append(norm.register_forward_hook(
                lambda norm, inputs, _o, gain=gain: (inputs[0] - inputs[0].mean(-1, keepdim=True)) * gain + norm.bias))
        yield


def _tensors(stream: Stream) -> tuple[Tensor, ...]:
    return (stream,) if isinstance(stream, Tensor) else stream


def _stream(tensors: Sequence[Tensor]) -> Stream:
    return tensors[0] if len(tensors) == 1 else tuple(tensors)


def _shares(parts: Tensor, whole: Tensor, real: Tensor) -> list[float]:
    """std(part) / std(whole) of each part [P, B, T, D], at real positions."""
    total = whole[real].std(correction=0)
    return [float(part[real].std(correction=0) / total) for part in parts]
