"""What incremental decoding remembers from one target position to the next.

`B` sentences, `S` source length, `H` heads, `d` width of a head, `K` beams.
"""

from __future__ import annotations

import torch
from torch import Tensor


def _move(store: Tensor, dim: int, places: Tensor, movers: Tensor) -> None:
    """Writes what `store` holds at `movers` of a dimension to its `places`."""
    store.index_copy_(dim, places, store.index_select(dim, movers))


class Cache:
    """What decoding remembers between steps, for B sentences with K hypotheses each.

    A sentence's hypotheses share one store of self-attention keys and values [B, H, max_steps·K, d], in which slot
    p·K + j belongs to the j-th hypothesis of position p. Which slots a hypothesis goes on from is its row of `lineage`,
    0 there and -inf elsewhere: reordering moves these numbers and no key or value. Those of the cross-attention are
    kept once for each sentence [B, H, S, d].
    """

    def __init__(self, past: Tensor, source: list[tuple[Tensor, Tensor]], mask: Tensor | None, beams: int) -> None:
        self.past = past  # [layers, 2, B, H, max_steps·K, d], filled up to `position`
        self.lineage = past.new_full((past.size(2) * beams, past.size(4)), -torch.inf)
        self.own = past.new_full((beams, beams), -torch.inf).fill_diagonal_(0.0)
        self.source = source
        self.mask = mask
        self.beams = beams
        self.position = 0

    def reorder(self, rows: Tensor) -> None:
        """Hypothesis r goes on from the past of hypothesis rows[r]; rows [B·K] index the present hypotheses."""
        self.lineage = self.lineage.index_select(0, rows)

    def advance(self, hypotheses: int) -> tuple[Tensor | None, slice]:
        """One position further: what the first `hypotheses` of each sentence see there, themselves included
        [B, 1, hypotheses, slots up to the position's] (None: everything), and the position's slots."""
        here = slice(self.position * self.beams, (self.position + 1) * self.beams)
        self.position += 1
        if self.beams == 1:
            return None, here
        lineage = self.lineage.view(-1, self.beams, self.lineage.size(1))
        lineage[:, :, here] = self.own
        return lineage[:, None, :hypotheses, : here.stop], here

    def select(self, sentences: Tensor) -> None:
        """Keeps these sentences [B'] with all their hypotheses, in this order.

        A sentence that keeps its place is not copied.
        """
        count, filled = len(sentences), self.position * self.beams
        places = (sentences != torch.arange(count, device=sentences.device)).nonzero().squeeze(1)
        movers = sentences[places]
        _move(self.past[..., :filled, :], 2, places, movers)
        self.past = self.past[:, :, :count]
        for k, v in self.source:
            _move(k, 0, places, movers)
            _move(v, 0, places, movers)
        self.source = [(k[:count], v[:count]) for k, v in self.source]
        self.lineage = self.lineage.unflatten(0, (-1, self.beams)).index_select(0, sentences).flatten(0, 1)
        self.mask = None if self.mask is None else self.mask.index_select(0, sentences)
