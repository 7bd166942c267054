"""Phrases and clauses that speak both languages: one meaning, an English and a German word order.

German puts the finite verb second in a main clause, first in a question and last in a subordinate clause, and what
belongs to it (separable prefix, participle, infinitive) at the end. English puts do-support before a negation and a
question. Words are in their final form here; only the first letter and the full stop of a sentence are missing.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from typing import Protocol

from deepnmt.demo import inflection as forms
from deepnmt.demo.inflection import ACC, DAT, NOM
from deepnmt.demo.lexicon import Adjective, Noun, Verb

Pair = tuple[str, str]
_CONTRACTIONS = {("in", "dem"): "im", ("in", "das"): "ins", ("an", "dem"): "am", ("an", "das"): "ans",
                 ("bei", "dem"): "beim", ("von", "dem"): "vom", ("zu", "dem"): "zum", ("zu", "der"): "zur"}
_ENGLISH_MODALS = {"future": "will", "can": "can", "must": "must", "should": "should"}


@dataclass(frozen=True)
class Phrase:
    """A noun phrase or pronoun. `de`: its four cases (pronouns have no genitive). `kind`: the determiner's role, or
    `pronoun`. `noun`: what it speaks of, where it is no pronoun."""

    en: str
    en_object: str
    de: tuple[str, ...]
    slot: int
    kind: str
    noun: Noun | None = None


def common(en: str, de: tuple[str, ...], slot: int, kind: str, noun: Noun | None = None) -> Phrase:
    """A phrase whose English subject and object look alike."""
    return Phrase(en, en, de, slot, kind, noun)


def attach(preposition: str, phrase: str) -> str:
    """A German preposition before a phrase, run together with the article where German does so (im, zur)."""
    first, _, rest = phrase.partition(" ")
    short = _CONTRACTIONS.get((preposition, first))
    return f"{short} {rest}" if short else f"{preposition} {phrase}"


class Clause(Protocol):
    """What sentences are built of."""

    subject: Phrase

    def english(self) -> str:
        """The statement."""

    def english_question(self, word: str = "") -> str:
        """The question, after its question word if any."""

    def german(self, front: str | None = None) -> str:
        """The main clause: `front`, or else the subject, then the finite verb. An empty front puts the verb first."""

    def german_final(self) -> str:
        """The subordinate clause, without its conjunction: the finite verb last."""


def _join(*parts: str) -> str:
    return " ".join(part for part in parts if part)


@dataclass
class Action:
    """A clause with a full verb.

    `mode`: present, past, or a key of `inflection.MODES`. `objects`: in German order, dative before accusative, with
    their cases. `adjunct`: a place, direction or prepositional object. `no`: an object carries the negation (kein), so
    that German needs no nicht.
    """

    subject: Phrase
    verb: Verb
    mode: str = "present"
    objects: list[tuple[Phrase, int]] = field(default_factory=list)
    adjunct: Pair = ("", "")
    adverb: Pair = ("", "")
    negated: bool = False

    @property
    def _nicht(self) -> str:
        return "nicht" if self.negated and all(phrase.kind != "no" for phrase, _ in self.objects) else ""

    def _english_verb(self, support: bool) -> Pair:
        """The auxiliary, if there is one, and the verb."""
        base = forms.verb_en(self.verb, "base")
        third = self.subject.slot == 2
        if self.mode in _ENGLISH_MODALS:
            return _ENGLISH_MODALS[self.mode], base
        if support:
            auxiliary = "did" if self.mode == "past" else "does" if third else "do"
            return auxiliary, f"want to {base}" if self.mode == "want" else base
        if self.mode == "want":
            return "", f"{'wants' if third else 'want'} to {base}"
        return "", forms.verb_en(self.verb, "past" if self.mode == "past" else "third" if third else "base")

    def _english_objects(self) -> str:
        particle = self.verb.en.partition("|")[2]
        objects = [phrase for phrase, _ in self.objects]
        if len(objects) == 2 and objects[1].kind == "pronoun":  # gives it to the man
            return f"{objects[1].en_object} to {objects[0].en_object}"
        words = [phrase.en_object for phrase in objects]
        if particle and objects and objects[0].kind != "pronoun":  # picks up the child, picks it up
            words.insert(0, particle)
        elif particle:
            words.append(particle)
        return " ".join(words)

    def english(self) -> str:
        auxiliary, verb = self._english_verb(support=self.negated)
        if self.negated:
            auxiliary = "cannot" if auxiliary == "can" else f"{auxiliary} not"
        return _join(self.subject.en, auxiliary, verb, self._english_objects(), self.adjunct[0], self.adverb[0])

    def english_question(self, word: str = "") -> str:
        auxiliary, verb = self._english_verb(support=True)
        return _join(word, auxiliary, self.subject.en, verb, self._english_objects(), self.adjunct[0], self.adverb[0])

    def _german_verb(self) -> tuple[str, str, bool]:
        """The finite verb, what stands at the end, and whether the two are one word when the verb is last."""
        slot = self.subject.slot
        if self.mode == "present":
            return forms.present_de(self.verb, slot), forms.prefix_de(self.verb), True
        if self.mode == "past":
            return *forms.perfect_de(self.verb, slot), False
        return forms.MODES[self.mode][slot], forms.infinitive_de(self.verb), False

    def _middle(self) -> str:
        """Pronouns (accusative first), time, objects (dative first), nicht, place; a negated object precedes time."""
        pronouns = [(phrase, case) for phrase, case in self.objects if phrase.kind == "pronoun"]
        pronouns.sort(key=lambda item: item[1])
        nouns = [phrase.de[case] for phrase, case in self.objects if phrase.kind != "pronoun"]
        order = [*nouns, self.adverb[1]] if self._nicht else [self.adverb[1], *nouns]
        return _join(*(phrase.de[case] for phrase, case in pronouns), *order, self._nicht, self.adjunct[1])

    def german(self, front: str | None = None) -> str:
        finite, end, _ = self._german_verb()
        subject = self.subject.de[NOM]
        start = f"{subject} {finite}" if front is None else _join(front, finite, subject)
        return _join(start, self._middle(), end)

    def german_final(self) -> str:
        finite, end, one_word = self._german_verb()
        last = end + finite if one_word else f"{end} {finite}"
        return _join(self.subject.de[NOM], self._middle(), last)


@dataclass
class State:
    """A clause with be and a predicate (old / alt, older than me / älter als ich). `mode`: present or past."""

    subject: Phrase
    predicate: Pair
    mode: str = "present"
    negated: bool = False

    @property
    def _be(self) -> Pair:
        past = self.mode == "past"
        return forms.be_en(self.subject.slot, past), forms.be_de(self.subject.slot, past)

    def english(self) -> str:
        return _join(self.subject.en, self._be[0], "not" * self.negated, self.predicate[0])

    def english_question(self, word: str = "") -> str:
        return _join(word, self._be[0], self.subject.en, self.predicate[0])

    def german(self, front: str | None = None) -> str:
        finite, subject = self._be[1], self.subject.de[NOM]
        start = f"{subject} {finite}" if front is None else _join(front, finite, subject)
        return _join(start, "nicht" * self.negated, self.predicate[1])

    def german_final(self) -> str:
        return _join(self.subject.de[NOM], "nicht" * self.negated, self.predicate[1], self._be[1])


def noun_phrase(
    noun: Noun,
    determiner: Pair,
    kind: str,
    plural: bool = False,
    adjective: Adjective | None = None,
    of: Phrase | None = None,
) -> Phrase:
    """A noun with its determiner, adjective and owner in every form.

    Args:
        determiner: English and German, the German as `inflection.determiner_de` takes it. `a` becomes `an` by itself. A
            number is given in its two words with kind `number`.
        of: the owner; it takes the English determiner's place (the man's old coat / der alte Mantel des Mannes).
    """
    en_det, de_det = determiner
    name = forms.plural_en(noun) if plural else noun.en
    en = _join(adjective.en if adjective else "", name)
    if en_det == "a":
        en_det = forms.article_en(en)
    en = _join(f"{of.en}'s" if of else en_det, en)
    counted = kind == "number"
    de = _declined(noun, "" if counted else de_det, plural, adjective)
    if counted:
        de = tuple(f"{de_det} {form}" for form in de)
    if of:
        de = tuple(f"{form} {of.de[forms.GEN]}" for form in de)
    return common(en, de, 3 if plural else 2, kind, noun)


@cache
def _declined(noun: Noun, determiner: str, plural: bool, adjective: Adjective | None) -> tuple[str, ...]:
    gender = "p" if plural else noun.gender
    return tuple(
        _join(
            forms.determiner_de(determiner, gender, case),
            forms.adjective_de(adjective, determiner, gender, case) if adjective else "",
            forms.noun_de(noun, case, plural),
        )
        for case in range(4)
    )


def relative_pronoun(head: Phrase, subject: bool) -> Phrase:
    """The pronoun of a relative clause about `head`, as its subject or object: who, whom or that; der, die, das."""
    assert head.noun is not None
    person = "person" in head.noun.tags
    en = ("who" if subject else "whom") if person else "that"
    gender = "p" if head.slot == 3 else head.noun.gender
    de = [forms.determiner_de("der", gender, c) for c in (NOM, ACC, DAT)]
    if gender == "p":
        de[DAT] = "denen"
    return common(en, tuple(de), head.slot, "relative", head.noun)
