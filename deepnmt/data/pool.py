"""Pools of processes that Ctrl-C reaches through their parent alone, and that end with it."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable
from concurrent.futures import Future, ProcessPoolExecutor
from multiprocessing.connection import wait
from typing import TypeVar

T = TypeVar("T")


def submit(pool: ProcessPoolExecutor, work: Callable[..., T], *arguments: object) -> Future[T]:
    """Like `pool.submit`, in whose course processes start. These never see Ctrl-C, even while they import.

    A terminal sends it to every process, and each would end with a traceback of its own.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # a new process has the mask of its parent
    try:
        return pool.submit(work, *arguments)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def end_with_parent() -> None:
    """Called in a process of a pool, which would else wait for ever on a queue whose other end was killed."""
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)
