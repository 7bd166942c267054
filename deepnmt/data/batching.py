"""Micro-batches: how sentences are grouped, in which order, and as which arrays.

A plan is a pure function of (lengths, token budget, seed, epoch, window). So every process computes the same plan, and
a position in training is (epoch, micro-batch). The order is the same on every machine: all sorts are stable, and random
numbers are the raw output of a bit generator, which NumPy guarantees not to change between versions.

A text in one piece is one window. One in shards has several an epoch (see `windows.py`); the number of a micro-batch is
then that of its window times `WINDOW`, plus its number in it, so that no other window has to be planned to find it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch

from deepnmt.batch import TRANSLATION, Batch
from deepnmt.data.arrays import Indices, Lengths, Tokens
from deepnmt.device import upload
from deepnmt.errors import UserError
from deepnmt.tokens import BOS, EOS, PAD

# Target-length groups per square root of the number of micro-batches. Each group is sorted by source length, so fewer
# groups mean more padding of targets, and more groups mean more padding of sources. On captions, everyday sentences and
# parliament speeches, with 1,024 to 8,192 tokens a micro-batch, the padding with 1.5 is within 0.9 percentage points of
# the best of ten values between 0.5 and 20.
GROUPS = 1.5
WINDOW = 1 << 20  # micro-batches that a window of several may have; (epoch, number) then is a key of 62 bits


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


def plan_epoch(src_lengths: Lengths, trg_lengths: Lengths, tokens: int, seed: int, epoch: int, window: int = 0
               ) -> EpochPlan:
    """The micro-batches of one epoch, or of a window of it, in random order, each of sentences of similar length,
    grouped anew every epoch.

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
    seeds = [(seed, epoch, purpose, *((window, 5) if window else ())) for purpose in range(3)]
    shuffled = random_order(len(longer), *seeds[0])
    by_target = shuffled[np.argsort(trg_lengths[shuffled], kind="stable")]
    positions = np.cumsum(longer[by_target], dtype=np.int64)
    total = int(positions[-1]) if len(positions) else 0
    groups = max(1, round(GROUPS * (total / tokens) ** 0.5))
    shift = int(random_order(1024, *seeds[1])[0]) / 1024
    group = (positions * (groups / max(1, total)) + shift).astype(np.int64)
    src = src_lengths[by_target].astype(np.int64)
    highest = int(src.max(initial=0))
    snake = group * (highest + 1) + np.where(group % 2 == 0, src, highest - src)
    order = by_target[np.argsort(snake, kind="stable")]
    starts = _batch_starts(longer[order], tokens)
    waste = _waste(src_lengths[order], trg_lengths[order], starts)
    return EpochPlan(*_shuffle(order, starts, random_order(len(starts) - 1, *seeds[2])), waste)


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


class Rows(Protocol):
    """One side of some sentences."""

    def __getitem__(self, row: int) -> Tokens:
        """The pieces of a sentence."""

    def with_eos(self, indices: Indices) -> tuple[Indices, Indices]:
        """The sentences `indices` [B] as pieces + eos, padded to the longest: ids [B, L] and lengths [B]."""


class Sentences(Protocol):
    """Sentences that are planned together: a `Split` or a `Window`."""

    @property
    def sources(self) -> Rows: ...
    @property
    def targets(self) -> Rows: ...
    @property
    def src_lengths(self) -> Lengths: ...
    @property
    def trg_lengths(self) -> Lengths: ...
    def column(self, name: str) -> Rows:
        """Another column of the same sentences."""


class Text(Protocol):
    """The training text: a `Split`, or the `Windows` of one in shards."""

    @property
    def name(self) -> str: ...
    def windows(self, epoch: int) -> int:
        """How many there are in an epoch."""

    def __len__(self) -> int: ...
    def window(self, epoch: int, number: int) -> Sentences:
        """The sentences of a window."""


class Stages(Protocol):
    """What an epoch has depends on the stage that it is in; see `mixing.Mixture`."""

    begun: Sequence[int]

    def firsts(self) -> list[int]:
        """The first epochs of the stages."""


class Page(NamedTuple):
    """A window of an epoch, whose plan has the rows of its sentences."""

    sentences: Sentences
    plan: EpochPlan


