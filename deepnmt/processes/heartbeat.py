"""Waiting is bounded: every process shows a sign of life in the store, and all end when one of them shows none, or when
they all live but training stands still.

Rank 0 reads all signs and writes its verdict into its own; the others read that one. So it makes no difference whether
a process has died, was stopped or is cut off, nor how long a collective, of gloo or NCCL, would wait for it. Since all
processes take every update together, rank 0 also sees from its own work that any of them stands still. Which one it is
their signs say: the others are in a collective.
"""

from __future__ import annotations

import json
import math
import os
import sys
import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import NamedTuple

import torch.distributed as dist

from deepnmt.errors import UserError
from deepnmt.version import PACKAGE

LOST = 76  # exit code: another process is gone, nothing new was saved
_SUSPECTED = 10.0  # seconds of silence that are enough once a connection has broken
SILENCE = 90.0  # seconds without a sign after which a process counts as lost
_LINGER = 10.0  # seconds in which the others can read why this process ends
UPDATE, VALIDATION, SAVE = "an update", "a validation", "a save"
# Seconds that a piece of work may take, the first of its kind, which may compile, and at least each later one
PATIENCE = {UPDATE: (1200.0, 600.0), VALIDATION: (6 * 3600.0, 1800.0), SAVE: (6 * 3600.0, 1800.0)}
_TIMES = 10  # as long as the longest of late may it take, too
_RESUMES = "all processes end; the same command resumes from the newest checkpoint"
_COLLECTIVES = ("/torch/distributed/", "/deepspeed/comm/")  # code that waits for other processes
_PACKAGE = f"{PACKAGE}/"


class Word(NamedTuple):
    """Why a process ends: a sentence, an exit code, and the ranks that the sentence names. The code is 0 while the
    process runs, and 1 with no sentence when it has ended well."""

    sentence: str = ""
    code: int = 0
    about: Sequence[int] = ()


class Sign(NamedTuple):
    """What a process shows: the number of this sign, its `Word`, whether a connection of its has broken, where its
    training is, and whether it waits there for the others."""

    number: int = 0
    sentence: str = ""
    code: int = 0
    about: Sequence[int] = ()
    broken: bool = False
    place: str = ""
    waits: bool = False


@dataclass
class Work:
    """A piece of the training, and the seconds that it has taken so far."""

    kind: str
    seconds: float = 0.0


