"""Prepared text: files to one stream of tokens, or one for each document, cut into blocks.

    train.tokens, train.offsets     the tokens of all documents, and where each begins, see `data/arrays.py`; so too
                                    valid and test.NAME
    src.spm, trg.spm                the vocabulary, twice, so that `vocab.model` finds it
    manifest.json                   settings, inputs, counts, sizes and hashes of the files

Every line ends with eos. What a document's first token is predicted from is eos, too. A pair is a document: source,
bos, target, eos. No text has the token bos, so it separates them whatever is in the text, and a search begins behind it
as behind that of any decoder. `B` blocks, `T` tokens of the longest.
"""

from __future__ import annotations

import glob
import os
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import islice, pairwise
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt
import torch

from deepnmt import folders
from deepnmt.batch import Batch
from deepnmt.checkpoint.checkpoint import SRC_VOCAB, TRG_VOCAB
from deepnmt.config import Recipe
from deepnmt.data.arrays import OFFSET, TOKENS, Indices, Lengths, SideWriter, array_of
from deepnmt.data.batching import Sentences, Stream, Text
from deepnmt.data.prepare import only_one_process
from deepnmt.data.prepared import REMEDY, manifest_of_task
from deepnmt.data.text import files_of, pair_files, read_lines, side_by_side
from deepnmt.data.vocab import Vocabulary, given_vocabularies, train_vocabulary
from deepnmt.device import upload
from deepnmt.errors import UserError
from deepnmt.files import sha256
from deepnmt.progress import print_status, show_progress
from deepnmt.tasks.language_model.settings import LanguageRecipe, TextFiles, Texts
from deepnmt.tokens import BOS, EOS, PAD, UNK

FORMAT = "deepnmt-text"
KIND = folders.Kind("prepared text", (FORMAT,), "delete the folder and run deepnmt prepare again",
                    "free space there, or set data.folder to another folder")
CHUNK = 10_000  # lines that are segmented at a time
LEARNED = 4_000  # bytes of a line that a vocabulary is learned from; SentencePiece passes by longer ones
_UNKNOWN = 0.5  # the share of unknown pieces of a file above which the vocabulary is another text's


def texts_of(recipe: Recipe) -> Texts:
    """The recipe's data section."""
    return cast(LanguageRecipe, recipe).data


class Line(NamedTuple):
    """A line, and where it is; `text` is None where a document ends. `source`: of a pair, whose target it is."""

    text: str | None
    file: str
    number: int
    source: str | None = None


def read_documents(files: Sequence[str], apart: bool) -> Iterator[Line]:
    """The lines of files; if documents are kept apart, without the empty ones, each of which, and the end of a file,
    ends one.

    Raises:
        UserError: a file cannot be read, is no text or has none; or a document is empty.
    """
    for name in files:
        line, begun, number = "", False, 0
        for number, line in enumerate(read_lines(Path(name)), 1):
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


def read_joined(files: Sequence[str]) -> Iterator[Line]:
    """The targets of pairs, files of sources and of targets in turn, with their sources; a document ends behind each.

    Raises:
        UserError: a file cannot be read, is no text or has none; a line is empty; or two files differ in their numbers
            of lines.
    """
    for source, target in zip(files[::2], files[1::2], strict=True):
        number = 0
        pairs = side_by_side(read_lines(Path(source)), read_lines(Path(target)), source, target)
        for number, (src, trg) in enumerate(pairs, 1):
            for side, text, file in (("source", src, source), ("target", trg, target)):
                if not text.strip():
                    raise UserError(f"{file}, line {number}: the {side} is empty; leave the pair out")
            yield Line(trg.strip(), target, number, src.strip())
            yield Line(None, target, number)
        if not number:
            raise UserError(f"there is no text in {source} and {target}; give other files, or leave them out")


