"""Micro-batches: how sentences are grouped, in which order, and as which arrays.

A plan is a pure function of (lengths, token budget, seed, epoch, window). So every process computes the same plan, and
a position in training is (epoch, micro-batch). The order is the same on every machine: all sorts are stable, and random
numbers are the raw output of a bit generator, which NumPy guarantees not to change between versions.

With `batch.update_tokens` the plan does not depend on the size of a micro-batch: it says which sentences an update has,
a position is (epoch, update), and each update is divided into micro-batches for the processes that there are.

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

from deepnmt.batch import Batch
from deepnmt.config.sections import LEAST_SHARES
from deepnmt.data.arrays import Indices, Lengths, Tokens
from deepnmt.errors import UserError
from deepnmt.tokens import BOS, EOS, PAD

# Target-length groups per square root of the number of micro-batches. Each group is sorted by source length, so fewer
# groups mean more padding of targets, and more groups mean more padding of sources. On captions, everyday sentences and
# parliament speeches, with 1,024 to 8,192 tokens a micro-batch, the padding with 1.5 is within 0.9 percentage points of
# the best of ten values between 0.5 and 20.
GROUPS = 1.5
FULL = 0.98  # how full the planned micro-batches of an update of a fixed size are, on the longer side
WINDOW = 1 << 20  # micro-batches that a window of several may have; (epoch, number) then is a key of 62 bits
WINDOWS = 1 << 12  # that an epoch may have, for that key


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
        updates: into how many updates of a fixed size the micro-batches go, equally many into each; 0: no such.
    """

    order: Indices
    starts: Indices
    waste: float
    updates: int = 0

    @property
    def entries(self) -> int:
        """What is counted in training: updates of a fixed size, else micro-batches."""
        return self.updates or len(self)

    def update(self, number: int) -> list[Indices]:
        """The micro-batches of an update of a fixed size."""
        first, last = (len(self) * end // self.updates for end in (number, number + 1))
        return [self[m] for m in range(first, last)]

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
    check_longest(longer, tokens)
    of_window = (window, 5) if window else ()
    seeds = [(seed, epoch, purpose, *of_window) for purpose in range(3)]
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


def check_longest(lengths: Lengths, tokens: int) -> None:
    """Raises `UserError` if a sentence is longer than a micro-batch of so many tokens."""
    longest = int(lengths.max(initial=0))
    if longest > tokens:
        raise UserError(f"batch.tokens is {tokens}, but a training sentence has {longest} tokens; set "
                        f"batch.tokens to {longest} or more, or data.filters.max_tokens lower")


def plan_updates(src_lengths: Lengths, trg_lengths: Lengths, update_tokens: int, seed: int, epoch: int, window: int = 0
                 ) -> EpochPlan:
    """The plan of an epoch, or of a window of it, for updates of about `update_tokens` target tokens each.

    An update has `LEAST_SHARES` micro-batches of `plan_epoch`, of sentences of similar length each, give or take one
    where the text is short. `share_out` divides or joins them for the processes.
    """
    longer = np.maximum(src_lengths, trg_lengths)
    updates = int(trg_lengths.sum(dtype=np.int64)) / update_tokens
    tokens = round(int(longer.sum(dtype=np.int64)) / (FULL * LEAST_SHARES * updates))
    plan = plan_epoch(src_lengths, trg_lengths, max(tokens, int(longer.max())), seed, epoch, window)
    equal = len(plan) / LEAST_SHARES
    if abs(equal - updates) < updates / 16:
        updates = equal
    return replace(plan, updates=min(len(plan), max(1, round(updates))))


def share_out(groups: Sequence[Indices], src_lengths: Lengths, trg_lengths: Lengths, tokens: int, world: int
              ) -> tuple[EpochPlan, int]:
    """An update as micro-batches for `world` ranks, and how many micro-batches each rank has.

    The groups, of sentences of similar length, are joined in the order of their lengths and split anew: into a multiple
    of `LEAST_SHARES` where that suits `world`, so that few micro-batches are of two groups; and so that the largest is
    as small as can be, since all ranks wait for it. No micro-batch is above `tokens`. There may be fewer micro-batches
    than the ranks have together if the update has few sentences.
    """
    def longest(group: Indices) -> int:
        return max(int(src_lengths[group].max()), int(trg_lengths[group].max()))

    rows = np.concatenate(sorted(groups, key=longest))
    lengths = np.maximum(src_lengths[rows], trg_lengths[rows])
    step = LEAST_SHARES // world if LEAST_SHARES % world == 0 else 1
    needed = max(LEAST_SHARES, len(_batch_starts(lengths, tokens)) - 1)
    each = -(-needed // (world * step)) * step
    size = max(int(lengths.max()), int(lengths.sum()) // (each * world))
    starts = _batch_starts(lengths, min(size, tokens))
    while len(starts) - 1 > each * world:
        size += -(-size // 50)
        starts = _batch_starts(lengths, min(size, tokens))
    return EpochPlan(rows, starts, _waste(src_lengths[rows], trg_lengths[rows], starts)), each


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
    """A position in the endless sequence of epochs: the next micro-batch, or the next update of a fixed size, is number
    `index` of `epoch`, both from 0."""

    epoch: int
    index: int


START = Position(0, 0)


@dataclass(frozen=True)
class Update:
    """The micro-batches of one update.

    Attributes:
        batches: this process's micro-batches.
        tokens: target tokens of all processes' micro-batches together, or of this process's alone, see `shared`.
        passes: passes over the training text before this update.
        next: the position after this update.
        shared: whether `tokens` has to be summed over processes: they are known where a micro-batch is made.
    """

    batches: list[Batch]
    tokens: int
    passes: float
    next: Position
    shared: bool = False


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
    """The training text: a `Split`, or the `Windows` of one in shards.

    A text whose sentences are made when they are read says `planned = True`: the lengths are then the most that they
    may have, of which its `Sentences` have about the share `fill`.
    """

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

    def __init__(self, text: Text, tokens: int, seed: int, rows: Callable[[int], Indices] | None = None,
                 update_tokens: int | None = None) -> None:
        """Raises `UserError` if the text is empty.

        Args:
            tokens: the budget of a micro-batch.
            rows: from an epoch to the numbers of its sentences, for a text of one window; by default an epoch has each
                sentence once.
            update_tokens: target tokens of an update of a fixed size; None: an update has `count` micro-batches.
        """
        if len(text) == 0:
            raise UserError(f"the {text.name} text has 0 sentences; give another corpus, or loosen data.filters")
        self._text, self._tokens, self._seed, self._rows = text, tokens, seed, rows
        self._update_tokens, self._shared_waste = update_tokens, 0.0
        self._planned: bool = getattr(text, "planned", False)
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
        """The number of micro-batches in an epoch, or of updates of a fixed size; with sampled segmentations it differs
        between epochs. It is estimated from the window at hand if there are several."""
        return self._some(epoch).plan.entries * self._text.windows(epoch)

    def waste(self, epoch: int) -> float:
        """The share of padding in an epoch, or in a window of it, or in the last update of a fixed size, from 0 to
        1."""
        return self._shared_waste or self._some(epoch).plan.waste

    def passes(self, position: Position) -> float:
        """Passes over the training text before a position; within a window that is not at hand, estimated from the one
        that is."""
        window, index = self._place(position.epoch, position.index)
        size = self._some(position.epoch, window).plan.entries
        return position.epoch + (window + min(1.0, index / size)) / self._text.windows(position.epoch)

    def sentences(self, epoch: int, index: int) -> tuple[Sentences, Indices]:
        """The sentences of micro-batch `index` of `epoch`: where they are, and their rows there."""
        window, number = self._place(epoch, index)
        page = self._page(epoch, window)
        return page.sentences, page.plan[number]

    def batch(self, epoch: int, index: int, device: torch.device) -> Batch:
        """Micro-batch `index` of the plan of `epoch`; its key is unique in a run."""
        return self.collate(*self.sentences(epoch, index), (epoch << 32) + index, device)

    def collate(self, sentences: Sentences, rows: Indices, key: int, device: torch.device) -> Batch:
        """The micro-batch of some sentences. Without any it is one whose loss is 0, for a rank that must compute as
        many micro-batches as the others."""
        return collate(sentences, rows, key, device)

    def update(self, position: Position, count: int, rank: int, world: int, device: torch.device) -> Update:
        """The next `count` micro-batches from `position` on, dealt out to `world` ranks in turn. Of updates of a fixed
        size it is the next `count`, each divided among the ranks.

        An update may span the end of an epoch, but for one of a fixed size.

        Raises:
            UserError: the epoch has fewer micro-batches than `position.index`: data or `batch.tokens` have changed.
        """
        window, index = self._place(position.epoch, position.index)
        if window >= self._text.windows(position.epoch) or index > self.plan(position.epoch, window).entries:
            raise UserError(f"training stopped at micro-batch {position.index} of epoch {position.epoch}, which now "
                            f"has {self.epoch_size(position.epoch)}; resume with the data and batch.tokens the run "
                            "began with")
        passes = self.passes(position)
        batches, tokens, number = [], 0, 0
        for _ in range(count):
            position = self._next(position)
            sentences, entry = self._entry(position, world)
            for key, rows in entry:
                tokens += int(sentences.trg_lengths[rows].sum())
                if number % world == rank:
                    batches.append(self.collate(sentences, rows, key, device))
                number += 1
            position = Position(position.epoch, position.index + 1)
        if self._planned:
            tokens = sum(batch.tokens for batch in batches)
        return Update(batches, tokens, passes, self._next(position), self._planned)

    def _entry(self, position: Position, world: int) -> tuple[Sentences, list[tuple[int, Indices]]]:
        """Keys and sentences of the micro-batch at a position, or of all those of the update of a fixed size."""
        window, index = self._place(position.epoch, position.index)
        sentences, plan = self._page(position.epoch, window)
        key = (position.epoch << 32) + position.index
        if not plan.updates:
            return sentences, [(key, plan[index])]
        shares, count = share_out(plan.update(index), sentences.src_lengths, sentences.trg_lengths, self._tokens, world)
        self._shared_waste = _with_unused(shares.waste, sentences)
        none = shares.order[:0]
        entry: list[tuple[int, Indices]] = []
        for number in range(count * world):
            rows = shares[number] if number < len(shares) else none
            entry.append(((key << 16) + number, rows))
        return sentences, entry

    def _place(self, epoch: int, index: int) -> tuple[int, int]:
        """The window of a micro-batch, and its number there."""
        return divmod(index, WINDOW) if self._text.windows(epoch) > 1 else (0, index)

    def _next(self, position: Position) -> Position:
        """The position itself, or where the next window begins if its own has ended."""
        window, index = self._place(position.epoch, position.index)
        if index < self.plan(position.epoch, window).entries:
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
        rows = None if self._rows is None else self._rows(epoch)
        if rows is not None:
            lengths = lengths[0][rows], lengths[1][rows]
        if self._update_tokens is None:
            plan = plan_epoch(*lengths, self._tokens, self._seed, epoch, window)
        else:
            check_longest(np.maximum(*lengths), self._tokens)
            plan = plan_updates(*lengths, self._update_tokens, self._seed, epoch, window)
        if rows is not None:
            plan = replace(plan, order=rows[plan.order])
        if self._text.windows(epoch) > 1 and len(plan) > WINDOW:
            raise UserError(f"a window has {len(plan)} micro-batches, but at most {WINDOW} can be numbered; set "
                            "data.window_pairs lower, or batch.tokens higher")
        return Page(sentences, replace(plan, waste=_with_unused(plan.waste, sentences)))


def _with_unused(waste: float, sentences: Sentences) -> float:
    """The share of padding in a plan, with what sentences do not use of their lengths."""
    return waste + (1 - waste) * (1 - getattr(sentences, "fill", 1.0))


def collate(split: Sentences, indices: Indices | Sequence[int], key: int, device: torch.device) -> Batch:
    """The sentences `indices` of a split as one micro-batch, in this order, padded on the right; none are one sentence
    whose target is a pad token, which does not count.

    Its tensors: src [B, S], pieces + eos; src_lengths [B], including eos; trg_in [B, T], bos + pieces; trg_out [B, T],
    pieces + eos.
    """
    rows = np.asarray(indices, dtype=np.int64)
    if len(rows):
        src, src_lengths = split.sources.with_eos(rows)
        trg_out, trg_lengths = split.targets.with_eos(rows)
    else:
        src, src_lengths = np.array([[EOS]]), np.array([1])
        trg_out, trg_lengths = np.array([[PAD]]), np.array([0])
    arrays = {"src": src, "src_lengths": src_lengths, "trg_in": tokens_before(trg_out), "trg_out": trg_out}
    return Batch.of_arrays(arrays, key, int(trg_lengths.sum()), device)


def tokens_before(trg_out: Indices) -> Indices:
    """What the decoder reads [B, T] to predict pieces + eos [B, T]: bos + pieces."""
    trg_in = np.full_like(trg_out, BOS)
    trg_in[:, 1:] = np.where(trg_out[:, :-1] == EOS, PAD, trg_out[:, :-1])
    return trg_in
