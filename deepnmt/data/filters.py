"""Which training pairs are left out, with a count for every reason."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from deepnmt.config import Filters
from deepnmt.data.text import Pair

KEPT, EMPTY, IDENTICAL, DUPLICATE, TOO_LONG, RATIO = range(6)
REASONS = {EMPTY: "empty", IDENTICAL: "identical", DUPLICATE: "duplicate", TOO_LONG: "too_long", RATIO: "ratio"}

Verdicts = npt.NDArray[np.uint8]  # [N], KEPT or a reason


def judge_texts(pairs: Iterable[Pair], filters: Filters) -> Verdicts:
    """Judges every pair by its text: a side is empty, both are equal, or an earlier pair is the same.

    Duplicates are found by a 64-bit hash of both sides, so n different pairs lose one wrongly with probability
    n²/2^65 (below 1e-4 for 40 million). This takes 9 bytes a pair while reading and some 32 at the end. Only
    such small arrays, a few bytes a pair, grow with the corpus; the texts never do.
    """
    verdicts = bytearray()
    hashes = array("Q")
    for src, trg in pairs:
        if not src or not trg:
            verdicts.append(EMPTY)
        elif filters.drop_identical and src == trg:
            verdicts.append(IDENTICAL)
        else:
            verdicts.append(KEPT)
            if filters.drop_duplicates:
                digest = hashlib.blake2b(f"{src}\n{trg}".encode(), digest_size=8).digest()
                hashes.append(int.from_bytes(digest, "little"))
    result = np.frombuffer(verdicts, dtype=np.uint8).copy()
    if filters.drop_duplicates:
        kept = np.flatnonzero(result == KEPT)
        _, first = np.unique(np.frombuffer(hashes, dtype=np.uint64), return_index=True)
        repeated = np.ones(len(kept), dtype=bool)
        repeated[first] = False
        result[kept[repeated]] = DUPLICATE
    return result


def judge_lengths(src: npt.NDArray[np.int64], trg: npt.NDArray[np.int64], filters: Filters) -> Verdicts:
    """Judges pairs by their pieces (int64 [N], without eos): a side has none or too many, or the ratio is too far."""
    shorter, longer = np.minimum(src, trg), np.maximum(src, trg)
    verdicts = np.full(len(src), KEPT, dtype=np.uint8)
    verdicts[longer > filters.max_ratio * shorter] = RATIO
    verdicts[longer > filters.max_tokens] = TOO_LONG
    verdicts[shorter == 0] = EMPTY
    return verdicts


def tally(verdicts: Verdicts) -> dict[str, int]:
    """How many pairs were left out for each reason; every reason is named."""
    return {name: int(np.count_nonzero(verdicts == reason)) for reason, name in REASONS.items()}
