"""Word alignments of prepared texts, for guided alignment and for the alignment error of a validation.

A line of an alignment file has the links of a sentence pair as Pharaoh wrote them: "0-0 1-2". Words are kept, not
pieces, so that one array serves every sampled segmentation; a link of two words is one of all their pieces.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path

import numpy as np

from deepnmt.data.annotations import Annotated, Annotation
from deepnmt.data.arrays import Indices, SideWriter, Split, Tokens
from deepnmt.data.batching import Sentences
from deepnmt.data.encoding import CHUNK
from deepnmt.data.filters import KEPT, Codes
from deepnmt.data.prepared import REMEDY, PreparedData
from deepnmt.data.vocab import Vocabulary
from deepnmt.errors import UserError

_LINK = re.compile(r"(\d{1,9})-(\d{1,9})")
_SIDES = ("source", "target")


def write_links(folder: Path, name: str, parts: Iterable[Annotated], codes: Codes,
                vocabs: tuple[Vocabulary, Vocabulary]) -> dict[str, int]:
    """Writes the links of the pairs that are kept beside their pieces, and returns counts for the manifest.

    A pair has none where the pieces begin another number of words than the text has, as with a vocabulary of other
    spaces.

    Raises:
        UserError: a file has another number of lines than its corpus, or a line is faulty.
    """
    split = Split(folder, os.listdir(folder), name)
    writer = SideWriter(folder, f"{name}.links")
    source_starts, target_starts = (np.array(vocab.begins_word) for vocab in vocabs)
    flat: list[int] = []
    lengths: list[int] = []
    row = aligned = unlike = links = 0
    for (linked, sizes), code in zip(_read_links(parts), codes, strict=True):
        if code != KEPT:
            continue
        if sizes != (_count(split.sources[row], source_starts), _count(split.targets[row], target_starts)):
            unlike += bool(linked)
            linked = []
        row += 1
        for link in linked:
            flat += link
        lengths.append(2 * len(linked))
        aligned += bool(linked)
        links += len(linked)
        if len(lengths) == CHUNK:
            writer.add(np.array(flat, dtype=np.uint16), np.array(lengths))
            flat, lengths = [], []
    writer.add(np.array(flat, dtype=np.uint16), np.array(lengths, dtype=np.int64))
    return {"aligned": aligned, "links": links, "unlike": unlike}


def _describe(counts: Mapping[str, int]) -> list[str]:
    lines = [f"word alignments of {counts['aligned']:,} pairs, {counts['links']:,} links"]
    if counts["unlike"]:
        lines.append(f"word alignments of {counts['unlike']:,} more pairs are left out, whose pieces have other words "
                     "than their text")
    return lines


alignments = Annotation(write_links, _describe)  # data.*.alignments


def _read_links(parts: Iterable[Annotated]) -> Iterator[tuple[list[tuple[int, int]], tuple[int, int]]]:
    """The links of every pair of a text, and its numbers of words; a corpus's tag is a word of the source."""
    for tag, all_pairs, files, lines in parts:
        tags = 1 if tag else 0
        for count, (pair, line) in enumerate(zip_longest(all_pairs, lines)):
            if pair is None or (files and line is None):
                aligned, pairs = str(count), f"at least {count + 1}"
                if pair is None:
                    aligned, pairs = str(count + 1 + sum(1 for _ in lines)), str(count)
                raise UserError(f"{', '.join(files)}: {aligned} lines of word alignments for {pairs} "
                                "sentence pairs; line N of one must align line N of the other")
            words = [len([word for word in side.split(" ") if word]) for side in pair]
            links = []
            if line is not None:
                file, number, content = line
                links = [(source + tags, target) for source, target in _links(file, number, content, words)]
            yield links, (words[0] + tags, words[1])


def _links(file: str, number: int, line: str, words: Sequence[int]) -> Iterator[tuple[int, int]]:
    """The links of a line; `words`: of source and target."""
    for text in line.split():
        match = _LINK.fullmatch(text)
        if match is None:
            raise UserError(f"{file}, line {number}: {text!r} is no link; write links as SOURCE-TARGET, two words "
                            "counted from 0, such as 0-0 1-2")
        for side, word, count in zip(_SIDES, map(int, match.groups()), words, strict=True):
            if word >= count:
                raise UserError(f"{file}, line {number}: {text} is beyond the {side} sentence, which has {count} words "
                                "counted from 0; align the text that the recipe names, in words that spaces separate")
        yield int(match[1]), int(match[2])


def _words(ids: Tokens | Indices, starts: np.typing.NDArray[np.bool_]) -> Indices:
    """The numbers, from 0, of the words that pieces [..., L] are of."""
    begins = starts[ids]
    begins[..., :1] = True
    return np.cumsum(begins, axis=-1) - 1


def _count(ids: Tokens, starts: np.typing.NDArray[np.bool_]) -> int:
    """The number of words that the pieces of a sentence are of."""
    return int(_words(ids, starts)[-1]) + 1 if len(ids) else 0


class Links:
    """The word alignments of a split. Raises `UserError` if it was prepared without."""

    def __init__(self, data: PreparedData, name: str) -> None:
        if "alignments" not in data.manifest["splits"][name]:
            raise UserError(f"prepared data {data.folder} has no word alignments of the {name} text; {REMEDY}")
        self._text = data.split(name)
        self._starts = [np.array(vocab.begins_word) for vocab in data.vocabs()]

    def of(self, row: int) -> list[tuple[int, int]]:
        """The linked words of a sentence."""
        return [(int(source), int(target)) for source, target in self._text.column("links")[row].reshape(-1, 2)]

    def of_pieces(self, split: Sentences, rows: Indices) -> Indices:
        """The links of pieces in the micro-batch of these sentences, int64 [4, L]: sentence, position of the target,
        position of the source, and how many links that target has."""
        links = split.column("links")
        words = [np.array(links[int(row)]).reshape(-1, 2) for row in rows]
        size = 1 + max((int(pairs.max(initial=0)) for pairs in words), default=0)
        linked = np.zeros((len(rows), size + 1, size + 1), dtype=bool)  # the last is of words without links
        for sentence, pairs in zip(linked, words, strict=True):
            sentence[pairs[:, 1], pairs[:, 0]] = True
        word_of_piece = []  # of source and target
        for side, starts in zip((split.sources, split.targets), self._starts, strict=True):
            ids, lengths = side.with_eos(rows)
            real = np.arange(ids.shape[1]) < lengths[:, None] - 1
            word_of_piece.append(np.where(real, np.minimum(_words(ids, starts), size), size))
        source, target = word_of_piece
        gold = linked[np.arange(len(rows))[:, None, None], target[:, :, None], source[:, None, :]]
        places = np.nonzero(gold)
        return np.stack([*places, gold.sum(2)[places[:2]]]).astype(np.int64)
