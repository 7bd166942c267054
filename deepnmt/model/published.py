"""The blocks as the code of their authors builds and initialises them: `init: published`.

A class here differs from the block in blocks/ in the draw of its weights, and four differ in their parameters: Fixup
in its scalars and biases, looks_linear in the rows of fc1, admin_closed_form in its ω, DLCL in the norm of y_0. Blocks
that are not listed start as their authors' code does anyway. docs/reference/blocks.md names the code,
studies/results/initial_weights.md compares the two, matrix by matrix.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

import torch
from torch import Tensor, nn

from deepnmt.model.blocks import (
    B2T,
    DLCL,
    AdminClosedForm,
    B2TNoLN,
    Block,
    Branch,
    DeepNorm,
    DLCLPost,
    Fixup,
    LayerPosition,
    Matrix,
    PostLN,
    ReZero,
    TFixup,
    say_facts,
)
from deepnmt.model.sublayers import ShiftedFeedForward


class _PlainLinear(Block):
    """Mixin: some matrices and biases keep the draw of PyTorch's `Linear`, uniform in ±1/√fan_in, times the gain."""

    plain: ClassVar[tuple[Matrix, ...]] = ()  # whose matrices
    random_biases: ClassVar[tuple[Matrix, ...]] = ()  # whose biases, which no gain multiplies

    @classmethod
    def init_matrix(cls, weight: Tensor, path: str, matrix: Matrix, gain: float, generator: torch.Generator) -> None:
        if matrix in cls.plain:
            bound = gain * weight.size(1) ** -0.5
            weight.uniform_(-bound, bound, generator=generator)
        else:
            super().init_matrix(weight, path, matrix, gain, generator)

    @classmethod
    def bias_bound(cls, matrix: Matrix, columns: int) -> float:
        return columns**-0.5 if matrix in cls.random_biases else 0.0


class PublishedB2T(_PlainLinear, B2T):
    """The factor L^-1/2 is on all matrices, but not on the random biases of q, k, v, fc1 and fc2."""

    plain = ("fc1", "fc2")
    random_biases = ("q", "k", "v", "fc1", "fc2")


class PublishedB2TNoLN(_PlainLinear, B2TNoLN):
    """As `PublishedB2T`."""

    plain = PublishedB2T.plain
    random_biases = PublishedB2T.random_biases


class PublishedReZero(_PlainLinear, ReZero):
    """The package's layers, which leave all but query, key and value to PyTorch."""

    plain = ("out", "fc1", "fc2")
    random_biases = ("fc1", "fc2")


class PublishedTFixup(_PlainLinear, TFixup):
    """Random biases of query, key and value."""

    random_biases = ("q", "k", "v")


class PublishedDeepNorm(DeepNorm):
    """Normal with Xavier's variance, as the paper's figure 2 says, too."""

    @classmethod
    def init_matrix(cls, weight: Tensor, path: str, matrix: Matrix, gain: float, generator: torch.Generator) -> None:
        nn.init.xavier_normal_(weight, gain=gain, generator=generator)


class PublishedLooksLinear(PostLN):
    """An ordinary FFN: the lower half of fc1 starts as minus its upper half, and the right half of fc2 as minus its
    left half. So the FFN is linear at first: relu(h) - relu(-h) = h."""

    @classmethod
    def init_matrix(cls, weight: Tensor, path: str, matrix: Matrix, gain: float, generator: torch.Generator) -> None:
        super().init_matrix(weight, path, matrix, gain, generator)
        if matrix in ("fc1", "fc2"):
            first, second = weight.chunk(2, dim=0 if matrix == "fc1" else 1)
            second.copy_(-first)


class PublishedAdminClosedForm(Block):
    """ω is a constant of the stack, not trained: the package's default."""

    def __init__(self, position: LayerPosition) -> None:
        super().__init__(position)
        self.omega = AdminClosedForm.constant(position)

    @classmethod
    def fixed_omega(cls, position: LayerPosition) -> float | None:
        return AdminClosedForm.constant(position)

    def join(self, i: int, x: Tensor, f: Branch) -> Tensor:
        return self.norms[i](self.omega * x + f(x))


