"""Waiting is bounded: every process shows a sign of life in the store, and all end when one of them shows none.

Rank 0 reads all signs and writes its verdict into its own; the others read that one. So it makes no difference whether
a process has died, was stopped or is cut off, nor how long a collective, of gloo or NCCL, would wait for it.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence

import torch.distributed as dist

from deepnmt.errors import UserError

LOST = 76  # exit code: another process is gone, nothing new was saved
_SUSPECTED = 10.0  # seconds of silence that are enough once a connection has broken
SILENCE = 90.0  # seconds without a sign after which a process counts as lost
_BROKEN = ("gloo", "NCCL", "Connection", "connection")  # words of an error of a collective
_LINGER = 10.0  # seconds in which the others can read why this process ends

Word = tuple[str, int]  # a sentence and an exit code; ("", 0) while a process runs, ("", 1) when it has ended well


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
        self._word: Word = ("", 0)
        self._broken = self._leaving = False
        self._signs: dict[int, tuple[int, str, int, bool]] = {}
        self._silent = dict.fromkeys(self._others, 0.0)
        self._over, self._shown, self._wake = threading.Event(), threading.Event(), threading.Event()
        self.when_lost: Callable[[str], object] = lambda sentence: None
        for work in (self._show, self._judge):
            threading.Thread(target=work, daemon=True).start()

    def _show(self) -> None:
        """Writes this process's sign and reads the others'; may be held up by the network."""
        for count in range(2**60):
            word, last = self._word, self._over.is_set()
            try:
                self._store.set(f"sign/{self._rank}", json.dumps([count, *word, self._broken]))
                self._shown.set()
                if last:
                    return
                for rank, sign in zip(self._others, self._store.multi_get([f"sign/{r}" for r in self._others])):
                    if (told := tuple(json.loads(sign))) != self._signs.get(rank):
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
            signs = dict(self._signs)
            if ended := [told for told in signs.values() if told[1]]:
                self._end(ended[0][1], ended[0][2])
            broken = self._broken or any(told[3] for told in signs.values())
            limit = min(self._limit, _SUSPECTED) if broken else self._limit
            lost = [r for r in self._others if self._silent[r] > limit and signs.get(r, (0, "", 0, False))[2] == 0]
            if lost:
                self._end(self._sentence(lost, max(self._silent[r] for r in lost)), LOST)

    def _sentence(self, lost: Sequence[int], silent: float) -> str:
        shown = ", ".join(f"rank {r} on {self._nodes[r]}" for r in lost[:8]) + (", ..." if len(lost) > 8 else "")
        return (f"no sign of life from {shown} for {silent:.0f} s: ended, stopped, or cut off from "
                f"{self._nodes[self._rank]}; all processes end; the same command resumes from the newest checkpoint")

    def _end(self, sentence: str, code: int) -> None:
        """Ends this process, after rank 0's sign has told the others."""
        if self._leaving:  # by itself
            if not self._over.wait(_LINGER):
                os._exit(code)
            return
        self._word = (sentence, code)
        if self._rank == 0:
            helper = threading.Thread(target=self.when_lost, args=(sentence,), daemon=True)  # disks may hang
            helper.start()
            time.sleep(3 * self._period)
            helper.join(5.0)
        here = [r for r, node in enumerate(self._nodes) if node == self._nodes[self._rank]]
        if self._rank == next(r for r in here if r == self._rank or f"rank {r} on " not in sentence):
            print(f"deepnmt: {sentence}", file=sys.stderr, flush=True)
        os._exit(code)

    def leave(self, error: BaseException | None) -> None:
        """Tells the others that this process ends, and why. After a broken connection it waits for a verdict on who is
        lost, with which the process then ends."""
        if isinstance(error, RuntimeError) and any(word in str(error) for word in _BROKEN):
            self._broken = True
            self._wake.set()
            self._over.wait(min(self._limit, _SUSPECTED) + 4 * self._period)
        self._leaving = True
        where = f"rank {self._rank} on {self._nodes[self._rank]}"
        if isinstance(error, UserError):
            self._word = (str(error), 2)
        elif error is not None:
            self._word = (f"{where} has ended with {type(error).__name__}: {error}"[:500], LOST)
        else:
            self._word = ("", 1)
        self._wake.set()
        if error is not None and self._rank == 0:
            until = time.monotonic() + _LINGER
            while time.monotonic() < until and not all(
                    self._signs.get(r, (0, "", 0, False))[2] or self._silent[r] > 3 * self._period
                    for r in self._others):
                time.sleep(0.1)

    def close(self) -> None:
        self._shown.clear()
        self._over.set()
        self._wake.set()
        self._shown.wait(1.0)


current: Watch | None = None  # of this process, while it is one of several
