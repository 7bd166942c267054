"""The demo's grammar against tables and sentences written by hand, and the corpus made of it."""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
from functools import partial
from itertools import islice
from pathlib import Path

import pytest

from deepnmt.errors import UserError
from deepnmt.extras.demo import lexicon
from deepnmt.extras.demo.clauses import Action, Pair, Phrase, State, attach, noun_phrase, relative_pronoun
from deepnmt.extras.demo.corpus import make_corpus
from deepnmt.extras.demo.grammar import Grammar
from deepnmt.extras.demo.inflection import (
    ACC,
    DAT,
    adjective_de,
    determiner_de,
    noun_de,
    number_de,
    number_en,
    perfect_de,
    plural_en,
    present_de,
    verb_en,
)
from deepnmt.extras.demo.lexicon import Adjective, Noun, Verb
from deepnmt.extras.demo.phrases import PRONOUNS, back_to, it_for


def noun(en: str) -> Noun:
    return next(n for n in lexicon.NOUNS if n.en == en)


def verb(en: str, de: str = "") -> Verb:
    return next(v for v in lexicon.VERBS if v.en == en and de in ("", v.de))


def adjective(en: str) -> Adjective:
    return next(a for a in lexicon.ADJECTIVES if a.en == en)


def the(en: str, adj: str = "", plural: bool = False) -> Phrase:
    return noun_phrase(noun(en), ("the", "der"), "the", plural, adjective(adj) if adj else None)


def an(en: str, adj: str = "", plural: bool = False) -> Phrase:
    return noun_phrase(noun(en), ("", "") if plural else ("a", "ein"), "a", plural, adjective(adj) if adj else None)


def no(en: str, plural: bool = False) -> Phrase:
    return noun_phrase(noun(en), ("any" if plural else "a", "kein"), "no", plural)


NUMBERS = {
    0: "zero, null",
    1: "one, eins",
    7: "seven, sieben",
    11: "eleven, elf",
    12: "twelve, zwölf",
    13: "thirteen, dreizehn",
    16: "sixteen, sechzehn",
    17: "seventeen, siebzehn",
    20: "twenty, zwanzig",
    21: "twenty-one, einundzwanzig",
    30: "thirty, dreißig",
    47: "forty-seven, siebenundvierzig",
    66: "sixty-six, sechsundsechzig",
    77: "seventy-seven, siebenundsiebzig",
    80: "eighty, achtzig",
    99: "ninety-nine, neunundneunzig",
    100: "one hundred, hundert",
    101: "one hundred and one, hunderteins",
    116: "one hundred and sixteen, hundertsechzehn",
    121: "one hundred and twenty-one, hunderteinundzwanzig",
    200: "two hundred, zweihundert",
    731: "seven hundred and thirty-one, siebenhunderteinunddreißig",
    1000: "one thousand, tausend",
    1001: "one thousand and one, tausendeins",
    1100: "one thousand one hundred, tausendeinhundert",
    1234: "one thousand two hundred and thirty-four, tausendzweihundertvierunddreißig",
    2020: "two thousand and twenty, zweitausendzwanzig",
    7017: "seven thousand and seventeen, siebentausendsiebzehn",
    9999: "nine thousand nine hundred and ninety-nine, neuntausendneunhundertneunundneunzig",
}


@pytest.mark.parametrize("number", NUMBERS)
def test_numbers_in_words(number: int) -> None:
    assert f"{number_en(number)}, {number_de(number)}" == NUMBERS[number]


def test_number_words_are_distinct() -> None:
    assert len({number_en(n) for n in range(10_000)}) == len({number_de(n) for n in range(10_000)}) == 10_000


