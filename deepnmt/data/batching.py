"""Micro-batches: how sentences are grouped, in which order, and as which arrays.

A plan is a pure function of (lengths, token budget, seed, epoch). So every process computes the same plan, and a
position in training is (epoch, micro-batch). The order is the same on every machine: all sorts are stable, and random
numbers are the raw output of a bit generator, which NumPy guarantees not to change between versions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch

from deepnmt.batch import TRANSLATION, Batch
from deepnmt.data.prepared import Indices, Lengths, Split
from deepnmt.device import upload
from deepnmt.errors import UserError
from deepnmt.tokens import BOS, EOS, PAD

# Target-length groups per square root of the number of micro-batches. Each group is sorted by source length, so fewer
# groups mean more padding of targets, and more groups mean more padding of sources. On captions, everyday sentences and
# parliament speeches, with 1,024 to 8,192 tokens a micro-batch, the padding with 1.5 is within 0.9 percentage points of
# the best of ten values between 0.5 and 20.
GROUPS = 1.5


def random_order(count: int, *seeds: int) -> Indices:
    """A random permutation, int64 [count]: the same for the same seeds on every machine and with every NumPy."""
    keys = np.random.PCG64(np.random.SeedSequence(seeds)).random_raw(count)
    return np.argsort(keys, kind="stable")


@dataclass(frozen=True)
class EpochPlan:
    """N sentences in M micro-batches.

    Attributes:
        order: int64 [N], sentence indices.
        starts: int64 [M+1]; micro-batch m is order[starts[m]:starts[m+1]].
        waste: the share of padding in all positions of both sides, from 0 to 1.
    """

    order: Indices
    starts: Indices
    waste: float

    def __len__(self) -> int:
        return len(self.starts) - 1

    def __getitem__(self, m: int) -> Indices:
        if not 0 <= m < len(self):
            raise IndexError(f"micro-batch {m} of a plan with {len(self)}")
        return self.order[self.starts[m]:self.starts[m + 1]]


def plan_epoch(src_lengths: Lengths, trg_lengths: Lengths, tokens: int, seed: int, epoch: int) -> EpochPlan:
    """The micro-batches of one epoch in random order, each of sentences of similar length, grouped anew every epoch.

    Sentences are divided into groups of similar target length, whose boundaries are shifted at random. Each group is
    sorted by source length, alternately ascending and descending, with ties in random order, and the whole sequence is
    split into micro-batches with `sentences * longest <= tokens` on both sides.

    Args:
        src_lengths, trg_lengths: int32 [N], including eos.
        tokens: the budget of a micro-batch.

    Raises:
        UserError: a sentence is longer than `tokens`.
    """
    longer = np.maximum(src_lengths, trg_lengths)
    if len(longer) and int(longer.max()) > tokens:
        raise UserError(f"batch.tokens is {tokens}, but a training sentence has {int(longer.max())} tokens; set "
                        f"batch.tokens to {int(longer.max())} or more, or data.filters.max_tokens lower")
    shuffled = random_order(len(longer), seed, epoch, 0)
    by_target = shuffled[np.argsort(trg_lengths[shuffled], kind="stable")]
    positions = np.cumsum(longer[by_target], dtype=np.int64)
    total = int(positions[-1]) if len(positions) else 0
    groups = max(1, round(GROUPS * (total / tokens) ** 0.5))
    shift = int(random_order(1024, seed, epoch, 1)[0]) / 1024
    group = (positions * (groups / max(1, total)) + shift).astype(np.int64)
    src = src_lengths[by_target].astype(np.int64)
    highest = int(src.max(initial=0))
    snake = group * (highest + 1) + np.where(group % 2 == 0, src, highest - src)
    order = by_target[np.argsort(snake, kind="stable")]
    starts = _batch_starts(longer[order], tokens)
    waste = _waste(src_lengths[order], trg_lengths[order], starts)
    return EpochPlan(*_shuffle(order, starts, random_order(len(starts) - 1, seed, epoch, 2)), waste)


def plan_eval(src_lengths: Lengths, trg_lengths: Lengths, tokens: int) -> EpochPlan:
    """Micro-batches in descending order of length, so that memory runs out at once or never. Nothing is random.

    A sentence longer than `tokens` is a micro-batch by itself, so that all sentences are included.
    """
    order = np.lexsort((np.arange(len(src_lengths)), -src_lengths, -trg_lengths))
    starts = _batch_starts(np.maximum(src_lengths, trg_lengths)[order], tokens)
    return EpochPlan(order, starts, _waste(src_lengths[order], trg_lengths[order], starts))


def _batch_starts(longer: npt.NDArray[np.integer], tokens: int) -> Indices:
    """The `starts` [M+1] of an `EpochPlan`: each micro-batch takes as many sentences as fit, but at least one."""
    starts = [0]
    while starts[-1] < len(longer):
        start = starts[-1]
        window = longer[start:start + max(1, tokens // int(longer[start]))]
        padded = np.maximum.accumulate(window) * np.arange(1, len(window) + 1)
        starts.append(start + max(1, int(np.searchsorted(padded, tokens, side="right"))))
    return np.array(starts, dtype=np.int64)


def _waste(src: Lengths, trg: Lengths, starts: Indices) -> float:
    if len(starts) == 1:
        return 0.0
    sizes = np.diff(starts)
    padded = sum(int((sizes * np.maximum.reduceat(side, starts[:-1])).sum()) for side in (src, trg))
    return 1.0 - (int(src.sum(dtype=np.int64)) + int(trg.sum(dtype=np.int64))) / padded


def _shuffle(order: Indices, starts: Indices, permutation: Indices) -> tuple[Indices, Indices]:
    """`order` and `starts` with the micro-batches permuted: the new m-th is the old `permutation[m]`-th."""
    sizes = np.diff(starts)[permutation]
    new_starts = np.concatenate([[0], np.cumsum(sizes)])
    indices = np.arange(len(order)) + np.repeat(starts[:-1][permutation] - new_starts[:-1], sizes)
    return order[indices], new_starts


@dataclass(frozen=True)
class Position:
    """A position in the endless sequence of epochs: the next micro-batch is number `index` of `epoch`, both from 0."""

    epoch: int
    index: int


START = Position(0, 0)


@dataclass(frozen=True)
class Update:
    """The micro-batches of one update.

    Attributes:
        batches: this process's micro-batches.
        tokens: target tokens of all processes' micro-batches together.
        passes: passes over the training text before this update.
        next: the position after this update.
    """

    batches: list[Batch]
    tokens: int
    passes: float
    next: Position


class Stream:
    """The micro-batches of all epochs, one after the other. To jump to any position costs one epoch's plan."""

    def __init__(self, split: Split, tokens: int, seed: int, rows: Callable[[int], Indices] | None = None) -> None:
        """Raises `UserError` if the split is empty.

        Args:
            tokens: the budget of a micro-batch.
            rows: from an epoch to the numbers of its sentences; by default an epoch has each sentence once.
        """
        if len(split) == 0:
            raise UserError(f"the {split.name} text has 0 sentences; give another corpus, or loosen data.filters")
        self._plain, self._tokens, self._seed, self._rows = split, tokens, seed, rows
        self._epoch = -1

    def split(self, epoch: int) -> Split:
        """The sentences of an epoch: sampled segmentation `epoch mod variants`, or the plain one if there is none."""
        self._enter(epoch)
        return self._split

    def plan(self, epoch: int) -> EpochPlan:
        """The plan of one epoch; the last one is cached."""
        self._enter(epoch)
        return self._plan

    def epoch_size(self, epoch: int) -> int:
        """The number of micro-batches in an epoch; with sampled segmentations it differs between epochs."""
        return len(self.plan(epoch))

    def waste(self, epoch: int) -> float:
        """The share of padding in an epoch, from 0 to 1."""
        return self.plan(epoch).waste

    def batch(self, epoch: int, index: int, device: torch.device) -> Batch:
        """Micro-batch `index` of `epoch`; its key is unique in a run."""
        return collate(self.split(epoch), self.plan(epoch)[index], (epoch << 32) + index, device)

    def update(self, position: Position, count: int, rank: int, world: int, device: torch.device) -> Update:
        """The next `count` micro-batches from `position` on, dealt out to `world` ranks in turn.

        An update may span the end of an epoch.

        Raises:
            UserError: the epoch has fewer micro-batches than `position.index`: data or `batch.tokens` have changed.
        """
        epoch, index = position.epoch, position.index
        if index > self.epoch_size(epoch):
            raise UserError(f"training stopped at micro-batch {index} of epoch {epoch}, which now has "
                            f"{self.epoch_size(epoch)}; resume with the data and batch.tokens the run began with")
        passes = epoch + index / self.epoch_size(epoch)
        batches, tokens = [], 0
        for number in range(count):
            if index == self.epoch_size(epoch):
                epoch, index = epoch + 1, 0
            tokens += int(self.split(epoch).trg_lengths[self.plan(epoch)[index]].sum())
            if number % world == rank:
                batches.append(self.batch(epoch, index, device))
            index += 1
        after = Position(epoch + 1, 0) if index == self.epoch_size(epoch) else Position(epoch, index)
        return Update(batches, tokens, passes, after)

    def _enter(self, epoch: int) -> None:
        if epoch == self._epoch:
            return
        variants = self._plain.variants
        self._split = self._plain.variant(epoch % variants) if variants else self._plain
        lengths = self._split.src_lengths, self._split.trg_lengths
        if self._rows is None:
            self._plan = plan_epoch(*lengths, self._tokens, self._seed, epoch)
        else:
            rows = self._rows(epoch)
            plan = plan_epoch(lengths[0][rows], lengths[1][rows], self._tokens, self._seed, epoch)
            self._plan = replace(plan, order=rows[plan.order])
        self._epoch = epoch


def collate(split: Split, indices: Indices | Sequence[int], key: int, device: torch.device) -> Batch:
    """The sentences `indices` (at least one) of a split as one micro-batch, in this order, padded on the right.

    Its tensors: src [B, S], pieces + eos; src_lengths [B], including eos; trg_in [B, T], bos + pieces; trg_out [B, T],
    pieces + eos.
    """
    rows = np.asarray(indices, dtype=np.int64)
    src, src_lengths = split.sources.with_eos(rows)
    trg_out, trg_lengths = split.targets.with_eos(rows)
    trg_in = np.full_like(trg_out, BOS)
    trg_in[:, 1:] = np.where(trg_out[:, :-1] == EOS, PAD, trg_out[:, :-1])
    tensors = (upload(torch.from_numpy(array), device) for array in (src, src_lengths, trg_in, trg_out))
    return Batch(dict(zip(TRANSLATION, tensors, strict=True)), key, int(trg_lengths.sum()))
