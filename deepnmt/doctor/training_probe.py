"""During training, every n updates: what flows through every layer and its sub-layers, and its gradients.

Of a layer's output its size, variance, largest magnitude, gradient, and how like the layer's input it is; of each
sub-layer its branch's size and gradient and its LayerNorm's gradient, which in a decoder layer whose norms follow the
branches are those at the five places of Takase et al. 2023 (B2T), figures 4 and 7 (but for `rezero_post_ln`, whose
branches are multiplied by a before they join). Hooks stand on the modules for that
one update only; all other updates run as if there were no probe.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from deepnmt.config import Model, Recipe
from deepnmt.doctor.probes import hooks, norms_of
from deepnmt.model.blocks import BLOCKS, SIDES, SUBLAYERS, Stream, newest
from deepnmt.parallel.engine import Engine, StepStats
from deepnmt.ranks import Ranks
from deepnmt.train.updates import Around

Combine = Callable[[list[float]], list[float]]

_OUTPUT, _BRANCH, _GRADIENT = 5, 2, 1  # how many sums of each kind, see `_seen`, `_added` and `_descend`


class TrainingProbe:
    """The layers of a model, whatever engine runs it.

    Args:
        module: what this process computes with: all of `encoder.layers.N` and `decoder.layers.N`, or a pipeline's part.
        model: the depths and blocks, so that every process knows every layer's name.
        every: updates between probes; 0: never.
    """

    def __init__(self, module: nn.Module, model: Model, every: int) -> None:
        self.every = every
        self.names: list[str] = []  # of all layers
        self.parts: dict[str, tuple[str, ...]] = {}  # by layer, its sub-layers
        self.normed: set[str] = set()  # the layers whose sub-layers have LayerNorms
        for side, stack in zip(SIDES, (model.encoder, model.decoder), strict=True):
            for name in (f"{side}.layers.{index}" for index in range(stack.layers)):
                self.names.append(name)
                self.parts[name] = SUBLAYERS[side]
                if BLOCKS[stack.block].layer_norms:
                    self.normed.add(name)
        here = dict(module.named_modules())
        self.layers = {name: here[name] for name in self.names if name in here}
        self._sums: dict[str, Tensor] = {}
        self._largest: dict[str, Tensor] = {}

    def due(self, update: int) -> bool:
        """Whether update number `update` (from 1) is probed."""
        return self.every > 0 and update % self.every == 0

    @contextmanager
    def watching(self, wanted: bool) -> Iterator[None]:
        """While it lasts, and if `wanted`, sums and maxima over the layers' outputs and their gradients are taken."""
        self._sums, self._largest = {}, {}
        with hooks() as handles:
            for name, layer in (self.layers if wanted else {}).items():
                handles.append(layer.register_forward_hook(
                    lambda _m, given, output, name=name: self._seen(name, given[0], output)))
                norms = norms_of(layer)
                for index, part in enumerate(self.parts[name]):
                    add = layer.get_submodule(f"rule.adds.{index}")
                    handles.append(add.register_forward_hook(
                        lambda _m, _i, output, name=name, part=part: self._added(name, part, output)))
                    if name in self.normed:
                        handles.append(norms[index].register_forward_hook(
                            lambda _m, given, output, name=name, part=part: self._normed(name, part, given[0], output)))
            yield

    def _seen(self, name: str, given: Stream, stream: Stream) -> None:
        """Of a layer's output: elements, sum, sum of squares, positions, sum of the cosines with the layer's input, and
        the largest magnitude; of the gradient: sum of squares. No value is waited for here."""
        output = newest(stream)
        x, below = output.detach().float(), newest(given).detach().float()
        cosines = F.cosine_similarity(x, below, dim=-1)
        self._add(f"{name} output", [_count(x), x.sum(), _squares(x), _count(cosines), cosines.sum()])
        self._top(f"{name} output", x)
        self._descend(f"{name} gradient", output)

    def _added(self, name: str, part: str, branch: Tensor) -> None:
        """Of a branch's output: elements, sum of squares, largest magnitude, and its gradient's sum of squares."""
        self._add(f"{name}.{part} branch", [_count(branch), _squares(branch)])
        self._top(f"{name} inside", branch)
        self._descend(f"{name}.{part} branch gradient", branch)

    def _normed(self, name: str, part: str, given: Tensor, output: Tensor) -> None:
        """Of what a LayerNorm takes in, the largest magnitude; of its output, the gradient's sum of squares."""
        self._top(f"{name} inside", given)
        self._descend(f"{name}.{part} norm gradient", output)

    def _descend(self, key: str, tensor: Tensor) -> None:
        if tensor.requires_grad and torch.is_grad_enabled():
            tensor.register_hook(lambda grad: self._add(key, [_squares(grad)]))

    def _add(self, key: str, values: list[Tensor]) -> None:
        found = torch.stack(values)
        self._sums[key] = self._sums[key] + found if key in self._sums else found

    def _top(self, key: str, tensor: Tensor) -> None:
        top = torch.linalg.vector_norm(tensor.detach(), math.inf, dtype=torch.float32)
        self._largest[key] = torch.maximum(self._largest[key], top) if key in self._largest else top

    def _keys(self) -> dict[str, int]:
        """Every sum of the whole model and its size, in the order that all processes report them."""
        keys: dict[str, int] = {}
        for name in self.names:
            keys |= {f"{name} output": _OUTPUT, f"{name} gradient": _GRADIENT}
            for part in self.parts[name]:
                keys |= {f"{name}.{part} branch": _BRANCH, f"{name}.{part} branch gradient": _GRADIENT}
                if name in self.normed:
                    keys[f"{name}.{part} norm gradient"] = _GRADIENT
        return keys

    def read(self, loss_scale: float, combine: Combine = list, largest: Combine = list) -> dict[str, float]:
        """What the probed update showed, by layer and sub-layer, padding included.

        `LAYER/output_rms`, `output_variance` and `output_largest` (magnitude) of its outputs, `cosine_below`, the mean
        cosine of a position's output with its input, that of the layer below, and `gradient_norm`, the norm of the
        update's gradient with respect to the outputs. `LAYER/inside_largest`, the largest magnitude of a branch's
        output or a LayerNorm's input, the residual sum. `LAYER.PART/branch_rms` and `branch_gradient` of the
        sub-layer's output before it joins the residual, and `norm_gradient` of its LayerNorm's output, where it has
        one.

        Args:
            loss_scale: that of the probed update; gradients are divided by it.
            combine: sums a list element-wise over all processes; then every process calls `read`.
            largest: the same for maxima.
        """
        keys = self._keys()
        totals = combine(torch.cat([self._sums.get(key, torch.zeros(size)).cpu() for key, size in keys.items()])
                         .tolist())
        tops = [f"{name} {kind}" for name in self.names for kind in ("output", "inside")]
        top = dict(zip(tops, largest([float(self._largest.get(key, 0.0)) for key in tops]), strict=True))
        rest = iter(totals)
        sums = {key: [next(rest) for _ in range(size)] for key, size in keys.items()}
        found: dict[str, float] = {}
        for name in self.names:
            found |= _of_layer(name, sums[f"{name} output"])
            found[f"{name}/output_largest"] = top[f"{name} output"]
            found[f"{name}/inside_largest"] = top[f"{name} inside"]
            found[f"{name}/gradient_norm"] = math.sqrt(sums[f"{name} gradient"][0]) / loss_scale
            for part in (f"{name}.{each}" for each in self.parts[name]):
                count, squares = sums[f"{part} branch"]
                found[f"{part}/branch_rms"] = math.sqrt(squares / count) if count else 0.0
                for kind in ("branch", "norm"):
                    if f"{part} {kind} gradient" in sums:
                        found[f"{part}/{kind}_gradient"] = math.sqrt(sums[f"{part} {kind} gradient"][0]) / loss_scale
        self._sums, self._largest = {}, {}
        return found