DECLENSIONS = {  # nominative, accusative, dative, genitive
    ("der", "man"): "der alte Mann, den alten Mann, dem alten Mann, des alten Mannes",
    ("der", "lamp"): "die alte Lampe, die alte Lampe, der alten Lampe, der alten Lampe",
    ("der", "book"): "das alte Buch, das alte Buch, dem alten Buch, des alten Buches",
    ("der", "men"): "die alten Männer, die alten Männer, den alten Männern, der alten Männer",
    ("ein", "man"): "ein alter Mann, einen alten Mann, einem alten Mann, eines alten Mannes",
    ("ein", "lamp"): "eine alte Lampe, eine alte Lampe, einer alten Lampe, einer alten Lampe",
    ("ein", "book"): "ein altes Buch, ein altes Buch, einem alten Buch, eines alten Buches",
    ("kein", "men"): "keine alten Männer, keine alten Männer, keinen alten Männern, keiner alten Männer",
    ("dies", "man"): "dieser alte Mann, diesen alten Mann, diesem alten Mann, dieses alten Mannes",
    ("dies", "lamp"): "diese alte Lampe, diese alte Lampe, dieser alten Lampe, dieser alten Lampe",
    ("dies", "book"): "dieses alte Buch, dieses alte Buch, diesem alten Buch, dieses alten Buches",
    ("dies", "men"): "diese alten Männer, diese alten Männer, diesen alten Männern, dieser alten Männer",
    ("unser", "man"): "unser alter Mann, unseren alten Mann, unserem alten Mann, unseres alten Mannes",
    ("unser", "men"): "unsere alten Männer, unsere alten Männer, unseren alten Männern, unserer alten Männer",
    ("", "men"): "alte Männer, alte Männer, alten Männern, alter Männer",
    ("der", "boy"): "der alte Junge, den alten Jungen, dem alten Jungen, des alten Jungen",
    ("ein", "neighbour"): "ein alter Nachbar, einen alten Nachbarn, einem alten Nachbarn, eines alten Nachbarn",
    ("", "cars"): "alte Autos, alte Autos, alten Autos, alter Autos",
    ("mein", "gardens"): "meine alten Gärten, meine alten Gärten, meinen alten Gärten, meiner alten Gärten",
    ("ihr", "uncles"): "ihre alten Onkel, ihre alten Onkel, ihren alten Onkeln, ihrer alten Onkel",
}


@pytest.mark.parametrize(("determiner", "word"), DECLENSIONS)
def test_declension(determiner: str, word: str) -> None:
    plural = all(n.en != word for n in lexicon.NOUNS)
    entry = next(n for n in lexicon.NOUNS if word in (n.en, plural_en(n)))
    gender = "p" if plural else entry.gender
    old = adjective("old")
    forms = []
    for case in range(4):
        words = [determiner_de(determiner, gender, case), adjective_de(old, determiner, gender, case)]
        forms.append(" ".join([*(w for w in words if w), noun_de(entry, case, plural)]))
    assert ", ".join(forms) == DECLENSIONS[determiner, word]


PRESENT = {  # ich, du, er, wir
    "kaufen": "kaufe kaufst kauft kaufen",
    "sehen": "sehe siehst sieht sehen",
    "lesen": "lese liest liest lesen",
    "essen": "esse isst isst essen",
    "finden": "finde findest findet finden",
    "antworten": "antworte antwortest antwortet antworten",
    "ein|laden": "lade lädst lädt laden",
    "aus|schalten": "schalte schaltest schaltet schalten",
    "mit|nehmen": "nehme nimmst nimmt nehmen",
    "füttern": "füttere fütterst füttert füttern",
    "tanzen": "tanze tanzt tanzt tanzen",
    "waschen": "wasche wäschst wäscht waschen",
    "haben": "habe hast hat haben",
    "wissen": "weiß weißt weiß wissen",
    "geben": "gebe gibst gibt geben",
    "reparieren": "repariere reparierst repariert reparieren",
    "fahren": "fahre fährst fährt fahren",
    "vergessen": "vergesse vergisst vergisst vergessen",
    "auf|räumen": "räume räumst räumt räumen",
    "weg|werfen": "werfe wirfst wirft werfen",
}


@pytest.mark.parametrize("infinitive", PRESENT)
def test_present_of_german_verbs(infinitive: str) -> None:
    entry = next(v for v in lexicon.VERBS if v.de == infinitive)
    assert " ".join(present_de(entry, slot) for slot in range(4)) == PRESENT[infinitive]


def test_perfect_takes_haben_or_sein() -> None:
    assert perfect_de(verb("buy"), 1) == ("hast", "gekauft")
    assert perfect_de(verb("get up"), 0) == ("bin", "aufgestanden")
    assert perfect_de(verb("follow"), 3) == ("sind", "gefolgt")


