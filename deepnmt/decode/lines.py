"""Lines out: what translation writes, in UTF-8, and how it tells its progress."""

from __future__ import annotations

import contextlib
import errno
import io
import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, Protocol, TextIO

from tqdm import tqdm

from deepnmt.errors import UserError
from deepnmt.files import replacing

Form = Literal["text", "tsv", "jsonl"]

PLAIN_SECONDS = 30.0  # between two progress lines where standard error is not a terminal


@dataclass(frozen=True)
class Hypothesis:
    """A translation: detokenised text on one line; its score (log-probability over length penalty); its number of
    tokens, without eos; whether it `ended` with eos or was cut at its longest length."""

    text: str
    score: float
    log_prob: float
    tokens: int
    ended: bool


def one_line(text: str) -> str:
    """`text` with line breaks and tabs, which a vocabulary with byte pieces can spell, made spaces."""
    return " ".join(text.splitlines()).replace("\t", " ")


def record(number: int, hypotheses: Sequence[Hypothesis], form: Form) -> str:
    """What is written for line `number` (from 1), with the final line end; `hypotheses` best first.

    text: the best translation. tsv: "line, rank, score, text" for each hypothesis, rank from 1. jsonl: one object.
    """
    if form == "text":
        return hypotheses[0].text + "\n"
    if form == "tsv":
        return "".join(f"{number}\t{rank}\t{h.score:.6f}\t{h.text}\n" for rank, h in enumerate(hypotheses, start=1))
    return json.dumps({"line": number, "hypotheses": [asdict(h) for h in hypotheses]}, ensure_ascii=False) + "\n"


@contextlib.contextmanager
def writing(target: Path | None) -> Iterator[TextIO]:
    """Where output goes: standard output (None), or a file that appears under its name only when it is complete
    (see `files.replacing`).

    Raises:
        UserError: the file cannot be made, or the disk is full.
    """
    if target is None:
        out = io.TextIOWrapper(sys.stdout.buffer, encoding="utf-8", newline="\n")  # whatever the locale says
        try:
            yield out
        finally:
            out.detach()
        return
    opened = False
    try:
        with replacing(target) as stream:
            opened = True
            yield stream
    except OSError as error:
        if not opened:
            raise UserError(f"output {target} cannot be written: {error.strerror}; give a file in an existing folder "
                            "that may be written to") from None
        if error.errno != errno.ENOSPC:
            raise
        raise UserError(f"output {target} cannot be written: no space is left; give a file on another disk") from None


class Progress(Protocol):
    """Told how many lines are done; shows it on standard error."""

    def at(self, lines: int) -> None:
        """`lines` are done by now."""


class Bar:
    """Progress on a terminal."""

    def __init__(self, bar: tqdm) -> None:
        self._bar = bar

    def at(self, lines: int) -> None:
        self._bar.update(lines - self._bar.n)


class Plain:
    """Progress in a log: a line every `PLAIN_SECONDS`."""

    def __init__(self) -> None:
        self._begin = self._said = time.monotonic()

    def at(self, lines: int) -> None:
        now = time.monotonic()
        if now - self._said >= PLAIN_SECONDS:
            self._said = now
            print(f"{lines:,} lines translated in {now - self._begin:.0f} s", file=sys.stderr, flush=True)


@contextlib.contextmanager
def progressing() -> Iterator[Progress]:
    """A bar where standard error is a terminal, plain lines elsewhere."""
    if sys.stderr.isatty():
        with tqdm(unit=" lines", leave=False) as bar:
            yield Bar(bar)
    else:
        yield Plain()
