"""`deepnmt prepare` for masked language models: text files to a folder of token arrays.

    train.tokens, train.offsets     the sequences without their marks, see `data/arrays.py`; valid likewise
    src.spm, trg.spm                the vocabulary, twice, so that `vocab.model` finds it
    manifest.json                   settings, hashes of the inputs, sizes and hashes of the files

The folder depends on the texts and the settings in `prepared_settings` alone. It is there whole or not at all.
"""

from __future__ import annotations

import glob
import itertools
import os
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from deepnmt import folders
from deepnmt.data.arrays import TOKENS, Side, SideWriter, array_of
from deepnmt.data.prepared import REMEDY, manifest_of_task
from deepnmt.data.text import files_of, read_lines
from deepnmt.data.vocab import Vocabulary, given_vocabularies, train_vocabulary
from deepnmt.errors import UserError
from deepnmt.files import sha256
from deepnmt.progress import print_status, show_progress
from deepnmt.tasks.masked_lm.masking import MASK
from deepnmt.tasks.masked_lm.settings import MaskedRecipe
from deepnmt.tokens import UNK

FORMAT = "deepnmt-masked-lm"
KIND = folders.Kind("prepared data", (FORMAT,), "delete the folder and run deepnmt prepare again",
                    "free space there, or set data.folder to another folder")
SPLITS = ("train", "valid")
CHUNK = 10_000  # lines or documents that are segmented at a time


class PreparedText:
    """A complete folder; made by `open_text`."""

    def __init__(self, folder: Path, manifest: dict[str, Any]) -> None:
        self.folder, self.manifest = folder, manifest

    @cached_property
    def vocab(self) -> Vocabulary:
        """The vocabulary, which has `<mask>`."""
        return Vocabulary.load(folders.require_named(self.folder, self.manifest, "src.spm", KIND))

    def sequences(self, split: str) -> Side:
        """The sequences of train or valid."""
        return Side(self.folder, self.manifest["files"], split)

    @property
    def fingerprint(self) -> str:
        """A hash of what training reads."""
        return folders.hash_of({name: entry["sha256"] for name, entry in self.manifest["files"].items()})

    def verify(self) -> None:
        """Compares every byte with the manifest. Raises `UserError`."""
        folders.check_files(self.folder, self.manifest, None, (), KIND)
        for name in self.manifest["files"]:
            kind = TOKENS.get(name.rpartition(".")[2])
            highest = int(array_of(self.folder / name, kind).max(initial=0)) if kind else 0
            if highest >= self.vocab.size:
                raise folders.DamagedFolder(self.folder, f"{name} has a token {highest}, but the vocabulary has "
                                            f"{self.vocab.size} pieces", KIND)


def prepared_settings(recipe: MaskedRecipe) -> dict[str, Any]:
    """What a folder depends on beside the texts."""
    data, vocab = recipe.data, recipe.vocab
    settings: dict[str, Any] = {f"data.{name}": getattr(data, name) for name in ("unit", "length", "lowercase")}
    if vocab.model is None:
        settings |= {f"vocab.{name}": getattr(vocab, name)
                     for name in ("kind", "size", "byte_fallback", "character_coverage", "max_sentences")}
    else:
        settings["vocab.model"] = True
    return settings


def open_text(recipe: MaskedRecipe, texts: bool = True) -> PreparedText:
    """The recipe's prepared text; `texts`: whether the files it was made from must still have their sizes.

    Raises:
        UserError: there is none, or it was made with other settings or from other texts.
    """
    folder = Path(recipe.data.folder)
    manifest = manifest_of_task(folder, prepared_settings(recipe), KIND)
    for split in SPLITS if texts else ():
        files = _files(recipe, split)
        if all(file.is_file() for file in files):
            sizes = [file.stat().st_size for file in files]
            if sizes != [entry["bytes"] for entry in manifest["inputs"][split]]:
                raise UserError(f"the {split} text has changed since {folder} was prepared; restore it, or {REMEDY}")
    return PreparedText(folder, manifest)


