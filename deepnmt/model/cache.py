"""The cache of keys and values for incremental decoding.

`B` sentences, `S` source length, `H` heads, `d` width of a head, `K` beams.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def indices(numbers: Sequence[int], device: torch.device) -> Tensor:
    """Numbers as int64 on a device, which the host does not wait for."""
    return torch.tensor(numbers, dtype=torch.int64, device="cpu").to(device, non_blocking=True)


def _copy_rows(store: Tensor, dim: int, targets: Tensor, sources: Tensor) -> None:
    """Copies `store` at the indices `sources` of a dimension to the indices `targets`, in place."""
    store.index_copy_(dim, targets, store.index_select(dim, sources))


class Cache:
    """Keys and values of earlier positions, for B sentences with K hypotheses each.

    The hypotheses of a sentence share one store of self-attention keys and values [B, H, max_steps·K, d], in which slot
    p·K + j belongs to the j-th hypothesis at position p. A hypothesis's row of `lineage` is 0 at the slots that it
    continues and -inf elsewhere, so reordering hypotheses copies these rows and no keys or values. Keys and values of
    the cross-attention are stored once for each sentence [B, H, S, d].
    """

    def __init__(self, past: Tensor, source: list[tuple[Tensor, Tensor]], mask: Tensor | None, beams: int) -> None:
        self.past = past  # [layers, 2, B, H, max_steps·K, d], filled up to `position`
        # Rows of a multiple of 8, so that no layer's attention has to copy the mask on a GPU.
        self.lineage = past.new_full((past.size(2) * beams, -(-past.size(4) // 8) * 8), -torch.inf)
        self._spare = self.lineage[:0]  # for wide beams both are large: allocated anew, they would fragment memory
        self.own = past.new_full((beams, beams), -torch.inf).fill_diagonal_(0.0)
        self.source = source
        self.mask = mask
        self.beams = beams
        self.position = 0

    def reorder(self, rows: Tensor) -> None:
        """Hypothesis r now continues the former hypothesis rows[r]; rows is [B·K]."""
        if self._spare.shape != self.lineage.shape:
            self._spare = torch.empty_like(self.lineage)
        torch.index_select(self.lineage, 0, rows, out=self._spare)
        self.lineage, self._spare = self._spare, self.lineage

    def advance(self, hypotheses: int) -> tuple[Tensor | None, slice]:
        """Advances by one position.

        Returns:
            The slots that the first `hypotheses` of each sentence attend to, their own included, [B, 1, hypotheses,
            slots.stop] as for `SelfAttention.step` (None: all); and the slots of the position.
        """
        slots = slice(self.position * self.beams, (self.position + 1) * self.beams)
        self.position += 1
        if self.beams == 1:
            return None, slots
        lineage = self.lineage.view(-1, self.beams, self.lineage.size(1))
        lineage[:, :, slots] = self.own
        return lineage[:, None, :hypotheses, : slots.stop], slots

    def select(self, sentences: Sequence[int]) -> None:
        """Keeps these sentences with all their hypotheses, in this order.

        A sentence whose index does not change is not copied.
        """
        count, filled, device = len(sentences), self.position * self.beams, self.past.device
        moves = [(target, source) for target, source in enumerate(sentences) if target != source]
        targets, sources = (indices([move[side] for move in moves], device) for side in (0, 1))
        rows = indices(sentences, device)
        for layer in self.past:  # one by one, so that the copy in between takes little memory
            _copy_rows(layer[..., :filled, :], 1, targets, sources)
        self.past = self.past[:, :, :count]
        for k, v in self.source:
            _copy_rows(k, 0, targets, sources)
            _copy_rows(v, 0, targets, sources)
        self.source = [(k[:count], v[:count]) for k, v in self.source]
        self.lineage = self.lineage.unflatten(0, (-1, self.beams)).index_select(0, rows).flatten(0, 1)
        if self.mask is not None:  # whose rows stay where key_mask has put them
            _copy_rows(self.mask, 0, targets, sources)
            self.mask = self.mask[:count]
