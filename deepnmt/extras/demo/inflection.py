"""Word forms of English and German, as functions of an entry of the lexicon.

Cases are 0 nominative, 1 accusative, 2 dative, 3 genitive. Verb forms come in four slots: 0 I/ich, 1 you/du,
2 he/er, 3 we and they/wir und sie. Plural nouns have the gender `p`.
"""

from __future__ import annotations

from functools import cache

from deepnmt.extras.demo.lexicon import ROWS, Adjective, Noun, Verb

NOM, ACC, DAT, GEN = range(4)


def _table(text: str) -> dict[str, list[str]]:
    """A name and its forms on each line, `-` for an empty one."""
    table = {}
    for line in text.strip().splitlines():
        name, *forms = line.split()
        table[name] = ["" if form == "-" else form for form in forms]
    return table


_DECLENSIONS = _table("""
    der.m    der den dem des
    der.f    die die der der
    der.n    das das dem des
    der.p    die die den der
    dies.m   er  en  em  es
    dies.f   e   e   er  er
    dies.n   es  es  em  es
    dies.p   e   e   en  er
    ein.m    -   en  em  es
    ein.f    e   e   er  er
    ein.n    -   -   em  es
    ein.p    e   e   en  er
    weak.m   e   en  en  en
    weak.f   e   e   en  en
    weak.n   e   e   en  en
    weak.p   en  en  en  en
    mixed.m  er  en  en  en
    mixed.f  e   e   en  en
    mixed.n  es  es  en  en
    mixed.p  en  en  en  en
    strong.p e   e   en  er
""")
# Irregular verbs, and for each English mode the German auxiliary
CONJUGATIONS = _table("""
    be.present   am     are     is     are
    be.past      was    were    was    were
    sein.present bin    bist    ist    sind
    sein.past    war    warst   war    waren
    haben        habe   hast    hat    haben
    wissen       weiß   weißt   weiß   wissen
    future       werde  wirst   wird   werden
    can          kann   kannst  kann   können
    must         muss   musst   muss   müssen
    want         will   willst  will   wollen
    should       sollte solltest sollte sollten
""")
_LIKE_DIESER = ("dies", "jed", "welch")
_NUMBERS_EN = {int(number): en for number, en, _ in ROWS["number"]}
_NUMBERS_DE = {int(number): de for number, _, de in ROWS["number"]}


def number_en(number: int) -> str:
    """A number from 0 to 9,999 in English words: 9041 is `nine thousand and forty-one`."""
    thousands, hundreds, below, ones = number // 1000, number // 100 % 10, number % 100, number % 10
    words = []
    if thousands:
        words.append(f"{_NUMBERS_EN[thousands]} thousand")
    if hundreds:
        words.append(f"{_NUMBERS_EN[hundreds]} hundred")
    if words and not below:
        return " ".join(words)
    if words:
        words.append("and")
    if below in _NUMBERS_EN:
        words.append(_NUMBERS_EN[below])
    else:
        words.append(f"{_NUMBERS_EN[below - ones]}-{_NUMBERS_EN[ones]}")
    return " ".join(words)


def number_de(number: int) -> str:
    """A number from 0 to 9,999 in German words, in the form without a noun: 101 is `hunderteins`."""
    thousands, hundreds, below, ones = number // 1000, number // 100 % 10, number % 100, number % 10

    def times(digit: int, one: str) -> str:
        return one if digit == 1 else _NUMBERS_DE[digit]

    word = ""
    if thousands:
        word = times(thousands, "") + "tausend"
    if hundreds:
        word += times(hundreds, "ein" if word else "") + "hundert"
    if word and not below:
        return word
    if below in _NUMBERS_DE:
        return word + _NUMBERS_DE[below]
    return f"{word}{times(ones, 'ein')}und{_NUMBERS_DE[below - ones]}"


def article_en(next_word: str) -> str:
    """`a` or `an`. The lexicon has no word for which the first letter misleads."""
    return "an" if next_word[0] in "aeiou" else "a"


def _with_ending(word: str, ending: str) -> str:
    """An English word with -s or -ed."""
    if word.endswith("y") and word[-2] not in "aeiou":
        word = f"{word[:-1]}ie"
    elif ending == "s" and word.endswith(("s", "x", "ch", "sh")):
        word += "e"
    if word.endswith("e"):
        ending = ending.removeprefix("e")
    return word + ending


@cache
def plural_en(noun: Noun) -> str:
    """The English plural."""
    return noun.en_plural or _with_ending(noun.en, "s")


@cache
def verb_en(verb: Verb, form: str) -> str:
    """The English `base`, `third` (person singular present) or `past`, without a moving particle."""
    head, *fixed = verb.en.partition("|")[0].split(" ", 1)
    if form == "third":
        head = {"have": "has", "go": "goes"}.get(head) or _with_ending(head, "s")
    elif form == "past":
        head = verb.past or _with_ending(head, "ed")
    return " ".join([head, *fixed])


@cache
def present_de(verb: Verb, slot: int) -> str:
    """The German present, without a separable prefix."""
    infinitive = verb.de.rpartition("|")[2]
    if infinitive in CONJUGATIONS:
        return CONJUGATIONS[infinitive][slot]
    stem = infinitive[:-1] if infinitive.endswith("ern") else infinitive[:-2]
    if slot == 3:
        return infinitive
    if slot == 0:
        return f"{stem}e"
    if verb.changed:
        stem = verb.changed
    elif stem.endswith(("t", "d")):
        stem += "e"
    if slot == 2 or stem.endswith(("s", "ß", "z")):
        return f"{stem}t"
    return f"{stem}st"


def perfect_de(verb: Verb, slot: int) -> tuple[str, str]:
    """The German perfect: the form of haben or sein, and the participle."""
    auxiliary, participle = verb.perfect.split()
    infinitive = "haben" if auxiliary == "hat" else "sein.present"
    return CONJUGATIONS[infinitive][slot], participle


def noun_de(noun: Noun, case: int, plural: bool) -> str:
    """The German noun in a case."""
    if plural:
        if case == DAT and noun.de_plural[-1] not in "ns":
            return f"{noun.de_plural}n"
        return noun.de_plural
    if noun.weak and case != NOM:
        return noun.weak
    if case == GEN and noun.gender != "f":
        return noun.de + noun.genitive
    return noun.de


def determiner_de(word: str, gender: str, case: int) -> str:
    """The German determiner in its form.

    Args:
        word: `der`, a stem inflected like dieser (`dies`, `jed`, `welch`), a stem inflected like ein (`ein`, `kein`,
            `mein`, ...), or nothing for a plural without an article.
        gender: m, f, n, or p for the plural.
    """
    if not word:
        return ""
    if word == "der":
        return _DECLENSIONS[f"der.{gender}"][case]
    pattern = "dies" if word in _LIKE_DIESER else "ein"
    return word + _DECLENSIONS[f"{pattern}.{gender}"][case]


def adjective_de(adjective: Adjective, word: str, gender: str, case: int) -> str:
    """The German adjective before its noun: weak after der and dieser, mixed after ein, strong without a determiner
    (only plurals have none here)."""
    kind = "mixed"
    if not word:
        kind = "strong"
    elif word == "der" or word in _LIKE_DIESER:
        kind = "weak"
    stem = adjective.stem or adjective.de
    return stem + _DECLENSIONS[f"{kind}.{gender}"][case]
