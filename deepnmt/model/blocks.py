"""The blocks, one under the other: how a layer threads x through its sub-layers.

A block owns a layer's LayerNorms and other extra parameters, the factors its paper puts on the initialisation, and what
stands on top of the stack. Notation: x the input of a sub-layer, F_i the i-th sub-layer after dropout (encoder:
self-attention, FFN; decoder: self-attention, cross-attention, FFN), K the number of sub-layers, LN LayerNorm (eps
1e-5), N encoder and M decoder layers, L the layers of the block's own stack, D width.

Every branch output passes through `adds[i]`, so a forward hook on `encoder.layers.3.rule.adds.1` sees F_2 of layer 3.
docs/reference/blocks.md compares them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from deepnmt import config
from deepnmt.model.feedforward import ConcatenatedFeedForward, FeedForward, ShiftedFeedForward, ShiftedLinear

Side = Literal["encoder", "decoder"]
Branch = Callable[[Tensor], Tensor]
Matrix = Literal["q", "k", "v", "out", "fc1", "fc2"]

SIDES: tuple[Side, Side] = ("encoder", "decoder")
SUBLAYERS: dict[Side, tuple[str, ...]] = {
    "encoder": ("self_attn", "ffn"),
    "decoder": ("self_attn", "cross_attn", "ffn"),
}

# What a layer hands to the next: its output [..., D]; with a block that `needs_history`, what is kept of the stack's
# input and of all layers below, and its output last. So layer l (from 0) is given l + 1 tensors then, layer 0 just one.
Stream = Tensor | tuple[Tensor, ...]


def last_output(x: Stream) -> Tensor:
    """The output of the layer below [..., D]."""
    return x if isinstance(x, Tensor) else x[-1]


class Norm(nn.Module):
    """A norm over the last dimension; all that stand in a model come from `LayerPosition.norm`."""

    def frozen(self, x: Tensor) -> Branch:
        """The norm as a map of any c [..., D] that keeps the statistics of x [..., D]: affine in c."""
        raise NotImplementedError


class LayerNorm(Norm, nn.LayerNorm):
    """(x - mean) / sqrt(variance + 1e-5) · weight + bias, over the last dimension. Ba et al. 2016, Layer Normalization.

    On a CPU PyTorch's 16-bit LayerNorm keeps mean and deviation in 16 bits for the backward pass and sums the gradients
    of weight and bias in 16 bits over all tokens (with 2,000 of them 11 eps off, here 0.3), so there all of it is done
    in fp32. On a GPU PyTorch does so by itself.
    """

    def forward(self, x: Tensor) -> Tensor:
        """x [..., D] to the same shape and type."""
        if x.dtype in (torch.float32, torch.float64) or x.device.type != "cpu":
            return super().forward(x)
        y = F.layer_norm(x.float(), self.normalized_shape, self.weight.float(), self.bias.float(), self.eps)
        return y.to(x.dtype)

    def frozen(self, x: Tensor) -> Branch:
        gain = (x.var(-1, correction=0, keepdim=True) + self.eps).rsqrt() * self.weight
        return lambda c: (c - c.mean(-1, keepdim=True)) * gain + self.bias


@dataclass(frozen=True)
class LayerPosition:
    """Where a layer stands, which is all a block may depend on."""

    side: Side
    index: int  # of the layer in its stack, from 0
    encoder_layers: int  # N
    decoder_layers: int  # M
    width: int  # D

    @classmethod
    def of(cls, model: config.Model, side: Side, index: int) -> LayerPosition:
        """That of layer `index` (from 0) of a model's stack."""
        return cls(side, index, model.encoder.layers, model.decoder.layers, model.width)

    def norm(self) -> Norm:
        """A new norm of the layer, or of what stands on the stack.

        To add a kind: a subclass of `Norm` above, its word in `config.Model`, and a field here that `of` takes it from.
        """
        return LayerNorm(self.width)

    @property
    def branches(self) -> int:
        """Sub-layers of the layer: 2 in the encoder, 3 in the decoder."""
        return len(SUBLAYERS[self.side])

    @property
    def sublayers(self) -> list[str]:
        """The canonical names of the layer's sub-layers, as in `encoder.layers.3.ffn`."""
        return [f"{self.side}.layers.{self.index}.{name}" for name in SUBLAYERS[self.side]]

    @property
    def depth(self) -> int:
        """Layers of the stack the layer stands in."""
        return self.encoder_layers if self.side == "encoder" else self.decoder_layers


