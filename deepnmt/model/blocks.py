"""The residual blocks: how a layer joins its sub-layers to its input x.

A block owns a layer's LayerNorms and further parameters, the factors of its paper on the initialisation, and what comes
after the last layer of the stack. docs/reference/blocks.md compares the blocks.

Notation: x the input of a sub-layer, F_i the i-th sub-layer after dropout (encoder: self-attention, FFN; decoder:
self-attention, cross-attention, FFN), K the number of sub-layers, LN LayerNorm (eps 1e-5), N encoder and M decoder
layers, L the layers of the block's own stack, D width.

Every branch output passes through `adds[i]`, so a forward hook on `encoder.layers.3.rule.adds.1` gets F_2 of layer 3.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from deepnmt import config
from deepnmt.config.plugins import Table
from deepnmt.model.feedforward import ConcatenatedFeedForward, FeedForward, ShiftedFeedForward, ShiftedLinear

Side = Literal["encoder", "decoder"]
Branch = Callable[[Tensor], Tensor]
Matrix = Literal["q", "k", "v", "out", "fc1", "fc2"]

SIDES: tuple[Side, Side] = ("encoder", "decoder")
SUBLAYERS: dict[Side, tuple[str, ...]] = {
    "encoder": ("self_attn", "ffn"),
    "decoder": ("self_attn", "cross_attn", "ffn"),
}

# The input of a layer: the output of the layer below [..., D]. With a block that `needs_history`: a tuple of what is
# kept of the stack's input and of all layers below, the output of the layer below last. So layer l (from 0) gets l + 1
# tensors.
Stream = Tensor | tuple[Tensor, ...]


def last_output(x: Stream) -> Tensor:
    """The output of the layer below [..., D]."""
    return x if isinstance(x, Tensor) else x[-1]


class Norm(nn.Module):
    """A norm over the last dimension. All norms of a model are made by `LayerPosition.norm`."""

    def frozen(self, x: Tensor) -> Branch:
        """The norm as a function of c [..., D], with its statistics fixed to those of x [..., D]; affine in c."""
        raise NotImplementedError


class LayerNorm(Norm, nn.LayerNorm):
    """(x - mean) / sqrt(variance + 1e-5) · weight + bias, over the last dimension. Ba et al. 2016, Layer Normalization.

    On a CPU, 16-bit inputs are normed in fp32, as PyTorch does by itself on a GPU. PyTorch's own 16-bit LayerNorm for
    CPUs keeps mean and deviation in 16 bits for the backward pass, and sums the gradients of weight and bias over all
    tokens in 16 bits: with 2,000 tokens their error is 11 eps, here 0.3.
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


class RMSNorm(Norm, nn.RMSNorm):
    """x / sqrt(mean of x² + 1e-5) · weight, over the last dimension. Zhang and Sennrich 2019, RMSNorm, eq. 4.

    On a CPU, 16-bit inputs are normed in fp32, as by `LayerNorm`.
    """

    eps: float

    def forward(self, x: Tensor) -> Tensor:
        """x [..., D] to the same shape and type."""
        if x.dtype in (torch.float32, torch.float64) or x.device.type != "cpu":
            return super().forward(x)
        return F.rms_norm(x.float(), self.normalized_shape, self.weight.float(), self.eps).to(x.dtype)

    def frozen(self, x: Tensor) -> Branch:
        gain = (x.square().mean(-1, keepdim=True) + self.eps).rsqrt() * self.weight
        return lambda c: c * gain


# A new norm of this width.
NORMS: dict[str, Callable[[int], Norm]] = {"layer_norm": LayerNorm, "rms_norm": partial(RMSNorm, eps=1e-5)}


@dataclass(frozen=True)
class LayerPosition:
    """The position of a layer, the model's shape and the stack's settings; a block depends on nothing else."""

    side: Side
    index: int  # of the layer in its stack, from 0
    encoder_layers: int  # N
    decoder_layers: int  # M
    width: int  # D
    settings: config.Stack = field(default_factory=config.Stack)  # of the layer's stack
    norm_kind: str = "layer_norm"  # in `NORMS`

    @classmethod
    def of(cls, model: config.Model, side: Side, index: int) -> LayerPosition:
        """The position of layer `index` (from 0) of a stack."""
        return cls(side, index, model.encoder.layers, model.decoder.layers, model.shape(side).width, model.stack(side),
                   model.norm)

    def norm(self) -> Norm:
        """A new norm of the layer, or of the stack's top."""
        return NORMS[self.norm_kind](self.width)

    @property
    def block(self) -> type[Block]:
        """The class of the layer's block; with `init: published` as its authors' code has it."""
        from deepnmt.model.published import PUBLISHED  # which builds on this file

        return (PUBLISHED if self.settings.as_published else BLOCKS)[self.settings.block]

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
        """Number of layers of the layer's stack."""
        return self.encoder_layers if self.side == "encoder" else self.decoder_layers


