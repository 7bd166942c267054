"""The layers of a stack: its input, and encoder or decoder layers, whose block (`blocks/`) joins their sub-layers.

`B` sentences, `S` source length, `T` target length, `D` width, `M` that of the encoder, `H` heads, `d` = D / H, `K`
beams.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from deepnmt import config
from deepnmt.model.blocks import Branch, LayerPosition, Side, Stream, stream_of, tensors
from deepnmt.model.dropout import Dropout, seed_dropout, stable_hash
from deepnmt.model.positions import POSITIONS
from deepnmt.model.sublayers import CrossAttention


class InputLayer(nn.Module):
    """The input of a stack: dropout(sqrt(D) · embedding + position); with rotary positions without the second.

    With `input_gain`, multiplied by a trainable vector, 1 at first; otherwise there are no parameters. With
    `word_dropout`, training puts zeros in place of whole embeddings, drawn independently, without scaling the others
    (Takase and Kiyono 2021, Rethinking Perturbations in Encoder-Decoders for Fast Training). The decoder keeps bos.
    """

    positions: Tensor
    gain: nn.Parameter | None

    def __init__(self, model: config.Model, side: Side, seed: int) -> None:
        super().__init__()
        self.name = f"{side}.input"
        self.seed = seed
        width = model.shape(side).width
        self.scale = math.sqrt(width)
        self.dropout = Dropout(model.dropout)
        self.word_dropout = model.stack(side).word_dropout
        self.keeps_first = side == "decoder"
        gain = nn.Parameter(torch.empty(width)) if model.stack(side).input_gain else None
        self.register_parameter("gain", gain)
        self.register_buffer("positions", POSITIONS[model.positions].table(model.max_length, width), persistent=False)

    def forward(self, embedded: Tensor, dropout_key: int = 0) -> Tensor:
        """Embeddings [B, T, D] of positions 0 … T-1 to the stack's input [B, T, D].

        Raises:
            ValueError: T exceeds `model.max_length`.
        """
        length, limit = embedded.size(1), self.positions.size(0)
        if length > limit:
            raise ValueError(f"{self.name}: a sequence of {length} tokens exceeds model.max_length ({limit})")
        if self.training and self.word_dropout > 0:
            seed_dropout(embedded.device, self.seed, dropout_key, f"{self.name}.words")
            kept = torch.rand(*embedded.shape[:2], 1, device=embedded.device) >= self.word_dropout
            kept[:, : int(self.keeps_first)] = True
            embedded = embedded * kept
        if self.training and self.dropout.p > 0:
            seed_dropout(embedded.device, self.seed, dropout_key, self.name)
        return self.dropout(self.add_positions(embedded, self.positions[:length]))

    def step(self, embedded: Tensor, position: int) -> Tensor:
        """Embeddings [B, K, D], all at `position`, to the stack's input [B, K, D], without dropout."""
        return self.add_positions(embedded, self.positions[position])

    def add_positions(self, embedded: Tensor, positions: Tensor) -> Tensor:
        """sqrt(D) · embedding + position, added in fp32 and returned in the embedding's type."""
        x = torch.add(positions, embedded, alpha=self.scale)
        return (x if self.gain is None else self.gain * x).to(embedded.dtype)


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
        self.layer_drop = position.settings.layer_drop
        block, shape = position.block, model.shape(position.side)
        self.self_attn = block.self_attention(
            shape.width, shape.heads, model.attention_dropout, block.linear, POSITIONS[model.positions].rotate,
            position.norm)
        self.ffn = block.feed_forward(
            shape.width, shape.ffn, model.activation, model.activation_dropout, position.norm)
        self.dropout = Dropout(model.dropout)
        self.rule = block(position)  # called `rule` because checkpoints contain the name

    def seed_masks(self, x: Stream, dropout_key: int) -> None:
        """Makes the dropout masks of this call a function of (seed, key, layer)."""
        if self.training and self.random:
            seed_dropout(tensors(x)[0].device, self.seed, dropout_key, self.name)

    def survivor(self, x: Stream, y: Stream, dropout_key: int) -> Stream:
        """The layer's output y; but with LayerDrop in training, with this probability, its input x (`Block.skip`).

        Fan et al. 2020, Reducing Transformer Depth on Demand with Structured Dropout, section 3.1. What is dropped is a
        function of (seed, key, layer). A dropped layer is computed all the same, and its gradients are zeros: ZeRO-3
        gathers its weights on all processes at once, but each drops other layers. Where layers are recomputed, it
        matters even how many tensors a layer saves, so one that stays is chosen by the same operation.
        """
        if not self.training or not self.layer_drop:
            return y
        dropped = stable_hash(self.seed, dropout_key, f"{self.name}.dropped") < self.layer_drop * 2**63
        kept = torch.full((), not dropped, device=tensors(y)[0].device)
        pairs = zip(tensors(y), tensors(self.rule.skip(x, y)), strict=True)
        return stream_of([b if a is b else torch.where(kept, a, b) for a, b in pairs])


