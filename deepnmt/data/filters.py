"""Filters for training pairs, with a count of the pairs left out for each reason.

To add a filter, add a row to `TEXT_FILTERS` or `LENGTH_FILTERS`, and its setting to `config.Filters`. The setting's
default must leave nothing out, because older prepared data counts as prepared with it.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Iterable

import numpy as np
import numpy.typing as npt

from deepnmt.config import Filters
from deepnmt.data.text import Pair

# Reason to filter: whether a pair is left out, given source, target and settings. If several filters leave a pair out,
# only the first one's reason is counted.
TEXT_FILTERS: dict[str, Callable[[str, str, Filters], bool]] = {
    "empty": lambda src, trg, _: not src or not trg,
    "identical": lambda src, trg, filters: filters.drop_identical and src == trg,
}

# The same for N pairs at once, given the numbers of pieces of both sides, int64 [N], without eos.
LENGTH_FILTERS: dict[
    str, Callable[[npt.NDArray[np.int64], npt.NDArray[np.int64], Filters], npt.NDArray[np.bool_]]
] = {
    "empty": lambda src, trg, _: np.minimum(src, trg) == 0,
    "too_long": lambda src, trg, filters: np.maximum(src, trg) > filters.max_tokens,
    "ratio": lambda src, trg, filters: np.maximum(src, trg) > filters.max_ratio * np.minimum(src, trg),
}

REASONS = list(dict.fromkeys([*TEXT_FILTERS, "duplicate", *LENGTH_FILTERS]))

Codes = npt.NDArray[np.uint8]  # [N], for each pair KEPT or the `code_of` the reason why it is left out
KEPT = 0


def code_of(reason: str) -> int:
    """The code of a reason."""
    return 1 + REASONS.index(reason)


def filter_by_text(pairs: Iterable[Pair], filters: Filters) -> Codes:
    """Applies `TEXT_FILTERS` and the filter of duplicates.

    Duplicates are detected by a 64-bit hash of both sides, so of n different pairs one is wrongly left out with
    probability n²/2^65 (below 1e-4 for 40 million). Texts are not kept in memory: this takes 9 bytes a pair while
    reading and some 32 at the end.
    """
    codes = bytearray()
    hashes = array("Q")
    rules = [(code_of(reason), leaves_out) for reason, leaves_out in TEXT_FILTERS.items()]
    for src, trg in pairs:
        code = next((code for code, leaves_out in rules if leaves_out(src, trg, filters)), KEPT)
        codes.append(code)
        if code == KEPT and filters.drop_duplicates:
            digest = hashlib.blake2b(f"{src}\n{trg}".encode(), digest_size=8).digest()
            hashes.append(int.from_bytes(digest, "little"))
    result = np.frombuffer(codes, dtype=np.uint8).copy()
    if filters.drop_duplicates:
        chosen = np.flatnonzero(result == KEPT)
        _, first = np.unique(np.frombuffer(hashes, dtype=np.uint64), return_index=True)
        repeated = np.ones(len(chosen), dtype=bool)
        repeated[first] = False
        result[chosen[repeated]] = code_of("duplicate")
    return result


def filter_by_length(src: npt.NDArray[np.int64], trg: npt.NDArray[np.int64], filters: Filters) -> Codes:
    """Applies `LENGTH_FILTERS` to N pairs with these numbers of pieces (int64 [N], without eos)."""
    codes = np.full(len(src), KEPT, dtype=np.uint8)
    for reason, leaves_out in LENGTH_FILTERS.items():
        codes[(codes == KEPT) & leaves_out(src, trg, filters)] = code_of(reason)
    return codes


def tally(codes: Codes) -> dict[str, int]:
    """How many pairs were left out for each reason, zeros included."""
    return {reason: int(np.count_nonzero(codes == code_of(reason))) for reason in REASONS}
