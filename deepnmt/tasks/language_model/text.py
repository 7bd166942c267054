"""Prepared text: files to one stream of tokens, or one for each document, cut into blocks. Beside what
`data/task_folder.py` says:

    train.tokens, train.offsets     the tokens of all documents, and where each begins, see `data/arrays.py`; so too
                                    valid and test.NAME

Every line ends with eos. What a document's first token is predicted from is eos, too. A pair is a document: source,
bos, target, eos. No text has the token bos, so it separates them whatever is in the text, and a search begins behind it
as behind that of any decoder. `B` blocks, `T` tokens of the longest.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice, pairwise
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt
import torch

from deepnmt import folders
from deepnmt.batch import Batch
from deepnmt.config import Recipe
from deepnmt.data.arrays import OFFSET, TOKENS, Indices, Lengths, SideWriter, array_of
from deepnmt.data.examples import Examples
from deepnmt.data.task_folder import PreparedFolder, kind_of_folder, write_vocabulary
from deepnmt.data.text import files_of, pair_files, read_lines, side_by_side
from deepnmt.data.vocab import SPACE, Vocabulary
from deepnmt.errors import UserError
from deepnmt.progress import show_progress
from deepnmt.tasks.language_model.settings import LanguageRecipe, Texts
from deepnmt.tokens import BOS, EOS, PAD, UNK

CHUNK = 10_000  # lines that are segmented at a time
_UNKNOWN = 0.5  # the share of unknown pieces of a file above which the vocabulary is another text's


def texts_of(recipe: Recipe) -> Texts:
    """The recipe's data section."""
    return cast(LanguageRecipe, recipe).data


class Line(NamedTuple):
    """A line, and where it is; `text` is None where a document ends. `source`: of a pair, whose target it is."""

    text: str | None
    file: Path
    number: int
    source: str | None = None


def read_documents(files: Sequence[Path], apart: bool) -> Iterator[Line]:
    """The lines of files; if documents are kept apart, without the empty ones, each of which, and the end of a file,
    ends one.

    Raises:
        UserError: a file cannot be read, is no text or has none; or a document is empty.
    """
    for name in files:
        line, begun, number = "", False, 0
        for number, line in enumerate(read_lines(name), 1):
            text = line.strip()
            if text or not apart:
                begun = True
                yield Line(text, name, number)
            elif begun:
                begun = False
                yield Line(None, name, number)
            else:
                raise UserError(f"{name}, line {number}: a document is empty, since nothing stands above this empty "
                                "line; remove it, or set data.documents: false")
        if not number:
            raise UserError(f"there is no text in {name}; give another file, or leave it out")
        if begun and apart:
            yield Line(None, name, number)


def read_joined(files: Sequence[Path]) -> Iterator[Line]:
    """The targets of pairs, files of sources and of targets in turn, with their sources; a document ends behind each.

    Raises:
        UserError: a file cannot be read, is no text or has none; a line is empty; or two files differ in their numbers
            of lines.
    """
    for source, target in zip(files[::2], files[1::2], strict=True):
        number = 0
        pairs = side_by_side(read_lines(source), read_lines(target), str(source), str(target))
        for number, (src, trg) in enumerate(pairs, 1):
            for side, text, file in (("source", src, source), ("target", trg, target)):
                if not text.strip():
                    raise UserError(f"{file}, line {number}: the {side} is empty; leave the pair out")
            yield Line(trg.strip(), target, number, src.strip())
            yield Line(None, target, number)
        if not number:
            raise UserError(f"there is no text in {source} and {target}; give other files, or leave them out")


def lines_of(recipe: Recipe, files: Sequence[Path]) -> Iterator[Line]:
    """The lines of a split's files. Raises `UserError`, see `read_joined` and `read_documents`."""
    data = texts_of(recipe)
    return read_joined(files) if data.pairs else read_documents(files, data.documents)


# -- the folder --------------------------------------------------------------------------------------------------------


