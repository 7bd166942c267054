"""Activations of one batch: variance and largest magnitude of every layer, room to fp16's end, likeness of layers.

Takase et al. 2023 (B2T), figure 5: the cosine between layers' outputs, a token at a time, averaged over tokens.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from deepnmt.batch import Batch
from deepnmt.doctor.probes import hooks, layer_outputs, layers_of, real_positions, stack_outputs
from deepnmt.model.blocks import SUBLAYERS, Side, Stream, newest
from deepnmt.model.transformer import Transformer

HALF_MAX = 65504.0  # the largest finite fp16 number


@dataclass(frozen=True)
class Range:
    """What flows through a layer.

    Attributes:
        variance: of the layer's output, at real positions.
        largest: the largest magnitude that any module of the layer puts out or any norm takes in (the residual sum,
            which no module puts out). Attention scores, inside a kernel, are not among them.
        where: that module, as in `ffn.fc1` or `rule.norms.1 (input)`.
    """

    variance: float
    largest: float
    where: str

    @property
    def headroom(self) -> float:
        """How many times larger it could be before fp16 ends."""
        return HALF_MAX / self.largest if self.largest else float("inf")

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {**asdict(self), "headroom": self.headroom}


@torch.no_grad()
def ranges(model: Transformer, batch: Batch) -> dict[str, Range]:
    """By layer, as in `encoder.layers.3`, in evaluation mode."""
    was_training = model.training
    model.eval()
    real = real_positions(batch)
    found: dict[str, Range] = {}
    largest: dict[str, float] = {}

    def see(name: str, tensor: Any) -> None:
        if isinstance(tensor, Tensor):
            largest[name] = max(largest.get(name, 0.0), float(tensor.abs().max()))

    def module_done(name: str, module: nn.Module, taken: tuple[Any, ...], output: Any) -> None:
        see(name, output)
        if isinstance(module, nn.LayerNorm):
            see(f"{name} (input)", taken[0])

    def layer_done(name: str, side: Side, stream: Stream) -> None:
        output = newest(stream)
        where = max((n for n in largest if n.startswith(f"{name}.")), key=lambda n: largest[n])
        top = max(largest[where], float(output.abs().max()))
        found[name] = Range(float(output[real[side]].var(correction=0)), top,
                            where.removeprefix(f"{name}.") if top == largest[where] else "output")

    with hooks() as handles:
        for side in SUBLAYERS:
            for index, layer in enumerate(layers_of(model, side)):
                name = f"{side}.layers.{index}"
                for path, module in layer.named_modules():
                    if path and not list(module.children()):
                        handles.append(module.register_forward_hook(partial(module_done, f"{name}.{path}")))
                handles.append(layer.register_forward_hook(
                    lambda _m, _i, output, name=name, side=side: layer_done(name, side, output)))
        stack_outputs(model, batch)
    model.train(was_training)
    return found


@torch.no_grad()
def likeness(model: Transformer, batch: Batch, side: Side) -> list[list[float]]:
    """The mean cosine between the outputs of each two layers of a stack [L][L], in evaluation mode."""
    was_training = model.training
    model.eval()
    outputs = [output / output.norm(dim=-1, keepdim=True).clamp_min(1e-30)
               for output in layer_outputs(model, batch)[side]]
    model.train(was_training)
    stacked = torch.stack(outputs)  # [L, positions, D]
    return (torch.einsum("lpd,mpd->lm", stacked, stacked) / stacked.size(1)).tolist()


def token_likeness(output: Tensor) -> float:
    """The mean cosine between a stack's outputs [positions, D] at different positions: 1 where all are one vector."""
    unit = output / output.norm(dim=-1, keepdim=True).clamp_min(1e-30)
    count = len(unit)
    return float((unit.sum(0).square().sum() - count) / (count * (count - 1)))