class Block(nn.Module):
    """Base class: one named add for each sub-layer and, with `layer_norms`, one LayerNorm.

    A block is called with the layer's input [..., D] and its sub-layers, and returns the layer's output [..., D]; one
    that `needs_history` takes and returns a `Stream`. Most blocks define only `join`, for one sub-layer. The rest of
    deepnmt looks at these attributes, never at a block's name, and gets the class from `LayerPosition.block`.
    """

    layer_norms: ClassVar[bool] = True  # whether the sub-layers have LayerNorms
    final_norm: ClassVar[bool] = False  # whether the stack ends with a further LayerNorm
    initial_values: ClassVar[dict[str, float]] = {}  # of the block's own parameters, see `initial_value`
    linear: ClassVar[type[nn.Linear]] = nn.Linear  # linear maps of the attentions
    feed_forward: ClassVar[type[FeedForward]] = FeedForward

    # What config/choices.py says of deepnmt's blocks, see `BlockFacts`, and a plug-in's class of itself.
    needs_history: ClassVar[bool] = False
    depth_scaled: ClassVar[bool] = False
    profiled: ClassVar[bool] = False
    growable: ClassVar[bool] = False
    fused_qkv: ClassVar[bool] = True

    def __init__(self, position: LayerPosition) -> None:
        super().__init__()
        self.norms = nn.ModuleList(position.norm() for _ in range(position.branches * self.layer_norms))
        self.adds = nn.ModuleList(nn.Identity() for _ in range(position.branches))

    @staticmethod
    def matrix_gain(position: LayerPosition, matrix: Matrix, separate: bool = False) -> float:
        """The factor on the Xavier bound of one of the layer's matrices: 1, but 1/√2 for query, key and value.

        1/√2 gives the bound of a fused [3D, D] matrix, as in the toolkit that the Admin and B2T papers used, and it
        reproduces Admin's published profile. With 1 (`separate`) a deep profile is 30 % too high
        (studies/results/papers.md).
        """
        return 2**-0.5 if matrix in ("q", "k", "v") and not separate else 1.0

    @classmethod
    def initial_value(cls, position: LayerPosition, name: str) -> float | list[float]:
        """The constant that fills a parameter of the block, or of the stack's top, before training.

        Args:
            position: the layer's; for the stack's top the position after the last layer's.
            name: the parameter's name in the block, as in `norms.0.bias`.

        Returns:
            The constant, or one for each element; NaN if there is none for this name, which `init.fill` rejects.
        """
        known = {"weight": 1.0, "bias": 0.0, **cls.initial_values}
        return known.get(name.split(".")[0], known.get(name.rpartition(".")[2], math.nan))

    @classmethod
    def init_matrix(cls, weight: Tensor, path: str, matrix: Matrix, gain: float, generator: torch.Generator) -> None:
        """Fills one matrix of a linear map, such as `cross_attn.kv`, in place: Xavier-uniform times `gain`."""
        nn.init.xavier_uniform_(weight, gain=gain, generator=generator)

    @staticmethod
    def bias_bound(matrix: Matrix, columns: int) -> float:
        """The bound of the uniform draw of a matrix's bias; `columns` are the matrix's."""
        return 0.0

    @staticmethod
    def embedding_gain(position: LayerPosition) -> float:
        """The factor on the embedding table of the stack's input."""
        return 1.0

    @staticmethod
    def output_gain() -> float:
        """The factor on the output table above the stack, if it is a table of its own (`tied: none`)."""
        return 1.0

    @classmethod
    def fixed_omega(cls, position: LayerPosition) -> float | None:
        """ω of all sub-layers of a `foldable` block's stack, if it is a constant and no parameter."""
        return None

    @classmethod
    def history(cls, position: LayerPosition) -> int:
        """How many outputs below the layer it sums; for the stack's top the position after the last layer's."""
        return 0

    def join(self, i: int, x: Tensor, f: Branch) -> Tensor:
        """Joins one sub-layer f = F_i, dropout included, to x: [..., D] to [..., D]."""
        raise NotImplementedError

    def forward(self, x: Any, branches: Sequence[Branch]) -> Any:
        for i, branch in enumerate(self.added(branches)):
            x = self.join(i, x, branch)
        return x

    def added(self, branches: Sequence[Branch]) -> list[Branch]:
        """The sub-layers, the output of each through its add."""
        return [partial(_added, add, branch) for add, branch in zip(self.adds, branches, strict=True)]

    @classmethod
    def top(cls, position: LayerPosition) -> nn.Module:
        """A new module for the stack's top: from the last layer's `Stream` to the stack's output [..., D]."""
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

    def join(self, i: int, x: Tensor, f: Branch) -> Tensor:
        return x + f(self.norms[i](x))


