"""A small grammar of English and German that writes sentence pairs for the demo.

`Grammar(seed).pairs()` yields distinct pairs without end. Every choice is made on the meaning, before either language
is spoken, and the English sentence always shows it: one source has one translation. What a learner has to find out:
agreement in gender, case and number, verb-second and verb-final order, separable verbs, perfect and modals, kein and
nicht, relative clauses, prepositions and their cases, pronouns that follow the gender of their noun, numbers in words.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache

from deepnmt.demo import inflection as forms
from deepnmt.demo import lexicon
from deepnmt.demo.clauses import Action, Clause, Pair, Phrase, State, attach, common, noun_phrase, relative_pronoun
from deepnmt.demo.inflection import ACC, DAT
from deepnmt.demo.lexicon import Noun, Verb
from deepnmt.demo.phrases import KNOWN, Phrases, adjectives_for, back_to, it_for, nouns_tagged

_CASES = {"a": ACC, "d": DAT}
_SOMEONE = nouns_tagged("person")[0]
_ANY_MODE = {"present": 8, "past": 5, "future": 3, "can": 2, "must": 2, "want": 2, "should": 1}
_TIMELESS = {"present": 8, "past": 5}
_LONGEST = 18  # English words of a sentence

_CONJUNCTIONS = (("because", "weil"), ("although", "obwohl"), ("if", "wenn"))
_MODES_ABOVE = {"present": 4, "past": 2, "future": 2}
_MODES_BELOW = {  # for each mode of a main clause, those of its subordinate clause

    "present": {"present": 6, "can": 1, "must": 1, "want": 2},
    "past": {"past": 1},
    "future": {"present": 5, "want": 2, "must": 1},
}
_WHO = Phrase("who", "whom", ("wer", "wen", "wem"), 2, "who")
_FOR = ("buy", "cook", "write", "repair", "paint")  # verbs of things done for someone


@cache
def verbs_for(noun: Noun) -> tuple[Verb, ...]:
    """The verbs that take a noun as their only object."""
    tags = set(noun.tags.split())
    return tuple(verb for verb in lexicon.TRANSITIVE if tags & set(verb.objects.split()))


class Grammar(Phrases):
    """Writes sentence pairs; the same seed writes the same pairs."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self._sentences: dict[Callable[[], Pair], int] = {
            self.statement: 30, self.fronted: 12, self.question: 6, self.asked: 9, self.coordinated: 5,
            self.subordinate: 14, self.that: 8, self.relative: 8, self.anaphor: 7, self.compared: 4, self.counted: 8,
        }
        self._frames: dict[Callable[[Action], None], tuple[Verb, ...]] = {
            self._transitive: lexicon.TRANSITIVE, self._ditransitive: lexicon.DITRANSITIVE,
            self._intransitive: lexicon.INTRANSITIVE, self._located: (*lexicon.LOCATED, lexicon.LIVE),
            self._posed: lexicon.POSED, self._placed: lexicon.PLACED, self._prepositional: lexicon.PREPOSITIONAL,
            self._motion: lexicon.MOTION,
        }
        self._frame_weights: dict[Callable[[Action], None], int] = {
            self._transitive: 12, self._ditransitive: 4, self._intransitive: 2, self._located: 3, self._placed: 2,
            self._prepositional: 4, self._motion: 3, self._posed: 2,
        }
        self._frame_weights_of_persons = {f: n for f, n in self._frame_weights.items() if f != self._posed}

    def pairs(self) -> Iterator[Pair]:
        """English and German sentences, no two alike on either side."""
        sources: set[str] = set()
        targets: set[str] = set()
        while True:
            en, de = self.sentence()
            if en not in sources and de not in targets and en.count(" ") < _LONGEST:
                sources.add(en)
                targets.add(de)
                yield en, de

    def sentence(self) -> Pair:
        """One pair of any kind; it may have come before."""
        en, de = self.weighted(self._sentences)()
        return en[0].upper() + en[1:], de[0].upper() + de[1:]

    # Clauses

    def action(self, modes: dict[str, int] = _ANY_MODE, subject: Phrase | None = None, adverb: float = 0.3,
               negation: float = 0.15) -> Action:
        """A clause with a full verb of any kind.

        Args:
            modes: the modes to choose from, with their weights.
            subject: of a person; None makes one that suits the verb.
            adverb, negation: how likely each is.
        """
        complete = self.weighted(self._frame_weights if subject is None else self._frame_weights_of_persons)
        verb = self.pick(self._frames[complete])
        mode = self.mode(verb, modes)
        negated = mode != "must" and self.chance(negation)
        clause = Action(subject or self.subject(verb.subjects, negated), verb, mode, negated=negated)
        complete(clause)
        if not verb.stative and self.chance(adverb):
            clause.adverb = self.adverb(mode)
        return clause

    def lively(self, negation: float) -> Action:
        """A clause without an adverb whose verb could take one."""
        while True:
            clause = self.action(adverb=0, negation=negation)
            if not clause.verb.stative:
                return clause

    def mode(self, verb: Verb, modes: dict[str, int]) -> str:
        """A mode the verb has; past is left out where English would not show it (read)."""
        barred = ["can", "must", "want", "should"] if verb.stative else []
        if verb.past == forms.verb_en(verb, "base"):
            barred.append("past")
        allowed = {mode: weight for mode, weight in modes.items() if mode not in barred}
        return self.weighted(allowed or {"present": 1})

    def adverb(self, mode: str) -> Pair:
        """An adverb of time that goes with a mode."""
        if self.chance(0.12):
            hour = self.between(1, 12)
            word = "ein" if hour == 1 else forms.number_de(hour)
            return f"at {forms.number_en(hour)} o'clock", f"um {word} Uhr"
        en, de, _ = self.pick([row for row in lexicon.ADVERBS if mode in row[2].split()])
        return en, de

    def _transitive(self, clause: Action) -> None:
        phrase = self.object(clause.verb.objects, clause.subject, clause.negated)
        clause.objects = [(phrase, _CASES[clause.verb.case])]
        if clause.verb.en in _FOR and not clause.negated and self.chance(0.2):
            clause.adjunct = self.companion("for", "für", "person", clause.subject)

    def _ditransitive(self, clause: Action) -> None:
        receiver = self.pronoun(but=clause.subject) if self.chance(0.25) else self.phrase("person", KNOWN)
        if receiver.en_object == "her":  # "send her jackets" would leave open whose they are
            thing = self.phrase(clause.verb.objects, KNOWN)
        else:
            thing = self.object(clause.verb.objects, clause.subject, clause.negated)
        clause.objects = [(receiver, DAT), (thing, ACC)]

    def _intransitive(self, clause: Action) -> None:
        """Nothing to add."""

    def _located(self, clause: Action) -> None:
        if clause.verb is not lexicon.LIVE and self.chance(0.15):
            clause.adjunct = self.companion("without", "ohne", "person animal", clause.subject)
        elif clause.verb is lexicon.LIVE or self.chance(0.8):
            clause.adjunct = self.place()

    def _posed(self, clause: Action) -> None:
        clause.adjunct = self.adjunct((*lexicon.POSITIONS[:2], ("in", "in", "inside container")), DAT)

    def _placed(self, clause: Action) -> None:
        thing = self.object(clause.verb.objects, clause.subject, clause.negated)
        clause.objects = [(thing, ACC)]
        clause.adjunct = self.adjunct(lexicon.POSITIONS, ACC)

    def _prepositional(self, clause: Action) -> None:
        en, de = clause.verb.prep
        pronoun = "person" in clause.verb.objects and self.chance(0.2)
        phrase = self.pronoun(but=clause.subject) if pronoun else self.phrase(clause.verb.objects, KNOWN)
        clause.adjunct = f"{en} {phrase.en_object}", attach(de, phrase.de[_CASES[clause.verb.case]])

    def _motion(self, clause: Action) -> None:
        clause.adjunct = self.adjunct(lexicon.DIRECTIONS, ACC)

    def state(self, subject: Phrase, modes: dict[str, int] = _TIMELESS) -> State:
        """A clause with be and an adjective."""
        mode = self.weighted({mode: weight for mode, weight in modes.items() if mode in _TIMELESS})
        return State(subject, self.quality(subject), mode, self.chance(0.15))

    def quality(self, phrase: Phrase) -> Pair:
        """An adjective that goes with a noun, or a person, and is not said of it already."""
        noun = phrase.noun or _SOMEONE
        adjective = self.pick([a for a in adjectives_for(noun) if f" {a.en} " not in phrase.en])
        return adjective.en, adjective.de

    def doing_to(self, phrase: Phrase, subject: Phrase, modes: dict[str, int], but: Verb | None = None) -> Action:
        """A clause whose object is the given phrase; `but`: a verb that has been used."""
        assert phrase.noun is not None
        verb = self.pick([verb for verb in verbs_for(phrase.noun) if verb is not but])
        return Action(subject, verb, self.mode(verb, modes), [(phrase, _CASES[verb.case])])

    # Sentences

    def statement(self) -> Pair:
        """The man feeds the dog. / Der Mann füttert den Hund."""
        clause: Clause = self.action() if self.chance(0.9) else self.state(self.subject("person animal thing"))
        return f"{clause.english()}.", f"{clause.german()}."

    def fronted(self) -> Pair:
        """Today the man feeds the dog. / Heute füttert der Mann den Hund."""
        clause = self.lively(negation=0.15)
        en, de = self.adverb(clause.mode)
        return f"{en} {clause.english()}.", f"{clause.german(front=de)}."

    def question(self) -> Pair:
        """Does the man feed the dog? / Füttert der Mann den Hund?"""
        clause: Clause = self.action(negation=0) if self.chance(0.9) else self.state(self.subject("person animal"))
        if isinstance(clause, State):
            clause.negated = False
        return f"{clause.english_question()}?", f"{clause.german(front='')}?"

    def asked(self) -> Pair:
        """Whom does the man help? / Wem hilft der Mann? Or with who, what, which, how many, where, when, why."""
        kind = self.weighted({"who": 2, "what": 3, "which": 3, "how many": 2, "where": 3, "when": 1, "why": 2})
        if kind == "who":
            clause = self.action(subject=_WHO, negation=0)
            return f"{clause.english()}?", f"{clause.german()}?"
        if kind in ("what", "which", "how many"):
            return self._asked_object(kind)
        if kind == "where":
            clause, de = self._asked_place()
        else:
            clause, de = self.lively(negation=0), {"when": "wann", "why": "warum"}[kind]
        return f"{clause.english_question(kind)}?", f"{clause.german(front=de)}?"

    def _asked_object(self, kind: str) -> Pair:
        verb = self.pick(lexicon.TRANSITIVE)
        case = _CASES[verb.case]
        clause = Action(self.subject(verb.subjects), verb, self.mode(verb, _ANY_MODE))
        if kind == "which":
            asked = self.phrase(verb.objects, {"which": 1})
            word, front = asked.en, asked.de[case]
        elif kind == "how many":
            asked = noun_phrase(self.pick(nouns_tagged(verb.objects)), ("how many", "wie viele"), "number", True)
            word, front = asked.en, asked.de[case]
        else:
            person = "person" in verb.objects
            word, front = ("whom", _WHO.de[case]) if person else ("what", "was")
        return f"{clause.english_question(word)}?", f"{clause.german(front=front)}?"

    def _asked_place(self) -> tuple[Action, str]:
        verb = self.pick((*lexicon.LOCATED, *lexicon.POSED, *lexicon.PLACED, *lexicon.MOTION, lexicon.LIVE))
        clause = Action(self.subject(verb.subjects), verb, self.mode(verb, _ANY_MODE))
        if verb in lexicon.PLACED:
            clause.objects = [(self.object(verb.objects, clause.subject), ACC)]
        return clause, "wohin" if verb in lexicon.PLACED or verb in lexicon.MOTION else "wo"

    def coordinated(self) -> Pair:
        """The man sleeps, but the dog waits. / Der Mann schläft, aber der Hund wartet."""
        mode = {self.weighted(_MODES_ABOVE): 1}
        first, second = self.action(mode, adverb=0.1), self.action(mode, adverb=0)
        en, de = self.pick(((" and ", " und "), (", but ", ", aber ")))
        return f"{first.english()}{en}{second.english()}.", f"{first.german()}{de}{second.german()}."

    def subordinate(self) -> Pair:
        """He calls her because she is old. / Er ruft sie an, weil sie alt ist. Or the subordinate clause first."""
        en, de = self.pick(_CONJUNCTIONS)
        above = {k: v for k, v in _MODES_ABOVE.items() if not (en == "if" and k == "past")}
        main = self.action(above, adverb=0.15, negation=0.1)
        subject = back_to(main.subject) if self.chance(0.5) else None
        below = _MODES_BELOW[main.mode]
        sub: Clause
        if subject is not None and self.chance(0.3):
            sub = self.state(subject, below)
        else:
            sub = self.action(below, subject, adverb=0.1, negation=0.1)
        if self.chance(0.35):
            return f"{en} {sub.english()}, {main.english()}.", f"{de} {sub.german_final()}, {main.german(front='')}."
        return f"{main.english()} {en} {sub.english()}.", f"{main.german()}, {de} {sub.german_final()}."

    def that(self) -> Pair:
        """I know that / why she calls. / Ich weiß, dass / warum sie anruft."""
        verb = self.pick(lexicon.SAYING)
        clause = Action(self.subject("person"), verb)
        en, de = "that", "dass"
        below = self.action(adverb=0.15, negation=0.1)
        if verb.en == "know" and self.chance(0.6):
            en, de = self.pick((("whether", "ob"), ("why", "warum")))
            clause.negated = self.chance(0.6)
        return f"{clause.english()} {en} {below.english()}.", f"{clause.german()}, {de} {below.german_final()}."

    def relative(self) -> Pair:
        """The man who helps me is old. I know the man you help. / Der Mann, der mir hilft, ist alt. ..."""
        if self.chance(0.5):
            head = self.phrase("person", KNOWN)
            about = self.action(_TIMELESS, relative_pronoun(head, subject=True), adverb=0, negation=0)
            en, de = about.english(), about.german_final()
        else:
            head = self.phrase("person animal thing food", KNOWN)
            about = self.doing_to(head, self.subject("person"), _TIMELESS)
            case = about.objects[0][1]
            about.objects = []
            pronoun = relative_pronoun(head, subject=False)
            en, de = f"{pronoun.en} {about.english()}", f"{pronoun.de[case]} {about.german_final()}"
        if self.chance(0.5):
            subject = common(f"{head.en} {en}", (f"{head.de[0]}, {de},",), head.slot, "relative", head.noun)
            state = self.state(subject)
            return f"{state.english()}.", f"{state.german()}."
        main = self.doing_to(head, self.subject("person"), _TIMELESS)
        return f"{main.english()} {en}.", f"{main.german()}, {de}."

    def anaphor(self) -> Pair:
        """The man sells the lamp because it is old. / Der Mann verkauft die Lampe, weil sie alt ist."""
        subject = self.subject("person")
        while (again := back_to(subject)) is None:
            subject = self.subject("person")
        thing = self.phrase("animal thing food", KNOWN)
        main = self.doing_to(thing, subject, _MODES_ABOVE)
        modes = _MODES_BELOW[main.mode]
        it = it_for(thing)
        sub: Clause
        if self.chance(0.5):
            sub = State(it, self.quality(thing), "past" if main.mode == "past" else "present")
        elif self.chance(0.3):
            verb = lexicon.GIVE
            sub = Action(again, verb, self.mode(verb, modes), [(self.phrase("person", KNOWN), DAT), (it, ACC)])
        else:
            sub = self.doing_to(thing, again, modes, but=main.verb)
            sub.objects = [(it, case) for _, case in sub.objects]
        en, de = self.pick(_CONJUNCTIONS[:2])
        return f"{main.english()} {en} {sub.english()}.", f"{main.german()}, {de} {sub.german_final()}."

    def compared(self) -> Pair:
        """The lamp is older than the table. / Die Lampe ist älter als der Tisch. Or as old as / so alt wie."""
        tags = self.pick(("person", "animal", "thing", "food", "place"))
        first, second = self.phrase(tags, KNOWN), self.phrase(tags, KNOWN)
        assert first.noun is not None and second.noun is not None
        also = adjectives_for(second.noun, compared=True)
        adjective = self.pick([a for a in adjectives_for(first.noun, compared=True) if a in also])
        if tags == "person" and self.chance(0.3):
            second = self.pronoun()
        if self.chance(0.7):
            predicate = f"{adjective.en_more} than {second.en_object}", f"{adjective.de_more} als {second.de[0]}"
        else:
            predicate = f"as {adjective.en} as {second.en_object}", f"so {adjective.de} wie {second.de[0]}"
        state = State(first, predicate, self.weighted(_TIMELESS), self.chance(0.15))
        return f"{state.english()}.", f"{state.german()}."

    def counted(self) -> Pair:
        """Ages, prices, pages and how many there are, with numbers in words up to 9,999."""
        kind = self.weighted({"age": 2, "price": 3, "page": 2, "there": 4})
        if kind == "there":
            tags, places = self.pick((("building", lexicon.IN_TOWN), ("person animal thing fruit", lexicon.INSIDE)))
            things = self.phrase(tags, {"number": 1})
            en, de = self.adjunct(places, DAT)
            if self.chance(0.5):
                return f"there are {things.en} {en}.", f"es gibt {things.de[ACC]} {de}."
            return f"{en} there are {things.en}.", f"{de} gibt es {things.de[ACC]}."
        if kind == "age":
            years = self.quantity(99)
            en, de = forms.number_en(years), forms.number_de(years)
            state = State(self.subject("person"), (f"{en} years old", f"{de} Jahre alt"), self.weighted(_TIMELESS))
            return f"{state.english()}.", f"{state.german()}."
        if kind == "price":
            number = self.quantity()
            euros = common(f"{forms.number_en(number)} euros", (f"{forms.number_de(number)} Euro",) * 3, 3, "number")
            price = Action(self.phrase("thing", KNOWN), lexicon.COST, objects=[(euros, ACC)])
            return f"{price.english()}.", f"{price.german()}."
        number = self.between(1, 1999)
        page = common(f"page {forms.number_en(number)}", (f"Seite {forms.number_de(number)}",) * 3, 2, "number")
        clause = Action(self.subject("person"), lexicon.READ, self.mode(lexicon.READ, _ANY_MODE), [(page, ACC)])
        return f"{clause.english()}.", f"{clause.german()}."
