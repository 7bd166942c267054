"""Prepared data: a folder of memory-mapped token arrays and two vocabularies, with a manifest (see `folders.py`).

`manifest.json` holds the settings, the inputs' hashes, the vocabularies' fingerprints, counts for every split, and the
size and hash of every other file, and no others are read. `arrays.py` has the files of a split. Those of the training
text may lie in folders of their own, see `shards.py`.

`open_prepared` opens the data of a recipe and checks that it was made with the recipe's settings.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, cast

from pydantic import BaseModel, Field, ValidationError

from deepnmt import folders
from deepnmt.config import Cleaning, Corpus, Data, Fact, Filters, Recipe, Vocab, flatten
from deepnmt.config.fields import FILE_NAME
from deepnmt.config.plugins import source_of
from deepnmt.data.arrays import FORMAT, KIND, Split, check_sides
from deepnmt.data.shards import TRAIN, Entry, ShardedText
from deepnmt.data.text import cleaning_of, corpora_of, files_by_corpus, named_files
from deepnmt.data.vocab import Vocabulary, vocabulary_files
from deepnmt.errors import UserError
from deepnmt.files import sha256
from deepnmt.folders import MANIFEST, DamagedFolder

VERSION, SHARDED = 2, 3  # of the manifest; the second where the training text is in shards
REMEDY = "set data.folder to a new folder, or, if no run needs this one any more, delete it to prepare it again"


def publish(temporary: Path, target: Path, contents: dict[str, Any]) -> None:
    """Completes a folder with its manifest, and gives it the name `target`. Raises `FolderWriteError`.

    Folders in it, the shards, are complete already.
    """
    entries = folders.entries_of(temporary, target, KIND)
    version = SHARDED if "shards" in contents else VERSION
    folders.publish(temporary, target, entries, {"format": FORMAT, "version": version, **contents}, KIND)


FileName = Annotated[str, Field(pattern=f"^{FILE_NAME}$")]
Natural = Annotated[int, Field(ge=0)]


class _File(BaseModel, strict=True):
    size: Natural
    sha256: str


class _Input(BaseModel, strict=True):
    bytes: Natural
    name: str = ""
    sha256: str = ""


class _Split(BaseModel, strict=True):
    variants: Natural
    corpora: dict[str, Natural] = {}


class _Manifest(BaseModel, strict=True, extra="forbid"):
    """The types of what is read from a manifest."""

    format: str
    deepnmt: str = ""
    version: int
    vocab: dict[str, Any]
    sha256: str | None = None
    settings: dict[str, Any]
    inputs: dict[str, list[_Input]]
    splits: dict[FileName, _Split]
    files: dict[FileName, _File]
    shards: dict[str, list[Entry]] | None = None


class PreparedData:
    """A complete folder of prepared data; made by `open`."""

    def __init__(self, folder: Path, manifest: dict[str, Any], former_fingerprints: Collection[str]) -> None:
        self.folder, self.manifest, self.former_fingerprints = folder, manifest, former_fingerprints

    @classmethod
    def open(cls, folder: str | Path) -> PreparedData:
        """Opens a folder and compares the size of every file with the manifest; `verify` compares contents.

        Raises:
            UserError: the folder is missing, incomplete, or of another format.
        """
        folder = Path(folder)
        require_manifest(folder)
        manifest = folders.read_json(folder, MANIFEST, KIND)
        if manifest.get("format") != FORMAT:
            raise UserError(f"{folder / MANIFEST} is not a manifest of deepnmt's prepared data; set data.folder to "
                            "another folder")
        if manifest.get("version") not in (1, VERSION, SHARDED):
            raise DamagedFolder(folder, f"its format version is {manifest.get('version')!r}, but this deepnmt reads 1 "
                                        f"to {SHARDED}", KIND)
        if manifest["version"] == 1:
            manifest = _from_version_1(folder, manifest)
        else:
            manifest = folders.read_manifest(folder, KIND)
        sections = ("settings", "inputs", "vocab", "splits", "files")
        missing = [key for key in sections if not isinstance(manifest.get(key), dict)]
        if missing:
            raise DamagedFolder(folder, f"{MANIFEST} lacks {', '.join(missing)}", KIND)
        try:
            _Manifest.model_validate(manifest)
        except ValidationError as error:
            where = ".".join(map(str, error.errors()[0]["loc"]))
            raise DamagedFolder(folder, f"in {MANIFEST}, {where} has an impossible value", KIND) from None
        folders.check_sizes(folder, manifest, manifest["files"], KIND)
        return cls(folder, manifest, _fingerprints_of_version_1(manifest))

    def verify(self) -> None:
        """Compares the hash of every file with the manifest, and tokens with the vocabularies.

        Raises:
            UserError: the first difference.
        """
        self._verify_files()
        if self._sharded is not None:
            self._sharded.check()

    def verify_as_read(self) -> None:
        """The same, but shards of the training text are compared when they are read for the first time."""
        if self._sharded is not None:
            self._sharded.verify = True
        self._verify_files()

    def _verify_files(self) -> None:
        folders.check_files(self.folder, self.manifest, None, (), KIND)
        source, target = self.vocabs()
        check_sides(self.folder, self.manifest["files"], {"src": source.size, "trg": target.size}, KIND)

    @property
    def fingerprint(self) -> str:
        """A hash of what training reads: the vocabularies, the files of the training and the validation text, and how
        many pairs of each are of which corpus. The same text has the same, prepared again by another version or with
        one test set more."""
        read = {}
        for name, entry in self.manifest["files"].items():
            if name.endswith(".spm") or name.startswith(("train.", "valid.")):
                read[name] = entry["sha256"]
        sizes = {name: list(self.corpora(name).values()) for name in self.splits if name in ("train", "valid")}
        if "shards" not in self.manifest:
            return folders.hash_of([read, sizes])
        shards = [[entry["content"] for entry in entries] for entries in self.manifest["shards"].values()]
        return folders.hash_of([read, sizes, shards])

    @property
    def splits(self) -> list[str]:
        """The names of all splits: train, valid and the tests as `test.<name>`."""
        return list(self.manifest["splits"])

    @property
    def train(self) -> Split | ShardedText:
        """The training text, in one piece or in shards."""
        return self.split(TRAIN) if self._sharded is None else self._sharded

    def split(self, name: str) -> Split:
        """One of `splits`. Raises `UserError` if there is no such split."""
        if name == TRAIN and self._sharded is not None:
            return cast(Split, self._sharded)  # it has what others than `training_stream` ask of a training text
        if name not in self.splits:
            raise UserError(f"prepared data {self.folder} has no split {name!r}; it has {', '.join(self.splits)}")
        return Split(self.folder, self.manifest["files"], name, self.manifest["splits"][name]["variants"])

    @cached_property
    def _sharded(self) -> ShardedText | None:
        """The training text, if it is in shards."""
        if "shards" not in self.manifest:
            return None
        shards: dict[str, list[Entry]] = {}
        for corpus, entries in self.manifest["shards"].items():
            shards[corpus] = [Entry.model_validate(entry) for entry in entries]
        sizes = {side: vocab["size"] for side, vocab in self.manifest["vocab"].items()}
        return ShardedText(self.folder, shards, self.manifest["splits"][TRAIN]["variants"], sizes)

    def corpora(self, name: str) -> dict[str, int]:
        """The corpora of a split by name, in their order, with the pairs of each; a single one has an empty name."""
        split = self.manifest["splits"][name]
        return dict(split.get("corpora") or {"": len(self.split(name))})

    def vocabs(self) -> tuple[Vocabulary, Vocabulary]:
        """The source and target vocabularies; equal if they are shared."""
        src = folders.require_named(self.folder, self.manifest, "src.spm", KIND)
        trg = folders.require_named(self.folder, self.manifest, "trg.spm", KIND)
        return Vocabulary.load(src), Vocabulary.load(trg)


def _from_version_1(folder: Path, manifest: dict[str, Any]) -> dict[str, Any]:
    """A manifest as version 0.2 and older wrote it, as today's. It was hashed as text, and told the `bytes` of files;
    the oldest had no hash of their own. Raises `DamagedFolder`."""
    expected = manifest.pop("sha256", None)
    if expected not in (None, _hash_of_version_1(manifest)):
        raise DamagedFolder(folder, f"{MANIFEST} has been altered", KIND)
    files = manifest.get("files")
    if isinstance(files, dict):
        for entry in files.values():
            if isinstance(entry, dict) and "bytes" in entry:
                entry["size"] = entry.pop("bytes")
    return manifest


def _fingerprints_of_version_1(manifest: dict[str, Any]) -> list[str]:
    """What checkpoints of version 0.2 and older know these data by: the hash of the manifest that those wrote. They
    had no `drop_overlap`, did not count the overlap or by corpora, and did not say of which corpus a file is;
    `vocab.tags` is younger than 0.1."""
    settings = dict(manifest["settings"])
    if not settings.get("data.filters.drop_overlap"):
        settings.pop("data.filters.drop_overlap", None)
    splits = {name: dict(split) for name, split in manifest["splits"].items()}
    for split in splits.values():
        split.pop("overlap", None)
        split.pop("by_corpus", None)
    inputs = {}
    for name, entries in manifest["inputs"].items():
        inputs[name] = [{fact: entry[fact] for fact in entry if fact != "corpus"} for entry in entries]
    files = {}
    for name, entry in manifest["files"].items():
        files[name] = {"bytes": entry["size"], "sha256": entry["sha256"]}
    old = {"format": manifest["format"], "settings": settings, "inputs": inputs,
           "vocab": manifest["vocab"], "splits": splits, "version": 1, "files": files}
    hashes = [_hash_of_version_1(old)]
    if not settings.get("vocab.tags"):
        settings.pop("vocab.tags", None)
    hashes.append(_hash_of_version_1(old))
    return hashes


def _hash_of_version_1(manifest: dict[str, Any]) -> str:
    text = json.dumps(manifest, indent=1, sort_keys=True, ensure_ascii=False) + "\n"
    return hashlib.sha256(text.encode()).hexdigest()


def is_free(folder: Path) -> bool:
    """Whether a folder is not there or empty, so that data may be prepared into it."""
    return not folder.exists() or (folder.is_dir() and not any(folder.iterdir()))


def require_manifest(folder: Path) -> None:
    """Raises `UserError` if a folder holds no prepared data."""
    if is_free(folder):
        raise UserError(f"there is no prepared data in {folder}; run deepnmt prepare with this recipe first")
    if not (folder / MANIFEST).is_file():
        raise UserError(f"{folder} holds no {MANIFEST}, so it is not prepared data; set data.folder to a new folder, "
                        "or to one that deepnmt prepare has written")


def open_prepared(recipe: Recipe, texts: bool = True) -> PreparedData:
    """The recipe's prepared data, to train from; `verify` then reads every byte of it.

    Args:
        texts: check that the training and validation texts, if they are on this machine, still have the sizes they had
            when they were prepared. A resumed run compares its data's fingerprint instead, and does not need the texts.

    Raises:
        UserError: the data is missing or damaged, or was made with another vocabulary, other filters or segmentation,
            or from other texts.
    """
    data = PreparedData.open(recipe.data.folder)
    check_settings(recipe, data)
    if not texts:
        return data
    for name, text in (("train", recipe.data.train), ("valid", recipe.data.valid)):
        if data.manifest["inputs"].get(name) and on_this_machine(text):
            files = files_by_corpus(text)
            check_texts(data, name, [{"bytes": file.stat().st_size, "corpus": corpus} for corpus, file in files])
    return data


def check_settings(recipe: Recipe, data: PreparedData) -> None:
    """Raises `UserError`, naming the first setting that differs, if a folder was prepared with other settings."""
    # a filter newer than the data counts as its default, which leaves nothing out
    defaults = _decisive({"data": {"filters": Filters().model_dump()}, "vocab": Vocab().model_dump()})
    then = defaults | data.manifest["settings"]
    now = prepared_settings(recipe)
    model = recipe.vocab.model
    if bool(model) != bool(then.get("vocab.model")):
        difference = "that vocab.model named, but the recipe has none"
        if model:
            difference = f"of its own, but vocab.model is {model}"
        raise UserError(f"prepared data {data.folder} was made with a vocabulary {difference}; {REMEDY}")
    files = vocabulary_files(Path(model)) if model else None
    if files is not None:
        hashes = [data.manifest["vocab"].get(side, {}).get("sha256") for side in ("src", "trg")]
        if [sha256(file) for file in files] != hashes:
            raise UserError(f"prepared data {data.folder} has another vocabulary than {model}, which vocab.model "
                            f"names; {REMEDY}")
    cleaned = [key for key in then if key.endswith(".cleaning")]
    for key in cleaned:
        rules = {}
        for name, value in then[key].items():
            if name not in Cleaning.model_fields or value != Cleaning.default(name):
                rules[name] = value
        then[key] = rules
        has_not_run = key in now and now[key].get("plugin", "") is None  # since nothing has to be cleaned
        if has_not_run and rules.get("plugin") in recipe.plugins.values():
            now[key]["plugin"] = rules["plugin"]
    lacking = {f"data.{name}" for name in corpora(recipe) if name not in data.splits}  # tests that are new
    for key in (*now, *cleaned, "data.train.corpora", "data.valid.corpora", "data.shard_pairs"):
        if key.rpartition(".")[0] not in lacking and then.get(key) != now.get(key):
            raise UserError(f"prepared data {data.folder} was made with {key} {then.get(key)}, but the recipe has "
                            f"{now.get(key)}; {REMEDY}")


def check_vocabularies(model: Path) -> None:
    """If `vocab.model` is a folder of ours, compares the vocabularies in it with its manifest. Raises `UserError`."""
    files = vocabulary_files(model)
    if not model.is_dir() or files is None or not (files[0].parent / MANIFEST).is_file():
        return
    folder, names = files[0].parent, {file.name for file in files}
    if folders.read_json(folder, MANIFEST).get("format") == FORMAT:
        folders.check_files(folder, PreparedData.open(folder).manifest, names, names, KIND)
    else:
        folders.check_files(folder, folders.read_manifest(folder), names, names)


def on_this_machine(corpus: Corpus) -> bool:
    """Whether all files of a text are on this machine; prepared data can be used without them."""
    return all(file.exists() for file in named_files(corpus))


def check_texts(data: PreparedData, name: str, files: Sequence[Mapping[str, Any]]) -> None:
    """Raises `UserError` if a split was prepared from other files, by what is known of these. Older data do not say of
    which corpus a file is."""
    inputs = data.manifest["inputs"][name]
    same = len(inputs) == len(files)
    for then, now in zip(inputs, files):
        for fact in ("bytes", "sha256", "corpus"):
            same &= fact not in then or fact not in now or then[fact] == now[fact]
    if not same:
        raise UserError(f"prepared data {data.folder} was made from other texts than the recipe's data.{name} names, "
                        "or they have changed since; set data.folder to a new folder to prepare these, or put the old "
                        "ones back")


def prepared_settings(recipe: Recipe) -> dict[str, Any]:
    """The settings that prepared data depends on, by their dotted keys."""
    settings = _decisive(recipe.model_dump())
    if not recipe.data.subword_variants:
        del settings["data.subword_alpha"]
    if not recipe.data.shard_pairs:  # as before there were shards
        del settings["data.shard_pairs"]
    if recipe.vocab.model:  # then the others have no effect, and the path may change
        for key in list(settings):
            if key.startswith("vocab.") and key not in ("vocab.kind", "vocab.shared"):
                del settings[key]
        settings["vocab.model"] = True
    for name, text in corpora(recipe).items():
        parts = corpora_of(text)
        if tuple(parts) != ("",) or text.tag:
            settings[f"data.{name}.corpora"] = [[part, corpus.tag] for part, corpus in parts.items()]
        for part, corpus in parts.items():
            place = f"data.{name}.{part}" if part else f"data.{name}"
            cleaning = cleaning_of(corpus).model_dump(exclude_defaults=True)
            if "language_id" in cleaning:
                cleaning["languages"] = languages_of(recipe, cleaning_of(corpus))
                cleaning["plugin"] = source_of("LANGUAGE_IDS", cleaning["language_id"])
            if cleaning:
                settings[f"{place}.cleaning"] = cleaning
            if corpus.tsv:
                settings[f"{place}.columns"] = corpus.columns
    return settings


def languages_of(recipe: Recipe, cleaning: Cleaning) -> list[str]:
    """The labels that a language identifier gives to sentences of the source and of the target."""
    return cleaning.languages or [recipe.data.src_lang, recipe.data.trg_lang]


def _decisive(tree: dict[str, Any]) -> dict[str, Any]:
    """The settings of a recipe's tree on which prepared data depends."""
    return {key: value for key, value in flatten(tree).items() if Recipe.is_marked(key, Fact.PREPARED)}


