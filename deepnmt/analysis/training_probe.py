"""During training, every n updates: the size of every layer's output and of its gradient.

Hooks stand on the layers for that one update only; all other updates run as if there were no probe.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from deepnmt.analysis.admin_profile import SIDES
from deepnmt.analysis.probes import hooks
from deepnmt.config import Model
from deepnmt.model.residual import Stream, newest

Combine = Callable[[list[float]], list[float]]


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

    def due(self, update: int) -> bool:
        """Whether update number `update` (from 1) is probed."""
        return self.every > 0 and update % self.every == 0

    @contextmanager
    def watching(self, wanted: bool) -> Iterator[None]:
        """While it lasts, and if `wanted`, sums over the layers' outputs and their gradients are taken."""
        self._sums = {}
        with hooks() as handles:
            for name, layer in (self.layers if wanted else {}).items():
                handles.append(layer.register_forward_hook(
                    lambda _m, _i, output, name=name: self._seen(name, output)))
            yield

    def _seen(self, name: str, stream: Stream) -> None:
        output = newest(stream)
        self._add(f"{name} output", output)
        if output.requires_grad and torch.is_grad_enabled():
            output.register_hook(lambda grad: self._add(f"{name} gradient", grad))

    def _add(self, key: str, tensor: Tensor) -> None:
        """Adds the number of elements and the sum of their squares; no value is waited for here."""
        squares = torch.linalg.vector_norm(tensor.detach(), dtype=torch.float32).square()
        found = torch.stack([squares.new_tensor(float(tensor.numel())), squares])
        self._sums[key] = self._sums[key] + found if key in self._sums else found

    def read(self, loss_scale: float, combine: Combine = list) -> dict[str, float]:
        """By layer: `NAME/output_rms`, the root mean square of its outputs (padding included), and
        `NAME/gradient_norm`, the norm of the update's gradient with respect to them.

        Args:
            loss_scale: that of the probed update; gradients are divided by it.
            combine: sums a list element-wise over all processes; then every process calls `read`.
        """
        keys = [f"{name} {kind}" for name in self.names for kind in ("output", "gradient")]
        nothing = torch.zeros(2)
        totals = combine(torch.stack([self._sums.get(key, nothing).cpu() for key in keys]).flatten().tolist())
        found = {}
        for place, key in enumerate(keys):
            count, squares = totals[2 * place], totals[2 * place + 1]
            name, kind = key.split()
            if kind == "output":
                found[f"{name}/output_rms"] = math.sqrt(squares / count) if count else 0.0
            else:
                found[f"{name}/gradient_norm"] = math.sqrt(squares) / loss_scale
        self._sums = {}
        return found