class Block(nn.Module):
    """What every block has: one named add and, unless it does without, one LayerNorm for each sub-layer.

    Called with the layer's input [..., D] and its sub-layers, a block gives the layer's output [..., D]; one that
    `needs_history` takes and gives a `Stream`. Most blocks only say how one sub-layer is joined to x (`join`). What the
    rest of deepnmt asks of a block are these attributes, never its name.
    """

    layer_norms: ClassVar[bool] = True  # whether the sub-layers have LayerNorms
    final_norm: ClassVar[bool] = False  # whether the stack ends with a LayerNorm of its own
    needs_history: ClassVar[bool] = False  # whether a layer needs the outputs of all layers below, see `Stream`
    depth_scaled: ClassVar[bool] = False  # whether `init: auto` multiplies every matrix by L^-1/2
    profiled: ClassVar[bool] = False  # whether its ω are measured before the first update (`admin.py`)
    foldable: ClassVar[bool] = False  # whether it is LN_i(ω_i ⊙ x + F_i(x)), ω a parameter or DeepNorm's α
    made_for_depth: ClassVar[bool] = False  # whether it is advised where another diverges
    initial_values: ClassVar[dict[str, float]] = {}  # of the block's own parameters, see `initial_value`
    fused_qkv: ClassVar[bool] = True  # whether `separate` changes any `matrix_gain`
    linear: ClassVar[type[nn.Linear]] = nn.Linear  # of the attentions
    feed_forward: ClassVar[type[FeedForward]] = FeedForward

    def __init__(self, position: LayerPosition) -> None:
        super().__init__()
        self.norms = nn.ModuleList(position.norm() for _ in range(position.branches * self.layer_norms))
        self.adds = nn.ModuleList(nn.Identity() for _ in range(position.branches))

    @staticmethod
    def matrix_gain(position: LayerPosition, matrix: Matrix, separate: bool = False) -> float:
        """The factor on the Xavier bound of one of the layer's matrices: 1, and 1/√2 for query, key and value.

        1/√2 is Xavier's bound for a fused [3D, D] matrix, as the toolkit drew it that the Admin and B2T papers used;
        Admin's published profile follows from it. With 1 (`separate`) a deep profile is 30 % too high
        (docs/results/papers.md).
        """
        return 2**-0.5 if matrix in ("q", "k", "v") and not separate else 1.0

    @classmethod
    def initial_value(cls, position: LayerPosition, name: str) -> float:
        """What all numbers of a parameter of the block, or of what stands on the stack, are before training.

        Args:
            position: of the layer; of what stands on the stack the one above the last layer's.
            name: the parameter's in the block, as in `norms.0.bias`; NaN where nobody says, which `fill` refuses.
        """
        known = {"weight": 1.0, "bias": 0.0, **cls.initial_values}
        return known.get(name.split(".")[0], known.get(name.rpartition(".")[2], math.nan))

    @classmethod
    def init_matrix(cls, weight: Tensor, matrix: Matrix, gain: float, generator: torch.Generator) -> None:
        """Fills one matrix, in position: Xavier-uniform times `gain`."""
        nn.init.xavier_uniform_(weight, gain=gain, generator=generator)

    @staticmethod
    def embedding_gain(position: LayerPosition) -> float:
        """The factor on the table that the stack's input is looked up in."""
        return 1.0

    def join(self, i: int, x: Tensor, f: Branch) -> Tensor:
        """One sub-layer, f = F_i with the dropout behind it: x [..., D] to [..., D]."""
        raise NotImplementedError

    def forward(self, x: Any, branches: Sequence[Branch]) -> Any:
        for i, (add, branch) in enumerate(zip(self.adds, branches, strict=True)):
            x = self.join(i, x, partial(_added, add, branch))
        return x

    @classmethod
    def top(cls, position: LayerPosition) -> nn.Module:
        """What stands on the stack, new: it takes the last layer's `Stream` to the stack's output [..., D]."""
        return position.norm() if cls.final_norm else nn.Identity()


