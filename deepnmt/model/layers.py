"""Encoder and decoder layers: sub-layers in a row, joined by the layer's residual rule (`residual.py`).

`B` sentences, `S` source length, `T` target length, `D` width, `H` heads, `d` = D / H, `K` beams.
"""

from __future__ import annotations

from typing import Literal

from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import skip_init

from deepnmt import config
from deepnmt.model.attention import CrossAttention, SelfAttention
from deepnmt.model.dropout import Dropout, seed_dropout
from deepnmt.model.residual import RULES, Place


class FeedForward(nn.Module):
    """fc2(dropout(activation(fc1(x)))), position by position."""

    def __init__(self, width: int, inner: int, activation: Literal["relu", "gelu"], dropout: float) -> None:
        super().__init__()
        self.fc1 = skip_init(nn.Linear, width, inner)
        self.fc2 = skip_init(nn.Linear, inner, width)
        self.activation = F.relu if activation == "relu" else F.gelu
        self.dropout = Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.dropout(self.activation(self.fc1(x))))


class Layer(nn.Module):
    """What encoder and decoder layers share: self-attention, FFN, rule, and dropout seeded at the entry.

    Args:
        model: the shapes and dropouts.
        place: where the layer stands.
        seed: the run's seed; with the layer's name and the micro-batch's key it fixes the dropout masks.
    """

    def __init__(self, model: config.Model, place: Place, seed: int) -> None:
        super().__init__()
        stack = model.encoder if place.side == "encoder" else model.decoder
        self.name = f"{place.side}.layers.{place.index}"
        self.seed = seed
        self.random = max(model.dropout, model.attention_dropout, model.activation_dropout) > 0
        self.self_attn = SelfAttention(model.width, model.heads, model.attention_dropout)
        self.ffn = FeedForward(model.width, model.ffn, model.activation, model.activation_dropout)
        self.dropout = Dropout(model.dropout)
        self.rule = RULES[stack.block](place)

    def seed_masks(self, x: Tensor, dropout_key: int) -> None:
        """Makes the dropout masks of this call a function of (seed, key, layer)."""
        if self.training and self.random:
            seed_dropout(x.device, self.seed, dropout_key, self.name)


class EncoderLayer(Layer):
    """Self-attention and FFN."""

    def forward(self, x: Tensor, mask: Tensor | None = None, dropout_key: int = 0) -> Tensor:
        """x [B, S, D] and key mask [B, 1, 1, S] (true: seen) to [B, S, D]."""
        self.seed_masks(x, dropout_key)
        return self.rule(
            x,
            (
                lambda h: self.dropout(self.self_attn(h, mask, causal=False)),
                lambda h: self.dropout(self.ffn(h)),
            ),
        )


class DecoderLayer(Layer):
    """Causal self-attention, cross-attention to the memory, and FFN."""

    def __init__(self, model: config.Model, place: Place, seed: int) -> None:
        super().__init__(model, place, seed)
        self.cross_attn = CrossAttention(model.width, model.heads, model.attention_dropout)

    def forward(self, x: Tensor, memory: Tensor, mask: Tensor | None = None, dropout_key: int = 0) -> Tensor:
        """x [B, T, D], memory [B, S, D] and its key mask [B, 1, 1, S] (true: seen) to [B, T, D]."""
        self.seed_masks(x, dropout_key)
        keys, values = self.cross_attn.keys_values(memory)
        return self.rule(
            x,
            (
                lambda h: self.dropout(self.self_attn(h, None, causal=True)),
                lambda h: self.dropout(self.cross_attn(h, keys, values, mask)),
                lambda h: self.dropout(self.ffn(h)),
            ),
        )

    def step(
        self,
        x: Tensor,
        past: tuple[Tensor, Tensor],
        seen: Tensor | None,
        source: tuple[Tensor, Tensor],
        mask: Tensor | None,
        position: int,
    ) -> Tensor:
        """One target position further, without dropout: x [B, K, D] to [B, K, D].

        `past` are the self-attention's keys and values [B, H, max_steps·K, d], extended in place, and `seen` which of
        them each hypothesis sees (`SelfAttention.step`); `source` the cross-attention's [B, H, S, d] and `mask` its key
        mask.
        """
        return self.rule(
            x,
            (
                lambda h: self.self_attn.step(h, *past, seen, position),
                lambda h: self.cross_attn(h, *source, mask),
                self.ffn,
            ),
        )