def tags_of(recipe: Recipe) -> list[str]:
    """The tags of the vocabulary: those that the recipe lists and those of the training text.

    Raises:
        UserError: one is a character or a piece of every vocabulary, or the validation text or a test has another one.
    """
    def of(text: Corpus) -> list[str]:
        return [corpus.tag for corpus in corpora_of(text).values() if corpus.tag]

    tags = list(dict.fromkeys([*recipe.vocab.tags, *of(recipe.data.train)]))
    for tag in tags:
        if len(tag) == 1:
            raise UserError(f"the tag {tag!r} is a single character, which no text could have any more; give it a "
                            "longer name, such as <2en>")
        if re.fullmatch("<unk>|</?s>|<pad>|<0x[0-9A-F]{2}>", tag):
            raise UserError(f"the tag {tag!r} is a piece of the vocabulary that stands for something else; give it "
                            "another name, such as <2en>")
    for name, text in corpora(recipe).items():
        for tag in of(text):
            if tag not in tags:
                raise UserError(f"data.{name} has the tag {tag!r}, which is not a piece of the vocabulary, whose tags "
                                f"are {', '.join(tags) or 'none'}; give a corpus of data.train this tag, or list it in "
                                "vocab.tags")
    return tags


def all_tags(recipe: Recipe) -> set[str]:
    """Every tag that the recipe names; sources may begin with them. Texts of other tasks have none."""
    if not isinstance(recipe.data, Data):
        return set()
    parts = [corpus for text in corpora(recipe).values() for corpus in corpora_of(text).values()]
    return {*recipe.vocab.tags, *(corpus.tag for corpus in parts if corpus.tag)}