class Admin(Block):
    """x ← LN_i(ω_i ⊙ x + F_i(x)), ω_i a trainable vector. Liu et al. 2020, Understanding the Difficulty, section 4.3.

    Initial values come from a profile of the stack: ω_1 = 1, ω_i = sqrt(Σ_{j<i} Var[F_j]), where Var[F_0] is the
    variance of the stack's input, or 1 as in the paper (`admin.input_variance`). F_j is measured with the ω below it in
    place, or with all ω at 1 as in the paper (`admin.method`). Without a profile all ω are 1.
    """

    initial_values: ClassVar[dict[str, float]] = {"omegas": 1.0}

    def __init__(self, position: LayerPosition) -> None:
        super().__init__(position)
        self.omegas = nn.ParameterList(nn.Parameter(torch.empty(position.width)) for _ in range(position.branches))

    def join(self, i: int, x: Tensor, f: Branch) -> Tensor:
        return self.norms[i](self.omegas[i] * x + f(x))


class AdminClosedForm(Admin):
    """Admin with one ω in all n = 2N or 3M sub-layers of a stack. Liu, the package admin-torch.

    No profile is needed: with branches of variance 1 the output change is Σ β_ii² = n/(1 + ω²). `output_change` says
    how it grows with n: `log`, the O(log n) of Admin, with ω = sqrt((n+1)/ln(n+1) - 1); `constant` with ω = sqrt(n);
    `linear` with ω = 1, which is Post-LN's.
    """

    @classmethod
    def initial_value(cls, position: LayerPosition, name: str) -> float | list[float]:
        return cls.constant(position) if name.startswith("omegas") else super().initial_value(position, name)

    @staticmethod
    def constant(position: LayerPosition) -> float:
        """ω of every sub-layer of the stack."""
        n = position.branches * position.depth
        squares = {"log": (n + 1) / math.log(n + 1) - 1, "constant": float(n), "linear": 1.0}
        return math.sqrt(squares[position.settings.output_change])


class B2T(Block):
    """x ← LN_i(x + F_i(x)) for i < K; then LN_K(x_in + h + F_K(h)). Takase et al. 2023, On LNs and Residuals, eq. 5.

    x_in is the layer's input, h the input of the last sub-layer (the FFN).
    """

    def forward(self, x: Tensor, branches: Sequence[Branch]) -> Tensor:
        *others, last = self.added(branches)
        h = x
        for norm, f in zip(self.norms, others):
            h = norm(h + f(h))
        return self.norms[-1](x + h + last(h))


class B2TNoLN(Block):
    """h ← h + F_i(h) for i < K from h = x; then x ← α·x + β·(h + F_K(h)). Takase et al. 2023, appendix D, eq. 6 to 8.

    α = min(L/12, L^-0.15), β = D^-0.2; no LayerNorm. A layer multiplies x by about α + β: 0.94 at 18 layers of width
    512, but 1.03 at width 128, so that activations grow in narrow, deep stacks.
    """

    layer_norms = False

    def __init__(self, position: LayerPosition) -> None:
        super().__init__(position)
        self.alpha, self.beta = self.constants(position)

    @staticmethod
    def constants(position: LayerPosition) -> tuple[float, float]:
        """α and β of the stack."""
        return min(position.depth / 12, position.depth**-0.15), position.width**-0.2

    def forward(self, x: Tensor, branches: Sequence[Branch]) -> Tensor:
        h = x
        for f in self.added(branches):
            h = h + f(h)
        return self.alpha * x + self.beta * h