def lines_of(recipe: Recipe, files: Sequence[str]) -> Iterator[Line]:
    """The lines of a split's files. Raises `UserError`, see `read_joined` and `read_documents`."""
    data = texts_of(recipe)
    return read_joined(files) if data.pairs else read_documents(files, data.documents)


# -- preparing ---------------------------------------------------------------------------------------------------------


def splits_of(recipe: Recipe) -> dict[str, list[str]]:
    """The files of each split; of pairs, sources and targets in turn, without test sets, which are translated as they
    are. Raises `UserError` if one is not there."""
    data = texts_of(recipe)
    named = {"train": data.train, "valid": data.valid}
    if not data.pairs:
        named |= {f"test.{name}": text for name, text in data.test.items()}
    splits = {name: files_in(text) for name, text in named.items()}
    for name, files in splits.items():
        for file in files:
            if not Path(file).is_file():
                raise UserError(f"there is no text file {file}; correct its path in data.{name}")
    return splits


def files_in(text: TextFiles) -> list[str]:
    """The files of a text; of pairs, sources and targets in turn. Raises `UserError` if not each has its other side."""
    return pair_files(text) if text.pairs else files_of(text.trg)


def prepared_settings(recipe: Recipe) -> dict[str, Any]:
    """What a folder depends on beside the texts."""
    vocab, data = recipe.vocab, texts_of(recipe)
    settings: dict[str, Any] = {"data.documents": data.documents}
    if data.pairs:  # folders of texts say nothing of it
        settings["data.train"] = "pairs"
    if vocab.model is not None:
        return {**settings, "vocab.model": True}
    names = ("kind", "size", "byte_fallback", "character_coverage", "max_sentences")
    return {**settings, **{f"vocab.{name}": getattr(vocab, name) for name in names}}


def prepare_text(recipe: Recipe, part: str = "") -> Path:
    """Prepares the recipe's texts and returns their folder; one that is up to date is not changed.

    Raises:
        UserError: a text is faulty, or changes meanwhile; the vocabulary does not suit it; the folder holds other data
            or cannot be written. Nothing is left of it then.
    """
    if part:
        raise UserError(f"--part is {part}, but the text of task: {recipe.task} is prepared in one piece; leave it out")
    folder = Path(recipe.data.folder)
    splits = splits_of(recipe)
    if folder.is_dir() and any(folder.iterdir()):
        data = open_text(recipe)
        data.verify()
        if _inputs(splits) != data.manifest["inputs"]:
            raise UserError(f"prepared text {folder} was made from other texts than the recipe names; {REMEDY}")
        return folder
    target = Path(os.path.realpath(folder))
    with folders.reporting(folder, KIND), only_one_process(target):
        folders.recover_after_kill(target.parent, glob.escape(target.name))
        with folders.new_folder(target, KIND) as temporary:
            inputs = _inputs(splits)
            contents = _build(recipe, splits, temporary)
            if _inputs(splits) != inputs:
                raise UserError("a text changed while it was prepared, so nothing was kept; wait until nothing writes "
                                "it any more, and prepare it again")
            entries = folders.entries_of(temporary, target, KIND)
            folders.publish(temporary, target, entries, {"format": FORMAT, **contents, "inputs": inputs}, KIND)
    for name, counts in contents["splits"].items():
        print_status(f"{name}: {counts['lines']:,} lines, {counts['words']:,} words, {counts['tokens']:,} tokens, "
                     f"unknown {counts['unknown']:,}, documents {counts['documents']:,}")
    return folder


def _inputs(splits: dict[str, list[str]]) -> dict[str, list[dict[str, Any]]]:
    """Names, sizes and hashes of the files of each split."""
    return {name: [{"name": file, "bytes": Path(file).stat().st_size, "sha256": sha256(Path(file))} for file in files]
            for name, files in splits.items()}


