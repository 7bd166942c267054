"""The feed-forward sub-layer, its two variants for Fixup and looks_linear, and a linear map with a shift.

`D` width, `I` inner width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from deepnmt.model.dropout import Dropout
from deepnmt.model.unfilled import unfilled


class Activation(NamedTuple):
    """`apply`: [..., rows·I] to [..., I], with `rows` outputs of fc1 for each input of fc2."""

    apply: Callable[[Tensor], Tensor]
    rows: int = 1


def _gated(activation: Callable[[Tensor], Tensor]) -> Activation:
    """f(a) ⊙ b of the halves a and b. Shazeer 2020, GLU Variants Improve Transformer, section 2."""
    def apply(h: Tensor) -> Tensor:
        a, b = h.chunk(2, dim=-1)
        return activation(a) * b

    return Activation(apply, rows=2)


ACTIVATIONS: dict[str, Activation] = {
    "relu": Activation(F.relu),
    "gelu": Activation(F.gelu),
    "silu": Activation(F.silu),
    "reglu": _gated(F.relu),
    "geglu": _gated(F.gelu),
    "swiglu": _gated(F.silu),
}


class ShiftedLinear(nn.Linear):
    """W (x - b) + c: a linear map with a trainable scalar b before it (Fixup, Zhang et al. 2019, section 3)."""

    def __init__(
        self, columns: int, rows: int, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__(columns, rows, device=device, dtype=dtype)
        self.shift = nn.Parameter(torch.empty(1, device=device, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x - self.shift)


class FeedForward(nn.Module):
    """fc2(dropout(activation(fc1(x)))), position by position: [..., D] to [..., D]. With a gate, the matrix of `fc1`
    [2I, D] holds that of the activation and that of the gate in this order. `norm` makes a norm of a width; only a
    subclass has one."""

    linear: ClassVar[type[nn.Linear]] = nn.Linear
    copies: ClassVar[int] = 1  # outputs of the activation for each output of fc1

    def __init__(
        self, width: int, inner: int, activation: str, dropout: float, norm: Callable[[int], nn.Module] = nn.LayerNorm
    ) -> None:
        super().__init__()
        self.activation, rows = ACTIVATIONS[activation]
        self.fc1 = unfilled(self.linear, width, rows * inner // self.copies)
        self.fc2 = unfilled(self.linear, inner, width)
        self.dropout = Dropout(dropout)

    def activate(self, h: Tensor) -> Tensor:
        """From the output of fc1 [..., I / copies] to the input of fc2 [..., I]."""
        return self.activation(h)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.dropout(self.activate(self.fc1(x))))


class ShiftedFeedForward(FeedForward):
    """Subtracts a trainable scalar before fc1, before the activation and before fc2 (Fixup)."""

    linear: ClassVar[type[nn.Linear]] = ShiftedLinear

    def __init__(
        self, width: int, inner: int, activation: str, dropout: float, norm: Callable[[int], nn.Module] = nn.LayerNorm
    ) -> None:
        super().__init__(width, inner, activation, dropout)
        self.shift = nn.Parameter(torch.empty(1))

    def activate(self, h: Tensor) -> Tensor:
        return self.activation(h - self.shift)


class NormedFeedForward(FeedForward):
    """Norms the input of fc2 (`sub_ln`)."""

    def __init__(
        self, width: int, inner: int, activation: str, dropout: float, norm: Callable[[int], nn.Module] = nn.LayerNorm
    ) -> None:
        super().__init__(width, inner, activation, dropout)
        self.norm = norm(inner)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.norm(self.dropout(self.activate(self.fc1(x)))))


class ConcatenatedFeedForward(FeedForward):
    """The activation is (f(h), f(-h)), with h = fc1(x) of half the inner width: the CReLU of Shang et al. 2016.

    With fc2 = [W, -W] the FFN equals W fc1(x), because f(h) - f(-h) = h for relu, gelu and silu.
    """

    copies = 2

    def activate(self, h: Tensor) -> Tensor:
        return torch.cat([self.activation(h), self.activation(-h)], dim=-1)
