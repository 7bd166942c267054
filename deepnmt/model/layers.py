"""Encoder and decoder layers: sub-layers in a row, joined by the layer's residual rule (`residual.py`).

`B` sentences, `S` source length, `T` target length, `D` width, `H` heads, `d` = D / H, `K` beams.
"""

from __future__ import annotations

from torch import Tensor, nn

from deepnmt import config
from deepnmt.model.attention import CrossAttention, SelfAttention
from deepnmt.model.blocks import RULES, Place
from deepnmt.model.dropout import Dropout, seed_dropout
from deepnmt.model.history import Stream, newest


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
        rule = RULES[stack.block]
        self.self_attn = SelfAttention(model.width, model.heads, model.attention_dropout, rule.linear)
        self.ffn = rule.feed_forward(model.width, model.ffn, model.activation, model.activation_dropout)
        self.dropout = Dropout(model.dropout)
        self.rule = rule(place)

    def seed_masks(self, x: Stream, dropout_key: int) -> None:
        """Makes the dropout masks of this call a function of (seed, key, layer)."""
        if self.training and self.random:
            seed_dropout(newest(x).device, self.seed, dropout_key, self.name)


class EncoderLayer(Layer):
    """Self-attention and FFN."""

    def forward(self, x: Stream, mask: Tensor | None = None, dropout_key: int = 0) -> Stream:
        """x [B, S, D] and key mask [B, 1, 1, S] (true: seen) to [B, S, D]; see `history.Stream`."""
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
        self.cross_attn = CrossAttention(model.width, model.heads, model.attention_dropout, self.rule.linear)

    def forward(self, x: Stream, memory: Tensor, mask: Tensor | None = None, dropout_key: int = 0) -> Stream:
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
        x: Stream,
        past: tuple[Tensor, Tensor],
        seen: Tensor | None,
        source: tuple[Tensor, Tensor],
        mask: Tensor | None,
        here: slice,
    ) -> Stream:
        """One target position further, without dropout: x [B, K, D] to [B, K, D].

        `past` are the self-attention's keys and values [B, H, max_steps·K, d], extended in place in the slots `here`,
        and `seen` which of them each hypothesis sees (`SelfAttention.step`); `source` the cross-attention's
        [B, H, S, d] and `mask` its key mask.
        """
        return self.rule(
            x,
            (
                lambda h: self.self_attn.step(h, *past, seen, here),
                lambda h: self.cross_attn(h, *source, mask),
                self.ffn,
            ),
        )