def watch(recipe: Recipe, engine: Engine, ranks: Ranks) -> Around:
    """The hook that a run's updates are made under: every `train.probe_every` of them what the probe reads. What it
    gives is collective."""
    probe = TrainingProbe(engine.module, recipe.model, recipe.train.probe_every)

    @contextmanager
    def around(number: int) -> Iterator[Callable[[StepStats], dict[str, float]] | None]:
        with probe.watching(due := probe.due(number)):
            # what engines multiply the loss by
            yield (lambda stats: probe.read(stats.loss_scale * engine.data_world, ranks.sum, ranks.largest)) if due \
                else None

    return around


def _of_layer(name: str, sums: list[float]) -> dict[str, float]:
    """Of a layer's output, from what `_seen` summed."""
    count, total, squares, positions, cosines = sums
    return {
        f"{name}/output_rms": math.sqrt(squares / count) if count else 0.0,
        f"{name}/output_variance": squares / count - (total / count) ** 2 if count else 0.0,
        f"{name}/cosine_below": cosines / positions if positions else 0.0,
    }


def _count(tensor: Tensor) -> Tensor:
    """Elements, where the tensor is (filled in there: a copy would be waited for)."""
    return tensor.new_full((), float(tensor.numel()), dtype=torch.float32)


def _squares(tensor: Tensor) -> Tensor:
    return torch.linalg.vector_norm(tensor.detach(), dtype=torch.float32).square()
