"""Adaptive inputs and adaptive softmax: frequent tokens have wide vectors, rare ones narrow ones.

Baevski and Auli 2019, Adaptive Input Representations for Neural Language Modeling; Grave et al. 2017, Efficient softmax
approximation for GPUs. Tokens are divided into bands by their ids, so these must be in the order of frequency. Band i
has vectors of width d_i = D / factor^i and a projection P_i [d_i, D].

- Input: a token's vector times its band's projection.
- Output: the first band's tokens and one class for each further band share a softmax over the first band's vectors and
  the classes'. A further band has a softmax of its own, whose logits are the band's vectors times P_i h.

Vectors and projections are the same in both, so that all of them are one tensor [R, D], a table of which every layout,
checkpoint and pipeline knows what to do with. Its rows: the first band's vectors, the classes', every projection, and
the vectors of each further band, end to end.

`N` tokens, `D` width, `V` vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from deepnmt.model import dropout as dropout_
from deepnmt.model.loss import linear_cross_entropy
from deepnmt.tokens import PAD


class Bands:
    """Where everything is in the table.

    Args:
        vocab: V.
        width: D.
        bounds: the ids at which bands begin, without the first; those above V leave their bands empty.
        factor: how much narrower each band is than the one before.
    """

    def __init__(self, vocab: int, width: int, bounds: Sequence[int], factor: int) -> None:
        self.width = width
        self.starts = [0, *(min(bound, vocab) for bound in bounds)]
        self.stops = [*self.starts[1:], vocab]
        self.widths = [max(1, width // factor**i) for i in range(len(self.starts))]
        self.head = self.stops[0] + len(bounds)  # rows that share the first softmax

    @cached_property
    def _projections(self) -> list[int]:
        """The row at which each band's projection begins, and where the last ends."""
        ends = [self.head]
        for width in self.widths:
            ends.append(ends[-1] + width)
        return ends

    @cached_property
    def _vectors(self) -> list[int]:
        """The row at which each further band's vectors begin, and where the last ends."""
        ends = [self._projections[-1]]
        for start, stop, width in list(zip(self.starts, self.stops, self.widths, strict=True))[1:]:
            ends.append(ends[-1] + -(-(stop - start) * width // self.width))
        return ends

    @property
    def rows(self) -> int:
        """R."""
        return self._vectors[-1]

    def projection(self, table: Tensor, band: int) -> Tensor:
        """P_i [d_i, D]."""
        return table[self._projections[band] : self._projections[band + 1]]

    def vectors(self, table: Tensor, band: int) -> Tensor:
        """The vectors of a band's tokens [n, d_i]."""
        if band == 0:
            return table[: self.stops[0]]
        count, width = self.stops[band] - self.starts[band], self.widths[band]
        flat = table[self._vectors[band - 1] : self._vectors[band]].flatten()
        return flat[: count * width].view(count, width)

    def members(self, ids: Tensor, band: int) -> Tensor:
        """Which of ids [N] are of a band, as indices."""
        return ((ids >= self.starts[band]) & (ids < self.stops[band])).nonzero().squeeze(1)

    def embed(self, table: Tensor, ids: Tensor) -> Tensor:
        """ids of any shape to their vectors [..., D]."""
        flat = ids.flatten()
        out = table.new_zeros(len(flat), self.width)
        for band, start in enumerate(self.starts):
            rows = self.members(flat, band)
            vectors = F.embedding(flat[rows] - start, self.vectors(table, band))
            out = out.index_copy(0, rows, vectors @ self.projection(table, band))
        return out.view(*ids.shape, self.width)

    def losses(self, hidden: Tensor, table: Tensor, targets: Tensor, dropout: float = 0.0) -> tuple[Tensor, Tensor]:
        """Loss and nll of hidden [N, D] against targets [N], which are the same. `dropout`: on P_i h."""
        classes = targets
        for band, start in list(enumerate(self.starts))[1:]:
            classes = torch.where(targets >= start, self.stops[0] + band - 1, classes)
        loss, nll = linear_cross_entropy(hidden, table[: self.head], classes, 0.0)
        for band, start in list(enumerate(self.starts))[1:]:
            rows = self.members(targets, band)
            if len(rows):
                narrow = dropout_.dropout(hidden[rows] @ self.projection(table, band).t(), dropout)
                more = linear_cross_entropy(narrow, self.vectors(table, band), targets[rows] - start, 0.0)
                loss, nll = loss + more[0], nll + more[1]
        return loss, nll

    def log_probabilities(self, hidden: Tensor, table: Tensor) -> Tensor:
        """Those of all tokens, from hidden [..., D] to fp32 [..., V]."""
        head = F.linear(hidden, table[: self.head]).float().log_softmax(-1)
        parts = [head[..., : self.stops[0]]]
        for band in range(1, len(self.starts)):
            logits = F.linear(F.linear(hidden, self.projection(table, band)), self.vectors(table, band))
            parts.append(logits.float().log_softmax(-1) + head[..., self.stops[0] + band - 1, None])
        return torch.cat(parts, -1)

    @torch.no_grad()
    def fill(self, table: Tensor, generator: torch.Generator) -> None:
        """Initial values: vectors normal with standard deviation d_i^-1/2, that of pad 0, projections and classes
        Xavier-uniform."""
        table.zero_()
        for band, width in enumerate(self.widths):
            self.vectors(table, band).normal_(std=width**-0.5, generator=generator)
            nn.init.xavier_uniform_(self.projection(table, band), generator=generator)
        if self.head > self.stops[0]:
            nn.init.xavier_uniform_(table[self.stops[0] : self.head], generator=generator)
        table[PAD] = 0


class BandedEmbedding(nn.Module):
    """The table in the place of `nn.Embedding`."""

    def __init__(self, bands: Bands) -> None:
        super().__init__()
        self.bands = bands
        self.weight = nn.Parameter(torch.empty(bands.rows, bands.width))

    def forward(self, ids: Tensor) -> Tensor:
        return self.bands.embed(self.weight, ids)