class DeepNorm(Block):
    """x ← LN_i(α·x + F_i(x)), and β on FFN, value and output matrices. Wang et al. 2022, DeepNet, figure 2.

    Encoder α = 0.81 (N⁴M)^(1/16), β = 0.87 (N⁴M)^(-1/16); decoder α = (3M)^(1/4), β = (12M)^(-1/4).
    """

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

    @classmethod
    def fixed_omega(cls, position: LayerPosition) -> float | None:
        return cls.constants(position)[0]

    def join(self, i: int, x: Tensor, f: Branch) -> Tensor:
        return self.norms[i](self.alpha * x + f(x))


class ReZero(Block):
    """x ← x + a·F_i(x), a one trainable scalar for each layer, 0 at first. Bachlechner et al. 2020, ReZero.

    No LayerNorm. Every layer is the identity at first, so its sub-layers get no gradient in the first update.
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
    `ShiftedFeedForward`). Initial matrices, with n = 2N + 3M residual branches and m matrices in a branch: the last one
    (fc2 or out) is 0, the others are multiplied by n^(-1/(2m-2)). That is n^-1/2 for fc1 (m = 2) and n^-1/6 for query,
    key and value (m = 4).
    """

    layer_norms = False
    initial_values: ClassVar[dict[str, float]] = {"scales": 1.0}
    linear: ClassVar[type[nn.Linear]] = ShiftedLinear
    feed_forward: ClassVar[type[FeedForward]] = ShiftedFeedForward

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

    Initial value, output and FFN matrices are multiplied by 0.67·N^-1/4 in the encoder and (9M)^-1/4 in the decoder,
    the source embeddings by (9N)^-1/4 and the target embeddings by (9M)^-1/4.
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

    The FFN is fc2((f(h), f(-h))) with h = fc1(x) (`ConcatenatedFeedForward`). At first fc1 is orthogonal and fc2 is
    [W, -W] with W orthogonal, so the FFN is W h. Attention has no activation and keeps its usual matrices.
    """

    feed_forward = ConcatenatedFeedForward

    @classmethod
    def init_matrix(cls, weight: Tensor, path: str, matrix: Matrix, gain: float, generator: torch.Generator) -> None:
        """fc1 orthogonal and fc2 = [W, -W] with W orthogonal, times `gain`; the others as usual."""
        if matrix not in ("fc1", "fc2"):
            super().init_matrix(weight, path, matrix, gain, generator)
            return
        rows, columns = weight.shape
        half = torch.empty(rows, columns if matrix == "fc1" else columns // 2, dtype=torch.float64)
        nn.init.orthogonal_(half, gain=gain, generator=generator)
        weight.copy_(half if matrix == "fc1" else torch.cat([half, -half], dim=1))


class Mixture(nn.Module):
    """Σ_{k≤l} w_k·y_k, y_0 the stack's input and y_k the output of the k-th of the l layers below, w trainable.

    Wang et al. 2019, Learning Deep Transformer Models for Machine Translation, section 3: w is row l of a triangular
    matrix, 1/(l+1) at first (`DLCL.initial_value`). Pre-norm form: each y_k is replaced by LN_k(y_k), computed once, in
    the first mixture above it. Post-norm form: LN_l(Σ w_k·y_k).

    Args:
        taken: how many y it sums: the last ones, l + 1 without a window.
        softmax: whether softmax(w) takes the place of w.
    """

    norm: nn.Module

    def __init__(self, taken: int, norm: Norm, pre_norm: bool, softmax: bool) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.empty(taken))
        self.norm = norm
        self.pre_norm, self.softmax = pre_norm, softmax

    def forward(self, x: Stream) -> tuple[Tensor, tuple[Tensor, ...]]:
        """From the stream of the layer below to the mixture [..., D] and the tensors kept for the layers above.

        Raises:
            ValueError: the stream does not hold one tensor for each weight.
        """
        kept = x if isinstance(x, tuple) else (x,)
        if self.pre_norm:
            kept = (*kept[:-1], self.norm(kept[-1]))
        mixed = torch.zeros_like(kept[0])
        weights = self.weights.softmax(0) if self.softmax else self.weights
        for weight, y in zip(weights.unbind(), kept, strict=True):
            mixed = torch.addcmul(mixed, weight, y)  # stores no product for the backward pass
        return (mixed if self.pre_norm else self.norm(mixed)), kept


class MixtureTop(nn.Module):
    """The output of a DLCL stack: the mixture of all its layers, followed by a LayerNorm in the pre-norm form."""

    def __init__(self, position: LayerPosition, taken: int, pre_norm: bool) -> None:
        super().__init__()
        self.mix = Mixture(taken, position.norm(), pre_norm, position.settings.history_softmax)
        self.norm = position.norm() if pre_norm else nn.Identity()

    def forward(self, x: Stream) -> Tensor:
        """From the last layer's stream to the stack's output [..., D]."""
        return self.norm(self.mix(x)[0])


class DLCL(Block):
    """Pre-LN whose layer l has the input Σ_{k≤l} W_{l,k}·LN_k(y_k), y_k the output of layer k, instead of y_l.

    Wang et al. 2019, Learning Deep Transformer Models for Machine Translation, section 3. W_{l,k} is 1/(l+1) at first.
    The stack ends with one more such sum and a LayerNorm. With a window w (`history_window`) a sum takes only the last
    w of its y, with W_{l,k} = 1/w at first; with `history_softmax` row l of W goes through a softmax.
    """

    pre_norm: ClassVar[bool] = True

    def __init__(self, position: LayerPosition) -> None:
        super().__init__(position)
        self.window = self.window_of(position)
        self.mix = Mixture(self.history(position), position.norm(), self.pre_norm, position.settings.history_softmax)

    @staticmethod
    def window_of(position: LayerPosition) -> int:
        """How many y a sum takes at most; 0: all."""
        return position.settings.history_window

    @classmethod
    def history(cls, position: LayerPosition) -> int:
        below = position.index + 1
        return min(below, cls.window_of(position) or below)

    @classmethod
    def top(cls, position: LayerPosition) -> nn.Module:
        return MixtureTop(position, cls.history(position), cls.pre_norm)

    @classmethod
    def initial_value(cls, position: LayerPosition, name: str) -> float | list[float]:
        return 1 / cls.history(position) if name == "mix.weights" else super().initial_value(position, name)

    def forward(self, y: Stream, branches: Sequence[Branch]) -> Stream:
        x, kept = self.mix(y)
        return (*kept, super().forward(x, branches))[-self.window :]  # the window of the layer above; 0: all

    def join(self, i: int, x: Tensor, f: Branch) -> Tensor:
        return x + f(self.norms[i](x))


class DLCLPost(DLCL):
    """Post-LN whose layer l has the input LN_l(Σ_{k≤l} W_{l,k}·y_k): the post-norm form of `DLCL`, same paper.

    The stack ends with one more such sum.
    """

    pre_norm = False

    def join(self, i: int, x: Tensor, f: Branch) -> Tensor:
        return self.norms[i](x + f(x))


def _fault(block: Any) -> str | None:
    """What a plug-in's block must be, if it is not."""
    if not (isinstance(block, type) and issubclass(block, Block)):
        return f"is {block!r}, must be a subclass of deepnmt.model.blocks.Block"
    return "has profiled = True, which only admin may; set profiled = False in its class" if block.profiled else None


BLOCKS: Table[type[Block]] = Table("BLOCKS", {
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
}, _fault)


def say_facts(blocks: Mapping[str, type[Block]]) -> None:
    """Gives classes the facts of their rows in config/choices.py, which a plug-in's subclass then has, too."""
    for name, block in blocks.items():
        for fact in ("needs_history", "depth_scaled", "profiled", "growable", "fused_qkv"):
            setattr(block, fact, getattr(config.choices.BLOCKS[name], fact))


say_facts(BLOCKS)

FOLDED = "post_ln"  # the block that a foldable one can be rewritten as


def profiled_sublayers(model: config.Model, side: Side) -> list[str]:
    """The canonical names of a stack's sub-layers, in order; none if its block is not profiled."""
    if not model.stack(side).facts.profiled:
        return []
    layers = range(model.stack(side).layers)
    return [name for index in layers for name in LayerPosition.of(model, side, index).sublayers]
