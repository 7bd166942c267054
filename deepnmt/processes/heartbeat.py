"""Heartbeats: every process writes one into the store again and again, and all end when one of them falls silent, or
when they all live but training stands still.

Rank 0 reads all heartbeats and writes its verdict into its own; the others read that one. So it makes no difference
whether a process has died, was stopped or is cut off, nor how long a collective, of gloo or NCCL, would wait for it.
Since all processes take every update together, rank 0 also sees from its own work that any of them stands still. Which
one it is their heartbeats say: the others are in a collective.
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
SILENCE = 90.0  # seconds without a heartbeat after which a process counts as lost
_READING = 10.0  # seconds in which the others can read why this process ends
UPDATE, VALIDATION, SAVE = "an update", "a validation", "a save"
# Seconds that a phase may take, the first of its kind, which may compile, and at least each later one
TIME_LIMITS = {UPDATE: (1200.0, 600.0), VALIDATION: (6 * 3600.0, 1800.0), SAVE: (6 * 3600.0, 1800.0)}
_SLOWEST_FACTOR = 10  # it may also take so many times as long as the slowest of the last ones
_RESUMES = "all processes end; the same command resumes from the newest checkpoint"
_COLLECTIVES = ("/torch/distributed/", "/deepspeed/comm/")  # code that waits for other processes
_PACKAGE = f"{PACKAGE}/"


class ExitNotice(NamedTuple):
    """Why a process ends: a sentence, an exit code, and the ranks that the sentence names. The code is 0 while the
    process runs, and 1 with no sentence when it has ended well."""

    sentence: str = ""
    code: int = 0
    about: Sequence[int] = ()


class Heartbeat(NamedTuple):
    """What a process shows: the number of this heartbeat, its `ExitNotice`, whether a connection of its has broken,
    where its training is, and whether it waits there for the others."""

    number: int = 0
    sentence: str = ""
    code: int = 0
    about: Sequence[int] = ()
    broken: bool = False
    place: str = ""
    waits: bool = False


@dataclass
class Phase:
    """A phase of the training, and the seconds that it has taken so far."""

    kind: str
    seconds: float = 0.0


class HeartbeatMonitor:
    """The two threads of a process that show its heartbeat and judge the others'.

    Args:
        store: a connection of their own.
        nodes: the machine of every process.
    """

    def __init__(self, store: dist.Store, rank: int, nodes: Sequence[str]) -> None:
        self._store, self._rank, self._nodes = store, rank, nodes
        self._limit = SILENCE
        self._period = min(3.0, SILENCE / 6)
        self._others = list(range(1, len(nodes))) if rank == 0 else [0]  # whose heartbeats this process reads
        self._notice = ExitNotice()
        self._broken = self._leaving = False
        self._heartbeats: dict[int, Heartbeat] = {}
        self._silent = dict.fromkeys(self._others, 0.0)
        self._thread = 0
        self._phase = Phase("")
        self._past = defaultdict[str, deque[float]](lambda: deque(maxlen=20))
        self._over, self._wake = threading.Event(), threading.Event()
        self.on_lost: Callable[[str], object] = lambda sentence: None
        self._threads = []
        for loop in (self._show, self._judge):
            thread = threading.Thread(target=loop, daemon=True)
            self._threads.append(thread)
            thread.start()

    def begin(self, kind: str) -> None:
        """The thread that calls this begins a phase of the training; until the next call it may take as long as
        `allowed` says of its kind. "" may take for ever."""
        if self._phase.kind != SAVE:  # a checkpoint is written beside updates, which `took` is told of
            self._past[self._phase.kind].append(self._phase.seconds)
        self._thread = threading.get_ident()
        self._phase = Phase(kind)

    def took(self, kind: str, seconds: float) -> None:
        """A phase of this kind has taken so long beside others."""
        self._past[kind].append(seconds)

    def _show(self) -> None:
        """Writes this process's heartbeat and reads the others'; may be held up by the network."""
        for count in range(2**60):
            notice = self._notice
            last = self._over.is_set()
            try:
                place, waits = self._place()
                own = Heartbeat(count, *notice, self._broken, place, waits)
                self._store.set(f"heartbeat/{self._rank}", json.dumps(own))
                if last:
                    return
                keys = [f"heartbeat/{rank}" for rank in self._others]
                for rank, content in zip(self._others, self._store.multi_get(keys)):
                    heartbeat = Heartbeat(*json.loads(content))
                    if heartbeat != self._heartbeats.get(rank):
                        self._heartbeats[rank] = heartbeat
                        self._silent[rank] = 0.0
            except RuntimeError:  # the store has ended with rank 0, or does not answer
                if last:
                    return
            self._wake.wait(0.1 if self._leaving else self._period)
            self._wake.clear()

    def _judge(self) -> None:
        then = time.monotonic()
        while not self._over.wait(self._period):
            now = time.monotonic()
            awake = min(now - then, 2 * self._period)  # this process may have been stopped itself
            then = now
            for rank in self._others:
                self._silent[rank] += awake
            phase = self._phase
            phase.seconds += awake
            heartbeats = dict(self._heartbeats)
            ended = [heartbeat for heartbeat in heartbeats.values() if heartbeat.sentence]
            if ended:
                self._end(ExitNotice(ended[0].sentence, ended[0].code, ended[0].about))
            broken = self._broken or any(heartbeat.broken for heartbeat in heartbeats.values())
            limit = self._limit
            if broken:
                limit = min(limit, _SUSPECTED)
            lost = []
            for rank in self._others:
                if self._silent[rank] > limit and heartbeats.get(rank, Heartbeat()).code == 0:
                    lost.append(rank)
            if lost:
                silent = max(self._silent[rank] for rank in lost)
                self._end(ExitNotice(f"no sign of life from {self._list(lost)} for {silent:.0f} s: ended, stopped, or "
                                     f"cut off from {self._nodes[self._rank]}; {_RESUMES}", LOST, lost))
            most = allowed(phase.kind, self._past[phase.kind])
            if self._rank == 0 and phase.seconds > most:
                self._end(self._standstill(phase, most, heartbeats))

    def _standstill(self, phase: Phase, most: float, heartbeats: dict[int, Heartbeat]) -> ExitNotice:
        """A notice of those that do not wait for the others; where all wait, or none, as a GPU's work is not seen to
        wait, on those first that are where few are."""
        places, waits = {}, {}
        places[self._rank], waits[self._rank] = self._place()
        for rank, heartbeat in heartbeats.items():
            places[rank], waits[rank] = heartbeat.place, heartbeat.waits
        stuck = [rank for rank in sorted(waits) if not waits[rank]]
        if len(stuck) in (0, len(waits)):
            common = Counter(places.values())
            named = sorted(places, key=lambda rank: (common[places[rank]], rank))
            waiting = "all wait for one another"
        else:
            named = stuck
            waiting = "the others wait for it" if len(stuck) == 1 else "the others wait for them"
        return ExitNotice(f"training stands still: {phase.kind} has taken {phase.seconds:.0f} s, of {most:.0f} s "
                          f"allowed; {self._list(named, places)}; {waiting}; {_RESUMES}", LOST, named)

    def _list(self, ranks: Sequence[int], places: Mapping[int, str] | None = None) -> str:
        shown = []
        for rank in ranks[:8]:
            text = f"rank {rank} on {self._nodes[rank]}"
            if places:
                text += f" is in {places[rank]}"
            shown.append(text)
        if len(ranks) > 8:
            shown.append("...")
        return ", ".join(shown)

    def _place(self) -> tuple[str, bool]:
        """Where the training of this process is, and whether one of its threads is in a collective."""
        waits, place = False, ""
        frame: FrameType | None
        for thread, frame in sys._current_frames().items():
            while frame is not None:
                file = frame.f_code.co_filename
                if any(part in file for part in _COLLECTIVES):
                    waits = True
                if thread == self._thread and not place and file.startswith(_PACKAGE):
                    place = f"{frame.f_code.co_name} ({file.removeprefix(_PACKAGE)}, line {frame.f_lineno})"
                frame = frame.f_back
        return place, waits

    def _end(self, notice: ExitNotice) -> None:
        """Ends this process, after rank 0's heartbeat has told the others."""
        if self._leaving:  # by itself
            if not self._over.wait(_READING):
                os._exit(notice.code)
            return
        self._notice = notice
        if self._rank == 0:
            helper = threading.Thread(target=self.on_lost, args=(notice.sentence,), daemon=True)  # disks may hang
            helper.start()
            time.sleep(3 * self._period)
            helper.join(5.0)
        here = [rank for rank, node in enumerate(self._nodes) if node == self._nodes[self._rank]]
        living = [rank for rank in here if rank not in notice.about]
        speaker = living[0] if living else here[0]
        if self._rank == speaker:
            print(f"deepnmt: {notice.sentence}", file=sys.stderr, flush=True)
        os._exit(notice.code)

    def shutdown(self, error: BaseException | None) -> None:
        """Tells the others that this process ends, and why. After a broken connection it waits for a verdict on who is
        lost, with which the process then ends."""
        self._phase = Phase("")
        if _is_broken_connection(error):
            self._broken = True
            self._wake.set()
            self._over.wait(min(self._limit, _SUSPECTED) + 4 * self._period)
        self._leaving = True
        where = f"rank {self._rank} on {self._nodes[self._rank]}"
        if isinstance(error, UserError):
            self._notice = ExitNotice(str(error), 2)
        elif error is not None:
            sentence = f"{where} has ended with {type(error).__name__}: {error}"[:500]
            self._notice = ExitNotice(sentence, LOST, [self._rank])
        else:
            self._notice = ExitNotice(code=1)
        self._wake.set()
        if error is not None and self._rank == 0:
            until = time.monotonic() + _READING
            while time.monotonic() < until and not all(map(self._knows, self._others)):
                time.sleep(0.1)

    def _knows(self, rank: int) -> bool:
        """Whether another process ends itself, or is silent."""
        return self._heartbeats.get(rank, Heartbeat()).code != 0 or self._silent[rank] > 3 * self._period

    def close(self) -> None:
        """Ends both threads after a last heartbeat. A thread that is still in the store when Python ends would abort
        the process; where the store is gone or does not answer, that takes a moment."""
        self._over.set()
        self._wake.set()
        for thread in self._threads:
            thread.join(_READING)


def _is_broken_connection(error: BaseException | None) -> bool:
    """Whether a collective has failed. NCCL's errors and the store's have a type; gloo throws a plain RuntimeError,
    which only the path of its source in the message tells from others."""
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "gloo" in str(error))


def allowed(kind: str, past: Sequence[float]) -> float:
    """The seconds that a phase of this kind may take, from those of the last ones."""
    first, least = TIME_LIMITS.get(kind, (math.inf, math.inf))
    if not past:
        return first
    return max(least, _SLOWEST_FACTOR * max(past))


def begin(kind: str) -> None:
    """`HeartbeatMonitor.begin`, where this process is one of several."""
    if current is not None:
        current.begin(kind)


def took(kind: str, seconds: float) -> None:
    """`HeartbeatMonitor.took`, where this process is one of several."""
    if current is not None:
        current.took(kind, seconds)


current: HeartbeatMonitor | None = None  # of this process, while it is one of several
