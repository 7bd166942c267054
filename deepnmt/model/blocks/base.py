"""What a residual block is: how a layer joins its sub-layers to the residual stream.

A block owns the stream from the stack's input to its output, a layer's LayerNorms and further parameters, and the
factors of its paper on the initialisation. docs/reference/blocks.md compares the blocks.

Notation: x the input of a sub-layer, F_i the i-th sub-layer after dropout (encoder: self-attention, FFN; decoder:
self-attention, cross-attention, FFN), K the number of sub-layers, LN LayerNorm (eps 1e-5), N encoder and M decoder
layers, L the layers of the block's own stack, D width.

Every branch output passes through `adds[i]`, so a forward hook on `encoder.layers.3.rule.adds.1` gets F_2 of layer 3.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from deepnmt import config
from deepnmt.model.sublayers import FeedForward, SelfAttention

Side = Literal["encoder", "decoder"]
Branch = Callable[[Tensor], Tensor]
Matrix = Literal["q", "k", "v", "out", "fc1", "fc2"]

SIDES: tuple[Side, Side] = ("encoder", "decoder")
SUBLAYERS: dict[Side, tuple[str, ...]] = {
    "encoder": ("self_attn", "ffn"),
    "decoder": ("self_attn", "cross_attn", "ffn"),
}

# What a layer gets from the layer below: one tensor [..., D], or a tuple of several, as many as `Block.carried` says.
Stream = Tensor | tuple[Tensor, ...]


def tensors(x: Stream) -> tuple[Tensor, ...]:
    """The tensors of a stream."""
    return (x,) if isinstance(x, Tensor) else x


def stream_of(tensors: Sequence[Tensor]) -> Stream:
    """The stream of one or several tensors."""
    return tensors[0] if len(tensors) == 1 else tuple(tensors)


def pack(x: Stream) -> Tensor:
    """A stream of k tensors [B, T, D] as one tensor [B, T, k·D]."""
    return x if isinstance(x, Tensor) else torch.cat(x, dim=-1)


def unpack(x: Tensor, width: int) -> Stream:
    """The stream [B, T, D] in a tensor of `pack`; D is `width`."""
    return stream_of(x.split(width, dim=-1))


class Rule(NamedTuple):
    """How the optimizer treats a parameter of a block: the factor on its learning rate; whether it is decayed (None: as
    other parameters of its shape); whether Muon takes it, if it is a matrix."""

    factor: float = 1.0
    decayed: bool | None = None
    muon: bool = True


class Norm(nn.Module):
    """A norm over the last dimension. All norms of a model are made by `LayerPosition.norm`."""

    def frozen(self, x: Tensor) -> Branch:
        """The norm as a function of c [..., D], with its statistics fixed to those of x [..., D]; affine in c."""
        raise NotImplementedError


class Gate(Norm):
    """Coefficients that depend on the stream, as a module of its own: frozen, it has those of x, and what it multiplies
    is affine, as behind a frozen norm; so a stream can be split into its parts exactly."""

    def frozen(self, x: Tensor) -> Branch:
        coefficients = self(x)
        return lambda c: coefficients


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

    def norm(self, width: int = 0) -> Norm:
        """A new norm of the layer, or of the stack's top, of its width or another."""
        return NORMS[self.norm_kind](width or self.width)

    @property
    def block(self) -> type[Block]:
        """The class of the layer's block; with `init: published` as its authors' code has it."""
        from deepnmt.model.blocks import BLOCKS  # which build on this file
        from deepnmt.model.published import PUBLISHED

        return (PUBLISHED if self.settings.as_published else BLOCKS)[self.settings.block]

    @property
    def branches(self) -> int:
        """Sub-layers of the layer: 2 in the encoder, 3 in the decoder, 2 in one without an encoder."""
        return len(self.parts)

    @property
    def parts(self) -> tuple[str, ...]:
        """The names of the layer's sub-layers, as in `ffn`."""
        return SUBLAYERS["decoder" if self.crossing else "encoder"]

    @property
    def crossing(self) -> bool:
        """Whether the layer has a cross-attention: a decoder's, if there is an encoder."""
        return self.side == "decoder" and self.encoder_layers > 0

    @property
    def sublayers(self) -> list[str]:
        """The canonical names of the layer's sub-layers, as in `encoder.layers.3.ffn`."""
        return [f"{self.side}.layers.{self.index}.{name}" for name in self.parts]

    @property
    def depth(self) -> int:
        """Number of layers of the layer's stack."""
        return self.encoder_layers if self.side == "encoder" else self.decoder_layers


