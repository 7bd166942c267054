"""Reads the whole training data once at a start, beside the first updates where that takes long."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

AT_ONCE = 5.0  # seconds that a start waits; hashing goes at about 1 GB a second


class Verification(threading.Thread):
    """Runs `verify`, which raises an exception if the data are damaged, in a thread."""

    def __init__(self, verify: Callable[[], None]) -> None:
        super().__init__(daemon=True)
        self._verify = verify
        self._fault: Exception | None = None
        self.start()

    def run(self) -> None:
        try:
            self._verify()
        except Exception as fault:
            self._fault = fault

    def wait(self, seconds: float | None = None) -> None:
        """Waits for the end (None), or for so many seconds; raises what `verify` raised, if it has."""
        self.join(seconds)
        if self._fault is not None:
            raise self._fault

    @contextmanager
    def explaining(self) -> Iterator[None]:
        """If the data are damaged, that is raised in place of an exception that may come of it."""
        try:
            yield
        except Exception:
            self.wait()
            raise