def _build(recipe: Recipe, splits: dict[str, list[str]], folder: Path) -> dict[str, Any]:
    """Fills an empty folder, and returns the contents of its manifest."""
    for files in splits.values():  # so that faults come before the long work
        for _ in lines_of(recipe, files):
            pass
    vocab = Vocabulary(_vocabulary(recipe, splits["train"]))
    if (bands := recipe.model.bands) and bands[-1] >= vocab.size:
        raise UserError(f"model.bands is {bands}, but the vocabulary has {vocab.size} pieces; set the last one lower")
    for file in (SRC_VOCAB, TRG_VOCAB):
        (folder / file).write_bytes(vocab.bytes)
    counts = {name: _encode(recipe, folder, name, files, vocab) for name, files in splits.items()}
    return {"settings": prepared_settings(recipe), "splits": counts,
            "vocab": {"size": vocab.size, "sha256": vocab.fingerprint}}


def _vocabulary(recipe: Recipe, files: Sequence[str]) -> bytes:
    """The vocabulary that `vocab.model` names, or one learned from the first lines of the training text."""
    if recipe.vocab.model is not None:
        return given_vocabularies(recipe.vocab, [])[0]
    lines = (text for line in lines_of(recipe, files) for text in (line.source, line.text) if text)
    parts = (part for line in islice(lines, recipe.vocab.max_sentences) for part in _parts(line))
    return train_vocabulary(parts, recipe.vocab)


