"""Progress of long jobs on standard error: a bar on a terminal, a line now and then in a log file."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from tqdm import tqdm

PLAIN_SECONDS = 30.0  # between two lines if standard error is not a terminal

Progress = Callable[[int], object]  # called with the number of lines, pairs, ... done so far


def print_status(text: str) -> None:
    """Prints a line to standard error, unbuffered. No job fails because nobody can read it, or its disk is full."""
    with suppress(OSError):
        print(text, file=sys.stderr, flush=True)


def no_progress(done: int) -> None:
    """A `Progress` that shows nothing."""


def bar_progress(bar: tqdm) -> Progress:
    """A `Progress` that moves a bar."""
    return lambda done: bar.update(done - bar.n)


@contextmanager
def show_progress(line: str, **bar: Any) -> Iterator[Progress]:
    """Shows a bar if standard error is a terminal, else a line every `PLAIN_SECONDS`; with an ETA if `total` is given.

    Args:
        line: format of the line, with a field for the number done: "{:,} lines translated".
        bar: arguments for `tqdm`.
    """
    begin = last_shown = time.monotonic()

    def report(done: int) -> None:
        nonlocal last_shown
        now = time.monotonic()
        if now - last_shown >= PLAIN_SECONDS:
            last_shown = now
            eta = f", ETA {(now - begin) / done * (bar['total'] - done):.0f} s" if bar.get("total") else ""
            print_status(f"{line.format(done)} in {now - begin:.0f} s{eta}")

    if sys.stderr.isatty():
        with tqdm(**bar) as shown:
            yield bar_progress(shown)
    else:
        yield report
