"""The micro-batches of utterances, and what training hides of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch

from deepnmt.batch import Batch
from deepnmt.data.arrays import Indices, Lengths, Side
from deepnmt.data.batching import Sentences, Stream, tokens_before
from deepnmt.data.examples import Examples
from deepnmt.tasks.speech.filterbanks import BINS
from deepnmt.tasks.speech.settings import SHORTER, SpecAugment
from deepnmt.tokens import PAD

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
class Utterances(Examples):
    """Utterances with their transcripts: the "source" counts frames.

    Attributes:
        name: train or valid.
        frames: float16 [all frames, 80].
        offsets: int64 [N+1]; utterance i is frames[offsets[i]:offsets[i+1]].
        transcripts: their tokens.
        epoch: in which they are read, by which training hides frames.
    """

    name: str
    frames: npt.NDArray[np.float16]
    offsets: Indices
    transcripts: Side
    epoch: int = 0

    def __len__(self) -> int:
        return len(self.transcripts.lengths)

    def window(self, epoch: int, number: int) -> Utterances:
        return replace(self, epoch=epoch)

    @cached_property
    def src_lengths(self) -> Lengths:
        positions = -(-np.diff(self.offsets) // SHORTER)
        return (SHORTER * positions).astype(np.int32)

    @property
    def trg_lengths(self) -> Lengths:
        return self.transcripts.lengths

    def features(self, row: int) -> Frames:
        """The features [frames, 80] of an utterance."""
        return self.frames[self.offsets[row]:self.offsets[row + 1]]

    def batch(
        self, rows: Indices | Sequence[int], key: int, device: torch.device, features: Sequence[Frames] | None = None,
    ) -> Batch:
        """The utterances `rows` as one micro-batch with these features, by default their own: src fp32 [B, F, 80],
        src_lengths [B] in positions, trg_in [B, T] and trg_out [B, T]. No rows are one utterance whose target is a pad
        token, which does not count."""
        if features is None:
            features = [self.features(int(row)) for row in rows]
        src, positions = padded_frames(features or [np.zeros((1, BINS), np.float32)])
        if features:
            trg_out, lengths = self.transcripts.with_eos(np.asarray(rows, dtype=np.int64))
        else:
            trg_out, lengths = np.array([[PAD]]), np.array([0])
        named: dict[str, npt.NDArray[Any]] = {"src": src, "src_lengths": positions}
        named |= {"trg_in": tokens_before(trg_out), "trg_out": trg_out}
        return Batch.of_arrays(named, key, int(lengths.sum()), device)


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
        return utterances.batch(rows, key, device, features)