class Watch:
    """The two threads of a process that show its sign and judge the others'.

    Args:
        store: a connection of their own.
        nodes: the machine of every process.
    """

    def __init__(self, store: dist.Store, rank: int, nodes: Sequence[str]) -> None:
        self._store, self._rank, self._nodes, self._limit = store, rank, nodes, SILENCE
        self._period = min(3.0, SILENCE / 6)
        self._others = [r for r in range(len(nodes)) if r != rank] if rank == 0 else [0]
        self._word = Word()
        self._broken = self._leaving = False
        self._signs: dict[int, Sign] = {}
        self._silent = dict.fromkeys(self._others, 0.0)
        self._thread, self._work, self._past = 0, Work(""), defaultdict[str, deque[float]](lambda: deque(maxlen=20))
        self._over, self._wake = threading.Event(), threading.Event()
        self.when_lost: Callable[[str], object] = lambda sentence: None
        self._threads = [threading.Thread(target=work, daemon=True) for work in (self._show, self._judge)]
        for thread in self._threads:
            thread.start()

    def begin(self, kind: str) -> None:
        """The thread that calls this begins a piece of the training; until the next call it may take as long as
        `allowed` says of its kind. "" may take for ever."""
        self._past[self._work.kind].append(self._work.seconds)
        self._thread, self._work = threading.get_ident(), Work(kind)

    def _show(self) -> None:
        """Writes this process's sign and reads the others'; may be held up by the network."""
        for count in range(2**60):
            word, last = self._word, self._over.is_set()
            try:
                self._store.set(f"sign/{self._rank}", json.dumps([count, *word, self._broken, *self._place()]))
                if last:
                    return
                for rank, sign in zip(self._others, self._store.multi_get([f"sign/{r}" for r in self._others])):
                    if (told := Sign(*json.loads(sign))) != self._signs.get(rank):
                        self._signs[rank], self._silent[rank] = told, 0.0
            except RuntimeError:  # the store has ended with rank 0, or does not answer
                if last:
                    return
            self._wake.wait(0.1 if self._leaving else self._period)
            self._wake.clear()

    def _judge(self) -> None:
        then = time.monotonic()
        while not self._over.wait(self._period):
            now = time.monotonic()
            awake, then = min(now - then, 2 * self._period), now  # this process may have been stopped itself
            for rank in self._others:
                self._silent[rank] += awake
            (work := self._work).seconds += awake
            signs = dict(self._signs)
            if ended := [told for told in signs.values() if told.sentence]:
                self._end(Word(ended[0].sentence, ended[0].code, ended[0].about))
            broken = self._broken or any(told.broken for told in signs.values())
            limit = min(self._limit, _SUSPECTED) if broken else self._limit
            lost = [r for r in self._others if self._silent[r] > limit and signs.get(r, Sign()).code == 0]
            if lost:
                silent = max(self._silent[rank] for rank in lost)
                self._end(Word(f"no sign of life from {self._list(lost)} for {silent:.0f} s: ended, stopped, or cut "
                               f"off from {self._nodes[self._rank]}; {_RESUMES}", LOST, lost))
            most = allowed(work.kind, self._past[work.kind])
            if self._rank == 0 and work.seconds > most:
                self._end(self._standstill(work, most, signs))

    def _standstill(self, work: Work, most: float, signs: dict[int, Sign]) -> Word:
        """A word on those that do not wait for the others; where all wait, or none, as a GPU's work is not seen to
        wait, on those first that are where few are."""
        told = {self._rank: self._place(), **{rank: (sign.place, sign.waits) for rank, sign in signs.items()}}
        places = {rank: place for rank, (place, _) in told.items()}
        common = Counter(places.values())
        stuck = [rank for rank in sorted(told) if not told[rank][1]]
        one = 0 < len(stuck) < len(told)
        named = stuck if one else sorted(told, key=lambda rank: (common[places[rank]], rank))
        it = "it" if len(stuck) == 1 else "them"
        waiting = f"the others wait for {it}" if one else "all wait for one another"
        return Word(f"training stands still: {work.kind} has taken {work.seconds:.0f} s, of {most:.0f} s allowed; "
                    f"{self._list(named, places)}; {waiting}; {_RESUMES}", LOST, named)

    def _list(self, ranks: Sequence[int], places: Mapping[int, str] | None = None) -> str:
        shown = (f"rank {r} on {self._nodes[r]}" + (f" is in {places[r]}" if places else "") for r in ranks[:8])
        return ", ".join(shown) + (", ..." if len(ranks) > 8 else "")

    def _place(self) -> tuple[str, bool]:
        """Where the training of this process is, and whether one of its threads is in a collective."""
        waits, found = False, ""
        frame: FrameType | None
        for thread, frame in sys._current_frames().items():
            while frame is not None:
                file = frame.f_code.co_filename
                waits |= any(part in file for part in _COLLECTIVES)
                if thread == self._thread and not found and file.startswith(_PACKAGE):
                    found = f"{frame.f_code.co_name} ({file.removeprefix(_PACKAGE)}, line {frame.f_lineno})"
                frame = frame.f_back
        return found, waits

    def _end(self, word: Word) -> None:
        """Ends this process, after rank 0's sign has told the others."""
        if self._leaving:  # by itself
            if not self._over.wait(_LINGER):
                os._exit(word.code)
            return
        self._word = word
        if self._rank == 0:
            helper = threading.Thread(target=self.when_lost, args=(word.sentence,), daemon=True)  # disks may hang
            helper.start()
            time.sleep(3 * self._period)
            helper.join(5.0)
        here = [r for r, node in enumerate(self._nodes) if node == self._nodes[self._rank]]
        if self._rank == next((rank for rank in here if rank not in word.about), here[0]):
            print(f"deepnmt: {word.sentence}", file=sys.stderr, flush=True)
        os._exit(word.code)

    def leave(self, error: BaseException | None) -> None:
        """Tells the others that this process ends, and why. After a broken connection it waits for a verdict on who is
        lost, with which the process then ends."""
        self._work = Work("")
        if _is_broken_connection(error):
            self._broken = True
            self._wake.set()
            self._over.wait(min(self._limit, _SUSPECTED) + 4 * self._period)
        self._leaving = True
        where = f"rank {self._rank} on {self._nodes[self._rank]}"
        if isinstance(error, UserError):
            self._word = Word(str(error), 2)
        elif error is not None:
            self._word = Word(f"{where} has ended with {type(error).__name__}: {error}"[:500], LOST, [self._rank])
        else:
            self._word = Word(code=1)
        self._wake.set()
        if error is not None and self._rank == 0:
            until = time.monotonic() + _LINGER
            while time.monotonic() < until and not all(
                    self._signs.get(r, Sign()).code or self._silent[r] > 3 * self._period
                    for r in self._others):
                time.sleep(0.1)

    def close(self) -> None:
        """Ends both threads after a last sign. A thread that is still in the store when Python ends would abort the
        process; where the store is gone or does not answer, that takes a moment."""
        self._over.set()
        self._wake.set()
        for thread in self._threads:
            thread.join(_LINGER)


def _is_broken_connection(error: BaseException | None) -> bool:
    """Whether a collective has failed. NCCL's errors and the store's have a type; gloo throws a plain RuntimeError,
    which only the path of its source in the message tells from others."""
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "gloo" in str(error))


def allowed(kind: str, past: Sequence[float]) -> float:
    """The seconds that a piece of work of this kind may take, from those of the last ones."""
    first, least = PATIENCE.get(kind, (math.inf, math.inf))
    return max(least, _TIMES * max(past)) if past else first


def begin(kind: str) -> None:
    """`Watch.begin`, where this process is one of several."""
    if current is not None:
        current.begin(kind)


current: Watch | None = None  # of this process, while it is one of several