def test_english_forms() -> None:
    third = [verb_en(verb(en), "third") for en in ("buy", "carry", "wash", "have", "go", "look for", "pick|up")]
    assert third == ["buys", "carries", "washes", "has", "goes", "looks for", "picks"]
    past = [verb_en(verb(en), "past") for en in ("carry", "close", "open", "have", "fall asleep", "take|along")]
    assert past == ["carried", "closed", "opened", "had", "fell asleep", "took"]
    plurals = [plural_en(noun(en)) for en in ("boy", "city", "church", "box", "child", "knife", "potato", "radio")]
    assert plurals == ["boys", "cities", "churches", "boxes", "children", "knives", "potatoes", "radios"]
    assert [an(en).en for en in ("apple", "uncle", "house")] == ["an apple", "an uncle", "a house"]
    assert an("house", "old").en == "an old house" and an("apple", "red").en == "a red apple"


def test_prepositions_run_together_with_the_article() -> None:
    garden, school = the("garden", "old"), the("school")
    assert attach("in", garden.de[DAT]) == "im alten Garten"
    assert attach("in", the("house").de[ACC]) == "ins Haus"
    assert attach("in", garden.de[ACC]) == "in den alten Garten"
    assert attach("zu", the("aunt").de[DAT]) == "zur Tante"
    assert attach("bei", the("friend").de[DAT]) == "beim Freund"
    assert attach("hinter", school.de[DAT]) == "hinter der Schule"
    assert attach("in", noun_phrase(noun("garden"), ("this", "dies"), "this").de[DAT]) == "in diesem Garten"


def test_a_genitive_owner_takes_the_english_articles_place() -> None:
    owner = noun_phrase(noun("neighbour"), ("my", "mein"), "my")
    coat = noun_phrase(noun("coat"), ("the", "der"), "owner", False, adjective("old"), owner)
    assert (coat.en, coat.de[ACC]) == ("my neighbour's old coat", "den alten Mantel meines Nachbarn")


MAN, HE, YOU, THEY = the("man"), PRONOUNS["he"], PRONOUNS["you"], PRONOUNS["they"]
IN_GARDEN: Pair = ("in the garden", "im Garten")
INTO_GARDEN: Pair = ("into the garden", "in den Garten")
TODAY: Pair = ("today", "heute")

CLAUSES = [  # clause, English, German main clause, German subordinate clause
    (Action(MAN, verb("buy"), objects=[(an("car", "new"), ACC)]),
     "the man buys a new car", "der Mann kauft ein neues Auto", "der Mann ein neues Auto kauft"),
    (Action(MAN, verb("open"), objects=[(the("door"), ACC)], adverb=TODAY),
     "the man opens the door today", "der Mann macht heute die Tür auf", "der Mann heute die Tür aufmacht"),
    (Action(MAN, verb("pick|up"), objects=[(the("child"), ACC)]),
     "the man picks up the child", "der Mann holt das Kind ab", "der Mann das Kind abholt"),
    (Action(MAN, verb("pick|up"), "can", [(PRONOUNS["she"], ACC)]),
     "the man can pick her up", "der Mann kann sie abholen", "der Mann sie abholen kann"),
    (Action(YOU, verb("call"), "past", [(HE, ACC)], adverb=("yesterday", "gestern")),
     "you called him yesterday", "du hast ihn gestern angerufen", "du ihn gestern angerufen hast"),
    (Action(THEY, verb("go", "gehen"), "past", adjunct=INTO_GARDEN),
     "they went into the garden", "sie sind in den Garten gegangen", "sie in den Garten gegangen sind"),
    (Action(HE, verb("sleep"), "future", adjunct=IN_GARDEN),
     "he will sleep in the garden", "er wird im Garten schlafen", "er im Garten schlafen wird"),
    (Action(HE, verb("help"), "want", [(the("aunt", "old"), DAT)]),
     "he wants to help the old aunt", "er will der alten Tante helfen", "er der alten Tante helfen will"),
    (Action(HE, verb("help"), "want", [(THEY, DAT)], negated=True),
     "he does not want to help them", "er will ihnen nicht helfen", "er ihnen nicht helfen will"),
    (Action(YOU, verb("give"), objects=[(the("child"), DAT), (an("apple", plural=True), ACC)]),
     "you give the child apples", "du gibst dem Kind Äpfel", "du dem Kind Äpfel gibst"),
    (Action(HE, verb("give"), "should", [(the("boy"), DAT), (it_for(the("lamp")), ACC)]),
     "he should give it to the boy", "er sollte sie dem Jungen geben", "er sie dem Jungen geben sollte"),
    (Action(HE, verb("buy"), objects=[(no("car"), ACC)], negated=True),
     "he does not buy a car", "er kauft kein Auto", "er kein Auto kauft"),
    (Action(HE, verb("buy"), "past", [(no("coat", plural=True), ACC)], adverb=TODAY, negated=True),
     "he did not buy any coats today", "er hat heute keine Mäntel gekauft", "er heute keine Mäntel gekauft hat"),
    (Action(HE, verb("open"), objects=[(the("door"), ACC)], adverb=TODAY, negated=True),
     "he does not open the door today", "er macht die Tür heute nicht auf", "er die Tür heute nicht aufmacht"),
    (Action(HE, verb("open"), "can", [(the("door"), ACC)], negated=True),
     "he cannot open the door", "er kann die Tür nicht aufmachen", "er die Tür nicht aufmachen kann"),
    (Action(MAN, verb("put", "stellen"), "must", [(the("cup"), ACC)], ("on the table", "auf den Tisch")),
     "the man must put the cup on the table", "der Mann muss die Tasse auf den Tisch stellen",
     "der Mann die Tasse auf den Tisch stellen muss"),
    (Action(HE, verb("sleep"), adjunct=IN_GARDEN, negated=True),
     "he does not sleep in the garden", "er schläft nicht im Garten", "er nicht im Garten schläft"),
    (State(the("cat"), ("tired", "müde"), "past", negated=True),
     "the cat was not tired", "die Katze war nicht müde", "die Katze nicht müde war"),
    (State(PRONOUNS["I"], ("older than him", "älter als er")),
     "I am older than him", "ich bin älter als er", "ich älter als er bin"),
]