def trained_on(recipe: Recipe, inputs: Mapping[str, Sequence[Mapping[str, Any]]] | None = None) -> list[str]:
    """A sentence on every validation or test text that has a file of the training text and so measures nothing.

    Args:
        inputs: of prepared data, whose files are compared by their contents; without, the recipe's are by their paths.
    """
    if inputs is None:
        paths: dict[str, list[dict[str, str]]] = {}
        for name, text in corpora(recipe).items():
            paths[name] = [{"name": str(file), "sha256": os.path.realpath(file)} for file in named_files(text)]
        inputs = paths
    trained = {file.get("sha256") for file in inputs.get("train", ())}
    sentences = []
    for name, files in inputs.items():
        names = [file["name"] for file in files if file.get("sha256") in trained and "name" in file]
        if names and name != "train":
            sentences.append(f"{name} has {' and '.join(names)} of the training text, so that its scores tell nothing "
                             "about other text; give sentences that are held out of training")
    return sentences


def corpora(recipe: Recipe) -> dict[str, Corpus]:
    """The texts of the recipe by the name of their split. Raises `UserError` if a test's name cannot be a file name."""
    if not isinstance(recipe.data, Data):
        raise UserError(f"the recipe has task: {recipe.task}, whose texts are not pairs of two languages; this is for "
                        "translation")
    for name in recipe.data.test:
        if not re.fullmatch(FILE_NAME, name):
            raise UserError(f"data.test.{name}: a test's name becomes part of file names; use letters, digits, '_', "
                            "'-' and '.' only")
    tests = {f"test.{name}": corpus for name, corpus in recipe.data.test.items()}
    return {"train": recipe.data.train, "valid": recipe.data.valid, **tests}
