"""Filters for training pairs, with a count of the pairs left out for each reason.

To add a filter, add a row to `TEXT_FILTERS` or `LENGTH_FILTERS`, and its setting to `config.Filters`; one that corpora
differ in is a row of `CLEANING`, and a setting of `config.Cleaning`. The setting's
default must leave nothing out, because older prepared data counts as prepared with it.
"""

from __future__ import annotations

import hashlib
import itertools
import re
import sys
import unicodedata
from array import array
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import lru_cache
from numbers import Real
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from deepnmt.config import Cleaning, Filters
from deepnmt.config.plugins import Table
from deepnmt.data.text import Pair, Row
from deepnmt.data.vocab import without_tags
from deepnmt.errors import UserError

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


def _numbers(text: str) -> list[str]:
    """The numbers of a text in digits, sorted, all in those of ASCII."""
    return sorted("".join(str(unicodedata.digit(digit)) for digit in number) for number in _DIGITS.findall(text))


# Setting of `config.Cleaning` to filter: whether it leaves a pair of its corpus out, given the score of the pair, too.
# It is asked if the setting has another value than its default, and gives the reason its name.
CLEANING: dict[str, Callable[[str, str, float | None, Cleaning], bool]] = {
    "scripts": lambda src, trg, _, clean: any(
        _share_of_script(text, script) < 0.5 for text, script in zip((src, trg), clean.scripts, strict=True)),
    "same_digits": lambda src, trg, *_: _numbers(src) != _numbers(trg),
    "max_length_ratio": lambda src, trg, _, clean:
        max(len(src), len(trg)) > (clean.max_length_ratio or 0.0) * min(len(src), len(trg)),
    "min_letters": lambda src, trg, _, clean: any(
        sum(map(str.isalpha, text)) < clean.min_letters * len("".join(text.split())) for text in (src, trg)),
    "drop_same_letters": lambda src, trg, *_: _letters(src) == _letters(trg),
    "min_score": lambda _, __, score, clean: score is not None and score < (clean.min_score or 0.0),
}

# Those of the settings of `config.Cleaning` that need more than a pair; the last one needs all pairs of all corpora.
LANGUAGE, NEAR = "language_id", "drop_near_duplicates"
OPTIONAL = ("overlap", *CLEANING, LANGUAGE, NEAR)  # reasons of rules that a recipe need not have
REASONS = list(dict.fromkeys([*TEXT_FILTERS, "duplicate", *LENGTH_FILTERS, *OPTIONAL]))

Codes = npt.NDArray[np.uint8]  # [N], for each pair KEPT or the `code_of` the reason why it is left out
KEPT = 0
CHUNK = 1000  # pairs that are filtered together, and whose sentences a language identifier gets at once


def code_of(reason: str) -> int:
    """The code of a reason."""
    return 1 + REASONS.index(reason)


Hashes = npt.NDArray[np.uint64]


class Rules(NamedTuple):
    """How the pairs of a corpus are filtered by their text.

    Attributes:
        languages: the labels of source and target, for a language identifier.
        scored: the sentences of validation and test texts, without tags.
        near: whether near-duplicates of this corpus or another are left out.
        tags: what sources may begin with in the text itself; no filter but that of duplicates looks at them.
    """

    filters: Filters = Filters()
    clean: Cleaning = Cleaning()
    languages: Sequence[str] = ()
    scored: Collection[str] = frozenset()
    near: bool = False
    tags: Collection[str] = ()


class Filtered(NamedTuple):
    """N pairs after the filters of their text.

    Attributes:
        codes: [N].
        hashes: of those kept.
        near: of those kept, of what remains where near-duplicates are equal; none without `Rules.near`.
        overlap: pairs that have a sentence of a text that is scored.
    """

    codes: Codes
    hashes: Hashes
    near: Hashes
    overlap: int


# -- rules for one pair ------------------------------------------------------------------------------------------------