class Stream:
    """The micro-batches of all epochs, one after the other. To jump to any position costs one window's plan.

    Where an epoch has several windows, the plan of the next is made in the background, from the first update on.
    """

    mixture: Stages | None = None  # of the text, which then depends on it

    def __init__(self, text: Text, tokens: int, seed: int, rows: Callable[[int], Indices] | None = None) -> None:
        """Raises `UserError` if the text is empty.

        Args:
            tokens: the budget of a micro-batch.
            rows: from an epoch to the numbers of its sentences, for a text of one window; by default an epoch has each
                sentence once.
        """
        if len(text) == 0:
            raise UserError(f"the {text.name} text has 0 sentences; give another corpus, or loosen data.filters")
        self._text, self._tokens, self._seed, self._rows = text, tokens, seed, rows
        self._at: tuple[int, int] | None = None
        self._ahead: dict[tuple[int, int], Future[Page]] = {}
        self._background = ThreadPoolExecutor(1, "plan")

    def begin_stages(self, epochs: Sequence[int]) -> None:
        """Says in which epochs the second and later stages began, as far as they have."""
        assert self.mixture is not None
        before = self.mixture.firsts()
        self.mixture.begun = epochs
        if self.mixture.firsts() != before:  # what was planned was not to be
            self._at, self._ahead = None, {}

    def split(self, epoch: int, window: int = 0) -> Sentences:
        """The sentences of an epoch's window: sampled segmentation `epoch mod variants`, or the plain one if there is
        none."""
        return self._page(epoch, window).sentences

    def plan(self, epoch: int, window: int = 0) -> EpochPlan:
        """The plan of an epoch's window; the last one is cached."""
        return self._page(epoch, window).plan

    def epoch_size(self, epoch: int) -> int:
        """The number of micro-batches in an epoch; with sampled segmentations it differs between epochs. It is
        estimated from the window at hand if there are several."""
        return len(self._some(epoch).plan) * self._text.windows(epoch)

    def waste(self, epoch: int) -> float:
        """The share of padding in an epoch, or in a window of it, from 0 to 1."""
        return self._some(epoch).plan.waste

    def passes(self, position: Position) -> float:
        """Passes over the training text before a position; within a window that is not at hand, estimated from the one
        that is."""
        window, index = self._place(position.epoch, position.index)
        size = len(self._some(position.epoch, window).plan)
        return position.epoch + (window + min(1.0, index / size)) / self._text.windows(position.epoch)

    def sentences(self, epoch: int, index: int) -> tuple[Sentences, Indices]:
        """The sentences of micro-batch `index` of `epoch`: where they are, and their rows there."""
        window, number = self._place(epoch, index)
        page = self._page(epoch, window)
        return page.sentences, page.plan[number]

    def batch(self, epoch: int, index: int, device: torch.device) -> Batch:
        """Micro-batch `index` of `epoch`; its key is unique in a run."""
        return collate(*self.sentences(epoch, index), (epoch << 32) + index, device)

    def update(self, position: Position, count: int, rank: int, world: int, device: torch.device) -> Update:
        """The next `count` micro-batches from `position` on, dealt out to `world` ranks in turn.

        An update may span the end of an epoch.

        Raises:
            UserError: the epoch has fewer micro-batches than `position.index`: data or `batch.tokens` have changed.
        """
        window, index = self._place(position.epoch, position.index)
        if window >= self._text.windows(position.epoch) or index > len(self.plan(position.epoch, window)):
            raise UserError(f"training stopped at micro-batch {position.index} of epoch {position.epoch}, which now "
                            f"has {self.epoch_size(position.epoch)}; resume with the data and batch.tokens the run "
                            "began with")
        passes = self.passes(position)
        batches, tokens = [], 0
        for number in range(count):
            position = self._next(position)
            sentences, rows = self.sentences(position.epoch, position.index)
            tokens += int(sentences.trg_lengths[rows].sum())
            if number % world == rank:
                batches.append(self.batch(position.epoch, position.index, device))
            position = Position(position.epoch, position.index + 1)
        return Update(batches, tokens, passes, self._next(position))

    def _place(self, epoch: int, index: int) -> tuple[int, int]:
        """The window of a micro-batch, and its number there."""
        return divmod(index, WINDOW) if self._text.windows(epoch) > 1 else (0, index)

    def _next(self, position: Position) -> Position:
        """The position itself, or where the next window begins if its own has ended."""
        window, index = self._place(position.epoch, position.index)
        if index < len(self.plan(position.epoch, window)):
            self._plan_ahead(*self._after(position.epoch, window))
            return position
        epoch, window = self._after(position.epoch, window)
        return Position(epoch, window * WINDOW)

    def _after(self, epoch: int, window: int) -> tuple[int, int]:
        return (epoch, window + 1) if window + 1 < self._text.windows(epoch) else (epoch + 1, 0)

    def _plan_ahead(self, epoch: int, window: int) -> None:
        if self._text.windows(epoch) > 1 and (epoch, window) not in self._ahead:
            self._ahead = {(epoch, window): self._background.submit(self._make, epoch, window)}

    def _some(self, epoch: int, window: int = 0) -> Page:
        """A window of an epoch. Where there are several, it is the one at hand, if there is one: to plan another would
        take seconds, and be for nothing."""
        return self._current if self._at is not None and self._text.windows(epoch) > 1 else self._page(epoch, window)

    def _page(self, epoch: int, window: int) -> Page:
        if self._at != (epoch, window):
            ahead = self._ahead.pop((epoch, window), None)
            self._current = self._make(epoch, window) if ahead is None else ahead.result()
            self._at = (epoch, window)
        return self._current

    def _make(self, epoch: int, window: int) -> Page:
        sentences = self._text.window(epoch, window)
        lengths = sentences.src_lengths, sentences.trg_lengths
        if self._rows is None:
            plan = plan_epoch(*lengths, self._tokens, self._seed, epoch, window)
        else:
            rows = self._rows(epoch)
            plan = plan_epoch(lengths[0][rows], lengths[1][rows], self._tokens, self._seed, epoch)
            plan = replace(plan, order=rows[plan.order])
        if self._text.windows(epoch) > 1 and len(plan) > WINDOW:
            raise UserError(f"a window has {len(plan)} micro-batches, but at most {WINDOW} can be numbered; set "
                            "data.window_pairs lower, or batch.tokens higher")
        return Page(sentences, plan)


def collate(split: Sentences, indices: Indices | Sequence[int], key: int, device: torch.device) -> Batch:
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
