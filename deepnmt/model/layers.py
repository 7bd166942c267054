"""Encoder and decoder layers: sub-layers, joined by the layer's block (`blocks.py`).

`B` sentences, `S` source length, `T` target length, `D` width, `H` heads, `d` = D / H, `K` beams.
"""

from __future__ import annotations

from torch import Tensor, nn

from deepnmt import config
from deepnmt.model.attention import CrossAttention, SelfAttention
from deepnmt.model.blocks import LayerPosition, Stream, last_output
from deepnmt.model.dropout import Dropout, seed_dropout
from deepnmt.model.published import block_of


class Layer(nn.Module):
    """Base class of encoder and decoder layers: self-attention, FFN, block and seeded dropout.

    Args:
        model: shapes, dropouts and blocks.
        position: the layer's position in the model.
        seed: the run's seed; with the layer's name and the micro-batch's key it fixes the dropout masks.
    """

    def __init__(self, model: config.Model, position: LayerPosition, seed: int) -> None:
        super().__init__()
        self.name = f"{position.side}.layers.{position.index}"
        self.seed = seed
        self.random = max(model.dropout, model.attention_dropout, model.activation_dropout) > 0
        block = block_of(position.settings)
        self.self_attn = SelfAttention(model.width, model.heads, model.attention_dropout, block.linear)
        self.ffn = block.feed_forward(model.width, model.ffn, model.activation, model.activation_dropout)
        self.dropout = Dropout(model.dropout)
        self.rule = block(position)  # called `rule` because checkpoints contain the name

    def seed_masks(self, x: Stream, dropout_key: int) -> None:
        """Makes the dropout masks of this call a function of (seed, key, layer)."""
        if self.training and self.random:
            seed_dropout(last_output(x).device, self.seed, dropout_key, self.name)


class EncoderLayer(Layer):
    """Self-attention and FFN."""

    def forward(self, x: Stream, mask: Tensor | None = None, dropout_key: int = 0) -> Stream:
        """x [B, S, D] and key mask [B, 1, 1, S] (false at padding) to [B, S, D]; see `blocks.Stream`."""
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

    def __init__(self, model: config.Model, position: LayerPosition, seed: int) -> None:
        super().__init__(model, position, seed)
        self.cross_attn = CrossAttention(model.width, model.heads, model.attention_dropout, self.rule.linear)

    def forward(self, x: Stream, memory: Tensor, mask: Tensor | None = None, dropout_key: int = 0) -> Stream:
        """x [B, T, D], memory [B, S, D] and its key mask [B, 1, 1, S] (false at padding) to [B, T, D]."""
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
        visible: Tensor | None,
        source: tuple[Tensor, Tensor],
        mask: Tensor | None,
        slots: slice,
    ) -> Stream:
        """Decodes one target position, without dropout: x [B, K, D] to [B, K, D].

        Args:
            past: keys and values of the self-attention [B, H, max_steps·K, d], extended in place.
            visible, slots: see `SelfAttention.step`.
            source: keys and values of the cross-attention [B, H, S, d].
            mask: the key mask of the cross-attention.
        """
        return self.rule(
            x,
            (
                lambda h: self.self_attn.step(h, *past, visible, slots),
                lambda h: self.cross_attn(h, *source, mask),
                self.ffn,
            ),
        )