def _added(add: nn.Module, branch: Branch, x: Tensor) -> Tensor:
    return add(branch(x))


class PostLN(Block):
    """x ← LN_i(x + F_i(x)). Vaswani et al. 2017, Attention Is All You Need, section 3.1."""

    def join(self, i: int, x: Tensor, f: Branch) -> Tensor:
        return self.norms[i](x + f(x))


class PreLN(Block):
    """x ← x + F_i(LN_i(x)), a LayerNorm on top of the stack. Xiong et al. 2020, On Layer Normalization, table 1."""

    final_norm = True
    made_for_depth = True

    def join(self, i: int, x: Tensor, f: Branch) -> Tensor:
        return x + f(self.norms[i](x))


class Admin(Block):
    """x ← LN_i(ω_i ⊙ x + F_i(x)), ω_i a trainable vector. Liu et al. 2020, Understanding the Difficulty, section 4.3.

    ω starts from what a profile measured over the stack: ω_1 = 1, ω_i = sqrt(Σ_{j<i} Var[F_j]) with Var[F_0] that of
    the stack's input, or 1 as in the paper (`admin.input_variance`); without a profile from 1.
    """

    profiled = True
    foldable = True
    made_for_depth = True
    initial_values: ClassVar[dict[str, float]] = {"omegas": 1.0}

    def __init__(self, position: LayerPosition) -> None:
        super().__init__(position)
        self.omegas = nn.ParameterList(nn.Parameter(torch.empty(position.width)) for _ in range(position.branches))

    def join(self, i: int, x: Tensor, f: Branch) -> Tensor:
        return self.norms[i](self.omegas[i] * x + f(x))


class AdminClosedForm(Admin):
    """Admin with ω = sqrt((n+1)/ln(n+1) - 1) in all n = 2N or 3M sub-layers of a stack. Liu, the package admin-torch.

    No profile is needed: with branches of variance 1 the output change Σ β_ii² = n/(1 + ω²) is about ln(n+1), the
    O(log n) of Admin.
    """

    profiled = False
    made_for_depth = False

    @classmethod
    def initial_value(cls, position: LayerPosition, name: str) -> float:
        return cls.constant(position) if name.startswith("omegas") else super().initial_value(position, name)

    @staticmethod
    def constant(position: LayerPosition) -> float:
        """ω of every sub-layer of the stack."""
        n = position.branches * position.depth
        return math.sqrt((n + 1) / math.log(n + 1) - 1)


class B2T(Block):
    """x ← LN_i(x + F_i(x)) for i < K; then LN_K(x_in + h + F_K(h)). Takase et al. 2023, On LNs and Residuals, eq. 5.

    x_in is the layer's input, h the input of the last sub-layer (the FFN).
    """

    depth_scaled = True  # the published code, not the paper
    made_for_depth = True

    def forward(self, x: Tensor, branches: Sequence[Branch]) -> Tensor:
        h = x
        for norm, add, branch in zip(self.norms[:-1], self.adds[:-1], branches[:-1], strict=True):
            h = norm(h + add(branch(h)))
        return self.norms[-1](x + h + self.adds[-1](branches[-1](h)))


