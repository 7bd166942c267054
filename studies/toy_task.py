"""A toy translation task, cheap enough to train hundreds of models on: random walks in a permuted alphabet.

A source sentence is a random walk: each symbol is followed by one of `successors` others with equal probability. Its
translation is the same sentence with the symbols replaced by a fixed permutation. The loss in nats a target symbol is
log(symbols) for a model that knows only the symbols' frequencies, log(successors) for one that uses its own output, and
0 for one that uses the source. All of them learn where sentences end.

`B` sentences, `S` source and `T` target length.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from deepnmt.batch import TRANSLATION, Batch
from deepnmt.model.dropout import stable_hash
from deepnmt.tokens import BOS, EOS, PAD

_FIRST = PAD + 1  # the id of the first symbol


@dataclass(frozen=True)
class ToyTask:
    """Number of symbols, successors of each, symbols in a sentence (shortest to longest), and the seed."""

    symbols: int = 12
    successors: int = 3
    shortest: int = 4
    longest: int = 6
    seed: int = 1

    @cached_property
    def _tables(self) -> tuple[Tensor, Tensor]:
        """The successors of each symbol, [symbols, successors], and its translation, [symbols]."""
        generator = torch.Generator().manual_seed(stable_hash(self.seed, "alphabet"))
        orders = [torch.randperm(self.symbols, generator=generator) for _ in range(self.symbols + 1)]
        return torch.stack(orders[:-1])[:, : self.successors], orders[-1]

    @property
    def vocabulary(self) -> int:
        """Number of ids, including the four special ones."""
        return self.symbols + _FIRST

    @property
    def target_only(self) -> float:
        """Nats a target token of a model that uses its own output, not the source, and guesses the first symbol."""
        length = (self.shortest + self.longest) / 2
        return (math.log(self.symbols) + math.log(self.successors) * (length - 1)) / (length + 1)

    def batch(self, number: int, sentences: int) -> Batch:
        """The batch with this number, always the same: src [B, S], src_lengths [B], trg_in and trg_out [B, T]."""
        following, alphabet = self._tables
        generator = torch.Generator().manual_seed(stable_hash(self.seed, "batch", number))
        lengths = torch.randint(self.shortest, self.longest + 1, (sentences,), generator=generator)
        steps = [torch.randint(self.symbols, (sentences,), generator=generator)]
        while len(steps) < self.longest:
            steps.append(following[steps[-1], torch.randint(self.successors, (sentences,), generator=generator)])
        walk = torch.stack(steps, dim=1)
        src, trg = (_closed(symbols + _FIRST, lengths) for symbols in (walk, alphabet[walk]))
        trg_in = torch.cat([torch.full((sentences, 1), BOS), trg[:, :-1].masked_fill(trg[:, :-1] == EOS, PAD)], dim=1)
        tensors = dict(zip(TRANSLATION, (src, lengths + 1, trg_in, trg), strict=True))
        return Batch(tensors, number, int((trg != PAD).sum()))


def _closed(symbols: Tensor, lengths: Tensor) -> Tensor:
    """Symbols [B, n] truncated to these lengths [B], followed by eos and padding, [B, n + 1]."""
    closed = torch.cat([symbols, torch.full((len(symbols), 1), PAD)], dim=1)
    positions = torch.arange(closed.size(1))
    closed = closed.masked_fill(positions > lengths[:, None], PAD)
    return closed.masked_fill(positions == lengths[:, None], EOS)
