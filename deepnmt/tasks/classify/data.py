"""Labelled sentences and pairs: read from their files, segmented, and put into micro-batches.

A sentence is bos + pieces + eos; a pair bos + pieces + eos + pieces + eos, whose second text is of segment 1, as [CLS]
and [SEP] are in Devlin et al. 2019.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import NamedTuple, cast

import numpy as np
import torch

from deepnmt.batch import Batch
from deepnmt.data.arrays import Indices, Lengths
from deepnmt.data.examples import Examples, ExampleStream
from deepnmt.data.tables import JSON, is_whole, kind_of
from deepnmt.data.text import files_of, read_lines
from deepnmt.data.vocab import Vocabulary, vocabulary_files
from deepnmt.errors import UserError, nearest
from deepnmt.tasks.classify.settings import ClassifyRecipe, Column
from deepnmt.tokens import BOS, EOS, PAD
from deepnmt.training.fine_tuning import find_trained


class Row(NamedTuple):
    """A line of a file: where it is, its one or two texts, and its label, "" where none was asked for."""

    where: str
    texts: list[str]
    label: str


class Labelled(Examples):
    """Segmented examples, each planned as a source and a target of length 1, so that a micro-batch has as many examples
    as it has tokens.

    Attributes:
        sequences: ids of each, marks included.
        firsts: how many of these are of the first segment.
        labels: [N], the number of each label.
    """

    def __init__(self, name: str, sequences: list[list[int]], firsts: list[int], labels: list[int]) -> None:
        self.name, self.sequences, self.firsts = name, sequences, firsts
        self.labels = np.array(labels, dtype=np.int64)
        self.lengths = np.array([len(sequence) for sequence in sequences], dtype=np.int64)

    def __len__(self) -> int:
        return len(self.sequences)

    @cached_property
    def src_lengths(self) -> Lengths:
        return np.ones(len(self), dtype=np.int32)

    @property
    def trg_lengths(self) -> Lengths:
        return self.src_lengths

    def batch(self, rows: Indices | Sequence[int], key: int, device: torch.device) -> Batch:
        """The examples `rows` as a micro-batch: src and segments [B, S], src_lengths and labels [B]."""
        lengths = self.lengths[np.asarray(rows)]
        src = np.full((len(lengths), lengths.max()), PAD, dtype=np.int64)
        segments = np.zeros_like(src)
        for place, row in enumerate(rows):
            src[place, :lengths[place]] = self.sequences[row]
            segments[place, self.firsts[row]:lengths[place]] = 1
        arrays = {"src": src, "src_lengths": lengths, "segments": segments, "labels": self.labels[np.asarray(rows)]}
        return Batch.of_arrays(arrays, key, len(lengths), device)

    def plan(self, size: int) -> list[Indices]:
        """Batches of so many examples each, the longest first."""
        order = np.argsort(-self.lengths, kind="stable")
        return [order[start:start + size] for start in range(0, len(order), size)]


class LabelledStream(ExampleStream):
    """The training micro-batches."""

    def waste(self, epoch: int) -> float:
        plan = self.plan(epoch)
        lengths = cast(Labelled, self.split(epoch)).lengths[plan.order]
        padded = np.diff(plan.starts) * np.maximum.reduceat(lengths, plan.starts[:-1])
        return 1.0 - float(lengths.sum() / padded.sum())


class ClassifyData:
    """The examples of a recipe, and the vocabulary."""

    def __init__(self, vocab: Vocabulary, train: Labelled, valid: Labelled) -> None:
        self.vocab, self.train, self.valid = vocab, train, valid

    @property
    def fingerprint(self) -> str:
        """A hash of what training reads."""
        digest = hashlib.sha256(self.vocab.bytes)
        for part in (self.train, self.valid):
            digest.update(json.dumps([part.sequences, part.firsts, part.labels.tolist()]).encode())
        return digest.hexdigest()


def open_examples(recipe: ClassifyRecipe) -> ClassifyData:
    """Reads and segments a recipe's examples. Raises `UserError`, see `read_rows` and `segment`."""
    vocab, data = vocabulary_of(recipe), recipe.data
    train = segment(recipe, vocab, read_rows(recipe, data.train), "train")
    valid = segment(recipe, vocab, read_rows(recipe, data.valid), "valid")
    return ClassifyData(vocab, train, valid)


