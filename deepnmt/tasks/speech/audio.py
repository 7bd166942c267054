"""Lists of utterances, and audio files to features. Each fault is a sentence with the list, the line and the file."""

from __future__ import annotations

import io
import wave
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
import numpy.typing as npt

from deepnmt.data.text import files_of, read_lines
from deepnmt.errors import UserError
from deepnmt.tasks.speech.filterbanks import BINS, filter_banks, normalised

Features = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Utterance:
    """A line of a list.

    Attributes:
        where: "LIST, line N (FILE)", for messages.
        file: the audio, or ready features.
        text: the transcript; "" if there is none.
    """

    where: str
    file: Path
    text: str


def utterance_of(line: str, number: int, listed: Path | None) -> Utterance:
    """Line `number` of a list; None: standard input, with paths from the present folder. Raises `UserError` if it
    names no file."""
    name, _, text = line.partition("\t")
    name = name.strip()
    if not name:
        raise UserError(f"{listed or 'standard input'}, line {number}: there is no file; give PATH, a tab and the "
                        "transcript")
    file = (listed.parent if listed else Path()) / name
    return Utterance(f"{listed or 'standard input'}, line {number} ({name})", file, text.strip())


def read_lists(names: Sequence[str], setting: str) -> Iterator[Utterance]:
    """The utterances of lists, all of which have a transcript. Raises `UserError`; `setting` names the lists."""
    empty = True
    for listed in map(Path, files_of(names)):
        if not listed.is_file():
            raise UserError(f"{setting}: there is no list {listed}; correct its path")
        for number, line in enumerate(read_lines(listed), start=1):
            utterance, empty = utterance_of(line, number, listed), False
            if not utterance.text:
                raise UserError(f"{utterance.where}: the transcript is empty; write it after a tab, or remove the line")
            yield utterance
    if empty:
        raise UserError(f"{setting}: there is no utterance in {', '.join(names)}; give another list")


def features_of(utterance: Utterance, rate: int, max_frames: int, setting: str = "data.max_frames") -> Features:
    """The normalised features [frames, 80] of an utterance; `setting` says in messages what `max_frames` is.

    Raises:
        UserError: there is no such file, it is damaged, has another rate or several channels, or is too short or long.
    """
    if not utterance.file.is_file():
        raise UserError(f"{utterance.where}: there is no file {utterance.file}; correct the path")
    if utterance.file.suffix == ".npy":
        features = _ready(utterance)
    else:
        samples = read_wave(utterance, rate)
        if not np.isfinite(samples).all():
            raise UserError(f"{utterance.where}: the audio holds what is no number (NaN or infinity); write it anew")
        features = filter_banks(samples, rate)
    if not len(features):
        raise UserError(f"{utterance.where}: the audio is shorter than a frame of 25 ms; remove the line")
    if len(features) > max_frames:
        higher = ", or set data.max_frames higher" if setting == "data.max_frames" else ""
        raise UserError(f"{utterance.where}: the audio has {len(features)} frames of 10 ms, but {setting} is "
                        f"{max_frames}; cut it into several, or remove the line{higher}")
    return normalised(features)


def _ready(utterance: Utterance) -> Features:
    try:
        features = np.load(utterance.file, allow_pickle=False)
    except (OSError, ValueError, EOFError, BadZipFile) as error:
        raise UserError(f"{utterance.where}: the array cannot be read ({error}); write it anew with numpy.save"
                        ) from None
    if not isinstance(features, np.ndarray):
        raise UserError(f"{utterance.where}: the file holds several arrays, as numpy.savez writes them, and must hold "
                        "one; write it anew with numpy.save")
    if features.ndim != 2 or features.shape[1] != BINS or features.dtype.kind != "f":
        raise UserError(f"{utterance.where}: the array has shape {list(features.shape)} of {features.dtype}, must be "
                        f"[frames, {BINS}] of floats")
    with np.errstate(over="ignore"):  # it is infinity then
        features = features.astype(np.float32)
    if not np.isfinite(features).all():
        raise UserError(f"{utterance.where}: the array holds what is no number in fp32 (NaN or infinity); write it "
                        "anew")
    return features


