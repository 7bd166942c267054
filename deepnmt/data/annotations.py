"""Annotations: what a text has beside its pairs, line by line. Visitors read them.

A setting of a corpus that is marked `Fact.ANNOTATION` names the files, and a visitor's module `annotations` has an
`Annotation` under the setting's name. `deepnmt prepare` hashes the files like those of the text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from deepnmt.config import Corpus
from deepnmt.data.filters import Codes
from deepnmt.data.text import Line, Pair, corpora_of, files_of, numbered_lines, read_pairs
from deepnmt.data.vocab import Vocabulary
from deepnmt.visitors import find, require_visitors


class Annotated(NamedTuple):
    """A corpus, or a unit of one, with an annotation beside it.

    Attributes:
        tag: of the corpus.
        pairs: without the tag.
        files: of the annotation; none where the corpus has none.
        lines: theirs.
    """

    tag: str | None
    pairs: Iterator[Pair]
    files: list[str]
    lines: Iterator[Line]


@dataclass(frozen=True)
class Annotation:
    """How an annotation is prepared.

    Attributes:
        write: (folder, name, parts, codes, vocabularies) writes the arrays of the split `name`, for the pairs of its
            parts that `codes` keep; their pieces lie in the folder already. Returns counts for the manifest, where they
            stand under the setting's name. Raises `UserError` if a file is faulty.
        describe: (counts) returns what `prepare` says of them, a clause and then sentences.
    """

    write: Callable[[Path, str, Iterable[Annotated], Codes, tuple[Vocabulary, Vocabulary]], dict[str, int]]
    describe: Callable[[Mapping[str, int]], list[str]]


def annotations_of(text: Corpus) -> dict[str, Annotation]:
    """Those that a text, or a corpus of it, has, by their settings. Raises `UserError` where no visitor reads them."""
    annotations: dict[str, Annotation] = {}
    for corpus in corpora_of(text).values():
        require_visitors(corpus)
        for setting in corpus.annotations:
            annotations[setting] = find("annotations", setting)
    return annotations


def annotated_text(text: Corpus) -> dict[str, list[Annotated]]:
    """The corpora of a text with each of its annotations, by the settings of these. Raises `UserError`, see
    `annotations_of`."""
    annotated: dict[str, list[Annotated]] = {}
    for setting in annotations_of(text):
        annotated[setting] = []
        for corpus in corpora_of(text).values():
            files = files_of(corpus.annotations.get(setting, ()))
            annotated[setting].append(
                Annotated(corpus.tag, read_pairs(corpus, tags=False), files, numbered_lines(files)))
    return annotated