class B2TNoLN(Block):
    """h ← h + F_i(h) for i < K from h = x; then x ← α·x + β·(h + F_K(h)). Takase et al. 2023, appendix D, eq. 6 to 8.

    α = min(L/12, L^-0.15), β = D^-0.2; no LayerNorm. A layer multiplies x by about α + β: 0.94 at 18 layers of width
    512, 1.03 at width 128, so that narrow and deep stacks grow.
    """

    layer_norms = False
    depth_scaled = True  # the published code, not the paper

    def __init__(self, position: LayerPosition) -> None:
        super().__init__(position)
        self.alpha, self.beta = self.constants(position)

    @staticmethod
    def constants(position: LayerPosition) -> tuple[float, float]:
        """α and β of the stack."""
        return min(position.depth / 12, position.depth**-0.15), position.width**-0.2

    def forward(self, x: Tensor, branches: Sequence[Branch]) -> Tensor:
        h = x
        for add, branch in zip(self.adds, branches, strict=True):
            h = h + add(branch(h))
        return self.alpha * x + self.beta * h


class DeepNorm(Block):
    """x ← LN_i(α·x + F_i(x)), and β on FFN, value and output matrices. Wang et al. 2022, DeepNet, figure 2.

    Encoder α = 0.81 (N⁴M)^(1/16), β = 0.87 (N⁴M)^(-1/16); decoder α = (3M)^(1/4), β = (12M)^(-1/4).
    """

    foldable = True
    made_for_depth = True
    fused_qkv = False  # 1 is the paper's

    def __init__(self, position: LayerPosition) -> None:
        super().__init__(position)
        self.alpha = self.constants(position)[0]

    @staticmethod
    def constants(position: LayerPosition) -> tuple[float, float]:
        """α and β of the stack."""
        n, m = position.encoder_layers, position.decoder_layers
        if position.side == "encoder":
            return 0.81 * (n**4 * m) ** (1 / 16), 0.87 * (n**4 * m) ** (-1 / 16)
        return (3 * m) ** (1 / 4), (12 * m) ** (-1 / 4)

    @staticmethod
    def matrix_gain(position: LayerPosition, matrix: Matrix, separate: bool = False) -> float:
        """β, but 1 for query and key, separate or not."""
        return 1.0 if matrix in ("q", "k") else DeepNorm.constants(position)[1]

    def join(self, i: int, x: Tensor, f: Branch) -> Tensor:
        return self.norms[i](self.alpha * x + f(x))


class ReZero(Block):
    """x ← x + a·F_i(x), a one trainable scalar for each layer, 0 at first. Bachlechner et al. 2020, ReZero.

    No LayerNorm; every layer is the identity at first, so that its sub-layers get no gradient until a has moved.
    """

    layer_norms = False
    initial_values: ClassVar[dict[str, float]] = {"a": 0.0}

    def __init__(self, position: LayerPosition) -> None:
        super().__init__(position)
        self.a = nn.Parameter(torch.empty(1))

    def join(self, i: int, x: Tensor, f: Branch) -> Tensor:
        return x + self.a * f(x)


class ReZeroPostLN(Block):
    """x ← LN_i(x + a·F_i(x)), a as in ReZero, 0 at first. Liu et al. 2020, appendix E; Post-LN where a is 1."""

    initial_values: ClassVar[dict[str, float]] = {"a": 0.0}

    def __init__(self, position: LayerPosition) -> None:
        super().__init__(position)
        self.a = nn.Parameter(torch.empty(1))

    def join(self, i: int, x: Tensor, f: Branch) -> Tensor:
        return self.norms[i](x + self.a * f(x))


