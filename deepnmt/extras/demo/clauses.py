"""Phrases and clauses in both languages: one meaning with an English and a German word order.

German puts the finite verb second in a main clause, first in a question and last in a subordinate clause; the parts
that belong to it (separable prefix, participle, infinitive) are at the end. English uses do-support in negations and
questions. The words have their final form; only the capital letter and the full stop of the sentence are added later.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from functools import cache
from typing import NamedTuple

from deepnmt.extras.demo import inflection as forms
from deepnmt.extras.demo.inflection import ACC, CONJUGATIONS, DAT, GEN, NOM
from deepnmt.extras.demo.lexicon import Adjective, Noun, Verb

Pair = tuple[str, str]
_CONTRACTIONS = {("in", "dem"): "im", ("in", "das"): "ins", ("an", "dem"): "am", ("an", "das"): "ans",
                 ("bei", "dem"): "beim", ("von", "dem"): "vom", ("zu", "dem"): "zum", ("zu", "der"): "zur"}
_ENGLISH_MODALS = {"future": "will", "can": "can", "must": "must", "should": "should"}


class Phrase(NamedTuple):
    """A noun phrase or pronoun. `de`: its four cases (pronouns have no genitive). `kind`: the determiner's role, or
    `pronoun`. `noun`: the noun, if it is no pronoun. `oblique`: English me, him, if different."""

    en: str
    de: tuple[str, ...]
    slot: int
    kind: str
    noun: Noun | None = None
    oblique: str = ""

    @property
    def en_object(self) -> str:
        return self.oblique or self.en


def attach(preposition: str, phrase: str) -> str:
    """A German preposition before a phrase, contracted with the article where German does so (im, zur)."""
    first, _, rest = phrase.partition(" ")
    if (preposition, first) in _CONTRACTIONS:
        return f"{_CONTRACTIONS[preposition, first]} {rest}"
    return f"{preposition} {phrase}"


def _join(*parts: str) -> str:
    return " ".join(filter(None, parts))


class Clause(ABC):
    """A clause of a sentence. `mode`: present, past, or a mode of `inflection.CONJUGATIONS`."""

    subject: Phrase
    mode: str
    negated: bool

    @abstractmethod
    def _english(self, support: bool) -> Pair:
        """The auxiliary, if any, and all words after it."""

    @abstractmethod
    def _german(self) -> tuple[str, str, str]:
        """The finite verb, the middle of the clause, and its end."""

    def pair(self) -> Pair:
        """The statement in both languages."""
        return self.english(), self.german()

    def english(self) -> str:
        """The statement."""
        auxiliary, rest = self._english(support=self.negated)
        if self.negated and auxiliary == "can":
            auxiliary = "cannot"
        elif self.negated:
            auxiliary = f"{auxiliary} not"
        return _join(self.subject.en, auxiliary, rest)

    def english_question(self, word: str = "") -> str:
        """The question, with its question word if any."""
        auxiliary, rest = self._english(support=True)
        return _join(word, auxiliary, self.subject.en, rest)

    def german(self, front: str | None = None) -> str:
        """The main clause: `front` (default: the subject), then the finite verb, which an empty front leaves first."""
        finite, middle, end = self._german()
        subject = self.subject.de[NOM]
        if front is None:
            return _join(subject, finite, middle, end)
        return _join(front, finite, subject, middle, end)

    def german_final(self) -> str:
        """The subordinate clause, without its conjunction: the finite verb last."""
        finite, middle, end = self._german()
        if self.mode == "present":
            return _join(self.subject.de[NOM], middle, end + finite)  # er aufmacht
        return _join(self.subject.de[NOM], middle, end, finite)  # er aufgemacht hat


@dataclass
class Action(Clause):
    """A clause with a full verb.

    `objects`: in German order, dative before accusative, with their cases. `adjunct`: a place, direction or
    prepositional object. An object of the kind `no` carries the negation (kein), so that German needs no nicht.
    """

    subject: Phrase
    verb: Verb
    mode: str = "present"
    objects: list[tuple[Phrase, int]] = field(default_factory=list)
    adjunct: Pair = ("", "")
    adverb: Pair = ("", "")
    negated: bool = False

    def _english(self, support: bool) -> Pair:
        verb = forms.verb_en(self.verb, "base")
        third = self.subject.slot == 2
        auxiliary = _ENGLISH_MODALS.get(self.mode, "")
        if support and not auxiliary:
            if self.mode == "past":
                auxiliary = "did"
            else:
                auxiliary = "does" if third else "do"
            if self.mode == "want":
                verb = f"want to {verb}"
        elif self.mode == "want":
            verb = f"wants to {verb}" if third else f"want to {verb}"
        elif self.mode == "past":
            verb = forms.verb_en(self.verb, "past")
        elif third and not auxiliary:
            verb = forms.verb_en(self.verb, "third")

        particle = self.verb.en.partition("|")[2]
        objects = [phrase for phrase, _ in self.objects]
        words = [phrase.en_object for phrase in objects]
        if len(objects) == 2 and objects[1].kind == "pronoun":  # gives it to the man
            words = [words[1], "to", words[0]]
        elif objects and objects[0].kind != "pronoun":  # picks up the child, picks it up
            words.insert(0, particle)
        else:
            words.append(particle)
        return auxiliary, _join(verb, *words, self.adjunct[0], self.adverb[0])

    def _german(self) -> tuple[str, str, str]:
        """In the middle: pronouns (accusative first), time, objects (dative first), nicht, place; a negated object
        precedes time."""
        slot = self.subject.slot
        if self.mode == "present":
            finite, end = forms.present_de(self.verb, slot), self.verb.de.rpartition("|")[0]
        elif self.mode == "past":
            finite, end = forms.perfect_de(self.verb, slot)
        else:
            finite, end = CONJUGATIONS[self.mode][slot], self.verb.de.replace("|", "")
        nicht = "nicht" if self.negated else ""
        pronouns, nouns = [], []
        for phrase, case in sorted(self.objects, key=lambda item: item[1]):  # the accusative first
            if phrase.kind == "pronoun":
                pronouns.append(phrase.de[case])
        for phrase, case in self.objects:
            if phrase.kind == "no":
                nicht = ""
            if phrase.kind != "pronoun":
                nouns.append(phrase.de[case])
        order = [self.adverb[1], *nouns]
        if nicht:
            order = [*nouns, self.adverb[1], nicht]
        return finite, _join(*pronouns, *order, self.adjunct[1]), end


@dataclass
class State(Clause):
    """A clause with be and a predicate (old / alt, older than me / älter als ich), in the present or past."""

    subject: Phrase
    predicate: Pair
    mode: str = "present"
    negated: bool = False

    def _english(self, support: bool) -> Pair:
        return CONJUGATIONS[f"be.{self.mode}"][self.subject.slot], self.predicate[0]

    def _german(self) -> tuple[str, str, str]:
        finite = CONJUGATIONS[f"sein.{self.mode}"][self.subject.slot]
        middle = f"nicht {self.predicate[1]}" if self.negated else self.predicate[1]
        return finite, middle, ""


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
        determiner: English and German, the German as for `inflection.determiner_de`. `a` becomes `an` where needed.
            A number is given as its two words with kind `number`; kind `one` puts nur before the German.
        of: the owner; it takes the English determiner's place (the man's old coat / der alte Mantel des Mannes).
    """
    before, inflected = determiner
    en = forms.plural_en(noun) if plural else noun.en
    if adjective:
        en = f"{adjective.en} {en}"
    if of:
        before = f"{of.en}'s"
    elif before == "a":
        before = forms.article_en(en)
    fixed = "nur" if kind == "one" else ""
    if kind == "number":
        fixed, inflected = inflected, ""
    owner = of.de[GEN] if of else ""
    de = [_join(fixed, form, owner) for form in _declined(noun, inflected, plural, adjective)]
    return Phrase(_join(before, en), tuple(de), 3 if plural else 2, kind, noun)


@cache
def _declined(noun: Noun, determiner: str, plural: bool, adjective: Adjective | None) -> list[str]:
    gender = "p" if plural else noun.gender
    declined = []
    for case in (NOM, ACC, DAT, GEN):
        words = [forms.determiner_de(determiner, gender, case)]
        if adjective:
            words.append(forms.adjective_de(adjective, determiner, gender, case))
        words.append(forms.noun_de(noun, case, plural))
        declined.append(_join(*words))
    return declined


def relative_pronoun(head: Phrase, subject: bool) -> Phrase:
    """The pronoun of a relative clause about `head`, as its subject or object: who, whom or that; der, die, das."""
    assert head.noun is not None
    en = "that"
    if "person" in head.noun.tags:
        en = "who" if subject else "whom"
    gender = "p" if head.slot == 3 else head.noun.gender
    nom, acc, dat = (forms.determiner_de("der", gender, case) for case in (NOM, ACC, DAT))
    if gender == "p":
        dat = "denen"
    return Phrase(en, (nom, acc, dat), head.slot, "relative", head.noun)
