"""Log-mel filter banks as Kaldi computes them with its usual options, but without dither: frames of 25 ms every 10 ms,
without those that the end cuts; pre-emphasis 0.97, Povey's window, 80 triangles from 20 Hz to half the sampling rate.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import numpy.typing as npt

BINS = 80
FRAME, SHIFT = 0.025, 0.010  # seconds
LOWEST = 20.0  # Hz
EMPHASIS = 0.97
FLOOR = float(np.finfo(np.float32).eps)  # of a bin's energy, before the logarithm
FULL_SCALE = 2.0**15  # Kaldi's samples are 16-bit integers

Floats = npt.NDArray[np.floating]


def filter_banks(wave: Floats, rate: int) -> npt.NDArray[np.float32]:
    """The log-mel energies [frames, 80] of a wave [samples] with values from -1 to 1. Less than 25 ms have no frame."""
    size, shift = int(rate * FRAME), int(rate * SHIFT)
    count = max(0, 1 + (len(wave) - size) // shift)
    if not count:
        return np.zeros((0, BINS), np.float32)
    frames = np.lib.stride_tricks.sliding_window_view(wave.astype(np.float64) * FULL_SCALE, size)[::shift][:count]
    frames = frames - frames.mean(axis=1, keepdims=True)
    before = np.concatenate([frames[:, :1], frames[:, :-1]], axis=1)
    window = (0.5 - 0.5 * np.cos(2 * np.pi * np.arange(size) / (size - 1))) ** 0.85
    padded = 1 << (size - 1).bit_length()
    power = np.abs(np.fft.rfft((frames - EMPHASIS * before) * window, padded)) ** 2
    energies = power[:, :-1] @ _triangles(rate, padded)
    return np.log(np.maximum(energies, FLOOR)).astype(np.float32)


@lru_cache
def _triangles(rate: int, padded: int) -> Floats:
    """The weight of each frequency in each bin [padded / 2, 80]: triangles of equal width in mels."""
    edges = np.linspace(_mel(LOWEST), _mel(rate / 2), BINS + 2)
    left, centre, right = edges[:-2], edges[1:-1], edges[2:]
    mels = _mel(np.arange(padded // 2) * rate / padded)[:, None]
    return np.maximum(0.0, np.minimum((mels - left) / (centre - left), (right - mels) / (right - centre)))


def _mel(hertz: Floats | float) -> Floats:
    return 1127.0 * np.log1p(np.asarray(hertz) / 700.0)


def normalised(features: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Features [frames, 80] of an utterance with mean 0 and variance 1 of each bin; a constant bin is 0."""
    deviation = features.std(axis=0)
    return (features - features.mean(axis=0)) / np.where(deviation > 1e-6, deviation, 1.0).astype(np.float32)