class _Characters(dict[int, str]):
    """What `str.translate` puts in the place of each character; found out when there is the first of them."""

    def __init__(self, instead: Callable[[str], str]) -> None:
        super().__init__()
        self.instead = instead

    def __missing__(self, code: int) -> str:
        self[code] = self.instead(chr(code))
        return self[code]


@lru_cache(100)
def _marks_of(script: str) -> _Characters:
    """1 for letters of a script, which is the first word of their names in Unicode, such as LATIN, CYRILLIC or CJK; 0
    for others; nothing for what is no letter. Raises `UserError` if no letter is of that script."""
    names = (unicodedata.name(chr(code), "") for code in range(sys.maxunicode + 1))
    if not any(name.startswith(f"{script.upper()} ") for name in names):
        raise UserError(f"cleaning.scripts has {script}, with which no letter's name in Unicode begins; give such as "
                        "Latin, Cyrillic, Arabic, Hangul, or CJK for Chinese")

    def mark(character: str) -> str:
        if not character.isalpha():
            return ""
        return "1" if unicodedata.name(character, "").partition(" ")[0] == script.upper() else "0"

    return _Characters(mark)


def _share_of_script(text: str, script: str) -> float:
    marks = text.translate(_marks_of(script))
    return marks.count("1") / len(marks) if marks else 1.0


def _letters(text: str) -> str:
    return "".join(filter(str.isalnum, text.casefold()))


def _folded(character: str) -> str:
    """0 for digits and other numbers, nothing for punctuation, symbols and spaces. Vowel signs and the like stay, since
    words differ in them."""
    kind = unicodedata.category(character)[0]
    if kind == "N":
        return "0"
    return character if kind in "LM" else ""


_FOLDING = _Characters(_folded)
_ZEROS = re.compile("00+")


def fold(text: str) -> str:
    """What near-duplicates have in common: letters, without case and in one form (NFKC), and 0 for each number. A text
    that has neither stays as it is."""
    return _ZEROS.sub("0", unicodedata.normalize("NFKC", text).casefold().translate(_FOLDING)) or text


def _hash(src: str, trg: str) -> int:
    return int.from_bytes(hashlib.blake2b(f"{src}\n{trg}".encode(), digest_size=8).digest(), "little")


# -- languages ---------------------------------------------------------------------------------------------------------

# (sentences, "src" or "trg") to a label or a score for each of them
LanguageId = Callable[[list[str], str], Sequence[str | float]]
LANGUAGE_IDS: Table[LanguageId] = Table("LANGUAGE_IDS", {}, lambda row: (
    None if callable(row) else f"is {row!r}, must be a function of sentences and a side"))


def _of_other_languages(pairs: Sequence[Pair], rules: Rules) -> list[bool]:
    """Whether a side of each pair is in another language than its own. Raises `UserError` where the plug-in fails."""
    name, lowest = str(rules.clean.language_id), rules.clean.min_language_score
    identify = LANGUAGE_IDS[name]
    foreign = [False] * len(pairs)
    for side, language, lines in zip(("src", "trg"), rules.languages, zip(*pairs)):
        try:
            labels: list[Any] = list(identify(list(lines), side))
        except Exception as error:
            raise UserError(f"the language identifier {name} fails on {len(lines)} sentences of {side}, of which the "
                            f"first is {lines[0]!r}: {type(error).__name__}: {error}; correct the plug-in") from error
        if len(labels) != len(lines):
            raise UserError(f"the language identifier {name} gives {len(labels)} labels for {len(lines)} sentences of "
                            f"{side}; it must give one for each")
        for row, label in enumerate(labels):
            if isinstance(label, str):
                foreign[row] |= label != language
            elif isinstance(label, Real):
                foreign[row] |= not float(label) >= lowest  # NaN is no language
            else:
                raise UserError(f"the language identifier {name} gives {label!r} for {lines[row]!r}; it must give a "
                                "label, such as 'de', or a score")
    return foreign


# -- texts -------------------------------------------------------------------------------------------------------------