def read_wave(utterance: Utterance, rate: int) -> Features:
    """The samples of an audio file, from -1 to 1. WAV of 16 bits needs no library. Raises `UserError`."""
    try:
        content = _with_sizes(utterance.file.read_bytes())
    except OSError as error:
        raise UserError(f"{utterance.where}: the audio cannot be read ({error.strerror}); give it again, or remove the "
                        "line") from None
    truncated = UserError(f"{utterance.where}: the audio is truncated: its header promises more than the "
                          f"{len(content):,} bytes there are; get the file again")
    if content[:4] == b"RIFF" and (len(content) < 8 or _size_at(content, 4) + 8 > len(content)):
        raise truncated
    plain = _plain_wave(content)
    if plain is not None and len(plain[0]) < plain[2]:
        raise truncated
    samples, its_rate = _any_audio(utterance, content) if plain is None else plain[:2]
    if its_rate != rate:
        raise UserError(f"{utterance.where}: the audio has {its_rate:,} samples a second, but data.sample_rate is "
                        f"{rate:,}; convert it, for example with sox FILE -r {rate} OTHER.wav")
    if samples.ndim != 1:
        raise UserError(f"{utterance.where}: the audio has {samples.shape[1]} channels, must have one; convert it, for "
                        "example with sox FILE -c 1 OTHER.wav")
    return samples


def _size_at(content: bytes, place: int) -> int:
    """A size in a WAV's header."""
    return int.from_bytes(content[place:place + 4], "little")


def _with_sizes(content: bytes) -> bytes:
    """A WAV that was written into a pipe, with the sizes in its header that its writer could not know yet: they are 0,
    or 0xFFFFFFFF (ffmpeg) or 0x7FFFF000 and the header (SoX). Any other audio as it is."""
    if content[:4] != b"RIFF" or 0 < _size_at(content, 4) < 0x7FFFF000:
        return content
    start = 12  # of a chunk: its name, its size, and so many bytes
    while content[start:start + 4] != b"data":
        if start >= len(content):
            return content
        size = _size_at(content, start + 4)
        start += 8 + size + size % 2
    size = _size_at(content, start + 4)
    if not 0 < size < 0x7FFFF000:
        size = min(len(content) - start - 8, 2**31)
    whole, samples = (start + size).to_bytes(4, "little"), size.to_bytes(4, "little")
    return b"".join([content[:4], whole, content[8:start + 4], samples, content[start + 8:]])


def _plain_wave(content: bytes) -> tuple[Features, int, int] | None:
    """The samples that are there and the rate of a WAV of 16-bit integers, and how many samples its header promises;
    None if the file is another."""
    try:
        with wave.open(io.BytesIO(content), "rb") as audio:
            if audio.getsampwidth() != 2:
                return None
            channels, promised = audio.getnchannels(), audio.getnframes()
            read = audio.readframes(promised)
            read = read[:len(read) // (2 * channels) * 2 * channels]  # whole ones
            samples = np.frombuffer(read, "<i2").astype(np.float32) / np.float32(2**15)
            return samples if channels == 1 else samples.reshape(-1, channels), audio.getframerate(), promised
    except (wave.Error, EOFError, ValueError):
        return None


def _any_audio(utterance: Utterance, content: bytes) -> tuple[Any, int]:
    try:
        import soundfile
    except (ImportError, OSError):  # OSError: without libsndfile
        raise UserError(f"{utterance.where}: only WAV of 16 bits is read without soundfile, which is not installed: "
                        "pip install 'deepnmt[speech]'") from None
    try:
        with soundfile.SoundFile(io.BytesIO(content)) as audio:
            if audio.frames > 2**48:
                raise UserError(f"{utterance.where}: the header does not say how long the audio is, as when it was "
                                "written into a pipe; write it into a file")
            samples = audio.read(dtype="float32")
            promised = audio.frames
            its_rate = audio.samplerate
    except RuntimeError as error:
        why = getattr(error, "error_string", error)  # without what was opened
        raise UserError(f"{utterance.where}: the audio cannot be read ({why}), or is truncated; get the file again"
                        ) from None
    if len(samples) < promised:
        raise UserError(f"{utterance.where}: the audio is truncated: {len(samples):,} of {promised:,} samples are "
                        "there; get the file again")
    return samples, its_rate
