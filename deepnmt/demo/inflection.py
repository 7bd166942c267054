"""Word forms of English and German: what a grammar's tables say, as functions of a dictionary entry.

Cases are 0 nominative, 1 accusative, 2 dative, 3 genitive. Verb forms come in four slots: 0 I/ich, 1 you/du,
2 he/er, 3 we and they/wir und sie. Plural nouns have the gender `p`.
"""

from __future__ import annotations

from functools import cache

from deepnmt.demo.lexicon import Adjective, Noun, Verb

NOM, ACC, DAT, GEN = range(4)

_DEFINITE = {"m": ("der", "den", "dem", "des"), "f": ("die", "die", "der", "der"),
             "n": ("das", "das", "dem", "des"), "p": ("die", "die", "den", "der")}
_DIES_ENDINGS = {"m": ("er", "en", "em", "es"), "f": ("e", "e", "er", "er"),
                 "n": ("es", "es", "em", "es"), "p": ("e", "e", "en", "er")}
_EIN_ENDINGS = {**_DIES_ENDINGS, "m": ("", "en", "em", "es"), "n": ("", "", "em", "es")}
_WEAK = {"m": ("e", "en", "en", "en"), "f": ("e", "e", "en", "en"),
         "n": ("e", "e", "en", "en"), "p": ("en", "en", "en", "en")}
_MIXED = {**_WEAK, "m": ("er", "en", "en", "en"), "n": ("es", "es", "en", "en")}
_STRONG_PLURAL = ("e", "e", "en", "er")

_PRESENT = {
    "haben": ("habe", "hast", "hat", "haben"),
    "sein": ("bin", "bist", "ist", "sind"),
    "war": ("war", "warst", "war", "waren"),
    "werden": ("werde", "wirst", "wird", "werden"),
    "wissen": ("weiß", "weißt", "weiß", "wissen"),
}
# English modes: the German verb that carries each
MODES = {
    "future": _PRESENT["werden"],
    "can": ("kann", "kannst", "kann", "können"),
    "must": ("muss", "musst", "muss", "müssen"),
    "want": ("will", "willst", "will", "wollen"),
    "should": ("sollte", "solltest", "sollte", "sollten"),
}

_SMALL_EN = (
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve",
    "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen",
)
_TENS_EN = ("", "", "twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")
_SMALL_DE = (
    "null", "eins", "zwei", "drei", "vier", "fünf", "sechs", "sieben", "acht", "neun", "zehn", "elf", "zwölf",
    "dreizehn", "vierzehn", "fünfzehn", "sechzehn", "siebzehn", "achtzehn", "neunzehn",
)
_TENS_DE = ("", "", "zwanzig", "dreißig", "vierzig", "fünfzig", "sechzig", "siebzig", "achtzig", "neunzig")


def number_en(number: int) -> str:
    """A number from 0 to 9,999 in English words: 9041 is `nine thousand and forty-one`."""
    thousands, rest = divmod(number, 1000)
    hundreds, below = divmod(rest, 100)
    words = []
    if thousands:
        words.append(f"{_SMALL_EN[thousands]} thousand")
    if hundreds:
        words.append(f"{_SMALL_EN[hundreds]} hundred")
    if below or not words:
        tens, ones = divmod(below, 10)
        last = _SMALL_EN[below] if below < 20 else _TENS_EN[tens] + (f"-{_SMALL_EN[ones]}" if ones else "")
        words.append(f"and {last}" if words else last)
    return " ".join(words)


def number_de(number: int) -> str:
    """A number from 0 to 9,999 in German words, counted, not before a noun: 101 is `hunderteins`."""
    thousands, rest = divmod(number, 1000)
    hundreds, below = divmod(rest, 100)
    word = ""
    if thousands:
        word += ("" if thousands == 1 else _SMALL_DE[thousands]) + "tausend"
    if hundreds:
        word += (("ein" if word else "") if hundreds == 1 else _SMALL_DE[hundreds]) + "hundert"
    if not below and word:
        return word
    if below < 20:
        return word + _SMALL_DE[below]
    tens, ones = divmod(below, 10)
    if ones:
        word += ("ein" if ones == 1 else _SMALL_DE[ones]) + "und"
    return word + _TENS_DE[tens]