class UnbiasedLinear(nn.Linear):
    """W x."""

    def __init__(self, columns: int, rows: int) -> None:
        super().__init__(columns, rows, bias=False)


class UnbiasedFeedForward(ShiftedFeedForward):
    """A scalar is subtracted before the activation and before fc2."""

    linear = UnbiasedLinear

    def __init__(
        self, width: int, inner: int, activation: str, dropout: float, norm: Callable[[int], nn.Module] = nn.LayerNorm
    ) -> None:
        super().__init__(width, inner, activation, dropout)
        self.fc2_shift = nn.Parameter(torch.empty(1))

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.dropout(self.activate(self.fc1(x))) - self.fc2_shift)


class FixupTop(nn.Module):
    """x - shift on top of a decoder, (x - shift)·scale on top of an encoder."""

    scale: nn.Parameter | None

    def __init__(self, scaled: bool) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.empty(1))
        self.register_parameter("scale", nn.Parameter(torch.empty(1)) if scaled else None)

    def forward(self, x: Tensor) -> Tensor:
        x = x - self.shift
        return x if self.scale is None else x * self.scale


class PublishedFixup(Fixup):
    """x ← x + s_i·F_i(x - b_i), no bias vectors: 6 scalars in an encoder layer, 8 in a decoder layer.

    Two more scalars are inside the FFN, none before out or on the memory. Query, key and value of the cross-attention
    have 12^-1/6 for n^-1/6 at any depth. An output table of its own starts at 0.
    """

    initial_values: ClassVar[dict[str, float]] = {"scales": 1.0, "shifts": 0.0, "scale": 1.0, "shift": 0.0}
    linear = UnbiasedLinear
    feed_forward = UnbiasedFeedForward

    def __init__(self, position: LayerPosition) -> None:
        super().__init__(position)
        self.shifts = nn.ParameterList(nn.Parameter(torch.empty(1)) for _ in range(position.branches))

    @classmethod
    def init_matrix(cls, weight: Tensor, path: str, matrix: Matrix, gain: float, generator: torch.Generator) -> None:
        if path in ("cross_attn.q", "cross_attn.kv"):
            gain = 2**-0.5 * 12 ** (-1 / 6)
        super().init_matrix(weight, path, matrix, gain, generator)

    @staticmethod
    def output_gain() -> float:
        return 0.0

    def join(self, i: int, x: Tensor, f: Branch) -> Tensor:
        return x + self.scales[i] * f(x - self.shifts[i])

    @classmethod
    def top(cls, position: LayerPosition) -> nn.Module:
        return FixupTop(scaled=position.side == "encoder")


class PublishedDLCL(DLCL):
    """y_0 has no norm. Without a softmax, a window says which weights start at 0; all are trained."""

    def __init__(self, position: LayerPosition) -> None:
        super().__init__(position)
        if position.index == 0:
            self.mix.norm = nn.Identity()

    @staticmethod
    def window_of(position: LayerPosition) -> int:
        return position.settings.history_window if position.settings.history_softmax else 0

    @classmethod
    def initial_value(cls, position: LayerPosition, name: str) -> float | list[float]:
        below, window = position.index + 1, position.settings.history_window
        if name != "mix.weights" or not 0 < window < below or position.settings.history_softmax:
            return super().initial_value(position, name)
        return [0.0] * (below - window) + [1 / window] * window


class PublishedDLCLPost(PublishedDLCL, DLCLPost):
    """As `PublishedDLCL`."""


PUBLISHED: dict[str, type[Block]] = {
    "admin_closed_form": PublishedAdminClosedForm,
    "b2t": PublishedB2T,
    "b2t_no_ln": PublishedB2TNoLN,
    "deepnorm": PublishedDeepNorm,
    "rezero": PublishedReZero,
    "fixup": PublishedFixup,
    "t_fixup": PublishedTFixup,
    "looks_linear": PublishedLooksLinear,
    "dlcl": PublishedDLCL,
    "dlcl_post": PublishedDLCLPost,
}

say_facts(PUBLISHED)
