"""Progress of long jobs on standard error: a bar on a terminal, a line now and then in a log file."""

from __future__ import annotations

import errno
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from typing import Any, TextIO

from tqdm import tqdm

PLAIN_SECONDS = 30.0  # between two lines if standard error is not a terminal
# Errors of a stream that nobody reads any more: a closed pipe, a terminal that has gone, a lost file server.
_GONE = (errno.EPIPE, errno.EIO, errno.EBADF, errno.ENXIO, errno.ESTALE)

Progress = Callable[[int], object]  # called with the number of lines, pairs, ... done so far


def print_status(text: str) -> None:
    """Prints a line to standard error, unbuffered. No job fails because nobody can read it, or its disk is full."""
    with suppress(OSError):
        print(text, file=sys.stderr, flush=True)


def no_progress(done: int) -> None:
    """A `Progress` that shows nothing."""


@contextmanager
def show_progress(line: str, *, shown: bool = True, **bar: Any) -> Iterator[Progress]:
    """Shows a bar if standard error is a terminal, else a line every `PLAIN_SECONDS`; with an ETA if `total` is given.

    Args:
        line: format of the line, with a field for the number done: "{:,} lines translated".
        shown: False shows nothing, as on all processes but the first.
        bar: arguments for `tqdm`.
    """
    begin = last_shown = time.monotonic()

    def report(done: int) -> None:
        nonlocal last_shown
        now = time.monotonic()
        if now - last_shown >= PLAIN_SECONDS:
            last_shown = now
            eta = ""
            if done and bar.get("total"):
                eta = f", ETA {(now - begin) / done * max(0, bar['total'] - done):.0f} s"
            print_status(f"{line.format(done)} in {now - begin:.0f} s{eta}")

    if not shown:
        yield no_progress
    elif sys.stderr.isatty():
        with tqdm(**bar) as on_terminal:
            yield lambda done: on_terminal.update(done - on_terminal.n)
    else:
        yield report


class _Lossy:
    """A text stream that drops what it is given once nobody reads it any more.

    What another error keeps from being written, such as a full disk, is lost; the next line is tried again.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        self._attempt(lambda: self._stream.write(text))
        return len(text)

    def flush(self) -> None:
        self._attempt(self._stream.flush)

    def _attempt(self, action: Callable[[], object]) -> None:
        try:
            action()
        except OSError as error:
            if error.errno in _GONE:
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, self._stream.fileno())
                os.close(nowhere)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def output_may_be_lost() -> Iterator[None]:
    """Within it, a standard output or error that nobody reads any more, or cannot be written now, is no error.

    A run whose ssh connection or terminal has ended must still save.
    """
    with redirect_stdout(_Lossy(sys.stdout)), redirect_stderr(_Lossy(sys.stderr)):
        yield
