"""A small grammar of English and German that writes sentence pairs for the demo.

`Grammar(seed).pairs()` yields distinct pairs without end. Every choice concerns the meaning and shows in the English
sentence, so that one source has one translation. A model has to learn: agreement in gender, case and number,
verb-second and verb-final order, separable verbs, perfect and modals, kein and nicht, relative clauses, prepositions
and their cases, pronouns that follow the gender of their noun, numbers in words.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from deepnmt.extras.demo import inflection as forms
from deepnmt.extras.demo.clauses import Action, Clause, Pair, Phrase, State, attach, noun_phrase, relative_pronoun
from deepnmt.extras.demo.inflection import ACC, DAT
from deepnmt.extras.demo.lexicon import ROWS, Verb, adjectives, nouns, verbs, verbs_for
from deepnmt.extras.demo.phrases import KNOWN, Phrases, back_to, it_for

_CASES = {"a": ACC, "d": DAT}
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
_VERBS = {"transitive": 12, "ditransitive": 4, "intransitive": 2, "located live": 3, "placed": 2, "prepositional": 4,
          "motion": 3, "posed": 2}
_VERBS_OF_PERSONS = {kinds: weight for kinds, weight in _VERBS.items() if kinds != "posed"}
_WHO = Phrase("who", ("wer", "wen", "wem"), 2, "who", None, "whom")
_FOR = ("buy", "cook", "write", "repair", "paint")  # verbs of things done for someone


class Grammar(Phrases):
    """Writes sentence pairs; the same seed writes the same pairs."""

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
        """One pair of any kind; pairs may repeat."""
        kinds: dict[Callable[[], Pair], int] = {
            self.statement: 30, self.fronted: 12, self.question: 6, self.open_question: 9, self.coordinated: 5,
            self.subordinate: 14, self.that: 8, self.relative: 8, self.anaphor: 7, self.compared: 4, self.counted: 8,
        }
        kind = self.weighted(kinds)
        end = "?" if kind in (self.question, self.open_question) else "."
        en, de = kind()
        return f"{en[0].upper()}{en[1:]}{end}", f"{de[0].upper()}{de[1:]}{end}"

    # Clauses

    def action(self, modes: dict[str, int] = _ANY_MODE, subject: Phrase | None = None, adverb: float = 0.3,
               negation: float = 0.15) -> Action:
        """A clause with a full verb of any kind.

        Args:
            modes: the modes to choose from, with their weights.
            subject: of a person; None makes one that suits the verb.
            adverb, negation: how likely each is.
        """
        kinds = _VERBS_OF_PERSONS if subject else _VERBS
        verb = self.pick(verbs(self.weighted(kinds)))
        mode = self.mode(verb, modes)
        negated = mode != "must" and self.chance(negation)
        clause = Action(subject or self.subject(verb.subjects, negated), verb, mode, negated=negated)
        self.complete(clause)
        if not verb.stative and self.chance(adverb):
            clause.adverb = self.adverb(mode)
        return clause

    def lively(self, negation: float) -> Action:
        """A clause without an adverb whose verb could take one."""
        while True:
            clause = self.action(adverb=0, negation=negation)
            if not clause.verb.stative:
                return clause

    def bare(self, verb: Verb) -> Action:
        """A clause of subject and verb only."""
        return Action(self.subject(verb.subjects), verb, self.mode(verb, _ANY_MODE))

    def mode(self, verb: Verb, modes: dict[str, int]) -> str:
        """A mode the verb has; past is left out where English would not show it (read)."""
        barred = []
        if verb.stative:
            barred = ["can", "must", "want", "should"]
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
        en, de, _ = self.pick([row for row in ROWS["adverb"] if mode in row[2].split()])
        return en, de

    def complete(self, clause: Action) -> None:
        """Adds the verb's objects and adjuncts."""
        verb, subject = clause.verb, clause.subject
        tags, case = verb.objects, _CASES[verb.case]
        match verb.kind:
            case "transitive":
                clause.objects = [(self.object(tags, subject, clause.negated), case)]
                if verb.en in _FOR and not clause.negated and self.chance(0.2):
                    clause.adjunct = self.companion("for", "für", "person", subject)
            case "ditransitive":
                if self.chance(0.25):
                    receiver = self.pronoun(but=subject)
                else:
                    receiver = self.phrase("person", KNOWN)
                if receiver.en_object == "her":  # "send her jackets" would be ambiguous
                    thing = self.phrase(tags, KNOWN)
                else:
                    thing = self.object(tags, subject, clause.negated)
                clause.objects = [(receiver, DAT), (thing, ACC)]
            case "located":
                if self.chance(0.15):
                    clause.adjunct = self.companion("without", "ohne", "person animal", subject)
                elif self.chance(0.8):
                    clause.adjunct = self.place()
            case "live":
                clause.adjunct = self.place()
            case "posed":
                clause.adjunct = self.adjunct([*ROWS["position"][:2], ("in", "in", "inside container")], DAT)
            case "placed":
                clause.objects = [(self.object(tags, subject, clause.negated), ACC)]
                clause.adjunct = self.adjunct(ROWS["position"], ACC)
            case "prepositional":
                if "person" in tags and self.chance(0.2):
                    phrase = self.pronoun(but=subject)
                else:
                    phrase = self.phrase(tags, KNOWN)
                clause.adjunct = f"{verb.en_prep} {phrase.en_object}", attach(verb.de_prep, phrase.de[case])
            case "motion":
                clause.adjunct = self.adjunct(ROWS["direction"], ACC)

    def state(self, subject: Phrase, modes: dict[str, int] = _TIMELESS) -> State:
        """A clause with be and an adjective."""
        mode = self.weighted({mode: weight for mode, weight in modes.items() if mode in _TIMELESS})
        return State(subject, self.quality(subject), mode, self.chance(0.15))

    def quality(self, phrase: Phrase) -> Pair:
        """An adjective that suits the noun, or a person, and is not in the phrase already."""
        fitting = adjectives(phrase.noun or nouns("person")[0])
        adjective = self.pick([a for a in fitting if f" {a.en} " not in phrase.en])
        return adjective.en, adjective.de

    def doing_to(self, phrase: Phrase, subject: Phrase, modes: dict[str, int], but: Verb | None = None) -> Action:
        """A clause whose object is the given phrase; `but`: a verb that has been used."""
        assert phrase.noun is not None
        verb = self.pick([verb for verb in verbs_for(phrase.noun) if verb is not but])
        return Action(subject, verb, self.mode(verb, modes), [(phrase, _CASES[verb.case])])

    # Sentences, without their first capital and their end

    def statement(self) -> Pair:
        """The man feeds the dog. / Der Mann füttert den Hund."""
        if self.chance(0.9):
            return self.action().pair()
        return self.state(self.subject("person animal thing")).pair()

    def fronted(self) -> Pair:
        """Today the man feeds the dog. / Heute füttert der Mann den Hund."""
        clause = self.lively(negation=0.15)
        en, de = self.adverb(clause.mode)
        return f"{en} {clause.english()}", clause.german(front=de)

    def question(self) -> Pair:
        """Does the man feed the dog? / Füttert der Mann den Hund?"""
        clause: Clause
        if self.chance(0.9):
            clause = self.action(negation=0)
        else:
            clause = self.state(self.subject("person animal"))
        clause.negated = False
        return clause.english_question(), clause.german(front="")

    def open_question(self) -> Pair:
        """Whom does the man help? / Wem hilft der Mann? Or with who, what, which, how many, where, when, why."""
        kind = self.weighted({"who": 2, "what": 3, "which": 3, "how many": 2, "where": 3, "when": 1, "why": 2})
        word = kind
        match kind:
            case "who":
                return self.action(subject=_WHO, negation=0).pair()
            case "when" | "why":
                clause = self.lively(negation=0)
                front = "wann" if kind == "when" else "warum"
            case "where":
                verb = self.pick(verbs("located posed placed motion live"))
                clause = self.bare(verb)
                front = "wohin" if verb.kind in ("placed", "motion") else "wo"
                if verb.kind == "placed":
                    clause.objects = [(self.object(verb.objects, clause.subject), ACC)]
            case _:
                verb = self.pick(verbs("transitive"))
                clause = self.bare(verb)
                case = _CASES[verb.case]
                if kind == "what" and "person" in verb.objects:
                    word, front = "whom", _WHO.de[case]
                elif kind == "what":
                    word, front = "what", "was"
                elif kind == "which":
                    thing = self.phrase(verb.objects, {"which": 1})
                    word, front = thing.en, thing.de[case]
                else:
                    thing = noun_phrase(self.pick(nouns(verb.objects)), ("how many", "wie viele"), "number", True)
                    word, front = thing.en, thing.de[case]
        return clause.english_question(word), clause.german(front=front)

    def coordinated(self) -> Pair:
        """The man sleeps, but the dog waits. / Der Mann schläft, aber der Hund wartet."""
        mode = {self.weighted(_MODES_ABOVE): 1}
        first, second = self.action(mode, adverb=0.1), self.action(mode, adverb=0)
        en, de = self.pick(((" and ", " und "), (", but ", ", aber ")))
        return f"{first.english()}{en}{second.english()}", f"{first.german()}{de}{second.german()}"

    def subordinate(self) -> Pair:
        """He calls her because she is old. / Er ruft sie an, weil sie alt ist. Or the subordinate clause first."""
        en, de = conjunction = self.pick(_CONJUNCTIONS)
        above = dict(_MODES_ABOVE)
        if en == "if":
            del above["past"]
        main = self.action(above, adverb=0.15, negation=0.1)
        subject = None
        if self.chance(0.5):
            subject = back_to(main.subject)
        below = _MODES_BELOW[main.mode]
        sub: Clause
        if subject is not None and self.chance(0.3):
            sub = self.state(subject, below)
        else:
            sub = self.action(below, subject, adverb=0.1, negation=0.1)
        if self.chance(0.35):
            return f"{en} {sub.english()}, {main.english()}", f"{de} {sub.german_final()}, {main.german(front='')}"
        return _joined(main, conjunction, sub)

    def that(self) -> Pair:
        """I know that / why she calls. / Ich weiß, dass / warum sie anruft."""
        verb = self.pick(verbs("saying"))
        clause = Action(self.subject("person"), verb)
        below = self.action(adverb=0.15, negation=0.1)
        conjunction = ("that", "dass")
        if verb.en == "know" and self.chance(0.6):
            conjunction = self.pick((("whether", "ob"), ("why", "warum")))
            clause.negated = self.chance(0.6)
        return _joined(clause, conjunction, below)

    def relative(self) -> Pair:
        """The man who helps me is old. I know the man you help. / Der Mann, der mir hilft, ist alt. ..."""
        if self.chance(0.5):
            head = self.phrase("person", KNOWN)
            about = self.action(_TIMELESS, relative_pronoun(head, subject=True), adverb=0, negation=0)
            en, de = about.english(), about.german_final()
        else:
            head = self.phrase("person animal thing food", KNOWN)
            about = self.doing_to(head, self.subject("person"), _TIMELESS)
            ((_, case),) = about.objects
            about.objects = []
            pronoun = relative_pronoun(head, subject=False)
            en, de = f"{pronoun.en} {about.english()}", f"{pronoun.de[case]} {about.german_final()}"
        if self.chance(0.5):
            subject = Phrase(f"{head.en} {en}", (f"{head.de[0]}, {de},",), head.slot, "relative", head.noun)
            return self.state(subject).pair()
        main = self.doing_to(head, self.subject("person"), _TIMELESS)
        return f"{main.english()} {en}", f"{main.german()}, {de}"

    def anaphor(self) -> Pair:
        """The man sells the lamp because it is old. / Der Mann verkauft die Lampe, weil sie alt ist."""
        again = None
        while again is None:
            subject = self.subject("person")
            again = back_to(subject)
        thing = self.phrase("animal thing food", KNOWN)
        main = self.doing_to(thing, subject, _MODES_ABOVE)
        modes = _MODES_BELOW[main.mode]
        it = it_for(thing)
        sub: Clause
        if self.chance(0.5):
            sub = State(it, self.quality(thing), "past" if main.mode == "past" else "present")
        elif self.chance(0.3):
            give = verbs("ditransitive")[0]
            sub = Action(again, give, self.mode(give, modes), [(self.phrase("person", KNOWN), DAT), (it, ACC)])
        else:
            sub = self.doing_to(thing, again, modes, but=main.verb)
            sub.objects = [(it, case) for _, case in sub.objects]
        return _joined(main, self.pick(_CONJUNCTIONS[:2]), sub)

    def compared(self) -> Pair:
        """The lamp is older than the table. / Die Lampe ist älter als der Tisch. Or as old as / so alt wie."""
        tags = self.pick(("person", "animal", "thing", "food", "place"))
        first, second = self.phrase(tags, KNOWN), self.phrase(tags, KNOWN)
        assert first.noun is not None and second.noun is not None
        also = adjectives(second.noun, compared=True)
        adjective = self.pick([a for a in adjectives(first.noun, compared=True) if a in also])
        if tags == "person" and self.chance(0.3):
            second = self.pronoun()
        if self.chance(0.7):
            predicate = f"{adjective.en_more} than {second.en_object}", f"{adjective.de_more} als {second.de[0]}"
        else:
            predicate = f"as {adjective.en} as {second.en_object}", f"so {adjective.de} wie {second.de[0]}"
        return State(first, predicate, self.weighted(_TIMELESS), self.chance(0.15)).pair()

    def counted(self) -> Pair:
        """Ages, prices, pages and how many there are, with numbers in words up to 9,999."""
        kind = self.weighted({"age": 2, "price": 3, "page": 2, "there": 4})
        if kind == "there":
            tags, places = self.pick((("building", "town"), ("person animal thing fruit", "inside")))
            things = self.phrase(tags, {"number": 1})
            en, de = self.adjunct([("in", "in", places)], DAT)
            if self.chance(0.5):
                return f"there are {things.en} {en}", f"es gibt {things.de[ACC]} {de}"
            return f"{en} there are {things.en}", f"{de} gibt es {things.de[ACC]}"
        if kind == "age":
            number = self.quantity(99)
        elif kind == "price":
            number = self.quantity()
        else:
            number = self.between(1, 1999)
        en, de = forms.number_en(number), forms.number_de(number)
        if kind == "age":
            years = f"{en} years old", f"{de} Jahre alt"
            return State(self.subject("person"), years, self.weighted(_TIMELESS)).pair()
        if kind == "price":
            euros = Phrase(f"{en} euros", (f"{de} Euro",) * 3, 3, "number")
            return Action(self.phrase("thing", KNOWN), verbs("cost")[0], objects=[(euros, ACC)]).pair()
        read = self.bare(next(verb for verb in verbs("transitive") if verb.en == "read"))
        read.objects = [(Phrase(f"page {en}", (f"Seite {de}",) * 3, 2, "number"), ACC)]
        return read.pair()


def _joined(main: Clause, conjunction: Pair, sub: Clause) -> Pair:
    """A main clause and its subordinate clause."""
    en, de = conjunction
    return f"{main.english()} {en} {sub.english()}", f"{main.german()}, {de} {sub.german_final()}"
