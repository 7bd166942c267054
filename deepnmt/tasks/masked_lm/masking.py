"""Which tokens of a sequence are predicted, and what the encoder reads in their place.

Devlin et al. 2019, BERT, section 3.1 and appendix A.1: 15 % of the tokens are chosen; 80 % of these become `<mask>`,
10 % a random piece, and 10 % stay. The draws are a function of the seeds alone, on every machine and with every NumPy.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from deepnmt.data.arrays import Indices
from deepnmt.tasks.masked_lm.settings import Masking
from deepnmt.tokens import PAD

MASK = "<mask>"
FIXED = 2**31  # in the place of an epoch, for the mask of a validation text
_PURPOSE = 31  # tells these draws from others with the same seeds


class Masked(NamedTuple):
    """A sequence [n] as the encoder reads it, and the tokens to predict [n], pad where none is."""

    read: Indices
    targets: Indices


def count_masked(lengths: npt.NDArray[np.integer], share: float) -> npt.NDArray[np.int32]:
    """How many tokens of sequences with so many tokens [N], marks aside, are predicted."""
    return np.maximum(1, np.rint(share * lengths)).astype(np.int32)


def mask(tokens: npt.NDArray[np.integer], settings: Masking, mask_id: int, vocab: int, seed: int, epoch: int,
         number: int) -> Masked:
    """Masks the tokens [n] of sequence `number`, without bos and eos, as in `epoch`.

    Args:
        vocab: the size of the vocabulary. A random piece is none of unk, bos, eos, pad and `<mask>`.
    """
    size = len(tokens)
    drawn = np.random.PCG64(np.random.SeedSequence((seed, epoch, number, _PURPOSE))).random_raw(3 * size)
    places, ways, pieces = drawn.reshape(3, size)
    chosen = np.argsort(places, kind="stable")[:count_masked(np.array([size]), settings.share)[0]]
    way = ways[chosen] / 2.0**64
    ordinary = PAD + 1 + (pieces[chosen] % np.uint64(vocab - PAD - 2)).astype(np.int64)
    ordinary += ordinary >= mask_id
    read, targets = tokens.astype(np.int64), np.full(size, PAD, dtype=np.int64)
    targets[chosen] = read[chosen]
    random = (way >= settings.mask) & (way < settings.mask + settings.random)
    read[chosen] = np.where(way < settings.mask, mask_id, np.where(random, ordinary, read[chosen]))
    return Masked(read, targets)
