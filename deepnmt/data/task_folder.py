"""The prepared folder of a task with one vocabulary: there whole or not at all, with a manifest.

    src.spm, trg.spm    the vocabulary, twice, so that `vocab.model` finds it
    manifest.json       settings, hashes of the inputs, counts, sizes and hashes of the files

A task says in a subclass of `PreparedFolder` what else is in it. The folder depends on the recipe's texts and on what
`prepared_settings` names alone. That of translation has two vocabularies and more, see `prepared.py`.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from deepnmt import folders
from deepnmt.config import Fact, Recipe
from deepnmt.data.arrays import KIND, TOKENS, check_tokens
from deepnmt.data.prepare import only_one_process
from deepnmt.data.prepared import REMEDY, is_free, require_manifest
from deepnmt.data.text import files_of
from deepnmt.data.vocab import Vocabulary, given_vocabularies, shorter, train_vocabulary, vocabulary_files
from deepnmt.errors import UserError
from deepnmt.files import sha256
from deepnmt.progress import print_status

_Folder = TypeVar("_Folder", bound="PreparedFolder")

SPLITS = ("train", "valid")
VOCABULARY = ("kind", "size", "byte_fallback", "character_coverage", "max_sentences")  # settings of one that is trained


def kind_of_folder(format_: str) -> folders.Kind:
    """The kind of a task's folder, whose manifest says this format."""
    return replace(KIND, formats=(format_,))


class PreparedFolder:
    """A complete folder; made by `open`. A subclass sets `kind`, and has `write` and `describe`.

    Attributes:
        kind: of the folder, see `kind_of_folder`.
        same_content: whether `open` compares the hashes of the files that the folder was made from; else their sizes.
    """

    kind: ClassVar[folders.Kind]
    same_content: ClassVar[bool] = False

    def __init__(self, folder: Path, manifest: dict[str, Any]) -> None:
        self.folder, self.manifest = folder, manifest

    @classmethod
    def settings(cls, recipe: Any) -> dict[str, Any]:
        """What a folder depends on beside the texts."""
        return prepared_settings(recipe)

    @classmethod
    def files(cls, recipe: Any) -> dict[str, list[Path]]:
        """The files that a folder is made from, by split: train, valid and others."""
        return {split: [Path(name) for name in files_of(getattr(recipe.data, split))] for split in SPLITS}

    @classmethod
    def write(cls, recipe: Any, folder: Path) -> dict[str, dict[str, int]]:
        """Fills an empty folder from the recipe's texts; returns the counts of each split. Raises `UserError`."""
        raise NotImplementedError

    @classmethod
    def describe(cls, recipe: Any, counts: dict[str, int]) -> str:
        """A line about a split."""
        raise NotImplementedError

    @classmethod
    def open(cls: type[_Folder], recipe: Recipe, texts: bool = True) -> _Folder:
        """The recipe's prepared data; `texts`: whether the files they were made from, if they are on this machine, must
        be the same.

        Raises:
            UserError: there is none, it is damaged, or it was made with other settings, another vocabulary or from
                other files.
        """
        folder, settings = Path(recipe.data.folder), cls.settings(recipe)
        require_manifest(folder)
        manifest = folders.read_manifest(folder, cls.kind)
        folders.check_sizes(folder, manifest, manifest["files"], cls.kind)
        then = manifest["settings"]
        for key in then | settings:
            if then.get(key) != settings.get(key):
                raise UserError(f"prepared data {folder} was made with {key} {then.get(key)}, but the recipe has "
                                f"{settings.get(key)}; {REMEDY}")
        given = vocabulary_files(Path(recipe.vocab.model)) if recipe.vocab.model else None
        if given and sha256(given[0]) != manifest["files"]["src.spm"]["sha256"]:
            raise UserError(f"prepared data {folder} has another vocabulary than {recipe.vocab.model}, which "
                            f"vocab.model names; {REMEDY}")
        named = cls.files(recipe) if texts else {}
        for split in SPLITS:
            files = named.get(split, [])
            if not files or not all(file.is_file() for file in files):
                continue
            then = manifest["inputs"][split]
            if cls.same_content:
                same = [entry["sha256"] for entry in then] == [sha256(file) for file in files]
            else:
                same = [entry["bytes"] for entry in then] == [file.stat().st_size for file in files]
            if not same:
                raise UserError(f"the files of data.{split} have changed since {folder} was prepared; restore them, or "
                                f"{REMEDY}")
        return cls(folder, manifest)

    @classmethod
    def planned(cls: type[_Folder], recipe: Recipe) -> tuple[_Folder | None, int]:
        """The recipe's prepared data, if there are any yet, and the size that its vocabulary has or will have.

        Raises:
            UserError: see `open`.
        """
        if not is_free(Path(recipe.data.folder)):
            data = cls.open(recipe)
            return data, data.vocab.size
        given = vocabulary_files(Path(recipe.vocab.model)) if recipe.vocab.model else None
        return None, Vocabulary.load(given[0]).size if given else recipe.vocab.size

    @classmethod
    def prepare(cls, recipe: Recipe, part: str = "") -> Path:
        """Prepares the recipe's data and returns their folder; one that is up to date is not changed.

        Raises:
            UserError: a text is faulty or changes meanwhile; the vocabulary does not suit it; the folder holds other
                data or cannot be written. Nothing is left of it then.
        """
        if part:
            raise UserError(f"--part is {part}, but the data of task: {recipe.task} are prepared in one piece; "
                            "leave it out")
        folder = Path(recipe.data.folder)
        inputs = inputs_of(cls.files(recipe))
        if not is_free(folder):
            data = cls.open(recipe)
            then = {split: _hashes(entries) for split, entries in data.manifest["inputs"].items()}
            now = {split: _hashes(entries) for split, entries in inputs.items()}
            if then != now:
                raise UserError(f"prepared data {folder} was made from other texts than the recipe names; {REMEDY}")
            data.verify()
            print_status(f"{folder} is up to date")
            return folder
        target = Path(os.path.realpath(folder))
        with folders.reporting(folder, cls.kind), only_one_process(target):
            folders.recover(target)
            with folders.new_folder(target, cls.kind) as temporary:
                splits = cls.write(recipe, temporary)
                if inputs_of(cls.files(recipe)) != inputs:
                    raise UserError("a text changed while it was prepared, so nothing was kept; wait until nothing "
                                    "writes it any more, and prepare it again")
                facts = {"format": cls.kind.formats[0], "settings": cls.settings(recipe), "inputs": inputs,
                         "splits": splits}
                folders.publish(temporary, target, folders.entries_of(temporary, target, cls.kind), facts, cls.kind)
        for split, counts in splits.items():
            print_status(f"{split}: {cls.describe(recipe, counts)}")
        return folder

    @cached_property
    def vocab(self) -> Vocabulary:
        """The vocabulary."""
        return Vocabulary.load(self.path("src.spm"))

    def path(self, name: str) -> Path:
        """A file that the manifest names. Raises `DamagedFolder`."""
        return folders.require_named(self.folder, self.manifest, name, self.kind)

    @property
    def fingerprint(self) -> str:
        """A hash of what training reads."""
        return folders.hash_of({name: entry["sha256"] for name, entry in self.manifest["files"].items()})

    def verify(self) -> None:
        """Compares every byte with the manifest, and tokens with the vocabulary. Raises `UserError`."""
        folders.check_files(self.folder, self.manifest, None, (), self.kind)
        for name in self.manifest["files"]:
            if name.rpartition(".")[2] in TOKENS:
                check_tokens(self.folder, name, self.vocab.size, self.kind)