@pytest.mark.parametrize(("clause", "en", "main", "final"), CLAUSES, ids=[case[1] for case in CLAUSES])
def test_word_order(clause: Action | State, en: str, main: str, final: str) -> None:
    assert (clause.english(), clause.german(), clause.german_final()) == (en, main, final)


def test_inversion_after_a_fronted_adverb_and_in_questions() -> None:
    clause = Action(MAN, verb("open"), objects=[(the("door"), ACC)])
    assert clause.german(front="heute") == "heute macht der Mann die Tür auf"
    assert clause.english_question() == "does the man open the door"
    assert clause.german(front="") == "macht der Mann die Tür auf"
    clause = Action(YOU, verb("listen to"), "past")
    assert clause.english_question("whom") == "whom did you listen to"
    assert clause.german(front="wem") == "wem hast du zugehört"
    assert Action(HE, verb("pick|up"), "want").english_question("whom") == "whom does he want to pick up"
    assert State(THEY, ("hungry", "hungrig")).german(front="") == "sind sie hungrig"


def test_relative_pronouns_follow_gender_number_and_case() -> None:
    women, key = the("woman", plural=True), the("key")
    who = Action(relative_pronoun(the("boy"), subject=True), verb("call"), objects=[(PRONOUNS["we"], ACC)])
    assert (who.english(), who.german_final()) == ("who calls us", "der uns anruft")
    assert [relative_pronoun(p, subject=False).de[ACC] for p in (key, the("lamp"), the("book"), women)] == [
        "den", "die", "das", "die"]
    assert relative_pronoun(women, subject=False).de[DAT] == "denen"
    assert [relative_pronoun(p, subject=False).en for p in (key, women)] == ["that", "whom"]


def test_pronouns_follow_the_nouns_gender() -> None:
    assert [it_for(the(en)).de[ACC] for en in ("key", "lamp", "book")] == ["ihn", "sie", "es"]
    assert it_for(the("key", plural=True)).en_object == "them"
    taken_up = [back_to(the(en)) for en in ("uncle", "queen", "child")]
    assert [p.en if p else None for p in taken_up] == ["he", "she", None]
    pair = Phrase("the man and the woman", ("der Mann und die Frau",) * 3, 3, "and")
    assert back_to(pair) == PRONOUNS["they"]


def test_every_lexicon_entry_is_sound() -> None:
    tags = {tag for n in lexicon.NOUNS for tag in n.tags.split()}
    for n in lexicon.NOUNS:
        assert n.gender in "mfn" and n.de[0].isupper() and n.de_plural[0].isupper(), n
    for v in lexicon.VERBS:
        auxiliary, participle = v.perfect.split()
        prefix = v.de.rpartition("|")[0]
        assert auxiliary in ("hat", "ist") and v.de.endswith("n") and participle.startswith(prefix), v
        assert set(f"{v.objects} {v.subjects}".split()) <= tags, v
    assert len({n.en for n in lexicon.NOUNS}) == len({n.de for n in lexicon.NOUNS}) == len(lexicon.NOUNS)
    for a in lexicon.ADJECTIVES:
        assert bool(a.en_more) == bool(a.de_more) and set(a.tags.split()) <= tags, a