class PreparedText(PreparedFolder):
    """A complete folder of documents. Of pairs it has no test sets, which are translated as they are."""

    kind = kind_of_folder("deepnmt-text")

    @classmethod
    def settings(cls, recipe: LanguageRecipe) -> dict[str, Any]:
        settings = super().settings(recipe)
        if recipe.data.pairs:  # folders of texts say nothing of it
            return {"data.train": "pairs", **settings}
        return settings

    @classmethod
    def files(cls, recipe: LanguageRecipe) -> dict[str, list[Path]]:
        """The files of each split; of pairs, sources and targets in turn. Raises `UserError` if not each has its other
        side."""
        data = recipe.data
        texts = {"train": data.train, "valid": data.valid}
        if not data.pairs:
            texts |= {f"test.{name}": text for name, text in data.test.items()}
        files = {}
        for split, text in texts.items():
            names = pair_files(text) if text.pairs else files_of(text.trg)
            files[split] = [Path(name) for name in names]
        return files

    @classmethod
    def write(cls, recipe: LanguageRecipe, folder: Path) -> dict[str, dict[str, int]]:
        splits = cls.files(recipe)
        for files in splits.values():  # so that faults come before the long work
            for _ in lines_of(recipe, files):
                pass
        vocab = write_vocabulary(recipe, folder, _learned(recipe, splits["train"]))
        bands = recipe.model.bands
        if bands and bands[-1] >= vocab.size:
            raise UserError(f"model.bands is {bands}, but the vocabulary has {vocab.size} pieces; set the last one "
                            "lower")
        return {split: _encode(recipe, folder, split, files, vocab) for split, files in splits.items()}

    @classmethod
    def describe(cls, recipe: LanguageRecipe, counts: dict[str, int]) -> str:
        return (f"{counts['lines']:,} lines, {counts['words']:,} words, {counts['tokens']:,} tokens, "
                f"unknown {counts['unknown']:,}, documents {counts['documents']:,}")

    def counts(self, split: str) -> dict[str, int]:
        """Lines, words, bytes, tokens, unknown tokens and documents of a split."""
        return dict(self.manifest["splits"][split])

    def documents(self, split: str) -> tuple[npt.NDArray[Any], Indices]:
        """The tokens of a split, and where each document begins and the last one ends [D + 1]. Raises `UserError`."""
        suffix = "tokens" if f"{split}.tokens" in self.manifest["files"] else "tokens32"
        tokens = array_of(self.path(f"{split}.{suffix}"), TOKENS[suffix])
        offsets = array_of(self.path(f"{split}.offsets"), OFFSET)
        if not len(offsets) or offsets[0] or offsets[-1] != len(tokens) or bool((np.diff(offsets) <= 0).any()):
            raise folders.DamagedFolder(self.folder, f"{split}.offsets does not divide {split}.{suffix} into documents",
                                        self.kind)
        return tokens, offsets

    @property
    def fingerprint(self) -> str:
        """A hash of what training reads."""
        return folders.hash_of({name: entry["sha256"] for name, entry in self.manifest["files"].items()
                                if not name.startswith("test.")})

    def verify(self) -> None:
        super().verify()
        for split in self.manifest["splits"]:
            self.documents(split)


def _learned(recipe: Recipe, files: Sequence[Path]) -> Iterator[str]:
    """The first lines of the training text, from which a vocabulary is learned."""
    number = 0
    for line in lines_of(recipe, files):
        for text in (line.source, line.text):
            if text:
                number += 1
                if number > recipe.vocab.max_sentences:
                    return
                yield text


def _encode(recipe: Recipe, folder: Path, name: str, files: Sequence[Path], vocab: Vocabulary) -> dict[str, int]:
    """Writes the tokens of a split, and returns its counts. A word is what spaces separate, and a line's end is one; of
    pairs, words and bytes are those of the targets.

    Raises:
        UserError: the vocabulary is that of another text; a pair is longer than a block.
    """
    data = texts_of(recipe)
    apart = data.documents or data.pairs
    writer = SideWriter(folder, name, vocab.size)
    counts = dict.fromkeys(("lines", "words", "bytes", "tokens", "unknown", "documents"), 0)
    foreign: Line | None = None  # the first line of which nothing is known
    empty = {BOS, *vocab.ids(SPACE)} - {UNK}  # every vocabulary has them
    pieces = 0  # others
    lines = lines_of(recipe, files)
    with show_progress("{:,} lines encoded", desc=name, unit="line") as progress:
        while chunk := list(islice(lines, CHUNK)):
            encoded = iter(vocab.encode_batch([line.text for line in chunk if line.text is not None]))
            sources = iter(vocab.encode_batch([line.source for line in chunk if line.source is not None]))
            tokens: list[int] = []
            ends: list[int] = []  # of documents, in these tokens
            for line in chunk:
                if line.text is None:
                    ends.append(len(tokens))
                    continue
                ids = next(encoded)
                if line.source is not None:
                    ids = [*next(sources), BOS, *ids]
                    if len(ids) >= data.block:
                        raise UserError(f"{line.file}, line {line.number}: source and target have {len(ids) + 1} "
                                        f"tokens with separator and end, but data.block is {data.block}; set it "
                                        "higher, or leave the pair out")
                unknown = ids.count(UNK)
                told = sum(token not in empty for token in ids)
                if foreign is None and told and unknown == told:
                    foreign = line
                pieces += told
                tokens += [*ids, EOS]
                counts["lines"] += 1
                counts["words"] += len(line.text.split()) + 1
                counts["bytes"] += len(line.text.encode()) + 1
                counts["unknown"] += unknown
            lengths = [end - begin for begin, end in pairwise([0, *ends])]
            writer.add(np.array(tokens, dtype=np.uint32), np.array(lengths, dtype=np.int64))
            counts["tokens"] += len(tokens)
            counts["documents"] += len(ends)
            progress(counts["lines"])
    if not apart:
        writer.add(np.zeros(0, np.uint32), np.zeros(1, np.int64))
        counts["documents"] = 1
    if foreign is not None and counts["unknown"] > _UNKNOWN * pieces:
        raise UserError(f"{foreign.file}, line {foreign.number}: the vocabulary has no piece of this line, and "
                        f"{counts['unknown']:,} of the text's {counts['tokens']:,} tokens are unknown, so it is "
                        "another text's; correct vocab.model")
    return counts


