"""Decoding without a cache: what the cache is worth is measured against it, and the cache is tested against it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from deepnmt.model.transformer import Transformer


class RecomputingStepper:
    """Decodes each hypothesis from its start at every step: slow but simple. Takes the arguments of `CachedStepper`."""

    def __init__(self, model: Transformer, src: Tensor, src_lengths: Tensor, beams: int, max_steps: int) -> None:
        self._model = model
        self._beams = beams
        self._memory = model.encode(src, src_lengths).repeat_interleave(beams, 0)
        self._lengths = src_lengths.repeat_interleave(beams, 0)
        self._prefixes = src.new_empty(len(self._memory), 0)

    def step(self, tokens: Tensor) -> Tensor:
        self._prefixes = torch.cat([self._prefixes, tokens[:, None]], dim=1)
        hidden = self._model.decode(self._prefixes, self._memory, self._lengths)
        return self._model.logits(hidden[:, -1])

    def reorder(self, rows: Tensor) -> None:
        self._prefixes = self._prefixes[rows]

    def select(self, sentences: Sequence[int]) -> None:
        rows = [sentence * self._beams + beam for sentence in sentences for beam in range(self._beams)]
        self._memory, self._lengths, self._prefixes = self._memory[rows], self._lengths[rows], self._prefixes[rows]