def article_en(next_word: str) -> str:
    """`a` or `an`. The lexicon holds no word whose first letter and first sound differ."""
    return "an" if next_word[0] in "aeiou" else "a"


@cache
def plural_en(noun: Noun) -> str:
    """The English plural."""
    if noun.en_plural:
        return noun.en_plural
    return _with_s(noun.en)


def _with_s(word: str) -> str:
    if word.endswith("y") and word[-2] not in "aeiou":
        return word[:-1] + "ies"
    return word + ("es" if word.endswith(("s", "x", "ch", "sh")) else "s")


@cache
def verb_en(verb: Verb, form: str) -> str:
    """The English `base`, `third` (person singular present) or `past`, without a moving particle."""
    phrase = verb.en.partition("|")[0]
    head, _, fixed = phrase.partition(" ")
    if form == "third":
        head = {"have": "has", "go": "goes"}.get(head) or _with_s(head)
    elif form == "past":
        head = verb.past or _regular_past(head)
    return f"{head} {fixed}" if fixed else head


def _regular_past(word: str) -> str:
    if word.endswith("y") and word[-2] not in "aeiou":
        return word[:-1] + "ied"
    return word + ("d" if word.endswith("e") else "ed")


@cache
def present_de(verb: Verb, slot: int) -> str:
    """The German present, without a separable prefix."""
    infinitive = verb.de.rpartition("|")[2]
    if infinitive in _PRESENT:
        return _PRESENT[infinitive][slot]
    if slot == 3:
        return infinitive
    stem = infinitive[:-1] if infinitive.endswith("ern") else infinitive[:-2]
    if slot == 0:
        return stem + "e"
    link = "e" if not verb.changed and stem.endswith(("t", "d")) else ""
    stem = verb.changed or stem
    if slot == 1:
        return stem + link + ("t" if stem.endswith(("s", "ß", "z")) else "st")
    return stem + link + "t"


def prefix_de(verb: Verb) -> str:
    """The separable prefix, or nothing."""
    return verb.de.rpartition("|")[0]


def infinitive_de(verb: Verb) -> str:
    """The German infinitive, in one word."""
    return verb.de.replace("|", "")


def perfect_de(verb: Verb, slot: int) -> tuple[str, str]:
    """The German perfect: the form of haben or sein, and the participle."""
    auxiliary, participle = verb.perfect.split()
    return _PRESENT["haben" if auxiliary == "hat" else "sein"][slot], participle


def be_en(slot: int, past: bool) -> str:
    """The forms of `be`."""
    return (("was", "were", "was", "were") if past else ("am", "are", "is", "are"))[slot]


def be_de(slot: int, past: bool) -> str:
    """The forms of `sein`."""
    return _PRESENT["war" if past else "sein"][slot]


def noun_de(noun: Noun, case: int, plural: bool) -> str:
    """The German noun in a case."""
    if plural:
        return noun.de_plural + ("n" if case == DAT and noun.de_plural[-1] not in "ns" else "")
    if noun.weak and case != NOM:
        return noun.weak
    return noun.de + (noun.genitive if case == GEN and noun.gender != "f" else "")


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
        return _DEFINITE[gender][case]
    endings = _DIES_ENDINGS if word in ("dies", "jed", "welch") else _EIN_ENDINGS
    return word + endings[gender][case]


def adjective_de(adjective: Adjective, word: str, gender: str, case: int) -> str:
    """The German adjective before its noun: weak after der and dieser, mixed after ein, strong without a determiner."""
    if not word:
        ending = _STRONG_PLURAL[case]  # only plurals go without a determiner here
    else:
        ending = (_WEAK if word in ("der", "dies", "jed", "welch") else _MIXED)[gender][case]
    return (adjective.stem or adjective.de) + ending
