"""`deepnmt prepare` for speech: lists of utterances to a folder of features and token arrays.

    train.frames                    float16 [all frames, 80], little-endian: the normalised features of all utterances
    train.frames.offsets            int64 [N+1]: utterance i is frames[offsets[i]:offsets[i+1]]
    train.tokens, train.offsets     the transcripts, see `data/arrays.py`; valid likewise
    valid.txt                       the transcripts of the validation
    src.spm, trg.spm                the vocabulary, twice, so that `vocab.model` finds it
    manifest.json                   settings, hashes of the lists, sizes and hashes of the files

The folder depends on lists, audio and the settings in `prepared_settings` alone. It is there whole or not at all.
"""

from __future__ import annotations

import glob
import itertools
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from deepnmt import folders
from deepnmt.data.arrays import OFFSET, Side, SideWriter, array_of
from deepnmt.data.prepared import REMEDY, manifest_of_task
from deepnmt.data.text import files_of
from deepnmt.data.vocab import Vocabulary, given_vocabularies, train_vocabulary
from deepnmt.errors import UserError
from deepnmt.files import sha256
from deepnmt.progress import print_status, show_progress
from deepnmt.tasks.speech.audio import Utterance, features_of, read_lists
from deepnmt.tasks.speech.data import Utterances
from deepnmt.tasks.speech.filterbanks import BINS
from deepnmt.tasks.speech.settings import SpeechRecipe

FORMAT = "deepnmt-speech"
KIND = folders.Kind("prepared data", (FORMAT,), "delete the folder and run deepnmt prepare again",
                    "free space there, or set data.folder to another folder")
SPLITS = ("train", "valid")
FLOAT = np.dtype("<f2")
CHUNK = 256  # utterances that are read at a time


class PreparedSpeech:
    """A complete folder; made by `open_speech`."""

    def __init__(self, folder: Path, manifest: dict[str, Any]) -> None:
        self.folder, self.manifest = folder, manifest

    @cached_property
    def vocab(self) -> Vocabulary:
        """The vocabulary of the transcripts."""
        return Vocabulary.load(folders.require_named(self.folder, self.manifest, "trg.spm", KIND))

    def utterances(self, split: str) -> Utterances:
        """Those of train or valid. Raises `UserError` if its files do not fit each other."""
        files = self.manifest["files"]
        names = [f"{split}.frames", f"{split}.frames.offsets"]
        paths = [folders.require_named(self.folder, self.manifest, name, KIND) for name in names]
        frames, offsets = array_of(paths[0], FLOAT), array_of(paths[1], OFFSET)
        transcripts = Side(self.folder, files, split)
        if len(offsets) != len(transcripts.lengths) + 1 or len(frames) != offsets[-1] * BINS or (
                np.diff(offsets) < 1).any():
            raise folders.DamagedFolder(self.folder, f"{names[1]} does not divide {names[0]} into the utterances of "
                                        f"{split}.tokens", KIND)
        return Utterances(split, frames.reshape(-1, BINS), offsets, transcripts)

    def texts(self) -> list[str]:
        """The transcripts of the validation."""
        return folders.require_named(self.folder, self.manifest, "valid.txt", KIND).read_text("utf-8").splitlines()

    @property
    def fingerprint(self) -> str:
        """A hash of what training reads."""
        return folders.hash_of({name: entry["sha256"] for name, entry in self.manifest["files"].items()})

    def verify(self) -> None:
        """Compares every byte with the manifest. Raises `UserError`."""
        folders.check_files(self.folder, self.manifest, None, (), KIND)


def prepared_settings(recipe: SpeechRecipe) -> dict[str, Any]:
    """What a folder depends on beside lists and audio."""
    data, vocab = recipe.data, recipe.vocab
    settings: dict[str, Any] = {f"data.{name}": getattr(data, name) for name in ("sample_rate", "max_frames",
                                                                                "max_tokens")}
    if vocab.model is None:
        settings |= {f"vocab.{name}": getattr(vocab, name)
                     for name in ("kind", "size", "byte_fallback", "character_coverage", "max_sentences")}
    else:
        settings["vocab.model"] = True
    return settings


def open_speech(recipe: SpeechRecipe, lists: bool = True) -> PreparedSpeech:
    """The recipe's prepared data; `lists`: whether the lists that they were made from must still be the same.

    Raises:
        UserError: there is none, or it was made with other settings or from other lists.
    """
    folder = Path(recipe.data.folder)
    manifest = manifest_of_task(folder, prepared_settings(recipe), KIND)
    for split in SPLITS if lists else ():
        if all(Path(name).is_file() for name in files_of(getattr(recipe.data, split))) and (
                _lists(recipe, split) != manifest["inputs"][split]):
            raise UserError(f"the lists of data.{split} have changed since {folder} was prepared; restore them, or "
                            f"{REMEDY}")
    return PreparedSpeech(folder, manifest)


