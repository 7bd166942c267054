"""Measures activations and gradients of every layer and sub-layer during training, every n updates.

For a layer: the size, variance, largest magnitude and gradient of its output, and the similarity to its input. For a
sub-layer: the size and gradient of its branch, and the gradient of its LayerNorm. In a decoder layer whose norms follow
the branches these are the gradients at the five points of Takase et al. 2023 (B2T), figures 4 and 7; in
`rezero_post_ln` the branch is measured before its factor a. Hooks stay on the modules for the probed update only, so
all other updates run as without a probe.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from deepnmt.config import Model, Recipe
from deepnmt.extras.doctor.probes import block_of, norms_of, value_in
from deepnmt.model.blocks import LayerPosition, Stream
from deepnmt.model.hooks import hooks
from deepnmt.parallel.engine import Engine, StepStats
from deepnmt.processes.ranks import Ranks
from deepnmt.training.updates import UpdateHook

Combine = Callable[[list[float]], list[float]]

_OUTPUT = ("elements", "sum", "squares", "positions", "cosines")  # sums over a layer's outputs


class TrainingProbe:
    """A probe on the layers of a model, under any engine.

    Args:
        module: this process's modules: all `encoder.layers.N` and `decoder.layers.N`, or those of its pipeline stage.
        model: depths and blocks of the whole model, so that every process can name every layer.
        every: updates from one probe to the next; 0: never.
    """

    def __init__(self, module: nn.Module, model: Model, every: int) -> None:
        self.every = every
        self.parts: dict[str, list[str]] = {}  # for every layer of the whole model, the full names of its sub-layers
        self.keys: list[str] = []  # of all sums of the whole model, in one order for all processes
        for side in model.sides:
            first = LayerPosition.of(model, side, 0)
            kinds = ["elements", "squares", "branch"]
            if first.block.layer_norms:
                kinds.append("norm")
            for index in range(model.stack(side).layers):
                name = f"{side}.layers.{index}"
                self.parts[name] = [f"{name}.{part}" for part in first.parts]
                self.keys += [f"{name} {kind}" for kind in (*_OUTPUT, "gradient")]
                self.keys += [f"{part} {kind}" for part in self.parts[name] for kind in kinds]
        here = dict(module.named_modules())
        self.layers = {name: here[name] for name in self.parts if name in here}
        self._sums: dict[str, Tensor] = {}
        self._largest: dict[str, Tensor] = {}

    def due(self, update: int) -> bool:
        """Whether update number `update` (from 1) is probed."""
        return self.every > 0 and update % self.every == 0

    @contextmanager
    def watching(self, enabled: bool) -> Iterator[None]:
        """If `enabled`, collects sums and maxima over the layers' outputs and gradients while the context is open,
        without waiting for the device."""
        self._sums, self._largest = {}, {}
        if not enabled:
            yield
            return
        with hooks() as handles:
            for name, layer in self.layers.items():
                handles.append(layer.register_forward_hook(
                    lambda layer, inputs, output, name=name: self._layer_done(name, layer, inputs[0], output)))
                norms = norms_of(layer)
                for index, part in enumerate(self.parts[name]):
                    handles.append(layer.get_submodule(f"rule.adds.{index}").register_forward_hook(
                        lambda _m, _i, output, name=name, part=part: self._branch_done(name, part, output)))
                    if f"{part} norm" in self.keys:
                        handles.append(norms[index].register_forward_hook(
                            lambda _m, inputs, output, name=name, part=part: self._norm_done(
                                name, part, inputs[0], output)))
            yield

    def _layer_done(self, name: str, layer: nn.Module, below: Stream, stream: Stream) -> Stream:
        output, stream = value_in(layer, stream)
        x = output.detach().float()
        cosines = F.cosine_similarity(x, block_of(layer).value(below).detach().float(), dim=-1)
        self._add(f"{name} elements", _count(x))
        self._add(f"{name} sum", x.sum())
        self._add(f"{name} squares", _squares(x))
        self._add(f"{name} positions", _count(cosines))
        self._add(f"{name} cosines", cosines.sum())
        self._raise_largest(f"{name}/output_largest", x)
        self._add_gradient(f"{name} gradient", output)
        return stream

    def _branch_done(self, name: str, part: str, branch: Tensor) -> None:
        self._add(f"{part} elements", _count(branch))
        self._add(f"{part} squares", _squares(branch))
        self._raise_largest(f"{name}/inside_largest", branch)
        self._add_gradient(f"{part} branch", branch)

    def _norm_done(self, name: str, part: str, x: Tensor, output: Tensor) -> None:
        self._raise_largest(f"{name}/inside_largest", x)
        self._add_gradient(f"{part} norm", output)

    def _add(self, key: str, value: Tensor) -> None:
        if key in self._sums:
            value = self._sums[key] + value
        self._sums[key] = value

    def _add_gradient(self, key: str, tensor: Tensor) -> None:
        if tensor.requires_grad and torch.is_grad_enabled():
            tensor.register_hook(lambda grad: self._add(key, _squares(grad)))

    def _raise_largest(self, key: str, tensor: Tensor) -> None:
        top = torch.linalg.vector_norm(tensor.detach(), math.inf, dtype=torch.float32)
        if key in self._largest:
            top = torch.maximum(self._largest[key], top)
        self._largest[key] = top

    def read(self, loss_scale: float, combine: Combine = list, largest: Combine = list) -> dict[str, float]:
        """The measurements of the probed update by layer and sub-layer; padding counts, too.

        * `LAYER/output_rms`, `output_variance` and `output_largest` (magnitude) of the layer's outputs.
        * `LAYER/cosine_below`: the mean cosine between output and input of a position.
        * `LAYER/gradient_norm`: the norm of the update's gradient with respect to the outputs.
        * `LAYER/inside_largest`: the largest magnitude among branch outputs and LayerNorm inputs (the residual sum).
        * `LAYER.PART/branch_rms` and `branch_gradient` of the branch: the sub-layer's output before the residual sum.
        * `LAYER.PART/norm_gradient` of its LayerNorm's output, if it has one.

        Args:
            loss_scale: of the probed update; gradients are divided by it.
            combine: sums a list element-wise over all processes, each of which must call `read`.
            largest: the same for maxima.
        """
        tops = [f"{name}/{kind}_largest" for name in self.parts for kind in ("output", "inside")]
        sums = dict(zip(self.keys, combine(_values(self._sums, self.keys)), strict=True))
        values = dict(zip(tops, largest(_values(self._largest, tops)), strict=True))
        self._sums, self._largest = {}, {}
        for name, parts in self.parts.items():
            count = sums[f"{name} elements"] or 1.0  # without elements all sums are 0
            square = sums[f"{name} squares"] / count
            mean = sums[f"{name} sum"] / count
            values |= {
                f"{name}/output_rms": math.sqrt(square),
                f"{name}/output_variance": square - mean**2,
                f"{name}/cosine_below": sums[f"{name} cosines"] / (sums[f"{name} positions"] or 1.0),
                f"{name}/gradient_norm": math.sqrt(sums[f"{name} gradient"]) / loss_scale,
            }
            for part in parts:
                count = sums[f"{part} elements"] or 1.0
                values[f"{part}/branch_rms"] = math.sqrt(sums[f"{part} squares"] / count)
                for kind in ("branch", "norm"):
                    if f"{part} {kind}" in sums:
                        values[f"{part}/{kind}_gradient"] = math.sqrt(sums[f"{part} {kind}"]) / loss_scale
        return values


def watch(recipe: Recipe, engine: Engine, ranks: Ranks) -> UpdateHook:
    """A context for a run's updates. At every `train.probe_every`-th it yields a function that returns the probe's
    measurements, at all others None. The function is collective."""
    probe = TrainingProbe(engine.module, recipe.model, recipe.train.probe_every)

    def read(stats: StepStats) -> dict[str, float]:
        factor = stats.loss_scale * engine.data_world  # engines multiply the loss by it
        return probe.read(factor, ranks.sum, ranks.max)

    @contextmanager
    def around(number: int) -> Iterator[Callable[[StepStats], dict[str, float]] | None]:
        due = probe.due(number)
        with probe.watching(due):
            yield read if due else None

    return around


def _values(tensors: dict[str, Tensor], keys: list[str]) -> list[float]:
    """The values in the order of the keys, 0 for missing ones; fetched from the device in one transfer."""
    fetched: dict[str, float] = {}
    if tensors:
        fetched = dict(zip(tensors, torch.stack(list(tensors.values())).tolist(), strict=True))
    return [fetched.get(key, 0.0) for key in keys]


def _count(tensor: Tensor) -> Tensor:
    """The number of elements, on the tensor's device. Filled in there, because a copy from the CPU would wait."""
    return tensor.new_full((), float(tensor.numel()), dtype=torch.float32)


def _squares(tensor: Tensor) -> Tensor:
    return torch.linalg.vector_norm(tensor.detach(), dtype=torch.float32).square()