class Block(nn.Module):
    """Base class: one named add for each sub-layer and, with `layer_norms`, one LayerNorm.

    A block is called with the layer's input and its sub-layers, and returns the layer's output, both a `Stream`: one
    tensor [..., D] unless the block overrides `carried`. Most blocks define only `join`, for one sub-layer. The rest of
    deepnmt looks at these attributes, never at a block's name, and gets the class from `LayerPosition.block`.
    """

    layer_norms: ClassVar[bool] = True  # whether the sub-layers have LayerNorms
    final_norm: ClassVar[bool] = False  # whether the stack ends with a further LayerNorm
    initial_values: ClassVar[dict[str, float]] = {}  # of the block's own parameters, see `initial_value`
    linear: ClassVar[type[nn.Linear]] = nn.Linear  # linear maps of the attentions
    self_attention: ClassVar[type[SelfAttention]] = SelfAttention
    feed_forward: ClassVar[type[FeedForward]] = FeedForward

    # What config/choices.py says of deepnmt's blocks, see `BlockFacts`, and a plug-in's class of itself.
    depth_scaled: ClassVar[bool] = False
    profiled: ClassVar[bool] = False
    growable: ClassVar[bool] = False
    fused_qkv: ClassVar[bool] = True

    def __init__(self, position: LayerPosition) -> None:
        super().__init__()
        self.norms = nn.ModuleList(position.norm() for _ in range(position.branches * self.layer_norms))
        self.adds = nn.ModuleList(nn.Identity() for _ in range(position.branches))
        self.ramp = position.settings.ramp * (position.index + 1)
        self.share = 1.0  # of each branch, see `clock`

    @staticmethod
    def matrix_gain(position: LayerPosition, matrix: Matrix) -> float:
        """The factor on the Xavier bound of one of the layer's matrices: 1, but 1/√2 for query, key and value.

        1/√2 gives the bound of a fused [3D, D] matrix, as in the toolkit that the Admin and B2T papers used, and it
        reproduces Admin's published profile. With 1 (`init: xavier_separate`) a deep profile is 30 % too high
        (studies/results/papers.md).
        """
        separate = position.settings.init == "xavier_separate"
        return 2**-0.5 if matrix in ("q", "k", "v") and not separate else 1.0

    @classmethod
    def sublayer_gain(cls, position: LayerPosition, sublayer: str, matrix: Matrix) -> float:
        """A further factor on a matrix of one sub-layer, such as `cross_attn`."""
        return 1.0

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
        """ω of all sub-layers of the stack, if it is a constant and no parameter."""
        return None

    @classmethod
    def norm_factor(cls, position: LayerPosition) -> float:
        """The factor on what the layer's norms put out, which is no parameter: it could be in γ and β."""
        return 1.0

    @classmethod
    def parameter_rule(cls, name: str) -> Rule:
        """How the optimizer treats a parameter of the block, or of the stack's top, by its name there."""
        return Rule()

    # The residual stream, from the stack's input to its output.

    @classmethod
    def start(cls, position: LayerPosition, x: Tensor) -> Stream:
        """The stream that enters layer 0, of this position, from the stack's input x [..., D]."""
        return x

    @classmethod
    def carried(cls, position: LayerPosition) -> int:
        """How many tensors [..., D] enter the layer; for the stack's top the position after the last layer's."""
        return 1

    @classmethod
    def value(cls, x: Stream) -> Tensor:
        """What stands for a layer's output [..., D] where one tensor is looked at: by default the last one."""
        return tensors(x)[-1]

    def skip(self, x: Stream, y: Stream) -> Stream:
        """The layer's output if LayerDrop passes it by: of y, the output that it computed, what keeps no trace of its
        sub-layers, else its input x."""
        return x

    def join(self, i: int, x: Any, f: Branch) -> Any:
        """Joins one sub-layer f = F_i, dropout included, to the stream x, as from [..., D] to [..., D]."""
        raise NotImplementedError

    def forward(self, x: Any, branches: Sequence[Branch]) -> Any:
        for i, branch in enumerate(self.added(branches)):
            x = self.join(i, x, branch)
        return x

    def added(self, branches: Sequence[Branch]) -> list[Branch]:
        """The sub-layers, the output of each through its add, and times the layer's share."""
        return [partial(self._added, add, branch) for add, branch in zip(self.adds, branches, strict=True)]

    def _added(self, add: nn.Module, branch: Branch, x: Tensor) -> Tensor:
        output = add(branch(x))
        return output if self.share == 1.0 else self.share * output

    def clock(self, update: int) -> None:
        """Says which update is made, from 1, or has been made last. With `ramp: T` the branches of layer l, from 1, are
        multiplied by min(t / (T·l), 1) in update t. ProRes, arXiv 2603.05369, eq. 4."""
        if self.ramp:
            self.share = min(update / self.ramp, 1.0)

    @classmethod
    def top(cls, position: LayerPosition) -> nn.Module:
        """A new module for the stack's top: from the last layer's `Stream` to the stack's output [..., D]."""
        return position.norm() if cls.final_norm else nn.Identity()


def set_clock(module: nn.Module, update: int) -> None:
    """Says to all blocks of a model or stage which update is made; see `Block.clock`."""
    for part in module.modules():
        if isinstance(part, Block):
            part.clock(update)
