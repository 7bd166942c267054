"""`deepnmt prepare` for masked language models: text files to a folder of token arrays, beside what
`data/task_folder.py` says:

    train.tokens, train.offsets     the sequences without their marks, see `data/arrays.py`; valid likewise
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from deepnmt.data.arrays import Side, SideWriter
from deepnmt.data.task_folder import SPLITS, PreparedFolder, kind_of_folder, write_vocabulary
from deepnmt.data.text import read_lines
from deepnmt.data.vocab import Vocabulary
from deepnmt.errors import UserError
from deepnmt.progress import show_progress
from deepnmt.tasks.masked_lm.masking import MASK
from deepnmt.tasks.masked_lm.settings import MaskedRecipe
from deepnmt.tokens import UNK

CHUNK = 10_000  # lines or documents that are segmented at a time


class PreparedText(PreparedFolder):
    """A complete folder, whose vocabulary has `<mask>`."""

    kind = kind_of_folder("deepnmt-masked-lm")

    def sequences(self, split: str) -> Side:
        """The sequences of train or valid."""
        return Side(self.folder, self.manifest["files"], split)

    @classmethod
    def write(cls, recipe: MaskedRecipe, folder: Path) -> dict[str, dict[str, int]]:
        """The short text comes first, for its faults. Raises `UserError`; see `read_units`."""
        if recipe.vocab.model is None:
            for _ in read_units(recipe, "valid"):
                pass  # its faults are told before the vocabulary is learned
        lines = itertools.chain.from_iterable(lines for _, lines in read_units(recipe, "train"))
        vocab = write_vocabulary(recipe, folder, itertools.islice(lines, recipe.vocab.max_sentences), [MASK])
        return {split: _encode(recipe, split, vocab, folder) for split in reversed(SPLITS)}

    @classmethod
    def describe(cls, recipe: MaskedRecipe, counts: dict[str, int]) -> str:
        return (f"{counts['sequences']:,} sequences of {counts['units']:,} {recipe.data.unit}, "
                f"{counts['tokens']:,} tokens, {counts['unknown']:,} of them unknown")


def _encode(recipe: MaskedRecipe, split: str, vocab: Vocabulary, folder: Path) -> dict[str, int]:
    """Writes the tokens of a split; returns its counts."""
    room = recipe.data.length - 2  # for the marks bos and eos
    writer = SideWriter(folder, split, vocab.size)
    counts = dict.fromkeys(("units", "sequences", "tokens", "unknown"), 0)
    with show_progress(f"{split}: encoding: {{:,}} {recipe.data.unit}", desc=f"{split}: encoding") as progress:
        units = read_units(recipe, split)
        while chunk := list(itertools.islice(units, CHUNK)):
            tokens: list[int] = []
            lengths: list[int] = []
            for where, lines in chunk:
                ids = list(itertools.chain.from_iterable(vocab.encode_batch(lines, tags=False)))
                if not ids:
                    raise UserError(f"{where}: the {recipe.data.unit[:-1]} has no piece of the vocabulary; remove it")
                tokens += ids
                for start in range(0, len(ids), room):
                    lengths.append(min(room, len(ids) - start))
            writer.add(np.array(tokens, dtype=np.uint32), np.array(lengths, dtype=np.int64))
            counts["units"] += len(chunk)
            counts["sequences"] += len(lengths)
            counts["tokens"] += len(tokens)
            counts["unknown"] += tokens.count(UNK)
            progress(counts["units"])
    return counts


def read_units(recipe: MaskedRecipe, split: str) -> Iterator[tuple[str, list[str]]]:
    """Each line or document of a text: where it begins, as "FILE, line N", and its lines.

    Raises:
        UserError: a file cannot be read, or is no text; a line or a document is empty; a text has none.
    """
    files = PreparedText.files(recipe)[split]
    whole = recipe.data.unit == "documents"
    empty = True
    document: list[str] = []
    for file in files:
        begin, number = 1, 0
        document = []
        for number, line in enumerate(read_lines(file), start=1):
            text = line.strip()
            if recipe.data.lowercase:
                text = text.lower()
            if text and whole:
                document.append(text)
            elif text:
                yield f"{file}, line {number}", [text]
            elif not whole:
                raise UserError(f"{file}, line {number}: the line is empty, but data.unit is lines; remove it, or set "
                                "data.unit=documents if empty lines are between documents")
            elif not document:
                raise UserError(f"{file}, line {number}: an empty document, since nothing stands before this empty "
                                "line; leave one empty line between documents")
            else:
                yield f"{file}, line {begin}", document
                begin, document = number + 1, []
        if document:
            yield f"{file}, line {begin}", document
        empty = empty and not number
    if empty:
        raise UserError(f"data.{split}: there is no text in {', '.join(map(str, files))}; give another file")