def prepared_settings(recipe: Recipe) -> dict[str, Any]:
    """What a folder depends on beside the texts: the settings of `data` that say so, and those of the vocabulary."""
    settings: dict[str, Any] = {}
    for key in type(recipe).marked(Fact.PREPARED):
        section, _, name = key.partition(".")
        if section == "data":
            settings[key] = getattr(recipe.data, name)
    if recipe.vocab.model is not None:
        settings["vocab.model"] = True
        return settings
    for name in VOCABULARY:
        settings[f"vocab.{name}"] = getattr(recipe.vocab, name)
    return settings


def inputs_of(files: Mapping[str, Iterable[Path]]) -> dict[str, list[dict[str, Any]]]:
    """Name, size and hash of the files of each split. Raises `UserError` if one is not there."""
    inputs: dict[str, list[dict[str, Any]]] = {}
    for split, some in files.items():
        inputs[split] = []
        for file in some:
            if not file.is_file():
                raise UserError(f"there is no text file {file}; correct its path in data.{split}")
            inputs[split].append({"name": file.name, "bytes": file.stat().st_size, "sha256": sha256(file)})
    return inputs


def _hashes(entries: Iterable[dict[str, Any]]) -> list[str]:
    return [entry["sha256"] for entry in entries]


def write_vocabulary(recipe: Recipe, folder: Path, lines: Iterable[str], tags: Sequence[str] = ()) -> Vocabulary:
    """Writes the vocabulary that `vocab.model` names, or one that is trained on all these lines, into a folder.
    Long lines are divided, since SentencePiece would pass by them.

    Raises:
        UserError: see `given_vocabularies` and `train_vocabulary`.
    """
    if recipe.vocab.model is not None:
        vocab = Vocabulary(given_vocabularies(recipe.vocab, tags)[0])
    else:
        print_status(f"training the vocabulary of {recipe.vocab.size} {recipe.vocab.kind} pieces")
        vocab = Vocabulary(train_vocabulary(chain.from_iterable(map(shorter, lines)), recipe.vocab, tags))
    for name, content in vocab.files.items():
        (folder / name).write_bytes(content)
    return vocab
