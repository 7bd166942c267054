"""Which training pairs are left out, with a count for every reason.

To add a filter: a row in `TEXT_FILTERS` or `LENGTH_FILTERS`, and its setting in `config.Filters` with a default that
leaves nothing out, since data prepared before it was there counts as prepared with that.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Iterable

import numpy as np
import numpy.typing as npt

from deepnmt.config import Filters
from deepnmt.data.text import Pair

# By the reason that is counted: whether a filter leaves out a pair, given source, target and settings. Of the filters
# that leave a pair out the first is counted.
TEXT_FILTERS: dict[str, Callable[[str, str, Filters], bool]] = {
    "empty": lambda src, trg, _: not src or not trg,
    "identical": lambda src, trg, filters: filters.drop_identical and src == trg,
}

# The same by the numbers of pieces of both sides, int64 [N] without eos, of N pairs at once.
LENGTH_FILTERS: dict[
    str, Callable[[npt.NDArray[np.int64], npt.NDArray[np.int64], Filters], npt.NDArray[np.bool_]]
] = {
    "empty": lambda src, trg, _: np.minimum(src, trg) == 0,
    "too_long": lambda src, trg, filters: np.maximum(src, trg) > filters.max_tokens,
    "ratio": lambda src, trg, filters: np.maximum(src, trg) > filters.max_ratio * np.minimum(src, trg),
}

REASONS = list(dict.fromkeys([*TEXT_FILTERS, "duplicate", *LENGTH_FILTERS]))

Verdicts = npt.NDArray[np.uint8]  # [N], KEPT or `verdict_of` a reason
KEPT = 0


def verdict_of(reason: str) -> int:
    """The number that stands for a reason."""
    return 1 + REASONS.index(reason)


def judge_texts(pairs: Iterable[Pair], filters: Filters) -> Verdicts:
    """Judges every pair by its text: by `TEXT_FILTERS`, and whether an earlier pair is the same.

    Duplicates are found by a 64-bit hash of both sides, so n different pairs lose one wrongly with probability
    n²/2^65 (below 1e-4 for 40 million). This takes 9 bytes a pair while reading and some 32 at the end. Only
    such small arrays, a few bytes a pair, grow with the corpus; the texts never do.
    """
    verdicts = bytearray()
    hashes = array("Q")
    rules = [(verdict_of(reason), leaves_out) for reason, leaves_out in TEXT_FILTERS.items()]
    for src, trg in pairs:
        verdict = next((verdict for verdict, leaves_out in rules if leaves_out(src, trg, filters)), KEPT)
        verdicts.append(verdict)
        if verdict == KEPT and filters.drop_duplicates:
            digest = hashlib.blake2b(f"{src}\n{trg}".encode(), digest_size=8).digest()
            hashes.append(int.from_bytes(digest, "little"))
    result = np.frombuffer(verdicts, dtype=np.uint8).copy()
    if filters.drop_duplicates:
        kept = np.flatnonzero(result == KEPT)
        _, first = np.unique(np.frombuffer(hashes, dtype=np.uint64), return_index=True)
        repeated = np.ones(len(kept), dtype=bool)
        repeated[first] = False
        result[kept[repeated]] = verdict_of("duplicate")
    return result


def judge_lengths(src: npt.NDArray[np.int64], trg: npt.NDArray[np.int64], filters: Filters) -> Verdicts:
    """Judges pairs by their pieces (int64 [N], without eos), by `LENGTH_FILTERS`."""
    verdicts = np.full(len(src), KEPT, dtype=np.uint8)
    for reason, leaves_out in LENGTH_FILTERS.items():
        verdicts[(verdicts == KEPT) & leaves_out(src, trg, filters)] = verdict_of(reason)
    return verdicts


def tally(verdicts: Verdicts) -> dict[str, int]:
    """How many pairs were left out for each reason; every reason is named."""
    return {reason: int(np.count_nonzero(verdicts == verdict_of(reason))) for reason in REASONS}