def prepare_speech(recipe: SpeechRecipe, part: str = "") -> Path:
    """Prepares the recipe's utterances and returns their folder; one that is up to date is not changed.

    Raises:
        UserError: an utterance is faulty; the folder holds other data or cannot be written. Nothing is left of it then.
    """
    if part:
        raise UserError(f"--part is {part}, but the data of task: speech are prepared in one piece; leave it out")
    folder = Path(recipe.data.folder)
    if folder.is_dir() and any(folder.iterdir()):
        open_speech(recipe).verify()
        print_status(f"{folder} is up to date")
        return folder
    target = Path(os.path.realpath(folder))
    utterances = {split: list(read_lists(getattr(recipe.data, split), f"data.{split}")) for split in SPLITS}
    inputs = {split: _lists(recipe, split) for split in SPLITS}
    folders.recover_after_kill(target.parent, glob.escape(target.name))
    with folders.new_folder(target, KIND) as temporary:
        vocab = _vocabulary(recipe, [utterance.text for utterance in utterances["train"]])
        for name in ("src.spm", "trg.spm"):
            (temporary / name).write_bytes(vocab.bytes)
        (temporary / "valid.txt").write_text("".join(f"{each.text}\n" for each in utterances["valid"]), "utf-8")
        counts = {split: _write(recipe, temporary, split, utterances[split], vocab) for split in reversed(SPLITS)}
        facts = {"format": FORMAT, "settings": prepared_settings(recipe), "inputs": inputs, "splits": counts}
        folders.publish(temporary, target, folders.entries_of(temporary, target, KIND), facts, KIND)
    for split, count in counts.items():
        print_status(f"{split}: {count['utterances']:,} utterances, {count['frames'] / 360_000:.2f} hours, "
                     f"{count['tokens']:,} tokens")
    return folder


def _lists(recipe: SpeechRecipe, split: str) -> list[dict[str, Any]]:
    """Name and hash of the lists of a split, which are there."""
    files = map(Path, files_of(getattr(recipe.data, split)))
    return [{"name": file.name, "sha256": sha256(file)} for file in files]


def _vocabulary(recipe: SpeechRecipe, texts: list[str]) -> Vocabulary:
    if recipe.vocab.model:
        return Vocabulary(given_vocabularies(recipe.vocab, [])[0])
    print_status(f"training the vocabulary of {recipe.vocab.size} {recipe.vocab.kind} pieces")
    return Vocabulary(train_vocabulary(itertools.islice(texts, recipe.vocab.max_sentences), recipe.vocab))


def _write(recipe: SpeechRecipe, folder: Path, split: str, utterances: list[Utterance], vocab: Vocabulary
           ) -> dict[str, int]:
    writer, offsets, data = SideWriter(folder, split, vocab.size), [0], recipe.data
    with open(folder / f"{split}.frames", "wb") as stream, \
            show_progress(f"{split}: {{:,}} utterances read", desc=split) as progress:
        for utterance, features in read_features(utterances, data.sample_rate, data.max_frames, data.workers):
            tokens = vocab.encode(utterance.text)
            if len(tokens) > data.max_tokens:
                raise UserError(f"{utterance.where}: the transcript has {len(tokens)} tokens, but data.max_tokens is "
                                f"{data.max_tokens}; remove the line, or set data.max_tokens higher")
            writer.add(np.array(tokens, dtype=np.uint32), np.array([len(tokens)], dtype=np.int64))
            stream.write(features.tobytes())
            offsets.append(offsets[-1] + len(features))
            progress(len(offsets) - 1)
    (folder / f"{split}.frames.offsets").write_bytes(np.array(offsets, OFFSET).tobytes())
    return {"utterances": len(utterances), "frames": offsets[-1], "tokens": writer.end}


def read_features(utterances: list[Utterance], rate: int, max_frames: int, workers: int = 0
                  ) -> Iterator[tuple[Utterance, np.ndarray[Any, np.dtype[np.float16]]]]:
    """The utterances in order, each with its features as float16 [frames, 80]. Raises `UserError`."""
    def read(utterance: Utterance) -> np.ndarray[Any, np.dtype[np.float16]]:
        return features_of(utterance, rate, max_frames).astype(FLOAT)

    with ThreadPoolExecutor(workers or os.cpu_count()) as pool:
        for begin in range(0, len(utterances), CHUNK):
            chunk = utterances[begin:begin + CHUNK]
            yield from zip(chunk, pool.map(read, chunk), strict=True)
