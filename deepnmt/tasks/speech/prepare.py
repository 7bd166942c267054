"""`deepnmt prepare` for speech: lists of utterances to a folder of features and token arrays, beside what
`data/task_folder.py` says:

    train.frames                    float16 [all frames, 80], little-endian: the normalised features of all utterances
    train.frames.offsets            int64 [N+1]: utterance i is frames[offsets[i]:offsets[i+1]]
    train.tokens, train.offsets     the transcripts, see `data/arrays.py`; valid likewise
    valid.txt                       the transcripts of the validation

The folder depends on the audio, too. `prepare` compares its size, since to read it all takes long.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from deepnmt import folders
from deepnmt.data.arrays import OFFSET, Side, SideWriter, array_of
from deepnmt.data.prepared import REMEDY, is_free
from deepnmt.data.task_folder import SPLITS, PreparedFolder, kind_of_folder, write_vocabulary
from deepnmt.data.vocab import Vocabulary
from deepnmt.errors import UserError
from deepnmt.progress import show_progress
from deepnmt.tasks.speech.audio import Utterance, features_of, read_lists
from deepnmt.tasks.speech.data import Utterances
from deepnmt.tasks.speech.filterbanks import BINS
from deepnmt.tasks.speech.settings import SpeechRecipe

FLOAT = np.dtype("<f2")
CHUNK = 256  # utterances that are read at a time


class PreparedSpeech(PreparedFolder):
    """A complete folder, with the vocabulary of the transcripts."""

    kind = kind_of_folder("deepnmt-speech")
    same_content = True  # lists are short

    def utterances(self, split: str) -> Utterances:
        """Those of train or valid. Raises `UserError` if its files do not fit each other."""
        stem = f"{split}.frames"
        frames, offsets = array_of(self.path(stem), FLOAT), array_of(self.path(f"{stem}.offsets"), OFFSET)
        transcripts = Side(self.folder, self.manifest["files"], split)
        fits = len(offsets) == len(transcripts.lengths) + 1 and len(frames) == offsets[-1] * BINS
        if not fits or (np.diff(offsets) < 1).any():
            raise folders.DamagedFolder(self.folder, f"{stem}.offsets does not divide {stem} into the utterances of "
                                        f"{split}.tokens", self.kind)
        return Utterances(split, frames.reshape(-1, BINS), offsets, transcripts)

    def texts(self) -> list[str]:
        """The transcripts of the validation."""
        return self.path("valid.txt").read_bytes().decode("utf-8").split("\n")[:-1]

    @classmethod
    def write(cls, recipe: SpeechRecipe, folder: Path) -> dict[str, dict[str, int]]:
        """The short list comes first, for its faults. Raises `UserError` if an utterance is faulty."""
        utterances = {split: list(read_lists(getattr(recipe.data, split), f"data.{split}")) for split in SPLITS}
        some = utterances["train"][:recipe.vocab.max_sentences]
        vocab = write_vocabulary(recipe, folder, [utterance.text for utterance in some])
        transcripts = [f"{utterance.text}\n" for utterance in utterances["valid"]]
        (folder / "valid.txt").write_text("".join(transcripts), "utf-8")
        return {split: _encode(recipe, folder, split, utterances[split], vocab) for split in reversed(SPLITS)}

    @classmethod
    def prepare(cls, recipe: SpeechRecipe, part: str = "") -> Path:  # type: ignore[override]
        folder = Path(recipe.data.folder)
        counts = {} if is_free(folder) else cls.open(recipe).manifest["splits"]
        for split in counts:
            then = counts[split].get("bytes")  # older folders do not say
            now = _bytes_of(read_lists(getattr(recipe.data, split), f"data.{split}"))
            if None not in (then, now) and then != now:
                raise UserError(f"the audio of data.{split} has {now:,} bytes, but had {then:,} when {folder} was "
                                f"prepared; restore it, or {REMEDY}")
        return super().prepare(recipe, part)

    @classmethod
    def describe(cls, recipe: SpeechRecipe, counts: dict[str, int]) -> str:
        return (f"{counts['utterances']:,} utterances, {counts['frames'] / 360_000:.2f} hours, "
                f"{counts['tokens']:,} tokens")


def _encode(recipe: SpeechRecipe, folder: Path, split: str, utterances: list[Utterance], vocab: Vocabulary
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
    counts = {"utterances": len(utterances), "frames": offsets[-1], "tokens": writer.end}
    size = _bytes_of(utterances)
    return counts if size is None else {**counts, "bytes": size}


def _bytes_of(utterances: Iterable[Utterance]) -> int | None:
    """The size of their audio; None if a file is not there any more."""
    try:
        return sum(utterance.file.stat().st_size for utterance in utterances)
    except OSError:
        return None


def read_features(
    utterances: list[Utterance], rate: int, max_frames: int, workers: int = 0, setting: str = "data.max_frames",
) -> Iterator[tuple[Utterance, np.ndarray[Any, np.dtype[np.float16]]]]:
    """The utterances in order, each with its features as float16 [frames, 80]. For `setting` see `features_of`. Raises
    `UserError`."""
    def read(utterance: Utterance) -> np.ndarray[Any, np.dtype[np.float16]]:
        return features_of(utterance, rate, max_frames, setting).astype(FLOAT)

    with ThreadPoolExecutor(workers or os.cpu_count()) as pool:
        for begin in range(0, len(utterances), CHUNK):
            chunk = utterances[begin:begin + CHUNK]
            yield from zip(chunk, pool.map(read, chunk), strict=True)
