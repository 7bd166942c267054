"""The micro-batches of masked sequences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
import torch

from deepnmt.batch import Batch
from deepnmt.data.arrays import Indices, Lengths, Side
from deepnmt.data.batching import Rows, Sentences, Stream
from deepnmt.device import upload
from deepnmt.tasks.masked_lm.masking import FIXED, count_masked, mask
from deepnmt.tasks.masked_lm.settings import Masking
from deepnmt.tokens import BOS, EOS, PAD


@dataclass(frozen=True)
class MaskedText:
    """Sequences, as `batching.Stream` asks for them: the "source" is a sequence with its marks, the "target" the tokens
    that are predicted.

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

    def windows(self, epoch: int) -> int:
        """One: all sequences are planned together."""
        return 1

    def __len__(self) -> int:
        return len(self.side.lengths)

    def window(self, epoch: int, number: int) -> MaskedText:
        """The same in every epoch; the masks differ."""
        return self

    @property
    def sources(self) -> Rows:
        return self.side

    targets = sources

    @property
    def src_lengths(self) -> Lengths:
        return self.side.lengths + 1  # pieces + eos, and bos

    @property
    def trg_lengths(self) -> Lengths:
        return count_masked(self.side.lengths - 1, self.masking.share)

    def column(self, name: str) -> Rows:
        raise KeyError(name)

    def batch(self, rows: Indices | Sequence[int], epoch: int, key: int, device: torch.device) -> Batch:
        """The sequences `rows` as one micro-batch, masked as in `epoch`: src [B, S], bos + pieces + eos, src_lengths
        [B], and targets [B, S], pad where nothing is predicted."""
        sequences = [mask(self.side[row], self.masking, self.mask_id, self.vocab, self.seed, epoch, int(row))
                     for row in rows]
        lengths = np.array([len(sequence.read) + 2 for sequence in sequences])
        src = np.full((len(sequences), lengths.max()), PAD, dtype=np.int64)
        targets = src.copy()
        for place, (read, target) in enumerate(sequences):
            src[place, :len(read) + 2] = [BOS, *read, EOS]
            targets[place, 1:len(read) + 1] = target
        tensors = {"src": src, "src_lengths": lengths, "targets": targets}
        uploaded = {name: upload(torch.from_numpy(array), device) for name, array in tensors.items()}
        return Batch(uploaded, key, int((targets != PAD).sum()))

    def fixed_batch(self, rows: Indices | Sequence[int], device: torch.device) -> Batch:
        """The same with the mask that every validation has."""
        return self.batch(rows, FIXED, 0, device)


class MaskedStream(Stream):
    """The training micro-batches, masked anew in each epoch."""

    def collate(self, sentences: Sentences, rows: Indices, key: int, device: torch.device) -> Batch:
        return cast(MaskedText, sentences).batch(rows, key >> 32, key, device)