class Fixup(Block):
    """x ← x + s_i·F_i(x), s_i a trainable scalar, 1 at first; no LayerNorm. Zhang et al. 2019, Fixup, section 3.

    A trainable scalar, 0 at first, is subtracted before each linear map and activation of F_i (`ShiftedLinear`,
    `ShiftedFeedForward`). Of the residual branches n = 2N + 3M and the m matrices of a branch each but the last is
    drawn n^(-1/(2m-2)) times as large: fc1 n^-1/2 (m = 2); q, k, v n^-1/6 (m = 4). The last, fc2 and out, is 0.
    """

    layer_norms = False
    initial_values: ClassVar[dict[str, float]] = {"scales": 1.0}
    linear = ShiftedLinear
    feed_forward = ShiftedFeedForward

    def __init__(self, position: LayerPosition) -> None:
        super().__init__(position)
        self.scales = nn.ParameterList(nn.Parameter(torch.empty(1)) for _ in range(position.branches))

    @staticmethod
    def matrix_gain(position: LayerPosition, matrix: Matrix, separate: bool = False) -> float:
        """n^-1/2 for fc1; n^-1/6 on the usual gain of query, key and value; 0 for out and fc2."""
        n = 2 * position.encoder_layers + 3 * position.decoder_layers
        own = {"fc1": n**-0.5, "fc2": 0.0, "out": 0.0}
        return own[matrix] if matrix in own else Block.matrix_gain(position, matrix, separate) * n ** (-1 / 6)

    def join(self, i: int, x: Tensor, f: Branch) -> Tensor:
        return x + self.scales[i] * f(x)


class TFixup(Block):
    """x ← x + F_i(x), no LayerNorm, no warm-up needed. Huang et al. 2020, Improving Transformer Optimization.

    Value, output and FFN matrices are drawn 0.67·N^-1/4 times as large in the encoder, (9M)^-1/4 in the decoder; the
    source table (9N)^-1/4 times, the target's (9M)^-1/4.
    """

    layer_norms = False

    @staticmethod
    def matrix_gain(position: LayerPosition, matrix: Matrix, separate: bool = False) -> float:
        """The stack's factor for value, out, fc1 and fc2; the usual gain for query and key."""
        factor = 0.67 * position.depth**-0.25 if position.side == "encoder" else (9 * position.depth) ** -0.25
        return Block.matrix_gain(position, matrix, separate) if matrix in ("q", "k") else factor

    @staticmethod
    def embedding_gain(position: LayerPosition) -> float:
        """(9L)^-1/4."""
        return (9 * position.depth) ** -0.25

    def join(self, i: int, x: Tensor, f: Branch) -> Tensor:
        return x + f(x)


class LooksLinear(PostLN):
    """Post-LN whose FFN is linear at first. Balduzzi et al. 2017, The Shattered Gradients Problem.

    The FFN is fc2((f(h), f(-h))), h = fc1(x) (`ConcatenatedFeedForward`), fc1 orthogonal, fc2 = [W, -W] with W
    orthogonal: W h at first. Attention has no rectifier to mirror and keeps its usual matrices.
    """

    feed_forward = ConcatenatedFeedForward

    @classmethod
    def init_matrix(cls, weight: Tensor, matrix: Matrix, gain: float, generator: torch.Generator) -> None:
        """fc1 orthogonal and fc2 mirrored orthogonal, times `gain`; the others as usual."""
        if matrix not in ("fc1", "fc2"):
            super().init_matrix(weight, matrix, gain, generator)
            return
        rows, columns = weight.shape
        half = torch.empty(rows, columns if matrix == "fc1" else columns // 2, dtype=torch.float64)
        nn.init.orthogonal_(half, gain=gain, generator=generator)
        weight.copy_(half if matrix == "fc1" else torch.cat([half, -half], dim=1))


class Mixture(nn.Module):
    """Σ_{k≤l} w_k·y_k, y_0 the stack's input and y_k the output of the k-th of the l layers below, w trainable.

    Wang et al. 2019, Learning Deep Transformer Models for Machine Translation, section 3: w is row l of a triangular
    matrix, 1/(l+1) at first (`DLCL.initial`). Pre-norm form: every y_k counts as LN_k(y_k), normed once, by the first
    mixture above it. Post-norm form: LN_l(Σ w_k·y_k).
    """

    def __init__(self, below: int, norm: Norm, pre_norm: bool) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.empty(below + 1))
        self.norm = norm
        self.pre_norm = pre_norm

    def forward(self, x: Stream) -> tuple[Tensor, tuple[Tensor, ...]]:
        """The stream of the layer below to the mixture [..., D] and what is kept for the layers above.

        Raises:
            ValueError: if the stream does not hold one tensor for each weight.
        """
        kept = x if isinstance(x, tuple) else (x,)
        if self.pre_norm:
            kept = (*kept[:-1], self.norm(kept[-1]))
        mixed = torch.zeros_like(kept[0])
        for weight, y in zip(self.weights.unbind(), kept, strict=True):
            mixed = torch.addcmul(mixed, weight, y)  # keeps no product for the backward pass
        return (mixed if self.pre_norm else self.norm(mixed)), kept


