"""The tables of embeddings: their widths and rows, plain or in bands. `D` width."""

from __future__ import annotations

from torch import nn

from deepnmt import config
from deepnmt.config.choices import Use
from deepnmt.model.adaptive import BandedEmbedding, Bands
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