class Blocks(Examples):
    """A text in blocks of at most `length` tokens, none of which has two documents.

    Attributes:
        starts: int64 [M], the first token of each block.
        src_lengths: int32 [M], the tokens of each block.
        trg_lengths: int32 [M], those of them that have a loss: the last ones.
        first: bool [M], whether a document begins there.
    """

    def __init__(self, name: str, tokens: npt.NDArray[Any], documents: Indices, length: int,
                 without_loss: Indices | None = None) -> None:
        """`without_loss`: how many tokens each document begins with that have none [D]; it is then one block."""
        self.name, self.tokens = name, tokens
        sizes = np.diff(documents)
        counts = -(-sizes // length)
        number = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)  # within the document
        self.first = number == 0
        self.starts: Indices = np.repeat(documents[:-1], counts) + number * length
        rest = np.repeat(documents[1:], counts) - self.starts
        self._lengths: Lengths = np.minimum(length, rest).astype(np.int32)
        self._counted = self._lengths
        if without_loss is not None:
            self._counted = (self._lengths - without_loss).astype(np.int32)

    def __len__(self) -> int:
        return len(self.starts)

    @property
    def src_lengths(self) -> Lengths:
        return self._lengths

    @property
    def trg_lengths(self) -> Lengths:
        return self._counted

    def batch(self, rows: Indices | Sequence[int], key: int, device: torch.device) -> Batch:
        """Blocks as one micro-batch: trg_out [B, T], pad where there is no loss, and trg_in [B, T], the token before
        each; pad behind the end. Without any, a block of which nothing counts."""
        rows = np.asarray(rows, dtype=np.int64)
        if not len(rows):
            return Batch({"trg_in": torch.full((1, 1), EOS, device=device),
                          "trg_out": torch.full((1, 1), PAD, device=device)}, key, 0)
        lengths = self.src_lengths[rows]
        columns = np.arange(int(lengths.max()))
        places = self.starts[rows][:, None] + columns
        inside = columns < lengths[:, None]
        trg_in = np.full(places.shape, PAD, dtype=np.int64)
        trg_out = trg_in.copy()
        counted = inside & (columns >= (lengths - self.trg_lengths[rows])[:, None])
        trg_out[counted] = self.tokens[places[counted]]
        trg_in[inside] = self.tokens[np.maximum(places[inside] - 1, 0)]
        trg_in[self.first[rows], 0] = EOS
        return Batch.of_arrays({"trg_in": trg_in, "trg_out": trg_out}, key, int(self.trg_lengths[rows].sum()), device)


def blocks_of(recipe: Recipe, data: PreparedText, split: str) -> Blocks:
    """A split of prepared text in blocks. Raises `UserError` if a pair is longer than one."""
    settings = texts_of(recipe)
    tokens, documents = data.documents(split)
    if not settings.pairs:
        return Blocks(split, tokens, documents, settings.block)
    longest = int(np.diff(documents).max(initial=0))
    if longest > settings.block:
        raise UserError(f"data.block is {settings.block}, but a pair of the {split} text has {longest} tokens with "
                        f"separator and end; set it to {longest} or more")
    if split == "train" and cast(LanguageRecipe, recipe).train.loss_on == "both":
        return Blocks(split, tokens, documents, settings.block)
    targets = np.flatnonzero(tokens == BOS) + 1
    return Blocks(split, tokens, documents, settings.block, targets - documents[:-1])
