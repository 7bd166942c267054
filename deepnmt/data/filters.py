"""Filters for training pairs, with a count of the pairs left out for each reason.

To add a filter, add a row to `TEXT_FILTERS` or `LENGTH_FILTERS`, and its setting to `config.Filters`; one that corpora
differ in is a row of `CLEANING`, and a setting of `config.Cleaning`. The setting's
default must leave nothing out, because older prepared data counts as prepared with it.
"""

from __future__ import annotations

import hashlib
import re
import unicodedata
from array import array
from collections.abc import Callable, Collection, Iterable
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from deepnmt.config import Cleaning, Filters
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

_DIGITS = re.compile(r"\d+")

# Setting of `config.Cleaning` to filter: whether it leaves a pair of its corpus out. It is asked if the setting has
# another value than its default, and gives the reason its name.
CLEANING: dict[str, Callable[[str, str, Cleaning], bool]] = {
    "scripts": lambda src, trg, clean: any(
        _share_of_script(text, script) < 0.5 for text, script in zip((src, trg), clean.scripts, strict=True)),
    "same_digits": lambda src, trg, _: sorted(_DIGITS.findall(src)) != sorted(_DIGITS.findall(trg)),
    "max_length_ratio": lambda src, trg, clean:
        max(len(src), len(trg)) > (clean.max_length_ratio or 0.0) * min(len(src), len(trg)),
    "min_letters": lambda src, trg, clean: any(
        sum(map(str.isalpha, text)) < clean.min_letters * len("".join(text.split())) for text in (src, trg)),
    "drop_same_letters": lambda src, trg, _: _letters(src) == _letters(trg),
}

REASONS = list(dict.fromkeys([*TEXT_FILTERS, "duplicate", *LENGTH_FILTERS, "overlap", *CLEANING]))

Codes = npt.NDArray[np.uint8]  # [N], for each pair KEPT or the `code_of` the reason why it is left out
KEPT = 0


def code_of(reason: str) -> int:
    """The code of a reason."""
    return 1 + REASONS.index(reason)


Hashes = npt.NDArray[np.uint64]


class Filtered(NamedTuple):
    """N pairs after the filters of their text.

    Attributes:
        codes: [N].
        hashes: of those kept, if they were asked for.
        overlap: pairs that have a sentence of a text that is scored.
    """

    codes: Codes
    hashes: Hashes
    overlap: int


@lru_cache(1 << 16)
def _script_of(letter: str) -> str:
    """The script of a letter: the first word of its name in Unicode, such as LATIN, CYRILLIC or CJK."""
    return unicodedata.name(letter, "").partition(" ")[0]


def _share_of_script(text: str, script: str) -> float:
    letters = [letter for letter in text if letter.isalpha()]
    return sum(_script_of(letter) == script.upper() for letter in letters) / len(letters) if letters else 1.0


def _letters(text: str) -> str:
    return "".join(filter(str.isalnum, text.casefold()))


def filter_corpora(corpora: Iterable[tuple[Cleaning, Iterable[Pair]]], filters: Filters,
                   scored: Collection[str] = frozenset()) -> tuple[Codes, int]:
    """Applies `apply_text_filters` to each corpus, and the filter of duplicates to all; returns the codes of all pairs,
    and how many have a sentence of `scored`.

    Duplicates are detected by a 64-bit hash of both sides, so of n different pairs one is wrongly left out with
    probability n²/2^65 (below 1e-4 for 40 million). Texts are not kept in memory: this takes 9 bytes a pair while
    reading and some 32 at the end.
    """
    parts = [apply_text_filters(pairs, filters, clean, scored, filters.drop_duplicates) for clean, pairs in corpora]
    result = np.concatenate([part.codes for part in parts])
    if filters.drop_duplicates:
        chosen = np.flatnonzero(result == KEPT)
        _, first = np.unique(np.concatenate([part.hashes for part in parts]), return_index=True)
        repeated = np.ones(len(chosen), dtype=bool)
        repeated[first] = False
        result[chosen[repeated]] = code_of("duplicate")
    return result, sum(part.overlap for part in parts)


def apply_text_filters(pairs: Iterable[Pair], filters: Filters, clean: Cleaning, scored: Collection[str], hashed: bool
                       ) -> Filtered:
    """Applies `TEXT_FILTERS` and a corpus's `CLEANING` to its pairs.

    Args:
        scored: the sentences of validation and test texts.
        hashed: whether hashes are asked for.
    """
    codes = bytearray()
    hashes = array("Q")
    overlap = 0
    rules = [(code_of(reason), leaves_out) for reason, leaves_out in TEXT_FILTERS.items()]
    cleaning = [(code_of(name), leaves_out) for name, leaves_out in CLEANING.items()
                if getattr(clean, name) != clean.default(name)]
    for src, trg in pairs:
        code = next((code for code, leaves_out in rules if leaves_out(src, trg, filters)), KEPT)
        if code == KEPT and scored and (src in scored or trg in scored):
            overlap += 1
            code = code_of("overlap") if filters.drop_overlap else KEPT
        if code == KEPT and cleaning:
            code = next((code for code, leaves_out in cleaning if leaves_out(src, trg, clean)), KEPT)
        codes.append(code)
        if code == KEPT and hashed:
            digest = hashlib.blake2b(f"{src}\n{trg}".encode(), digest_size=8).digest()
            hashes.append(int.from_bytes(digest, "little"))
    return Filtered(np.frombuffer(codes, dtype=np.uint8).copy(), np.array(hashes, dtype=np.uint64), overlap)


def filter_by_length(src: npt.NDArray[np.int64], trg: npt.NDArray[np.int64], filters: Filters) -> Codes:
    """Applies `LENGTH_FILTERS` to N pairs with these numbers of pieces (int64 [N], without eos)."""
    codes = np.full(len(src), KEPT, dtype=np.uint8)
    for reason, leaves_out in LENGTH_FILTERS.items():
        codes[(codes == KEPT) & leaves_out(src, trg, filters)] = code_of(reason)
    return codes


def tally(codes: Codes) -> dict[str, int]:
    """How many pairs were left out for each reason; zeros are included, but those of rules that a recipe need not have.
    """
    counts = {reason: int(np.count_nonzero(codes == code_of(reason))) for reason in REASONS}
    optional = ("overlap", *CLEANING)
    return {reason: count for reason, count in counts.items() if count or reason not in optional}
