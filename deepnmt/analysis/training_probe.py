"""During training, every n updates: size, variance, largest magnitude and gradient of every layer's output, and how
like its input it is.

Hooks stand on the layers for that one update only; all other updates run as if there were no probe.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from deepnmt.analysis.admin_profile import SIDES
from deepnmt.analysis.probes import hooks
from deepnmt.config import Model
from deepnmt.model.residual import Stream, newest

Combine = Callable[[list[float]], list[float]]

_SUMS = {"output": 5, "gradient": 1}  # how many of each kind, see `_seen`


class TrainingProbe:
    """The layers of a model, whatever engine runs it.

    Args:
        module: what this process computes with: all of `encoder.layers.N` and `decoder.layers.N`, or a pipeline's part.
        model: the depths, so that every process knows every layer's name.
        every: updates between probes; 0: never.
    """

    def __init__(self, module: nn.Module, model: Model, every: int) -> None:
        self.every = every
        depths = {"encoder": model.encoder.layers, "decoder": model.decoder.layers}
        self.names = [f"{side}.layers.{index}" for side in SIDES for index in range(depths[side])]
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
            yield

    def _seen(self, name: str, given: Stream, stream: Stream) -> None:
        """Of the output: elements, sum, sum of squares, positions, sum of the cosines with the layer's input, and the
        largest magnitude; of the gradient: sum of squares. No value is waited for here."""
        output = newest(stream)
        x, below = output.detach().float(), newest(given).detach().float()
        cosines = F.cosine_similarity(x, below, dim=-1)
        self._add(f"{name} output", [x.new_tensor(float(x.numel())), x.sum(), _squares(x),
                                     x.new_tensor(float(cosines.numel())), cosines.sum()])
        top = torch.linalg.vector_norm(x, math.inf)
        self._largest[name] = torch.maximum(self._largest[name], top) if name in self._largest else top
        if output.requires_grad and torch.is_grad_enabled():
            output.register_hook(lambda grad: self._add(f"{name} gradient", [_squares(grad)]))

    def _add(self, key: str, values: list[Tensor]) -> None:
        found = torch.stack(values)
        self._sums[key] = self._sums[key] + found if key in self._sums else found

    def read(self, loss_scale: float, combine: Combine = list, largest: Combine = list) -> dict[str, float]:
        """By layer: `NAME/output_rms`, `NAME/output_variance` and `NAME/output_largest` (magnitude) of its outputs,
        `NAME/cosine_below`, the mean cosine of a position's output with its input, that of the layer below (all of them
        with padding), and `NAME/gradient_norm`, the norm of the update's gradient with respect to the outputs.

        Args:
            loss_scale: that of the probed update; gradients are divided by it.
            combine: sums a list element-wise over all processes; then every process calls `read`.
            largest: the same for maxima.
        """
        sums = [self._sums.get(f"{name} {kind}", torch.zeros(size)).cpu()
                for name in self.names for kind, size in _SUMS.items()]
        totals = iter(combine(torch.cat(sums).tolist()))
        tops = largest([float(self._largest.get(name, 0.0)) for name in self.names])
        found = {}
        for name, top in zip(self.names, tops, strict=True):
            count, total, squares, positions, cosines, gradient = (next(totals) for _ in range(sum(_SUMS.values())))
            mean_square = squares / count if count else 0.0
            found[f"{name}/output_rms"] = math.sqrt(mean_square)
            found[f"{name}/output_variance"] = mean_square - (total / count) ** 2 if count else 0.0
            found[f"{name}/output_largest"] = top
            found[f"{name}/cosine_below"] = cosines / positions if positions else 0.0
            found[f"{name}/gradient_norm"] = math.sqrt(gradient) / loss_scale
        self._sums, self._largest = {}, {}
        return found


def _squares(tensor: Tensor) -> Tensor:
    return torch.linalg.vector_norm(tensor.detach(), dtype=torch.float32).square()
