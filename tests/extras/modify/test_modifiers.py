"""Each modifier against words worked out by hand, its rate, and words as pieces and back."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from deepnmt.config import Vocab, load_recipe
from deepnmt.data.prepared import open_prepared
from deepnmt.data.subword_variants import BpeDropout
from deepnmt.data.vocab import SPACE, Vocabulary, train_vocabulary
from deepnmt.extras.modify import modifiers
from deepnmt.extras.modify.modifiers import CASES, MODIFIERS, Pair
from deepnmt.extras.modify.words import UNKNOWN, Words
from deepnmt.tokens import UNK


class Given(random.Random):
    """Draws these numbers."""

    def __init__(self, *numbers: float) -> None:
        super().__init__(0)
        self.numbers = list(numbers)

    def random(self) -> float:
        return self.numbers.pop(0)


def words(text: str) -> list[str]:
    return [SPACE + word for word in text.split()]


def pair_of(source: str, target: str = "", links: tuple[tuple[int, int], ...] = ()) -> Pair:
    return Pair(words(source), words(target), links=links)


def text_of(side: list[str]) -> str:
    return "".join(side).replace(SPACE, " ").strip()


@pytest.mark.parametrize(("case", "source", "target"), [
    ("upper", "DON'T \"STRASSE\" 3RD ÉTÉ", "ÄH"), ("lower", "don't \"straße\" 3rd été", "äh"),
    ("title", "Don't \"Straße\" 3Rd Été", "Äh")])
def test_case_is_of_both_sides(case: str, source: str, target: str) -> None:
    pair = pair_of('don\'t "straße" 3rd été', "äh") if case != "lower" else pair_of('Don\'t "Straße" 3RD ÉTÉ', "ÄH")
    CASES[case](pair)
    assert (text_of(pair.source), text_of(pair.target)) == (source, target)


@pytest.mark.parametrize(("modifier", "draws", "expected", "origins"), [
    ("drop_words", (0.9, 0.1, 0.5, 0.3), "a c", [0, 2]),
    ("drop_words", (0.1, 0.1, 0.1, 0.1), "a", [0]),
    ("swap_words", (0.1, 0.9), "b a c d", [1, 0, 2, 3]),  # of a and b, and not of c and d
    ("swap_words", (0.9, 0.1, 0.9), "a c b d", [0, 2, 1, 3]),
    ("insert_words", (0.9, 0.1, 0.75, 0.9, 0.2, 0.0), "a b d c d a", [0, 1, -1, 2, 3, -1]),
])
def test_noise_of_words(modifier: str, draws: tuple[float, ...], expected: str, origins: list[int]) -> None:
    pair = pair_of("a b c d", "w x")
    MODIFIERS[modifier](pair, 0.4, Given(*draws))
    assert (text_of(pair.source), pair.origins, text_of(pair.target)) == (expected, origins, "w x")


@pytest.mark.parametrize(("fault", "expected"), [(0.0, "hose"), (0.25, "hoouse"), (0.5, "huose"), (0.75, "huuse")])
def test_typos(fault: float, expected: str) -> None:
    pair = pair_of("a house", "ein Haus")
    place = 0.5 if expected == "hose" else 0.25
    MODIFIERS["typos"](pair, 0.4, Given(0.1, fault, place, 0.9))  # other letters: aehsu
    assert text_of(pair.source) == f"a {expected}" and text_of(pair.target) == "ein Haus"


def test_every_typo_changes_its_word_at_any_character() -> None:
    generator, seen = random.Random(4), set()
    for _ in range(2000):
        for word in ("abc", "2024", "ee", "...", "Éa"):
            pair = pair_of(word)
            MODIFIERS["typos"](pair, 1.0, generator)
            assert text_of(pair.source) not in ("", word)
            seen.add(text_of(pair.source))
    assert {"ab", "abcc", "aba", "abb", "acb", "bac", "aabc", "ac"} <= seen, "of the last character, too"


def test_copies_are_the_same_on_both_sides() -> None:
    pair = pair_of("Ms. Ko-Li has 42 of 42 in 1999 .", "Frau Ko-Li hat 42 in 1999 .")
    # letters of the target: a f h i k l n o r t u; "42" stands twice in the source; "in" and "." are not drawn
    draws = {"Ko-Li": (0.1, 0.0, 0.99, 0.5, 0.5), "in": (0.9,), "1999": (0.1, 0.1, 0.25, 0.91, 0.0), ".": (0.9,)}
    MODIFIERS["copies"](pair, 0.5, Given(*(draw for word in draws.values() for draw in word)))
    assert text_of(pair.source) == "Ms. Au-Ll has 42 of 42 in 1290 ."
    assert text_of(pair.target) == "Frau Au-Ll hat 42 in 1290 ."


def test_terms_are_words_of_the_target() -> None:
    pair = pair_of("the old house", "das alte Haus", links=((1, 1), (2, 2)))
    MODIFIERS["terms"](pair, 0.5, Given(0.9, 0.1))
    assert text_of(pair.source) == "the old Haus" and text_of(pair.target) == "das alte Haus"


COUNTS: dict[str, tuple[int, Callable[[Pair], int]]] = {
    "terms": (4, lambda pair: sum(word in pair.target for word in pair.source)),
    "copies": (1, lambda pair: pair.source[3] != f"{SPACE}Paris"),
    "insert_words": (4, lambda pair: pair.origins.count(-1)),
    "drop_words": (4, lambda pair: 4 - len(pair.source)),
    "typos": (4, lambda pair: sum(a != b for a, b in zip(pair.source, words("ab cd ef Paris")))),
}


@pytest.mark.parametrize("modifier", COUNTS)
def test_rates(modifier: str) -> None:
    """Within 3 sd of 4,000 sentences."""
    rate, generator = 0.1, random.Random(5)
    each, count = COUNTS[modifier]
    total, found = 4000 * each, 0
    for _ in range(4000):
        pair = pair_of("ab cd ef Paris", "w x y Paris" if modifier == "copies" else "w x y z",
                       tuple((i, i) for i in range(4)))
        MODIFIERS[modifier](pair, rate, generator)
        found += count(pair)
    assert abs(found - rate * total) < 3 * (total * rate * (1 - rate)) ** 0.5


def test_a_swap_is_as_frequent_as_it_should_be() -> None:
    """Of two words, so that each swap is seen."""
    generator, found = random.Random(6), 0
    for _ in range(4000):
        pair = pair_of("a b")
        modifiers.swap_words(pair, 0.1, generator)
        found += pair.origins == [1, 0]
    assert abs(found - 400) < 3 * (400 * 0.9) ** 0.5


# -- words -------------------------------------------------------------------------------------------------------------


def test_pieces_are_words_and_pieces_again(prepared: Path) -> None:
    data = open_prepared(load_recipe(prepared / "recipe.yaml"))
    for vocab, side in zip(data.vocabs(), (data.split("train").sources, data.split("train").targets), strict=True):
        both = Words(vocab, None)
        for row in range(len(side.lengths)):
            ids = side[row].tolist()
            tags, found = both.read(ids)
            assert not tags and both.write(found, random.Random(1)) == ids
            assert "".join(found).replace(SPACE, " ").strip() == vocab.decode(ids)


@pytest.mark.parametrize("byte_fallback", [False, True])
def test_unknown_characters_and_tags_stay(byte_fallback: bool) -> None:
    sentences = ["the old dog sees a house", "a small cat in the green tree", "two birds and an old house"] * 3
    settings = Vocab(size=300 if byte_fallback else 40, byte_fallback=byte_fallback)
    vocab = Vocabulary(train_vocabulary(sentences, settings, ["<BT>"]))
    both, sampling = Words(vocab, None), Words(vocab, BpeDropout(vocab, 0.5))
    ids = vocab.encode("<BT> the öldß dog 漢字")
    tags, found = both.read(ids)
    assert tags == [vocab.tags["<BT>"]] and len(found) == 4
    assert found[3] == (f"{SPACE}漢字" if byte_fallback else SPACE + UNKNOWN)
    assert [*tags, *both.write(found, random.Random(1))] == ids
    sampled: Any = {tuple(sampling.write(found, random.Random(seed))) for seed in range(20)}
    assert len(sampled) > 5 and {vocab.decode(one) for one in sampled} == {vocab.decode(ids[1:])}
    assert all((UNK in one) != byte_fallback for one in sampled)
