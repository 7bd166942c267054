"""The micro-batches of masked sequences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from deepnmt.batch import Batch
from deepnmt.data.arrays import Indices, Lengths, Side
from deepnmt.data.examples import Examples
from deepnmt.tasks.masked_lm.masking import FIXED, count_masked, mask
from deepnmt.tasks.masked_lm.settings import Masking
from deepnmt.tokens import BOS, EOS, PAD


@dataclass(frozen=True)
class MaskedText(Examples):
    """Sequences, masked anew in each epoch: the "source" is a sequence with its marks, the "target" the tokens that are
    predicted.

    Attributes:
        side: the sequences, without marks.
        mask_id: the id of `<mask>`.
        vocab: the size of the vocabulary.
        seed: of the masks.
    """

    name: str
    side: Side
    masking: Masking
    mask_id: int
    vocab: int
    seed: int

    def __len__(self) -> int:
        return len(self.side.lengths)

    @cached_property
    def src_lengths(self) -> Lengths:
        return self.side.lengths + 1  # pieces + eos, and bos

    @cached_property
    def trg_lengths(self) -> Lengths:
        return count_masked(self.side.lengths - 1, self.masking.share)

    def batch(self, rows: Indices | Sequence[int], key: int, device: torch.device, epoch: int | None = None) -> Batch:
        """The sequences `rows` as one micro-batch, masked as in `epoch`, by default that of the key: src [B, S],
        bos + pieces + eos, src_lengths [B], and targets [B, S], pad where nothing is predicted."""
        epoch = key >> 32 if epoch is None else epoch
        sequences = [mask(self.side[row], self.masking, self.mask_id, self.vocab, self.seed, epoch, int(row))
                     for row in rows]
        lengths = np.array([len(sequence.read) + 2 for sequence in sequences])
        src = np.full((len(sequences), lengths.max()), PAD, dtype=np.int64)
        targets = src.copy()
        for place, (read, target) in enumerate(sequences):
            src[place, :len(read) + 2] = [BOS, *read, EOS]
            targets[place, 1:len(read) + 1] = target
        arrays = {"src": src, "src_lengths": lengths, "targets": targets}
        return Batch.of_arrays(arrays, key, int((targets != PAD).sum()), device)

    def fixed_batch(self, rows: Indices | Sequence[int], device: torch.device) -> Batch:
        """The same with the mask that every validation has."""
        return self.batch(rows, 0, device, FIXED)
