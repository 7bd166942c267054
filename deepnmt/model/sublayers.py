"""The sub-layers of a layer, which its block joins: attention and feed-forward.

`B` sentences, `S` source length, `T` target length, `D` width, `H` heads, `d` = D / H, `K` hypotheses, `I` inner width
of the feed-forward. A key mask is boolean [B, 1, 1, S], false at padding, or is added to the scores, -inf at padding;
None means that there is no padding.

`overrides.py` may put other functions in the place of `self_attention` and `attend_step`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from deepnmt import device
from deepnmt.model.dropout import Dropout
from deepnmt.model.positions import Rotate
from deepnmt.model.unfilled import unfilled

# -- multi-head attention on PyTorch's fused kernel (Vaswani et al. 2017, section 3.2) ---------------------------------


def key_mask(lengths: Tensor, size: int, dtype: torch.dtype) -> Tensor | None:
    """The key mask [B, 1, 1, size] of sentences with these lengths [B], or None if there is no padding.

    On a GPU it is never None, because the check would make the host wait for the GPU, and it is added to scores of
    `dtype`. Its rows begin at multiples of 8. So no layer has to convert it, which takes four kernels.
    """
    if device.on_gpu(lengths):
        kept = torch.arange(-(-size // 8) * 8, device=lengths.device) < lengths[:, None]
        return torch.where(kept, 0.0, -torch.inf).to(dtype)[:, None, None][..., :size]
    if bool((lengths == size).all()):
        return None
    return (torch.arange(size, device=lengths.device) < lengths[:, None])[:, None, None, :]


def attend(
    q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None = None, dropout: float = 0.0, causal: bool = False
) -> Tensor:
    """softmax(q kᵀ / √d) v: q [B, H, T, d], keys and values [B, H, S, d] to [B, H, T, d].

    On a CPU, 16-bit inputs that need a gradient are computed in fp32: the backward pass of PyTorch's 16-bit kernel
    takes six times as long as that in fp32 at sentence length (studies/results/log.md).
    """
    if not device.on_gpu(q) and q.dtype in (torch.bfloat16, torch.float16) and q.requires_grad:
        attended = F.scaled_dot_product_attention(q.float(), keys.float(), values.float(), mask, dropout, causal)
        return attended.to(q.dtype)
    return F.scaled_dot_product_attention(q, keys, values, mask, dropout, causal)


def self_attention(
    packed: Tensor, heads: int, mask: Tensor | None, dropout: float, causal: bool, rotate: Rotate | None
) -> Tensor:
    """`attend` of the queries, keys and values in [B, T, 3D], to [B, T, D]."""
    q, k, v = (split_heads(part, heads) for part in packed.chunk(3, dim=-1))
    if rotate is not None:
        q, k = (rotate(each, 0, packed.size(1)) for each in (q, k))
    return merge_heads(attend(q, k, v, mask, dropout, causal))


def attend_step(
    packed: Tensor, heads: int, past: Tensor, visible: Tensor | None, slots: slice, rotate: Rotate | None
) -> Tensor:
    """`self_attention` at one position of decoding; its keys and values are put into the past.

    Args:
        packed: queries, keys and values [B, K, 3D]; or [B, 1, 3D], if all hypotheses of a sentence are the same.
        past, visible, slots: see `SelfAttention.step`.

    Returns:
        [B, K, D], or [B, 1, D].
    """
    position = slots.start // (slots.stop - slots.start)
    q, k, v = packed.unflatten(-1, (3, heads, -1)).permute(2, 0, 3, 1, 4)  # each [B, H, K, d]
    if rotate is not None:
        q, k = (rotate(each, position, position + 1) for each in (q, k))
    past[0, ..., slots, :], past[1, ..., slots, :] = k, v
    keys, values = past[..., : slots.stop, :]
    return merge_heads(attend(q, keys, values, visible))


def split_heads(x: Tensor, heads: int) -> Tensor:
    """[B, T, D] to [B, H, T, d]."""
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def merge_heads(x: Tensor) -> Tensor:
    """[B, H, T, d] to [B, T, D]."""
    return x.transpose(1, 2).flatten(2)


class SelfAttention(nn.Module):
    """Attention of a sequence to itself. `qkv` [3D, D] holds the query, key and value matrices in this order.

    `norm` makes a norm of a width; only a subclass has one.
    """

    def __init__(
        self, width: int, heads: int, dropout: float, linear: type[nn.Linear] = nn.Linear,
        rotate: Rotate | None = None, norm: Callable[[int], nn.Module] = nn.LayerNorm,
    ) -> None:
        super().__init__()
        self.heads = heads
        self.dropout = dropout
        self.rotate = rotate  # see `positions.Positions`
        self.qkv = unfilled(linear, width, 3 * width)
        self.out = unfilled(linear, width, width)

    def forward(self, x: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
        """[B, T, D] to [B, T, D]; `causal`: position t attends to positions up to t, and `mask` must be None."""
        dropout = self.dropout if self.training else 0.0
        return self.put_out(self_attention(self.qkv(x), self.heads, mask, dropout, causal, self.rotate))

    def put_out(self, heads: Tensor) -> Tensor:
        """What all heads found [B, T, D] to the output [B, T, D]."""
        return self.out(heads)

    def step(self, x: Tensor, past: Tensor, visible: Tensor | None, slots: slice) -> Tensor:
        """Decodes one position: x [B, K, D], the inputs of all hypotheses there, to [B, K, D].

        Args:
            x: may be [B, 1, D] as long as all hypotheses of a sentence are the same; its key and value then go into all
                slots of the position.
            past: keys and values [2, B, H, max_steps·K, d], of all hypotheses of a sentence: slot p·K + j is the j-th
                at position p. Those of this position are written.
            visible: [B, 1, K, slots.stop], added to the scores: 0 if a hypothesis continues that slot, else -inf. None
                if all slots are visible.
            slots: those of this position.
        """
        return self.put_out(attend_step(self.qkv(x), self.heads, past, visible, slots, self.rotate))


class NormedSelfAttention(SelfAttention):
    """Norms what the heads have found, before `out` (`sub_ln`)."""

    def __init__(
        self, width: int, heads: int, dropout: float, linear: type[nn.Linear] = nn.Linear,
        rotate: Rotate | None = None, norm: Callable[[int], nn.Module] = nn.LayerNorm,
    ) -> None:
        super().__init__(width, heads, dropout, linear, rotate)
        self.norm = norm(width)

    def put_out(self, heads: Tensor) -> Tensor:
        return self.out(self.norm(heads))


class CrossAttention(nn.Module):
    """Attention of target positions to the encoder's memory. `kv` [2D, M] holds the key and value matrices, M the width
    of the memory (`memory`; None: D)."""

    def __init__(
        self, width: int, heads: int, dropout: float, linear: type[nn.Linear] = nn.Linear, memory: int | None = None
    ) -> None:
        super().__init__()
        self.heads = heads
        self.dropout = dropout
        self.q = unfilled(linear, width, width)
        self.kv = unfilled(linear, memory or width, 2 * width)
        self.out = unfilled(linear, width, width)

    def keys_values(self, memory: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values [B, H, S, d] of a memory [B, S, M]."""
        k, v = self.kv(memory).chunk(2, dim=-1)
        return split_heads(k, self.heads), split_heads(v, self.heads)

    def forward(self, x: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
        """[B, T, D] to [B, T, D]. In decoding T is the K hypotheses of a sentence, which share keys and values."""
        q = split_heads(self.q(x), self.heads)
        dropout = self.dropout if self.training else 0.0
        return self.out(merge_heads(attend(q, keys, values, mask, dropout)))


# -- feed-forward ------------------------------------------------------------------------------------------------------


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

    def __init__(self, columns: int, rows: int) -> None:
        super().__init__(columns, rows)
        self.shift = nn.Parameter(torch.empty(1))

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
