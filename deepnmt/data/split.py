"""Splits sentence pairs into training, validation and test texts that share no sentence."""

from __future__ import annotations

import hashlib
import itertools
import os
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

from deepnmt.config import Corpus
from deepnmt.data.text import Pair, input_files, read_pairs, write_pairs
from deepnmt.errors import UserError
from deepnmt.files import reporting


def split_tsv(
    tsv: Path, folder: Path, columns: tuple[int, int], langs: tuple[str, str], valid: int = 10, test: int = 20
) -> dict[str, int]:
    """`split_corpus` of one TSV.

    Args:
        tsv: plain or compressed.
        columns: of source and target, counted from 1.

    Raises:
        UserError: columns are the same or out of range; the folder cannot be written; see `split_corpus`.
    """
    if min(columns) < 1 or columns[0] == columns[1]:
        raise UserError(f"--columns is {columns[0]} {columns[1]}, must be two different columns counted from 1, for "
                        "example 1 2")
    with reporting(str(folder), "name another folder"):
        return split_corpus(Corpus(tsv=[str(tsv)], columns=list(columns)), folder, langs, valid, test)


def split_corpus(
    corpus: Corpus, folder: Path, langs: tuple[str, str], valid: int = 10, test: int = 20
) -> dict[str, int]:
    """Writes `train.SRC`, `train.TRG`, `valid.SRC`, ... into `folder` and returns the number of pairs in each.

    All pairs of a target sentence go into the same text, which depends on that sentence alone; so a later, larger
    corpus moves no sentence to another text. Sentences that differ only in case, punctuation or spaces count as the
    same. Validation and test texts keep one pair of each target sentence. A training pair is left out if its source is
    in the validation or test text, and a validation pair if its source is in the test text.

    Args:
        langs: of source and target: the suffixes of the files.
        valid, test: how many of every 1,000 target sentences.

    Raises:
        UserError: see `read_pairs`; a share is out of range; the suffixes are the same; a text would be empty, or a
            file of its name is there. No file is written.
        OSError: the folder cannot be written.
    """
    if valid < 1 or test < 1 or valid + test >= 1000:
        raise UserError(f"{valid} + {test} of 1,000 sentences cannot be held out; give 1 or more for validation and "
                        "for test, below 1,000 together")
    if langs[0] == langs[1] or any(not lang or "/" in lang for lang in langs):
        raise UserError(f"--langs is {langs[0]!r} {langs[1]!r}, must be two different file suffixes without a /, "
                        "for example de en")
    files = input_files(corpus)
    for name, lang in itertools.product(("train", "valid", "test"), langs):
        if os.path.lexists(file := folder / f"{name}.{lang}"):  # it may be the corpus itself
            raise UserError(f"{file} exists already; name another folder, or move it away")

    first: dict[str, dict[str, Pair]] = {"valid": {}, "test": {}}  # one pair a target sentence
    sources: dict[str, set[str]] = {"valid": set(), "test": set()}
    for pair in read_pairs(corpus):
        name = split_of(pair[1], valid, test)
        if name != "train":
            first[name].setdefault(normalised(pair[1]), pair)
            sources[name].add(normalised(pair[0]))
    texts = {name: list(pairs.values()) for name, pairs in first.items()}
    texts["valid"] = [pair for pair in texts["valid"] if normalised(pair[0]) not in sources["test"]]
    if not (texts["valid"] and texts["test"]):
        raise UserError(f"{files[0]} has too few sentences to hold {valid} + {test} of 1,000 out; give a larger text "
                        "or larger shares")

    held_out = sources["valid"] | sources["test"]

    def of_training() -> Iterator[Pair]:
        for source, target in read_pairs(corpus):
            if split_of(target, valid, test) == "train" and normalised(source) not in held_out:
                yield source, target

    folder.mkdir(parents=True, exist_ok=True)
    counts = {}
    with TemporaryDirectory(prefix=".tmp-", dir=folder) as temporary:
        for name, pairs in (("train", of_training()), *texts.items()):
            counts[name] = write_pairs([Path(temporary) / f"{name}.{lang}" for lang in langs], pairs)
        if not counts["train"]:
            raise UserError(f"{files[0]} has no pair left to train on if {valid} + {test} of 1,000 sentences are held "
                            "out; give smaller shares")
        for file in Path(temporary).iterdir():
            file.rename(folder / file.name)
    return counts


def split_of(sentence: str, valid: int, test: int) -> str:
    """The text for the pairs of a target sentence, if `valid` and `test` of every 1,000 sentences are held out."""
    bucket = int.from_bytes(hashlib.blake2b(normalised(sentence).encode(), digest_size=8).digest(), "big") % 1000
    if bucket < test:
        return "test"
    return "valid" if bucket < test + valid else "train"


def normalised(sentence: str) -> str:
    """The sentence's letters and digits, case-folded; sentences count as the same if these agree.

    A sentence without letters and digits is returned as it is.
    """
    return "".join(filter(str.isalnum, sentence.casefold())) or sentence
