"""A translation task made of numbers, cheap enough to train hundreds of models on: a walk through a secret alphabet.

A source sentence is a random walk: each symbol is followed by one of `successors` others, drawn evenly. Its translation
is the same sentence in another alphabet, a fixed permutation of the symbols. In nats a target symbol: a model that
learned nothing but the symbols' frequencies loses log(symbols), one that reads its own output log(successors), and one
that reads the source 0; of the end of the sentence all learn.

`B` sentences, `S` source and `T` target length.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from deepnmt.batch import Batch
from deepnmt.model.dropout import stable_hash
from deepnmt.tokens import BOS, EOS, PAD

_FIRST = PAD + 1  # the id of the first symbol


@dataclass(frozen=True)
class ToyTask:
    """Symbols, successors of each, symbols of a sentence (shortest to longest), and the seed of all of it."""

    symbols: int = 12
    successors: int = 3
    shortest: int = 4
    longest: int = 6
    seed: int = 1
    _alphabet: Tensor = field(init=False, repr=False, compare=False)
    _next: Tensor = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        draw = torch.Generator().manual_seed(stable_hash(self.seed, "alphabet"))
        following = torch.stack([torch.randperm(self.symbols, generator=draw)[: self.successors]
                                 for _ in range(self.symbols)])
        object.__setattr__(self, "_alphabet", torch.randperm(self.symbols, generator=draw))
        object.__setattr__(self, "_next", following)

    @property
    def vocabulary(self) -> int:
        """Ids, the four special ones included."""
        return self.symbols + _FIRST

    @property
    def frequencies_only(self) -> float:
        """Nats a target token of a model that knows how often each symbol is and when a sentence ends."""
        length = (self.shortest + self.longest) / 2
        return math.log(self.symbols) * length / (length + 1)

    @property
    def target_only(self) -> float:
        """Nats a target token of a model that reads its own output, not the source; the first symbol is a guess."""
        length = (self.shortest + self.longest) / 2
        return (math.log(self.symbols) + math.log(self.successors) * (length - 1)) / (length + 1)

    def batch(self, number: int, sentences: int) -> Batch:
        """Batch `number`, a function of it and the seed: src [B, S], src_lengths [B], trg_in [B, T], trg_out [B, T]."""
        draw = torch.Generator().manual_seed(stable_hash(self.seed, "batch", number))
        lengths = torch.randint(self.shortest, self.longest + 1, (sentences,), generator=draw)
        walk = torch.empty(sentences, self.longest, dtype=torch.int64)
        walk[:, 0] = torch.randint(self.symbols, (sentences,), generator=draw)
        for place in range(1, self.longest):
            chosen = torch.randint(self.successors, (sentences,), generator=draw)
            walk[:, place] = self._next[walk[:, place - 1], chosen]
        src, trg = (_closed(symbols + _FIRST, lengths) for symbols in (walk, self._alphabet[walk]))
        trg_in = torch.cat([torch.full((sentences, 1), BOS), trg[:, :-1].masked_fill(trg[:, :-1] == EOS, PAD)], dim=1)
        return Batch((src, lengths + 1, trg_in, trg), number, int((trg != PAD).sum()))


def _closed(symbols: Tensor, lengths: Tensor) -> Tensor:
    """Symbols [B, n] of these lengths [B] with eos behind them and pad behind that, [B, n + 1]."""
    closed = torch.cat([symbols, torch.full((len(symbols), 1), PAD)], dim=1)
    places = torch.arange(closed.size(1))
    closed = closed.masked_fill(places > lengths[:, None], PAD)
    return closed.masked_fill(places == lengths[:, None], EOS)