class MixtureTop(nn.Module):
    """The output of a DLCL stack: the mixture of all its layers, in the pre-norm form with a LayerNorm on it."""

    def __init__(self, position: LayerPosition, pre_norm: bool) -> None:
        super().__init__()
        self.mix = Mixture(position.depth, position.norm(), pre_norm)
        self.norm = position.norm() if pre_norm else nn.Identity()

    def forward(self, x: Stream) -> Tensor:
        """The last layer's stream to the stack's output [..., D]."""
        return self.norm(self.mix(x)[0])


class DLCL(Block):
    """Pre-LN whose layer l starts from Σ_{k≤l} W_{l,k}·LN_k(y_k), y_k the output of layer k, instead of y_l alone.

    Wang et al. 2019, Learning Deep Transformer Models for Machine Translation, section 3. W_{l,k} is 1/(l+1) at first.
    The stack ends with one more such sum and a LayerNorm.
    """

    needs_history = True
    pre_norm: ClassVar[bool] = True

    def __init__(self, position: LayerPosition) -> None:
        super().__init__(position)
        self.mix = Mixture(position.index, position.norm(), pre_norm=self.pre_norm)

    @classmethod
    def top(cls, position: LayerPosition) -> nn.Module:
        return MixtureTop(position, pre_norm=cls.pre_norm)

    @classmethod
    def initial_value(cls, position: LayerPosition, name: str) -> float:
        return 1 / (position.index + 1) if name == "mix.weights" else super().initial_value(position, name)

    def forward(self, y: Stream, branches: Sequence[Branch]) -> Stream:
        x, kept = self.mix(y)
        return (*kept, super().forward(x, branches))

    def join(self, i: int, x: Tensor, f: Branch) -> Tensor:
        return x + f(self.norms[i](x))


class DLCLPost(DLCL):
    """Post-LN whose layer l starts from LN_l(Σ_{k≤l} W_{l,k}·y_k). As DLCL, the paper's post-norm form.

    The stack ends with one more such sum.
    """

    pre_norm = False

    def join(self, i: int, x: Tensor, f: Branch) -> Tensor:
        return self.norms[i](x + f(x))


BLOCKS: dict[str, type[Block]] = {
    "post_ln": PostLN,
    "pre_ln": PreLN,
    "admin": Admin,
    "admin_closed_form": AdminClosedForm,
    "b2t": B2T,
    "b2t_no_ln": B2TNoLN,
    "deepnorm": DeepNorm,
    "rezero": ReZero,
    "rezero_post_ln": ReZeroPostLN,
    "fixup": Fixup,
    "t_fixup": TFixup,
    "looks_linear": LooksLinear,
    "dlcl": DLCL,
    "dlcl_post": DLCLPost,
}

FOLDED = "post_ln"  # what a foldable block can be rewritten as


def profiled_sublayers(model: config.Model, side: Side) -> list[str]:
    """The canonical names of a stack's sub-layers in order; none if its block is not profiled."""
    if not BLOCKS[model.stack(side).block].profiled:
        return []
    layers = range(model.stack(side).layers)
    return [name for index in layers for name in LayerPosition.of(model, side, index).sublayers]