def prepare_text(recipe: MaskedRecipe, part: str = "") -> Path:
    """Prepares the recipe's texts and returns their folder; one that is up to date is not changed.

    Raises:
        UserError: a text is faulty; the vocabulary has no `<mask>`; the folder holds other data or cannot be written.
            Nothing is left of it then.
    """
    if part:
        raise UserError(f"--part is {part}, but the text of task: masked_lm is prepared in one piece; leave it out")
    folder = Path(recipe.data.folder)
    inputs = {split: _inputs(recipe, split) for split in SPLITS}
    if folder.is_dir() and any(folder.iterdir()):
        text = open_text(recipe)
        if text.manifest["inputs"] != inputs:
            raise UserError(f"{folder} was prepared from other texts; {REMEDY}")
        text.verify()
        print_status(f"{folder} is up to date")
        return folder
    target = Path(os.path.realpath(folder))
    folders.recover_after_kill(target.parent, glob.escape(target.name))
    with folders.new_folder(target, KIND) as temporary:
        counts = _write(recipe, temporary)
        for split in SPLITS:
            if _inputs(recipe, split) != inputs[split]:
                raise UserError(f"the {split} text changed while it was prepared, so nothing was kept; wait until "
                                "nothing writes it any more, and prepare it again")
        facts = {"format": FORMAT, "settings": prepared_settings(recipe), "inputs": inputs, "splits": counts}
        folders.publish(temporary, target, folders.entries_of(temporary, target, KIND), facts, KIND)
    for split, count in counts.items():
        print_status(f"{split}: {count['sequences']:,} sequences of {count['units']:,} {recipe.data.unit}, "
                     f"{count['tokens']:,} tokens, {count['unknown']:,} of them unknown")
    return folder


def _files(recipe: MaskedRecipe, split: str) -> list[Path]:
    return [Path(name) for name in files_of(getattr(recipe.data, split))]


def _inputs(recipe: MaskedRecipe, split: str) -> list[dict[str, Any]]:
    """Name, size and hash of a text's files. Raises `UserError` if one is not there."""
    inputs = []
    for file in _files(recipe, split):
        if not file.is_file():
            raise UserError(f"data.{split}: there is no text file {file}; correct its path")
        inputs.append({"name": file.name, "bytes": file.stat().st_size, "sha256": sha256(file)})
    return inputs


def _write(recipe: MaskedRecipe, folder: Path) -> dict[str, dict[str, int]]:
    """Fills an empty folder; returns the counts of each split. The short text comes first, for its faults."""
    if recipe.vocab.model:
        model = given_vocabularies(recipe.vocab, [MASK])[0]
    else:
        for _ in itertools.chain.from_iterable(read_units(recipe, split) for split in SPLITS):
            pass  # for faults of the texts, which SentencePiece would report as its own
        print_status(f"training the vocabulary of {recipe.vocab.size} {recipe.vocab.kind} pieces")
        lines = itertools.chain.from_iterable(lines for _, lines in read_units(recipe, "train"))
        model = train_vocabulary(itertools.islice(lines, recipe.vocab.max_sentences), recipe.vocab, [MASK])
    vocab = Vocabulary(model)
    for name in ("src.spm", "trg.spm"):
        (folder / name).write_bytes(model)
    return {split: _encode(recipe, split, vocab, folder) for split in reversed(SPLITS)}


def _encode(recipe: MaskedRecipe, split: str, vocab: Vocabulary, folder: Path) -> dict[str, int]:
    room = recipe.data.length - 2  # for the marks bos and eos
    writer, units, sequences, unknown = SideWriter(folder, split, vocab.size), 0, 0, 0
    with show_progress(f"{split}: encoding: {{:,}} {recipe.data.unit}", desc=f"{split}: encoding") as progress:
        reading = read_units(recipe, split)
        while chunk := list(itertools.islice(reading, CHUNK)):
            tokens: list[int] = []
            lengths: list[int] = []
            for where, lines in chunk:
                ids = list(itertools.chain.from_iterable(vocab.encode_batch(lines)))
                if not ids:
                    raise UserError(f"{where}: the {recipe.data.unit[:-1]} has no piece of the vocabulary; remove it")
                tokens += ids
                lengths += [len(ids[start:start + room]) for start in range(0, len(ids), room)]
            writer.add(np.array(tokens, dtype=np.uint32), np.array(lengths, dtype=np.int64))
            units, sequences, unknown = units + len(chunk), sequences + len(lengths), unknown + tokens.count(UNK)
            progress(units)
    return {"units": units, "sequences": sequences, "tokens": writer.end, "unknown": unknown}


def read_units(recipe: MaskedRecipe, split: str) -> Iterator[tuple[str, list[str]]]:
    """Each line or document of a text: where it begins, as "FILE, line N", and its lines.

    Raises:
        UserError: a file cannot be read, or is no text; a line or a document is empty; a text has none.
    """
    files, whole = _files(recipe, split), recipe.data.unit == "documents"
    empty = True
    for file in files:
        begin, document = 1, []
        number = 0
        for number, line in enumerate(read_lines(file), start=1):
            text = line.strip().lower() if recipe.data.lowercase else line.strip()
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
