"""Scaled embeddings with positions, and tying of the three embedding tables.

`B` sentences, `T` length, `D` width, `V` vocabulary.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from deepnmt import config
from deepnmt.config.choices import Use
from deepnmt.model.adaptive import BandedEmbedding, Bands
from deepnmt.model.blocks import Side
from deepnmt.model.dropout import Dropout, seed_dropout
from deepnmt.model.positions import POSITIONS
from deepnmt.model.unfilled import unfilled


def table_width(model: config.Model, use: Use) -> int:
    """The width of the table for a use."""
    return model.shape("encoder" if use == "src" else "decoder" if use == "trg" else model.last).width


def bands_of(model: config.Model, vocab: int) -> Bands | None:
    """The bands of a vocabulary of this size; None if all tokens have the width of the model."""
    return Bands(vocab, model.shape(model.last).width, model.bands, model.band_factor) if model.bands else None


def table_rows(model: config.Model, vocab: int) -> int:
    """The rows of the table of a vocabulary."""
    bands = bands_of(model, vocab)
    return vocab if bands is None else bands.rows


def new_table(model: config.Model, use: Use, vocab: int) -> nn.Module:
    """The table for a use, unfilled: from ids to their embeddings [..., D]."""
    bands = bands_of(model, vocab)
    if bands is None:
        return unfilled(nn.Embedding, vocab, table_width(model, use))
    return BandedEmbedding(bands)


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