def filter_corpora(corpora: Iterable[tuple[Rules, Iterable[Row]]]) -> tuple[Codes, list[int]]:
    """Applies `apply_text_filters` to each corpus, and the filters of duplicates to all; returns the codes of all
    pairs, and how many of each corpus have a sentence that is scored.

    Duplicates are detected by a 64-bit hash of both sides, so of n different pairs one is wrongly left out with
    probability n²/2^65 (below 1e-4 for 40 million). Texts are not kept in memory: this takes 9 bytes a pair while
    reading and some 32 at the end; with near-duplicates 17 and 40.
    """
    parts: list[Filtered] = []
    rules: list[Rules] = []
    for rule, rows in corpora:
        rules.append(rule)
        parts.append(apply_text_filters(rows, rule))
    result = np.concatenate([part.codes for part in parts])
    chosen = np.flatnonzero(result == KEPT)
    if rules[0].filters.drop_duplicates:
        repeated = chosen[_repeated(np.concatenate([part.hashes for part in parts]))]
        result[repeated] = code_of("duplicate")
    if rules[0].near:
        near = [rule.clean.drop_near_duplicates for rule in rules]
        cleaned = np.repeat(near, [len(part.codes) for part in parts])
        repeated = chosen[_repeated(np.concatenate([part.near for part in parts]))]
        result[repeated[cleaned[repeated] & (result[repeated] == KEPT)]] = code_of(NEAR)
    return result, [part.overlap for part in parts]


def _repeated(hashes: Hashes) -> npt.NDArray[np.bool_]:
    """Which of the hashes have been there before."""
    repeated = np.ones(len(hashes), dtype=bool)
    repeated[np.unique(hashes, return_index=True)[1]] = False
    return repeated


def apply_text_filters(rows: Iterable[Row], rules: Rules) -> Filtered:
    """Applies `TEXT_FILTERS` and a corpus's `CLEANING` to its pairs. Raises `UserError` where a plug-in fails."""
    codes = bytearray()
    hashes, near = array("Q"), array("Q")
    overlap = 0
    clean = rules.clean
    cleaning = []
    for name, leaves_out in CLEANING.items():
        if getattr(clean, name) != clean.default(name):
            cleaning.append((code_of(name), leaves_out))
    stream = iter(rows)
    while chunk := list(itertools.islice(stream, CHUNK)):
        chunk_codes = []
        pairs = [(src, trg) for src, trg, _ in chunk]
        if rules.tags:
            pairs = [(without_tags(src, rules.tags).lstrip(), trg) for src, trg in pairs]
        for pair, (_, _, score) in zip(pairs, chunk):
            code = _code_of_pair(pair[0], pair[1], rules)
            if code == code_of("overlap"):
                overlap += 1
                if not rules.filters.drop_overlap:
                    code = KEPT
            if code == KEPT:
                code = next((reason for reason, leaves_out in cleaning if leaves_out(*pair, score, clean)), KEPT)
            chunk_codes.append(code)
        rest = [row for row, code in enumerate(chunk_codes) if code == KEPT]
        if clean.language_id is not None and rest:
            foreign = _of_other_languages([pairs[row] for row in rest], rules)
            for row in itertools.compress(rest, foreign):
                chunk_codes[row] = code_of(LANGUAGE)
        for (tagged, _, _), (src, trg), code in zip(chunk, pairs, chunk_codes):
            if code == KEPT:
                hashes.append(_hash(tagged, trg))
                if rules.near:
                    near.append(_hash(fold(src), fold(trg)))
        codes += bytes(chunk_codes)
    return Filtered(np.frombuffer(codes, dtype=np.uint8).copy(), np.array(hashes, dtype=np.uint64),
                    np.array(near, dtype=np.uint64), overlap)


def _code_of_pair(src: str, trg: str, rules: Rules) -> int:
    """By the rules that all corpora have in common."""
    for reason, leaves_out in TEXT_FILTERS.items():
        if leaves_out(src, trg, rules.filters):
            return code_of(reason)
    if src in rules.scored or trg in rules.scored:
        return code_of("overlap")
    return KEPT


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
    return {reason: count for reason, count in counts.items() if count or reason not in OPTIONAL}
