"""The micro-batches of utterances, and what training hides of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import cast

import numpy as np
import numpy.typing as npt
import torch

from deepnmt.batch import TRANSLATION, Batch
from deepnmt.data.arrays import Indices, Lengths, Side
from deepnmt.data.batching import Rows, Sentences, Stream
from deepnmt.device import upload
from deepnmt.tasks.speech.filterbanks import BINS
from deepnmt.tasks.speech.settings import SHORTER, SpecAugment
from deepnmt.tokens import BOS, EOS, PAD

_PURPOSE = 57  # tells these draws from others with the same seeds

Frames = npt.NDArray[np.floating]


def padded_frames(utterances: Sequence[Frames]) -> tuple[npt.NDArray[np.float32], Indices]:
    """Features [frames, 80] of each as one array [B, F, 80], and their positions [B]. Each has zeros up to a whole
    number of positions, so that it has the same ones in every batch; F is that of the longest."""
    positions = np.array([-(-len(frames) // SHORTER) for frames in utterances], dtype=np.int64)
    array = np.zeros((len(utterances), SHORTER * int(positions.max()), BINS), np.float32)
    for row, frames in zip(array, utterances, strict=True):
        row[:len(frames)] = frames
    return array, positions


def hide(frames: Frames, settings: SpecAugment, seed: int, epoch: int, number: int) -> Frames:
    """The features [frames, 80] of utterance `number` with zeros, their mean, where `epoch` hides them. The draws are a
    function of the seeds alone, on every machine and with every NumPy."""
    draws = np.random.PCG64(np.random.SeedSequence((seed, epoch, number, _PURPOSE)))
    longest = min(settings.stretch_length, int(settings.stretch_share * len(frames)))

    def drawn(most: int) -> int:
        return int(draws.random_raw()) % (most + 1)

    frames = frames.copy()
    for _ in range(settings.bands):
        width = drawn(settings.band_width)
        start = drawn(BINS - width)
        frames[:, start:start + width] = 0
    for _ in range(settings.stretches):
        length = drawn(longest)
        start = drawn(len(frames) - length)
        frames[start:start + length] = 0
    return frames


@dataclass(frozen=True)
class Utterances:
    """Utterances with their transcripts, as `batching.Stream` asks for them: the "source" counts frames.

    Attributes:
        name: train or valid.
        frames: float16 [all frames, 80].
        offsets: int64 [N+1]; utterance i is frames[offsets[i]:offsets[i+1]].
        transcripts: their tokens.
        epoch: in which they are read.
    """

    name: str
    frames: npt.NDArray[np.float16]
    offsets: Indices
    transcripts: Side
    epoch: int = 0

    def __len__(self) -> int:
        return len(self.transcripts.lengths)

    def windows(self, epoch: int) -> int:
        return 1

    def window(self, epoch: int, number: int) -> Utterances:
        """The same in every epoch; what is hidden differs."""
        return replace(self, epoch=epoch)

    @property
    def sources(self) -> Rows:
        raise TypeError("an utterance has no tokens")

    @property
    def targets(self) -> Rows:
        return self.transcripts

    @property
    def src_lengths(self) -> Lengths:
        positions = -(-np.diff(self.offsets) // SHORTER)
        return (SHORTER * positions).astype(np.int32)

    @property
    def trg_lengths(self) -> Lengths:
        return self.transcripts.lengths

    def column(self, name: str) -> Rows:
        raise KeyError(name)

    def features(self, row: int) -> Frames:
        """The features [frames, 80] of an utterance."""
        return self.frames[self.offsets[row]:self.offsets[row + 1]]

    def batch(self, rows: Indices | Sequence[int], features: Sequence[Frames], key: int, device: torch.device) -> Batch:
        """The utterances `rows` as one micro-batch with these features: src fp32 [B, F, 80], src_lengths [B] in
        positions, trg_in [B, T] and trg_out [B, T]. No rows are one utterance whose target is a pad token, which does
        not count."""
        src, positions = padded_frames(features or [np.zeros((1, BINS), np.float32)])
        if features:
            trg_out, lengths = self.transcripts.with_eos(np.asarray(rows, dtype=np.int64))
        else:
            trg_out, lengths = np.array([[PAD]]), np.array([0])
        trg_in = np.full_like(trg_out, BOS)
        trg_in[:, 1:] = np.where(trg_out[:, :-1] == EOS, PAD, trg_out[:, :-1])
        tensors = (upload(torch.from_numpy(array), device) for array in (src, positions, trg_in, trg_out))
        return Batch(dict(zip(TRANSLATION, tensors, strict=True)), key, int(lengths.sum()))

    def whole_batch(self, rows: Indices | Sequence[int], device: torch.device) -> Batch:
        """The same with nothing hidden."""
        return self.batch(rows, [self.features(int(row)) for row in rows], 0, device)


class SpeechStream(Stream):
    """The training micro-batches; `tokens` is their size in frames."""

    def __init__(
        self, utterances: Utterances, tokens: int, seed: int, settings: SpecAugment, update_tokens: int | None = None,
    ) -> None:
        super().__init__(utterances, tokens, seed, update_tokens=update_tokens)
        self._settings = settings

    def collate(self, sentences: Sentences, rows: Indices, key: int, device: torch.device) -> Batch:
        utterances = cast(Utterances, sentences)
        features = [hide(utterances.features(int(row)), self._settings, self._seed, utterances.epoch, int(row))
                    for row in rows]
        return utterances.batch(rows, features, key, device)