def vocabulary_of(recipe: ClassifyRecipe) -> Vocabulary:
    """The vocabulary that `vocab.model` names, else that of `train.init_from`; a run that has begun also goes on
    without them, with its own. Raises `UserError` if there is none."""
    begun = vocabulary_files(Path(recipe.run))
    if recipe.vocab.model:
        setting, place = "vocab.model", Path(recipe.vocab.model)
    else:
        setting, place = "train.init_from", Path(str(recipe.train.init_from))
        if place.exists() or begun is None:
            place = find_trained(recipe)
    files = vocabulary_files(place) or begun
    if files is None:
        raise UserError(f"{setting} is {place}, where there is no vocabulary; give the folder of a run that has saved "
                        "a checkpoint, or of prepared data, or a SentencePiece file")
    return Vocabulary.load(files[0])


def read_rows(recipe: ClassifyRecipe, names: Sequence[str], labelled: bool = True) -> Iterator[Row]:
    """The lines of some files; `labelled`: whether they need a label.

    Raises:
        UserError: a file cannot be read, has none of a line's columns, an empty text, or a label that is none of
            `data.labels`; with file and line. Or there is no line.
    """
    columns = recipe.data.columns
    none = True
    asked = [columns.text]
    if columns.pair is not None:
        asked.append(columns.pair)
    if labelled:
        asked.append(columns.label)
    for file in map(Path, files_of(names)):
        if not file.is_file():
            raise UserError(f"there is no file {file} of examples; correct its path")
        for where, cells in _cells(file, asked):
            none = False
            label = cells.pop() if labelled else ""
            texts = [cell.strip() for cell in cells]
            if recipe.data.lowercase:
                texts = [text.lower() for text in texts]
            for column, text in zip(asked, texts, strict=False):
                if not text:
                    raise UserError(f"{where}: the text in column {column!r} is empty; remove the line")
            if labelled and label not in recipe.data.labels:
                near = nearest(label, recipe.data.labels)
                way = f"did you mean {near}?" if near else "correct the line, or add the label to data.labels"
                raise UserError(f"{where}: the label is {label!r}, but data.labels are "
                                f"{', '.join(recipe.data.labels)}; {way}")
            yield Row(where, texts, label)
    if none:
        raise UserError(f"there are no examples in {', '.join(names)}; give another file")


def _cells(file: Path, columns: Sequence[Column]) -> Iterator[tuple[str, list[str]]]:
    """Where each line of a file is, and what it has in these columns. Raises `UserError`."""
    lines, begin = read_lines(file), 1
    header: list[str] = []
    if kind_of(file) not in JSON and isinstance(columns[0], str):
        header, begin = next(lines, "").split("\t"), 2
        for column in columns:
            if header.count(str(column)) > 1:
                raise UserError(f"{file}, line 1: two columns are named {column!r}; rename one of them")
    for number, line in enumerate(lines, start=begin):
        where = f"{file}, line {number}"
        there: dict[int | str, str]
        if kind_of(file) in JSON:
            try:
                value = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise UserError(f"{where}: no JSON ({error}); write an object a line") from None
            there = {}
            if isinstance(value, dict):
                there = {key: str(cell) for key, cell in value.items() if isinstance(cell, str | int | float)}
        elif header:
            there = dict(zip(header, line.split("\t"), strict=False))
        else:
            there = dict(enumerate(line.split("\t"), start=1))
        for column in columns:
            if column not in there:
                raise UserError(f"{where}: there is no column {column!r} with a text or a number, only "
                                f"{', '.join(map(str, there)) or 'none'}; correct the line, or data.columns")
            if not is_whole(there[column]):
                raise UserError(f"{where}: the column {column!r} has half of a character (a lone surrogate); correct "
                                "the line, or leave it out")
        yield where, [there[column] for column in columns]


def segment(recipe: ClassifyRecipe, vocab: Vocabulary, rows: Iterator[Row], name: str) -> Labelled:
    """Rows as sequences. Raises `UserError` for one that is longer than the encoder reads, with file and line."""
    limit = recipe.model.max_length
    numbers = {label: number for number, label in enumerate(recipe.data.labels)}
    sequences: list[list[int]] = []
    firsts: list[int] = []
    labels: list[int] = []
    while chunk := list(itertools.islice(rows, 10_000)):
        encoded = iter(vocab.encode_batch([text for row in chunk for text in row.texts], tags=False))
        for row in chunk:
            parts = [next(encoded) for _ in row.texts]
            room = limit - 1 - len(parts)
            size = sum(map(len, parts))
            if size > room and recipe.data.too_long == "refuse":
                raise UserError(f"{row.where}: {size + 1 + len(parts)} tokens with their marks, but model.max_length "
                                f"is {limit}; shorten the text, or set data.too_long=cut")
            for _ in range(size - room):
                max(parts, key=len).pop()
            sequence = [BOS]
            for part in parts:
                sequence += [*part, EOS]
            sequences.append(sequence)
            firsts.append(2 + len(parts[0]))
            labels.append(numbers.get(row.label, 0))
    return Labelled(name, sequences, firsts, labels)
