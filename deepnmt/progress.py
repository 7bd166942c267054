"""How far a long job has come, on standard error: a bar on a terminal, now and then a line in a log."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from tqdm import tqdm

PLAIN_SECONDS = 30.0  # between two lines where standard error is no terminal

Progress = Callable[[int], object]  # is told how many lines, pairs, ... are done by now


def say(text: str) -> None:
    """A line for the person watching, at once."""
    print(text, file=sys.stderr, flush=True)


def silent(done: int) -> None:
    """The progress that says nothing."""


def on_bar(bar: tqdm) -> Progress:
    """The progress that a bar shows."""
    return lambda done: bar.update(done - bar.n)


@contextmanager
def progressing(line: str, **bar: Any) -> Iterator[Progress]:
    """A bar where standard error is a terminal, a line every `PLAIN_SECONDS` elsewhere; with the time left where the
    `total` is known.

    Args:
        line: what the line says, with a field for the number done: "{:,} lines translated".
        bar: what `tqdm` is given.
    """
    begin = said = time.monotonic()

    def report(done: int) -> None:
        nonlocal said
        now = time.monotonic()
        if now - said >= PLAIN_SECONDS:
            said = now
            left = f", {(now - begin) / done * (bar['total'] - done):.0f} s left" if bar.get("total") else ""
            say(f"{line.format(done)} in {now - begin:.0f} s{left}")

    if sys.stderr.isatty():
        with tqdm(**bar) as shown:
            yield on_bar(shown)
    else:
        yield report
