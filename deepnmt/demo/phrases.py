"""Noun phrases, pronouns and adjuncts of the demo's grammar, chosen with a seed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from random import Random
from typing import TypeVar

from deepnmt.demo import inflection as forms
from deepnmt.demo import lexicon
from deepnmt.demo.clauses import Pair, Phrase, attach, common, noun_phrase
from deepnmt.demo.inflection import ACC, DAT
from deepnmt.demo.lexicon import Adjective, Noun

T = TypeVar("T")

_PRONOUNS = {row[0]: Phrase(row[0], row[1], row[2:5], row[5], "pronoun") for row in lexicon.PRONOUNS}
_IT = {"m": ("er", "ihn", "ihm"), "f": ("sie", "sie", "ihr"), "n": ("es", "es", "ihm"), "p": ("sie", "sie", "ihnen")}
_SAME_PERSON = {"I": ("I", "we"), "you": ("you",), "he": (), "she": (), "we": ("I", "we"), "they": ()}
_DETERMINERS: dict[str, Pair] = {"the": ("the", "der"), "a": ("a", "ein"), "this": ("this", "dies"),
                                 "every": ("every", "jed"), "no": ("a", "kein"), "which": ("which", "welch")}
_PLURAL_DETERMINERS: dict[str, Pair] = {"the": ("the", "der"), "a": ("", ""), "this": ("these", "dies"),
                                        "no": ("any", "kein"), "which": ("which", "welch")}


@cache
def nouns_tagged(tags: str) -> tuple[Noun, ...]:
    """The nouns that carry any of the tags."""
    wanted = tags.split()
    return tuple(noun for noun in lexicon.NOUNS if any(tag in noun.tags.split() for tag in wanted))


@cache
def adjectives_for(noun: Noun, compared: bool = False) -> tuple[Adjective, ...]:
    """The adjectives that go with a noun; `compared`: those that have a comparative."""
    fitting = (a for a in lexicon.ADJECTIVES if any(tag in noun.tags.split() for tag in a.tags.split()))
    return tuple(a for a in fitting if a.en_more or not compared)


class _Choices:
    """Seeded choices, built on `Random.random` alone, which gives the same numbers in every version of Python."""

    def __init__(self, seed: int) -> None:
        self._rng = Random(seed)

    def chance(self, probability: float) -> bool:
        return self._rng.random() < probability

    def pick(self, options: Sequence[T]) -> T:
        return options[int(self._rng.random() * len(options))]

    def between(self, low: int, high: int) -> int:
        return low + int(self._rng.random() * (high - low + 1))

    def weighted(self, weights: dict[T, int]) -> T:
        left = int(self._rng.random() * sum(weights.values()))
        for option, weight in weights.items():
            left -= weight
            if left < 0:
                return option
        raise ValueError(f"weights must be positive: {weights}")


# How often a noun phrase takes which determiner, by its place in the clause
_SUBJECT = {"the": 9, "a": 4, "my": 4, "this": 2, "owner": 1, "every": 1, "number": 2}
_OBJECT = {"the": 8, "a": 6, "my": 3, "this": 2, "owner": 2, "number": 4, "one": 1}
_NEGATED_SUBJECT = {"the": 9, "my": 4, "this": 2, "owner": 1}
_NEGATED_OBJECT = {"the": 5, "my": 3, "this": 1, "owner": 1, "no": 8}
ADJUNCT = {"the": 9, "a": 3, "my": 3, "this": 2, "owner": 2}
KNOWN = {"the": 9, "my": 4, "this": 2}


class Phrases(_Choices):
    """Noun phrases, pronouns and adjuncts."""

    def phrase(self, tags: str, kinds: dict[str, int], plural: bool | None = None) -> Phrase:
        """A noun phrase about a noun with one of the tags; `plural` None leaves the number open."""
        return self.phrase_about(self.pick(nouns_tagged(tags)), kinds, plural)

    def phrase_about(self, noun: Noun, kinds: dict[str, int], plural: bool | None = None) -> Phrase:
        """The same for a noun already chosen."""
        kind = self.weighted(kinds)
        adjective = self.pick(adjectives_for(noun)) if self.chance(0.3) else None
        if kind == "every":
            return noun_phrase(noun, _DETERMINERS[kind], kind, adjective=adjective)
        if kind == "one":
            one = noun_phrase(noun, ("only one", "ein"), kind, adjective=adjective)
            return replace(one, de=tuple(f"nur {form}" for form in one.de))
        if kind == "number":
            number = self.quantity(99 if "person" in noun.tags else 9999)
            return noun_phrase(noun, (forms.number_en(number), forms.number_de(number)), kind, True, adjective)
        if plural is None:
            plural = self.chance(0.3)
        if kind == "my":
            return noun_phrase(noun, self.pick(lexicon.POSSESSIVES), kind, plural, adjective)
        if kind == "owner":
            owner = self.pick(nouns_tagged("person"))
            determiner = _DETERMINERS["the"] if self.chance(0.6) else self.pick(lexicon.POSSESSIVES)
            of = noun_phrase(owner, determiner, "the")
            return noun_phrase(noun, _DETERMINERS["the"], kind, plural, adjective, of)
        return noun_phrase(noun, (_PLURAL_DETERMINERS if plural else _DETERMINERS)[kind], kind, plural, adjective)

    def quantity(self, most: int = 9999) -> int:
        """A number to count things with, from 2; small ones come often. None ends in 01: grammars dispute its form."""
        high = min(most, self.pick((12, 12, 12, 99, 99, 9999)))
        number = self.between(2, high)
        return number + 1 if number % 100 == 1 else number

    def pronoun(self, but: Phrase | None = None) -> Phrase:
        """A personal pronoun. `but`: the other party in the clause: no I see me, no we see me, no you see you."""
        while True:
            pronoun = self.pick(tuple(_PRONOUNS.values()))
            if but is None or but.kind != "pronoun" or but.en not in _SAME_PERSON[pronoun.en]:
                return pronoun

    def subject(self, tags: str, negated: bool = False) -> Phrase:
        """A subject; persons come as pronouns or in company, too."""
        kinds = _NEGATED_SUBJECT if negated else _SUBJECT
        if "person" in tags:
            if self.chance(0.3):
                return self.pronoun()
            if self.chance(0.06):
                first, second = self.phrase("person", KNOWN, False), self.phrase("person", KNOWN, False)
                de = tuple(f"{a} und {b}" for a, b in zip(first.de, second.de, strict=True))
                return common(f"{first.en} and {second.en}", de, 3, "and")
        return self.phrase(tags, kinds)

    def object(self, tags: str, subject: Phrase, negated: bool = False) -> Phrase:
        """An object; persons come as pronouns, too."""
        if "person" in tags and self.chance(0.2):
            return self.pronoun(but=subject)
        return self.phrase(tags, _NEGATED_OBJECT if negated else _OBJECT)

    def adjunct(self, choices: Sequence[tuple[str, str, str]], case: int) -> Pair:
        """A place or direction out of a table of the lexicon."""
        en, de, tags = self.pick(choices)
        phrase = self.phrase(tags, ADJUNCT)
        return f"{en} {phrase.en_object}", attach(de, phrase.de[case])

    def place(self) -> Pair:
        """Where something is; now and then a numbered room."""
        if self.chance(0.06):
            number = self.between(1, 999)
            return f"in room {forms.number_en(number)}", f"in Zimmer {forms.number_de(number)}"
        return self.adjunct(lexicon.PLACES, DAT)

    def companion(self, en: str, de: str, tags: str, subject: Phrase) -> Pair:
        """A preposition with the accusative and a person or animal: for, without."""
        phrase = self.pronoun(but=subject) if self.chance(0.2) else self.phrase(tags, ADJUNCT)
        return f"{en} {phrase.en_object}", attach(de, phrase.de[ACC])


def back_to(subject: Phrase) -> Phrase | None:
    """The pronoun that takes a subject up again, or None where English or German would leave it open."""
    if subject.kind == "pronoun":
        return subject
    if subject.slot == 3:
        return _PRONOUNS["they"]
    if subject.noun is None or subject.kind == "every":
        return None
    tags = subject.noun.tags.split()
    return _PRONOUNS["he"] if "he" in tags else _PRONOUNS["she"] if "she" in tags else None


def it_for(phrase: Phrase) -> Phrase:
    """It or they for a thing or animal; the German pronoun follows the gender of the noun."""
    assert phrase.noun is not None
    if phrase.slot == 3:
        return Phrase("they", "them", _IT["p"], 3, "pronoun")
    return common("it", _IT[phrase.noun.gender], 2, "pronoun")
