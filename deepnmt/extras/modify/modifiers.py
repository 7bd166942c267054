"""What may be done to the words of a sentence pair. Each modifier changes a `Pair` in place, by a generator's draws.

Case changes both sides alike, words to copy are the same on both, and all noise is the source's alone: a model learns
to read it, and not to write it.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from deepnmt.data.vocab import SPACE
from deepnmt.extras.modify.words import UNKNOWN

_LETTER = re.compile(r"[^\W\d_]")


@dataclass
class Pair:
    """A sentence pair.

    Attributes:
        source, target: the words, each with `SPACE` before it.
        origins: which word each of the source was, from 0; -1 is a new one. Words of the target keep their places.
        links: words of source and target, as they were, that are each other's only translation.
    """

    source: list[str]
    target: list[str]
    origins: list[int] = field(init=False)
    links: Iterable[tuple[int, int]] = ()

    def __post_init__(self) -> None:
        self.origins = list(range(len(self.source)))


def upper(pair: Pair) -> None:
    """All letters are capitals."""
    _both(pair, str.upper)


def lower(pair: Pair) -> None:
    """No letter is a capital."""
    _both(pair, str.lower)


def title(pair: Pair) -> None:
    """The first letter of each word is a capital."""
    _both(pair, lambda word: _LETTER.sub(lambda letter: letter[0].upper(), word, count=1))


CASES: dict[str, Callable[[Pair], None]] = {"upper": upper, "title": title, "lower": lower}  # at most one of them


def terms(pair: Pair, rate: float, generator: random.Random) -> None:
    """Source words are replaced by their translation (Dinu et al. 2019, Training Neural Machine Translation to Apply
    Terminology Constraints, section 3)."""
    for source, target in pair.links:
        if generator.random() < rate:
            pair.source[source] = pair.target[target]


def copies(pair: Pair, rate: float, generator: random.Random) -> None:
    """Words that stand once on both sides, such as names and numbers, become a made-up word, the same on both."""
    in_source, in_target = Counter(pair.source), Counter(pair.target)
    for place, word in enumerate(pair.source):
        once = in_source[word] == 1 and in_target[word] == 1 and UNKNOWN not in word
        if once and generator.random() < rate:
            letters = _letters(pair.target)
            made_up = "".join(_another(character, letters, generator) for character in word)
            pair.target[pair.target.index(word)] = pair.source[place] = made_up


def insert_words(pair: Pair, rate: float, generator: random.Random) -> None:
    """After a source word comes another of the same sentence."""
    words, origins = pair.source, pair.origins
    pair.source, pair.origins = [], []
    for word, origin in zip(words, origins, strict=True):
        pair.source.append(word)
        pair.origins.append(origin)
        if generator.random() < rate:
            pair.source.append(words[_below(len(words), generator)])
            pair.origins.append(-1)


def drop_words(pair: Pair, rate: float, generator: random.Random) -> None:
    """Source words are left out, but not all."""
    if not pair.source:
        return
    places = [place for place in range(len(pair.source)) if generator.random() >= rate]
    if not places:
        places = [0]
    _take(pair, places)


def swap_words(pair: Pair, rate: float, generator: random.Random) -> None:
    """A source word changes places with the next."""
    order = list(range(len(pair.source)))
    place = 0
    while place + 1 < len(order):
        if generator.random() < rate:
            order[place], order[place + 1] = place + 1, place
            place += 1
        place += 1
    _take(pair, order)


def _take(pair: Pair, places: Sequence[int]) -> None:
    """The source's words are those of these places."""
    pair.source = [pair.source[place] for place in places]
    pair.origins = [pair.origins[place] for place in places]


def typos(pair: Pair, rate: float, generator: random.Random) -> None:
    """A source word has one character left out, doubled, exchanged with the next or replaced by another letter of the
    sentence; it is left out where that changes nothing. Words of one character have none."""
    for place, word in enumerate(pair.source):
        text = word.removeprefix(SPACE)
        if len(text) > 1 and generator.random() < rate:
            fault = _below(4, generator)
            i = _below(len(text) - 1 if fault == 2 else len(text), generator)
            if fault == 0:
                wrong = text[i + 1:]
            elif fault == 1:
                wrong = text[i] + text[i:]
            elif fault == 2:
                wrong = text[i + 1] + text[i] + text[i + 2:]
            else:
                others = [letter for letter in _letters(pair.source) if letter != text[i].lower()]
                wrong = _another(text[i], others, generator) + text[i + 1:]
            if wrong == text[i:]:  # two of a kind, a digit drawn again, or a character that is no letter
                wrong = text[i + 1:]
            pair.source[place] = word[:len(word) - len(text)] + text[:i] + wrong


# By the setting, in the order in which they are done: `terms` needs the words in their places.
MODIFIERS: dict[str, Callable[[Pair, float, random.Random], None]] = {
    "terms": terms, "copies": copies, "insert_words": insert_words, "drop_words": drop_words,
    "swap_words": swap_words, "typos": typos,
}


def _both(pair: Pair, change: Callable[[str], str]) -> None:
    pair.source = [change(word) for word in pair.source]
    pair.target = [change(word) for word in pair.target]


def _letters(words: list[str]) -> list[str]:
    """Their letters, in a fixed order."""
    return sorted(set(_LETTER.findall("".join(words).lower())))


def _below(count: int, generator: random.Random) -> int:
    """A number from 0, below `count`; `randrange` may change between versions of Python."""
    return int(generator.random() * count)


def _another(character: str, letters: list[str], generator: random.Random) -> str:
    """Another letter for a letter, in the same case, and another digit for a digit."""
    if character.isdecimal():
        return str(_below(10, generator))
    if not letters or not _LETTER.fullmatch(character):
        return character
    letter = letters[_below(len(letters), generator)]
    return letter.upper() if character.isupper() else letter
