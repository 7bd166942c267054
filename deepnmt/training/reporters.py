"""What a run's monitor calls: the console, log.jsonl, TensorBoard and STATUS.json. Visitors bring more.

A record is what happened, by its kind: `train` (an interval), `valid`, `look` (at how the source is used),
`checkpoint`, `event` or `probe`, with the update it belongs to.
"""

from __future__ import annotations

import errno
import io
import json
import math
import os
import socket
import stat
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.summary.writer.record_writer import RecordWriter
from torch.utils.tensorboard.summary import scalar
from tqdm import tqdm

from deepnmt.files import as_json, is_record, write_json
from deepnmt.progress import print_status

_GROUPS = {"train": "train", "valid": "valid", "look": "valid", "probe": "probe"}  # figures, by the kind of a record

Describe = Callable[[Mapping[str, Any]], str]


class Reporter:
    """Takes what it wants of these. A method may raise `OSError`; training continues, and the monitor says so once.

    Attributes:
        name: the file that it writes, for messages.
    """

    name = ""

    def record(self, kind: str, update: int, record: Mapping[str, Any]) -> None:
        """Something has happened."""

    def status(self, content: Mapping[str, Any]) -> None:
        """The run's state has changed: its `status`, `update` and more."""

    def close(self, status: str) -> None:
        """The run ends, with this status."""


def figures_of(kind: str, record: Mapping[str, Any]) -> dict[str, float]:
    """The numbers in a record by the names that TensorBoard has for them, such as "train/loss"; of a probe those that
    are finite."""
    if kind not in _GROUPS:
        return {}
    named = {f"{_GROUPS[kind]}/{name}": value for name, value in record.items() if isinstance(value, (int, float))}
    if kind == "probe":
        return {name: value for name, value in named.items() if math.isfinite(value)}
    return named


class Console(Reporter):
    """Lines on standard error, and a progress bar if that is a terminal.

    Args:
        update, updates: the update a run resumes from, and the number of updates planned.
        describe: what a line says of the figures of a record, see `training.task.Task`.
    """

    def __init__(self, update: int, updates: int, describe: Describe) -> None:
        self._describe = describe
        self._updates = updates
        self._bar = tqdm(total=updates, initial=update, unit="update", dynamic_ncols=True,
                         disable=not sys.stderr.isatty(), bar_format="{n_fmt}/{total_fmt} |{bar:12}| {desc}")

    def print(self, line: str) -> None:
        """Prints a line above the progress bar."""
        with suppress(OSError):  # it may be a file on a full disk
            tqdm.write(line, file=sys.stderr)

    def record(self, kind: str, update: int, record: Mapping[str, Any]) -> None:
        if kind == "train":
            self._progress(update, record)
        elif kind == "valid":
            best = " (best so far)" if record["best"] else ""
            self.print(f"validation at update {update}: loss {record['loss']:.4f} ppl {record['perplexity']:.2f}"
                       f"{self._describe(record)}{best}")
        elif kind == "look":
            self.print(f"a first look at update {update}:{self._describe(record)}")
        elif kind == "checkpoint":
            self.print(f"checkpoint of update {record['checkpoint']}: {record['bytes'] / 1e6:,.1f} MB, training waited "
                       f"{record['stall_seconds']:.2f} s, written in {record['write_seconds']:.2f} s")
        elif kind == "event":
            self.print(record["message"])

    def _progress(self, update: int, record: Mapping[str, Any]) -> None:
        others = "".join(f"{name.removesuffix('_loss')} {value:.3f} " for name, value in record.items()
                         if name.endswith("_loss"))
        skipped = f" skipped {record['skipped_updates']:.0f}" if record["skipped_updates"] else ""
        text = (f"epoch {record['epoch']:.0f} loss {record['loss']:.3f} ppl {record['perplexity']:.2f} {others}"
                f"lr {record['learning_rate']:.2e} gnorm {record['gradient_norm']:.2f} scale {record['loss_scale']:g} "
                f"{record['target_tokens_per_second']:.0f} tok/s{skipped}")
        left = clock(record["seconds_left"])
        if self._bar.disable:
            print_status(f"update {update}/{self._updates} {text} ETA {left}")
        else:
            self._bar.n = update
            self._bar.set_description_str(f"ETA {left} {text}")  # ETA first: a narrow terminal hides the end

    def close(self, status: str) -> None:
        self._bar.close()