def test_a_source_has_one_translation() -> None:
    grammar = Grammar(7)
    seen: dict[str, str] = {}
    repeated = 0
    for _ in range(30_000):
        en, de = grammar.sentence()
        repeated += en in seen
        assert seen.setdefault(en, de) == de, en
    assert repeated > 100  # else the check above has checked nothing


def test_sentences_are_well_formed() -> None:
    pairs = list(islice(Grammar(3).pairs(), 5000))
    text = "\n".join(f"{en}\n{de}" for en, de in pairs)
    assert not re.findall(r"  | [,.?]|\|| $|^[a-zäöü]", text, re.MULTILINE)
    assert set(text) <= set("abcdefghijklmnopqrstuvwxyzäöüßABCDEFGHIJKLMNOPQRSTUVWXYZÄÖÜ ,.?-'\n")
    assert all(en[-1] == de[-1] for en, de in pairs)
    lengths = [len(en.split()) for en, _ in pairs]
    assert max(lengths) <= 18 and 8 < sum(lengths) / len(lengths) < 11


def test_same_seed_same_text_whatever_the_hash_seed() -> None:
    code = ("import hashlib, itertools; from deepnmt.extras.demo.grammar import Grammar; "
            "print(hashlib.sha256(repr(list(itertools.islice(Grammar(5).pairs(), 800))).encode()).hexdigest())")
    digests = [
        subprocess.run([sys.executable, "-c", code], env={**os.environ, "PYTHONHASHSEED": seed}, check=True,
                       capture_output=True, text=True).stdout.strip()
        for seed in ("1", "2")
    ]
    here = hashlib.sha256(repr(list(islice(Grammar(5).pairs(), 800))).encode()).hexdigest()
    assert digests == [here, here]
    assert list(islice(Grammar(6).pairs(), 20)) != list(islice(Grammar(5).pairs(), 20))


def read(folder: Path, name: str) -> list[str]:
    return (folder / name).read_text(encoding="utf-8").splitlines()


def test_a_corpus_of_100_000_distinct_pairs(tmp_path: Path) -> None:
    made = make_corpus(tmp_path / "text", pairs=100_000, valid=50, test=100)
    assert made["counts"] == {"test": 100, "valid": 50, "train": 100_000}
    for lang in ("en", "de"):
        lines = [line for split in ("train", "valid", "test") for line in read(tmp_path / "text", f"{split}.{lang}")]
        assert len(lines) == len(set(lines)) == 100_150
        assert sum(len(line.split()) for line in lines) == sum(words[lang] for words in made["words"].values())


def test_a_complete_corpus_is_reused_and_a_damaged_one_made_again(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "text"
    make = partial(make_corpus, folder, valid=5, test=5)
    first, file = make(pairs=40), folder / "train.de"
    before, text = file.stat().st_mtime_ns, file.read_bytes()
    assert make(pairs=40) == first
    assert file.stat().st_mtime_ns == before
    file.write_bytes(text[:-10])
    assert make(pairs=40) == first
    assert file.read_bytes() == text
    tests = read(folder, "test.en")
    make(pairs=60)
    assert len(read(folder, "train.en")) == 60
    assert read(folder, "test.en") == tests
    make(pairs=60, seed=2)
    assert read(folder, "test.en") != tests
    assert [path.name for path in folder.parent.iterdir()] == ["text"]  # nothing is left aside


def test_a_folder_of_other_things_is_not_touched(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine", encoding="utf-8")
    with pytest.raises(UserError, match=r"other content than a demo corpus \(notes.txt\); choose a new folder"):
        make_corpus(tmp_path, pairs=10, valid=1, test=1)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]
    make_corpus(tmp_path / "demo", pairs=10, valid=1, test=1)
    (tmp_path / "demo" / "run").mkdir()
    with pytest.raises(UserError, match=r"has other content than a demo corpus \(run\); choose a new folder"):
        make_corpus(tmp_path / "demo", pairs=20, valid=1, test=1)
    assert len(read(tmp_path / "demo", "train.en")) == 10 and (tmp_path / "demo" / "run").is_dir()
    with pytest.raises(UserError, match="valid of the demo corpus is 0, must be 1 or more"):
        make_corpus(tmp_path / "text", pairs=10, valid=0, test=1)