def _parts(line: str) -> Iterator[str]:
    """A line in parts of whole words that SentencePiece reads."""
    while len(line.encode()) > LEARNED:
        cut = line.rfind(" ", 0, LEARNED // 4)  # a character has at most four bytes
        if cut < 0:
            return
        yield line[:cut]
        line = line[cut + 1:]
    yield line


def _encode(recipe: Recipe, folder: Path, name: str, files: Sequence[str], vocab: Vocabulary) -> dict[str, int]:
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
                if foreign is None and ids and unknown == len(ids):
                    foreign = line
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
    if foreign is not None and counts["unknown"] > _UNKNOWN * (counts["tokens"] - counts["lines"]):
        raise UserError(f"{foreign.file}, line {foreign.number}: the vocabulary has no piece of this line, and "
                        f"{counts['unknown']:,} of the text's {counts['tokens']:,} tokens are unknown, so it is "
                        "another text's; correct vocab.model")
    return counts


# -- reading -----------------------------------------------------------------------------------------------------------


class PreparedText:
    """A complete folder; made by `open_text`."""

    def __init__(self, folder: Path, manifest: dict[str, Any]) -> None:
        self.folder, self.manifest = folder, manifest

    @cached_property
    def vocab(self) -> Vocabulary:
        """The vocabulary."""
        return Vocabulary.load(folders.require_named(self.folder, self.manifest, SRC_VOCAB, KIND))

    def counts(self, split: str) -> dict[str, int]:
        """Lines, words, bytes, tokens, unknown tokens and documents of a split."""
        return dict(self.manifest["splits"][split])

    def documents(self, split: str) -> tuple[npt.NDArray[Any], Indices]:
        """The tokens of a split, and where each document begins and the last one ends [D + 1]. Raises `UserError`."""
        suffix = "tokens" if f"{split}.tokens" in self.manifest["files"] else "tokens32"
        file = folders.require_named(self.folder, self.manifest, f"{split}.{suffix}", KIND)
        ends = folders.require_named(self.folder, self.manifest, f"{split}.offsets", KIND)
        tokens, offsets = array_of(file, TOKENS[suffix]), array_of(ends, OFFSET)
        if not len(offsets) or offsets[0] or offsets[-1] != len(tokens) or bool((np.diff(offsets) <= 0).any()):
            raise folders.DamagedFolder(self.folder, f"{split}.offsets does not divide {split}.{suffix} into documents",
                                        KIND)
        return tokens, offsets

    @property
    def fingerprint(self) -> str:
        """A hash of what training reads."""
        return folders.hash_of({name: entry["sha256"] for name, entry in self.manifest["files"].items()
                                if not name.startswith("test.")})

    def verify(self) -> None:
        """Compares every byte with the manifest, and tokens with the vocabulary. Raises `UserError`."""
        folders.check_files(self.folder, self.manifest, None, (), KIND)
        for split in self.manifest["splits"]:
            highest = int(self.documents(split)[0].max(initial=0))
            if highest >= self.vocab.size:
                raise folders.DamagedFolder(self.folder, f"{split} has a token {highest}, but the vocabulary has "
                                            f"{self.vocab.size} pieces", KIND)


def open_text(recipe: Recipe, texts: bool = True) -> PreparedText:
    """The recipe's prepared text.

    Args:
        texts: whether the files it was made from, if they are on this machine, must still have their sizes.

    Raises:
        UserError: there is none, or it was made with other settings or from other texts.
    """
    folder = Path(recipe.data.folder)
    manifest = manifest_of_task(folder, prepared_settings(recipe), KIND)
    data = texts_of(recipe)
    for split, named in (("train", data.train), ("valid", data.valid)) if texts else ():
        files = [Path(file) for file in files_in(named)]
        then = [entry["bytes"] for entry in manifest["inputs"][split]]
        if all(file.is_file() for file in files) and [file.stat().st_size for file in files] != then:
            raise UserError(f"the {split} text has changed since {folder} was prepared; restore it, or {REMEDY}")
    return PreparedText(folder, manifest)


class Blocks:
    """A text in blocks of at most `length` tokens, none of which has two documents.

    Attributes:
        starts: int64 [M], the first token of each block.
        src_lengths: int32 [M], the tokens of each block.
        trg_lengths: int32 [M], those of them that have a loss: the last ones.
        first: bool [M], whether a document begins there.
    """

    def __init__(self, name: str, tokens: npt.NDArray[Any], documents: Indices, length: int,
                 given: Indices | None = None) -> None:
        """`given`: how many tokens each document begins with that have no loss [D]; a document is then one block."""
        self.name, self.tokens = name, tokens
        sizes = np.diff(documents)
        counts = -(-sizes // length)
        number = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)  # within the document
        self.first = number == 0
        self.starts: Indices = np.repeat(documents[:-1], counts) + number * length
        rest = np.repeat(documents[1:], counts) - self.starts
        self.src_lengths: Lengths = np.minimum(length, rest).astype(np.int32)
        self.trg_lengths = self.src_lengths if given is None else (self.src_lengths - given).astype(np.int32)

    def __len__(self) -> int:
        return len(self.starts)

    def windows(self, epoch: int) -> int:
        """How many an epoch has."""
        return 1

    def window(self, epoch: int, number: int) -> Blocks:
        """The blocks of an epoch: all."""
        return self

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
        given, target = (np.full(places.shape, PAD, dtype=np.int64) for _ in range(2))
        counted = inside & (columns >= (lengths - self.trg_lengths[rows])[:, None])
        target[counted] = self.tokens[places[counted]]
        given[inside] = self.tokens[np.maximum(places[inside] - 1, 0)]
        given[self.first[rows], 0] = EOS
        named = {"trg_in": given, "trg_out": target}
        tensors = {name: upload(torch.from_numpy(ids), device) for name, ids in named.items()}
        return Batch(tensors, key, int(self.trg_lengths[rows].sum()))


class BlockStream(Stream):
    """The micro-batches of all epochs: every block once in each, in an order that (seed, epoch) fix."""

    def __init__(self, blocks: Blocks, tokens: int, seed: int, update_tokens: int | None = None) -> None:
        super().__init__(cast(Text, blocks), tokens, seed, update_tokens=update_tokens)

    def collate(self, sentences: Sentences, rows: Indices, key: int, device: torch.device) -> Batch:
        return cast(Blocks, sentences).batch(rows, key, device)


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
