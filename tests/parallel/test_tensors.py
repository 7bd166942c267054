"""Casting a model onto a device: which tensors the device receives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from deepnmt.parallel.deepspeed import cast_onto


class Moves(TorchDispatchMode):
    """Records the type and size of every tensor that is copied from the CPU to the meta device."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[torch.dtype, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if torch.is_tensor(result) and result.is_meta and torch.is_tensor(args[0]) and not args[0].is_meta:
            self.seen.append((args[0].dtype, args[0].numel()))
        return result


def moved(put: Callable[[nn.Module], object]) -> list[tuple[torch.dtype, int]]:
    model = nn.Linear(3, 5)
    model.register_buffer("positions", torch.ones(7))
    with Moves() as moves:
        put(model)
    assert model.weight.is_meta and model.positions.dtype == torch.float32
    return sorted(moves.seen, key=lambda move: move[1])


def test_the_device_never_holds_weights_of_a_wider_type() -> None:
    half = torch.bfloat16
    found = moved(lambda model: cast_onto(model, half, torch.device("meta")))
    assert found == [(half, 5), (torch.float32, 7), (half, 15)]
    wide = [(torch.float32, size) for size in (5, 7, 15)]
    assert moved(lambda model: model.to("meta")) == wide, "what would be seen otherwise"
