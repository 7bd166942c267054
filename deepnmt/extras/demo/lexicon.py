"""The words of the demo corpus, read from `lexicon.tsv`, where the columns are explained.

Each English word has one German counterpart wherever it is used, so a sentence has one translation. A bar marks a
separable part: `auf|machen` (er macht auf), `pick|up` (picks him up). Tags tell which words fit together: a verb lists
the tags of its subjects and objects, an adjective those of its nouns, so sentences are sometimes odd, never nonsense.

Entries compare by identity, which makes them fast dictionary keys.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path


@dataclass(frozen=True, eq=False)
class Noun:
    en: str
    de: str
    de_plural: str
    gender: str
    tags: str
    en_plural: str
    genitive: str
    weak: str


@dataclass(frozen=True, eq=False)
class Verb:
    kind: str
    en: str
    de: str
    perfect: str
    objects: str
    past: str
    changed: str
    subjects: str
    case: str
    en_prep: str
    de_prep: str
    stative: str


@dataclass(frozen=True, eq=False)
class Adjective:
    en: str
    de: str
    tags: str
    en_more: str
    de_more: str
    stem: str


def _read() -> dict[str, list[list[str]]]:
    rows: dict[str, list[list[str]]] = {}
    for line in Path(__file__).with_name("lexicon.tsv").read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            kind, *cells = line.split("\t")
            rows.setdefault(kind, []).append(["" if cell == "-" else cell for cell in cells])
    return rows


ROWS = _read()
NOUNS = [Noun(*row) for row in ROWS["noun"]]
VERBS = [Verb(*row) for row in ROWS["verb"]]
ADJECTIVES = [Adjective(*row) for row in ROWS["adjective"]]


def share(tags: str, others: str) -> bool:
    """Whether two lists of tags have one in common."""
    return not set(tags.split()).isdisjoint(others.split())


@cache
def nouns(tags: str) -> list[Noun]:
    """The nouns that carry any of the tags."""
    return [noun for noun in NOUNS if share(noun.tags, tags)]


@cache
def adjectives(noun: Noun, compared: bool = False) -> list[Adjective]:
    """The adjectives that go with a noun; `compared`: those that have a comparative."""
    return [a for a in ADJECTIVES if share(a.tags, noun.tags) and (a.en_more or not compared)]


@cache
def verbs(kinds: str) -> list[Verb]:
    """The verbs of the kinds, one kind after the other."""
    return [verb for kind in kinds.split() for verb in VERBS if verb.kind == kind]


@cache
def verbs_for(noun: Noun) -> list[Verb]:
    """The verbs that take a noun as their only object."""
    return [verb for verb in verbs("transitive") if share(verb.objects, noun.tags)]
