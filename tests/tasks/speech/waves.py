"""Synthetic waves, the same on every machine."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

RATE = 16_000


def wave_of(number: int, seconds: float = 0.0451) -> npt.NDArray[np.float32]:
    """Wave `number`: chirps in noise, loud or faint, with an offset, from -1 to 1. Bins without noise would hold what
    Kaldi's fp32 rounds, which is no figure to compare with."""
    time = np.arange(int(seconds * RATE)) / RATE
    draw = np.random.PCG64(np.random.SeedSequence((9, number))).random_raw(len(time)) / 2.0**63 - 1
    start, end = 80 + 150 * number, 7800 - 200 * number
    tone = np.sin(2 * np.pi * (start + (end - start) * time / (2 * seconds)) * time)
    loudness, noise = (0.9, 0.3, 0.02)[number % 3], (0.05, 0.1, 0.8, 0.2)[number % 4]
    return (loudness * ((1 - noise) * tone + noise * draw) + 0.01 * (number % 5)).clip(-1, 1).astype(np.float32)