class LogFile(Reporter):
    """`log.jsonl`: every record but probes, a line of JSON each."""

    name = "log.jsonl"

    def __init__(self, file: Path) -> None:
        self._path, self._file = file, _Appended(file)

    def resume(self, update: int) -> int:
        """Removes the lines of later updates, which will be repeated, and what a kill left of a last one; returns the
        number of other lines that are damaged.

        Lines of a later update that was dropped may stand before some of this one.
        """
        if not self._path.is_file() or self._path.is_symlink():
            return 0
        position = end = damaged = suspects = 0
        later: list[tuple[int, bytes]] = []  # where such a line begins, and the line
        with self._path.open("r+b") as file:
            for line in file:
                begin, position = position, position + len(line)
                try:
                    record = json.loads(line)
                except (ValueError, RecursionError):
                    record = None
                if not is_record(record):
                    suspects += 1
                elif record["update"] <= update:
                    end, damaged = position, suspects
                else:
                    later.append((begin, line))
            file.truncate(end)
            for begin, line in reversed([one for one in later if one[0] < end]):  # few
                file.seek(begin + len(line))
                rest = file.read()
                file.seek(begin)
                file.write(rest)
                end -= len(line)
                file.truncate(end)
            file.seek(end - 1 if end else 0)
            if file.read(1) not in (b"", b"\n"):  # an editor left out the last line's end
                file.write(b"\n")
        return damaged

    def record(self, kind: str, update: int, record: Mapping[str, Any]) -> None:
        line = ""  # of a probe: what waits is written
        if kind != "probe":
            finite = {k: (v if not isinstance(v, float) or math.isfinite(v) else str(v)) for k, v in record.items()}
            line = json.dumps({"type": kind, "update": update, **finite}, ensure_ascii=False) + "\n"
        self._file.write(line.encode())

    def close(self, status: str) -> None:
        self._file.close()


class TensorBoard(Reporter):
    """An event file in the folder `tensorboard`, of this attempt, which begins after `update`."""

    name = "tensorboard"

    def __init__(self, folder: Path, update: int) -> None:
        self._file = _Appended(
            folder / f"events.out.tfevents.{time.time():010.0f}.{socket.gethostname()}.{os.getpid()}")
        self._update = update

    def record(self, kind: str, update: int, record: Mapping[str, Any]) -> None:
        self._write(*({"step": update, "summary": scalar(name, value)}
                      for name, value in figures_of(kind, record).items()))  # none: what waits is written

    def begin(self) -> None:
        """Writes the file's head. At its START TensorBoard forgets what a killed attempt wrote of later updates."""
        self._write({"file_version": "brain.Event:2"},
                    {"step": self._update + 1, "session_log": SessionLog(status=SessionLog.START)})

    def _write(self, *events: dict[str, Any]) -> None:
        records = io.BytesIO()
        for fields in events:
            RecordWriter(records).write(Event(wall_time=time.time(), **fields).SerializeToString())
        self._file.write(records.getvalue())

    def close(self, status: str) -> None:
        self._file.close()


class StatusFile(Reporter):
    """`STATUS.json`: the run's current state, or how it ended."""

    name = "STATUS.json"

    def __init__(self, file: Path) -> None:
        self._path = file

    def status(self, content: Mapping[str, Any]) -> None:
        try:
            write_json(self._path, dict(content))
        except OSError as error:
            try:  # a full disk still has the room that the file takes now
                with open(os.open(self._path, os.O_WRONLY | os.O_NOFOLLOW), "wb", buffering=0) as old:
                    old.truncate(old.write(as_json(dict(content)).encode()))
            except OSError:
                raise error from None


class _Appended:
    """A file that is appended to. What cannot be written is kept, and written before what comes next."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor = -1
        self._waiting = bytearray()

    def write(self, content: bytes) -> None:
        """Raises `OSError`; the content is then written by a later call."""
        self._waiting += content
        if self._descriptor < 0:
            self.path.parent.mkdir(exist_ok=True)
            if os.path.lexists(self.path) and not stat.S_ISREG(self.path.lstat().st_mode):
                raise OSError(errno.EINVAL, "it is not a plain file")
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
            self._descriptor = os.open(self.path, flags, 0o666)
        while self._waiting:
            del self._waiting[: os.write(self._descriptor, self._waiting)]

    def close(self) -> None:
        """Raises `OSError` if something could not be written until now."""
        try:
            if self._waiting:
                self.write(b"")
        finally:
            if self._descriptor >= 0:
                os.close(self._descriptor)


def clock(seconds: float) -> str:
    """1:02:03 for 3,723 seconds."""
    minutes, s = divmod(int(seconds), 60)
    hours, m = divmod(minutes, 60)
    return f"{hours}:{m:02d}:{s:02d}" if hours else f"{m}:{s:02d}"
