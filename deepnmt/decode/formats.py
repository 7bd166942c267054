"""How translations and scores are written, by `--format`: the output for a line of input, line end included; and the
file that it goes into."""

from __future__ import annotations

import errno
import io
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TextIO

from xopen import xopen

from deepnmt.data.tables import COMPRESSED
from deepnmt.errors import UserError
from deepnmt.files import atomic_write

if TYPE_CHECKING:
    from deepnmt.decode.score import Scored
    from deepnmt.decode.translate import Hypothesis


class Writers(NamedTuple):
    """From the number of a line (from 1), and its hypotheses, best first, or its scored translations."""

    hypotheses: Callable[[int, Sequence[Hypothesis]], str]
    scores: Callable[[int, Sequence[Scored]], str]


def as_record(hypothesis: Hypothesis) -> dict[str, Any]:
    """A hypothesis as JSON has it, without what was not asked for."""
    return {name: value for name, value in asdict(hypothesis).items() if value is not None}


def _text(number: int, hypotheses: Sequence[Hypothesis]) -> str:
    """The best translation alone."""
    return hypotheses[0].text + "\n"


def _text_scores(number: int, line: Sequence[Scored]) -> str:
    """The log-probabilities of its translations, separated by tabs."""
    return "\t".join(f"{scored.log_prob:.6f}" for scored in line) + "\n"


def _tsv(number: int, hypotheses: Sequence[Hypothesis]) -> str:
    """A line "line, rank, score, text" for each hypothesis, rank from 1."""
    lines = []
    for rank, hypothesis in enumerate(hypotheses, start=1):
        lines.append(f"{number}\t{rank}\t{hypothesis.score:.6f}\t{hypothesis.text}\n")
    return "".join(lines)


def _tsv_scores(number: int, line: Sequence[Scored]) -> str:
    """A line "line, number, log-probability, score, text" for each translation, numbers from 1; or with pieces a line
    "line, number, position, piece, log-probability" for each of its pieces, then the likeliest there, each with its
    log-probability."""
    lines = []
    for rank, scored in enumerate(line, start=1):
        if not scored.pieces:
            lines.append(f"{number}\t{rank}\t{scored.log_prob:.6f}\t{scored.score:.6f}\t{scored.text}\n")
        for position, piece in enumerate(scored.pieces, start=1):
            fields = [f"{number}\t{rank}\t{position}\t{piece.piece}\t{piece.log_prob:.6f}"]
            for other, log_prob in piece.top:
                fields.append(f"{other}\t{log_prob:.6f}")
            lines.append("\t".join(fields) + "\n")
    return "".join(lines)


def _jsonl(number: int, hypotheses: Sequence[Hypothesis]) -> str:
    """One object."""
    return json.dumps({"line": number, "hypotheses": [as_record(h) for h in hypotheses]}, ensure_ascii=False) + "\n"


def _jsonl_scores(number: int, line: Sequence[Scored]) -> str:
    """One object."""
    objects = [asdict(scored) for scored in line]
    for each in objects:
        if not each["pieces"]:
            del each["pieces"]
    return json.dumps({"line": number, "translations": objects}, ensure_ascii=False) + "\n"


WRITERS: dict[str, Writers] = {
    "text": Writers(_text, _text_scores),
    "tsv": Writers(_tsv, _tsv_scores),
    "jsonl": Writers(_jsonl, _jsonl_scores),
}


@contextmanager
def open_output(target: Path | None) -> Iterator[TextIO]:
    """Opens standard output (None), or a file that appears under its name only when it is complete (see
    `files.atomic_write`), compressed if the name ends in .gz, .xz, .zst or .bz2.

    Raises:
        UserError: the file cannot be created, or the disk is full.
    """
    if target is None:
        out = io.TextIOWrapper(sys.stdout.buffer, encoding="utf-8", newline="\n")  # in any locale
        try:
            yield out
            out.flush()
        except OSError as error:
            raise _full(error, "standard output") from None
        finally:
            with suppress(OSError):
                out.detach()
        return
    opened = False
    try:
        with atomic_write(target) as stream:
            opened = True
            if target.suffix not in COMPRESSED:
                yield stream
                return
            with xopen(stream.buffer, "wb", threads=0, format=target.suffix[1:]) as packed:
                text = io.TextIOWrapper(packed, encoding="utf-8", newline="\n")
                yield text
                text.detach()
    except OSError as error:
        if not opened:
            raise UserError(f"output {target} cannot be written: {error.strerror}; give a file in an existing, "
                            "writable folder") from None
        raise _full(error, f"output {target}") from None


def _full(error: OSError, output: str) -> Exception:
    """What is raised where an output cannot be written any further: a sentence if the disk is full."""
    if error.errno != errno.ENOSPC:
        return error
    return UserError(f"{output} cannot be written: no space is left; give a file on another disk")
