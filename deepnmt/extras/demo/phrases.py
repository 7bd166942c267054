"""Noun phrases, pronouns and adjuncts of the demo's grammar, chosen with a seed."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Mapping, Sequence
from itertools import accumulate
from random import Random
from typing import TypeVar

from deepnmt.extras.demo import inflection as forms
from deepnmt.extras.demo.clauses import Pair, Phrase, attach, noun_phrase
from deepnmt.extras.demo.inflection import ACC, DAT
from deepnmt.extras.demo.lexicon import ROWS, Noun, adjectives, nouns

T = TypeVar("T")

PRONOUNS = {en: Phrase(en, tuple(de), int(slot), "pronoun", None, oblique)
            for en, oblique, *de, slot in ROWS["pronoun"]}
_DETERMINERS = {kind: ((en, de), (en_plural, de_plural)) for kind, en, de, en_plural, de_plural in ROWS["determiner"]}

# How often a noun phrase takes which determiner, by its part in the clause
_SUBJECT = {"the": 9, "a": 4, "my": 4, "this": 2, "owner": 1, "every": 1, "number": 2}
_OBJECT = {"the": 8, "a": 6, "my": 3, "this": 2, "owner": 2, "number": 4, "one": 1}
_NEGATED_SUBJECT = {"the": 9, "my": 4, "this": 2, "owner": 1}
_NEGATED_OBJECT = {"the": 5, "my": 3, "this": 1, "owner": 1, "no": 8}
_ADJUNCT = {"the": 9, "a": 3, "my": 3, "this": 2, "owner": 2}
KNOWN = {"the": 9, "my": 4, "this": 2}


class Phrases:
    """Chooses noun phrases, pronouns and adjuncts.

    All choices use `Random.random` only, which gives the same numbers in every version of Python.
    """

    def __init__(self, seed: int) -> None:
        self._rng = Random(seed)

    def chance(self, probability: float) -> bool:
        return self._rng.random() < probability

    def pick(self, options: Sequence[T]) -> T:
        return options[self.between(0, len(options) - 1)]

    def between(self, low: int, high: int) -> int:
        return low + int(self._rng.random() * (high - low + 1))

    def weighted(self, weights: Mapping[T, int]) -> T:
        options = list(weights)
        upto = list(accumulate(weights.values()))
        return options[bisect(upto, self.between(0, upto[-1] - 1))]

    def phrase(self, tags: str, kinds: dict[str, int], plural: bool | None = None) -> Phrase:
        """A noun phrase about a noun with one of the tags; `plural` None leaves the number open."""
        noun: Noun = self.pick(nouns(tags))
        kind = self.weighted(kinds)
        adjective = None
        if self.chance(0.3):
            adjective = self.pick(adjectives(noun))
        of = None
        if kind == "every":
            plural = False
        elif kind == "one":
            return noun_phrase(noun, ("only one", "ein"), kind, False, adjective)
        elif kind == "number":
            number = self.quantity(99 if "person" in noun.tags else 9999)
            return noun_phrase(noun, (forms.number_en(number), forms.number_de(number)), kind, True, adjective)
        elif plural is None:
            plural = self.chance(0.3)
        if kind == "my":
            return noun_phrase(noun, self.possessive(), kind, bool(plural), adjective)
        if kind == "owner":
            owner = self.pick(nouns("person"))
            owned_by = _DETERMINERS["the"][0] if self.chance(0.6) else self.possessive()
            of = noun_phrase(owner, owned_by, "the")
        determiner = _DETERMINERS["the" if of else kind][bool(plural)]
        return noun_phrase(noun, determiner, kind, bool(plural), adjective, of)

    def possessive(self) -> Pair:
        """My, your, ..."""
        en, de = self.pick(ROWS["possessive"])
        return en, de

    def quantity(self, most: int = 9999) -> int:
        """A number of things, from 2, often a small one. None ends in 01, since grammars disagree on its form."""
        high = min(most, self.pick((12, 12, 12, 99, 99, 9999)))
        number = self.between(2, high)
        if number % 100 == 1:
            number += 1
        return number

    def pronoun(self, but: Phrase | None = None) -> Phrase:
        """A personal pronoun. `but`: the other party in the clause: no I see me, no we see me, no you see you."""
        while True:
            pronoun = self.pick(list(PRONOUNS.values()))
            both = {pronoun.en, "" if but is None else but.en}
            if not both <= {"I", "we"} and both != {"you"}:
                return pronoun

    def subject(self, tags: str, negated: bool = False) -> Phrase:
        """A subject; persons may also be pronouns or pairs."""
        if "person" in tags:
            if self.chance(0.3):
                return self.pronoun()
            if self.chance(0.06):
                first = self.phrase("person", KNOWN, False)
                second = self.phrase("person", KNOWN, False)
                de = tuple(f"{a} und {b}" for a, b in zip(first.de, second.de, strict=True))
                return Phrase(f"{first.en} and {second.en}", de, 3, "and")
        return self.phrase(tags, _NEGATED_SUBJECT if negated else _SUBJECT)

    def object(self, tags: str, subject: Phrase, negated: bool = False) -> Phrase:
        """An object; persons may also be pronouns."""
        if "person" in tags and self.chance(0.2):
            return self.pronoun(but=subject)
        return self.phrase(tags, _NEGATED_OBJECT if negated else _OBJECT)

    def adjunct(self, choices: Sequence[Sequence[str]], case: int) -> Pair:
        """A place or direction; `choices`: rows of the lexicon with English, German and tags of the noun."""
        en, de, tags = self.pick(choices)
        phrase = self.phrase(tags, _ADJUNCT)
        return f"{en} {phrase.en_object}", attach(de, phrase.de[case])

    def place(self) -> Pair:
        """A place where something is; sometimes a numbered room."""
        if self.chance(0.06):
            number = self.between(1, 999)
            return f"in room {forms.number_en(number)}", f"in Zimmer {forms.number_de(number)}"
        return self.adjunct(ROWS["place"], DAT)

    def companion(self, en: str, de: str, tags: str, subject: Phrase) -> Pair:
        """A preposition with the accusative and a person or animal: for, without."""
        if self.chance(0.2):
            phrase = self.pronoun(but=subject)
        else:
            phrase = self.phrase(tags, _ADJUNCT)
        return f"{en} {phrase.en_object}", attach(de, phrase.de[ACC])


def back_to(subject: Phrase) -> Phrase | None:
    """The pronoun that refers back to a subject, or None if it would be ambiguous in either language."""
    if subject.kind == "pronoun":
        return subject
    if subject.slot == 3:
        return PRONOUNS["they"]
    if subject.noun is None or subject.kind == "every":
        return None
    for tag in subject.noun.tags.split():
        if tag in ("he", "she"):
            return PRONOUNS[tag]
    return None


def it_for(phrase: Phrase) -> Phrase:
    """It or they for a thing or animal; the German pronoun follows the gender of the noun."""
    assert phrase.noun is not None
    if phrase.slot == 3:
        return PRONOUNS["they"]
    de = {"m": PRONOUNS["he"].de, "f": PRONOUNS["she"].de, "n": ("es", "es", "ihm")}[phrase.noun.gender]
    return Phrase("it", de, 2, "pronoun")