class EncoderLayer(Layer):
    """Self-attention and FFN."""

    def forward(self, x: Stream, mask: Tensor | None = None, dropout_key: int = 0) -> Stream:
        """x [B, S, D] and key mask [B, 1, 1, S] (false at padding) to [B, S, D]; see `blocks.Stream`."""
        self.seed_masks(x, dropout_key)
        return self.survivor(x, self.compute(x, mask), dropout_key)

    def compute(self, x: Stream, mask: Tensor | None) -> Stream:
        """The layer once its dropout is seeded."""
        return self.rule(
            x,
            (
                lambda h: self.dropout(self.self_attn(h, mask, causal=False)),
                lambda h: self.dropout(self.ffn(h)),
            ),
        )


class DecoderLayer(Layer):
    """Causal self-attention, cross-attention to the memory if the model has an encoder, and FFN."""

    cross_attn: CrossAttention

    def __init__(self, model: config.Model, position: LayerPosition, seed: int) -> None:
        super().__init__(model, position, seed)
        shape, memory = model.shape("decoder"), model.shape("encoder").width
        self.crossing = position.crossing
        self.register_module("cross_attn", CrossAttention(
            shape.width, shape.heads, model.attention_dropout, self.rule.linear, memory) if self.crossing else None)

    def forward(
        self, x: Stream, memory: Tensor | None = None, mask: Tensor | None = None, dropout_key: int = 0
    ) -> Stream:
        """x [B, T, D], memory [B, S, M] and its key mask [B, 1, 1, S] (false at padding) to [B, T, D]."""
        self.seed_masks(x, dropout_key)
        return self.survivor(x, self.compute(x, memory, mask), dropout_key)

    def compute(self, x: Stream, memory: Tensor | None, mask: Tensor | None) -> Stream:
        """The layer once its dropout is seeded."""
        branches: list[Branch] = [
            lambda h: self.dropout(self.self_attn(h, None, causal=True)),
            lambda h: self.dropout(self.ffn(h)),
        ]
        if memory is not None:
            keys, values = self.cross_attn.keys_values(memory)
            branches.insert(1, lambda h: self.dropout(self.cross_attn(h, keys, values, mask)))
        return self.rule(x, branches)

    def step(
        self,
        x: Stream,
        past: Tensor,
        visible: Tensor | None,
        source: tuple[Tensor, Tensor] | None,
        mask: Tensor | None,
        slots: slice,
    ) -> Stream:
        """Decodes one target position, without dropout: x [B, K, D] to [B, K, D].

        Args:
            past: keys and values of the self-attention [2, B, H, max_steps·K, d], extended in place.
            visible, slots: see `SelfAttention.step`.
            source: keys and values of the cross-attention [B, H, S, d]; None without an encoder.
            mask: the key mask of the cross-attention.
        """
        branches: list[Branch] = [lambda h: self.self_attn.step(h, past, visible, slots), self.ffn]
        if source is not None:
            branches.insert(1, lambda h: self.cross_attn(h, *source, mask))
        return self.rule(x, branches)
