"""The windows of a text in shards: an epoch is planned a window at a time.

Every corpus is an endless sequence of pairs: pass after pass over its blocks, pieces of its shards of up to `BLOCK`
pairs, in another random order in every pass. An epoch takes as many pairs of each corpus as are due to it (see
`mixing.py`) and goes on where the one before ended; of W windows each takes one W-th of them. So

* every pair of a corpus is used equally often, give or take one, and once an epoch where the weights are equal;
* every window has the corpora in their shares, give or take a pair;
* what a window has is a function of (seed, epoch, window), and costs the same for any number of pairs.

A text that is one window has all its pairs in their order, and the plan that it would have in one piece.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from deepnmt.data.batching import WINDOWS, random_order
from deepnmt.data.shards import Piece, Shard, ShardedText, Window
from deepnmt.errors import UserError

# Pairs of a block: enough to be read in one go, and so few that a window has blocks from all over a corpus that is
# sorted. A small corpus has SOME blocks or more.
BLOCK, SOME = 100_000, 64


class Range(NamedTuple):
    """Pairs of a shard: its corpus and its number, and from which pair to which."""

    corpus: int
    shard: int
    start: int
    stop: int


class Due(Protocol):
    """How many pairs of each corpus are due; see `mixing.Mixture`."""

    def counts(self, epoch: int) -> list[int]:
        """In an epoch."""

    def starts(self, epoch: int) -> list[int]:
        """Before it."""


class Windows:
    """A text in shards as a `Stream` reads it."""

    def __init__(self, text: ShardedText, due: Due, seed: int, pairs: int) -> None:
        """`pairs`: of a window, or fewer, so that all windows of an epoch are equally large."""
        self.name = text.name
        self._text, self._due, self._seed, self._pairs = text, due, seed, pairs
        self._blocks = [_blocks(corpus, sizes) for corpus, sizes in enumerate(text.sizes.values())]

    def windows(self, epoch: int) -> int:
        """How many an epoch has; each has a pair of its largest corpus. Raises `UserError` for too many."""
        counts = self._due.counts(epoch)
        windows = min(-(-sum(counts) // self._pairs), max(counts))
        if windows > WINDOWS:
            raise UserError(f"data.window_pairs is {self._pairs:,}, so an epoch has {windows:,} windows, but at most "
                            f"{WINDOWS:,} can be numbered; set it to {-(-sum(counts) // WINDOWS):,} or more")
        return windows

    def __len__(self) -> int:
        return len(self._text)

    def window(self, epoch: int, number: int) -> Window:
        """The sentences of a window. Raises `DamagedFolder`."""
        corpora = list(self._text.sizes)
        shards: dict[tuple[int, int], Shard] = {}
        pieces = []
        for corpus, shard, start, stop in self.ranges(epoch, number):
            if (corpus, shard) not in shards:
                shards[corpus, shard] = self._text.open(corpora[corpus], shard)
            pieces.append(Piece(shards[corpus, shard], start, stop))
        return Window(pieces, epoch % self._text.variants if self._text.variants else None)

    def ranges(self, epoch: int, number: int) -> list[Range]:
        """The pairs of a window in the order of corpora and shards."""
        ranges: list[Range] = []
        windows = self.windows(epoch)
        for corpus, (begin, count) in enumerate(zip(self._due.starts(epoch), self._due.counts(epoch), strict=True)):
            start = begin + count * number // windows
            stop = begin + count * (number + 1) // windows
            ranges += self._between(corpus, start, stop)
        joined: list[Range] = []
        for part in sorted(ranges):
            if joined and joined[-1][:2] == part[:2] and joined[-1].stop == part.start:
                joined[-1] = joined[-1]._replace(stop=part.stop)
            else:
                joined.append(part)
        return joined

    def _between(self, corpus: int, start: int, stop: int) -> Iterator[Range]:
        """The pairs `start` to `stop` of a corpus's endless sequence."""
        blocks = self._blocks[corpus]
        sizes = np.array([block.stop - block.start for block in blocks])
        total = int(sizes.sum())
        if start >= stop:
            return
        for number in range(start // total, -(-stop // total)):
            order = random_order(len(blocks), self._seed, corpus, number, 6)
            ends = np.cumsum(sizes[order]) + number * total
            first, last = np.searchsorted(ends, (start, stop - 1), side="right").tolist()
            for place in range(first, min(last + 1, len(order))):
                block, end = blocks[order[place]], int(ends[place])
                shift = block.stop - end  # from numbers in the sequence to those in the shard
                yield block._replace(start=max(block.start, start + shift), stop=min(block.stop, stop + shift))


def _blocks(corpus: int, sizes: Sequence[int]) -> list[Range]:
    """The blocks of a corpus whose shards have these sizes."""
    most = max(1, min(BLOCK, sum(sizes) // SOME))
    ranges: list[Range] = []
    for shard, size in enumerate(sizes):
        for start in range(0, size, most):
            ranges.append(Range(corpus, shard, start, min(start + most, size)))
    return ranges
