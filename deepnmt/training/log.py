"""How a run reports: a progress line, a JSON-lines log, TensorBoard, and a status file."""

from __future__ import annotations

import errno
import io
import json
import math
import os
import socket
import stat
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.summary.writer.record_writer import RecordWriter
from torch.utils.tensorboard.summary import scalar
from tqdm import tqdm

from deepnmt.checkpoint.saving import Saved
from deepnmt.files import as_json, is_record, make_run_folder, write_json
from deepnmt.progress import print_status
from deepnmt.training.trackers import Tracking


class Monitor:
    """Reports a run's progress, on rank 0. On other ranks every method does nothing.

    Args:
        folder: the run folder; `log.jsonl`, `tensorboard/` and `STATUS.json` are written there.
        active: whether this process reports.
        update: the update a run resumes from; log lines of later updates, from a killed attempt, are removed.
        updates: the number of updates planned.

    Raises:
        UserError: the folder cannot be made or written to.
    """

    def __init__(self, folder: Path, active: bool, update: int, updates: int) -> None:
        self.folder, self.active, self.first, self.updates = folder, active, update, updates
        self.started = time.monotonic()
        self.tracking: Tracking | None = None  # gets what TensorBoard gets
        self.warning: str | None = None  # stands in STATUS.json
        self._failing: set[str] = set()
        self._status = "running"
        self._speaking = threading.Lock()
        if not active:
            return
        make_run_folder(folder)
        self._bar = tqdm(total=updates, initial=update, unit="update", dynamic_ncols=True,
                         disable=not sys.stderr.isatty(), bar_format="{n_fmt}/{total_fmt} |{bar:12}| {desc}")
        self._log = _Appended(folder / "log.jsonl")
        with self._reporting("log.jsonl"):
            if damaged := _cut_log(folder / "log.jsonl", update):
                self.print_line(f"{folder / 'log.jsonl'} has {damaged} damaged line(s), which readers of it leave out")
        self._board = _Appended(folder / "tensorboard" /
                                f"events.out.tfevents.{time.time():010.0f}.{socket.gethostname()}.{os.getpid()}")
        # at a START TensorBoard forgets what a killed attempt wrote of later updates
        self._add_to_board({"file_version": "brain.Event:2"},
                           {"step": update + 1, "session_log": SessionLog(status=SessionLog.START)})

    def print_line(self, message: str) -> None:
        """Prints a line to standard error, above the progress bar."""
        if self.active:
            with suppress(OSError):  # it may be a file on a full disk
                tqdm.write(message, file=sys.stderr)

    def train(self, update: int, record: dict[str, float], updates_left: int, at_most: float = math.inf) -> None:
        """Logs the training figures of one interval and shows the progress line.

        The ETA assumes that the `updates_left` updates go as fast as those so far, validations and checkpoints
        included, but is at most `at_most` seconds.
        """
        if not self.active:
            return
        left = min((time.monotonic() - self.started) / max(1, update - self.first) * updates_left, at_most)
        record = {**record, "seconds_left": round(left, 1)}
        self.status("running", update)
        self._write("train", update, record)
        self._write_figures("train", update, record)
        aligned = f"alignment {record['alignment_loss']:.3f} " if "alignment_loss" in record else ""
        text = (f"epoch {record['epoch']:.0f} loss {record['loss']:.3f} ppl {record['perplexity']:.2f} {aligned}"
                f"lr {record['learning_rate']:.2e} gnorm {record['gradient_norm']:.2f} scale {record['loss_scale']:g} "
                f"{record['target_tokens_per_second']:.0f} tok/s"
                + (f" skipped {record['skipped_updates']:.0f}" if record["skipped_updates"] else ""))
        if self._bar.disable:
            print_status(f"update {update}/{self.updates} {text} ETA {clock(left)}")
        else:
            self._bar.n = update
            self._bar.set_description_str(f"ETA {clock(left)} {text}")  # ETA first: a narrow terminal hides the end

    def valid(self, update: int, record: dict[str, Any]) -> None:
        """Logs the figures of a validation and prints them on a line."""
        if not self.active:
            return
        self.status("running", update)
        self._write("valid", update, record)
        self._write_figures("valid", update, {k: v for k, v in record.items() if isinstance(v, (int, float))})
        bleu = f" BLEU {record['bleu']:.1f}" if "bleu" in record else ""
        each = [f"{key.removesuffix('/bleu')} {value:.1f}" for key, value in record.items() if key.endswith("/bleu")]
        bleu += f" ({', '.join(each)})" if each else ""
        bleu += f" alignment error {record['alignment_error']:.1%}" if "alignment_error" in record else ""
        self.print_line(f"validation at update {update}: loss {record['loss']:.4f} ppl {record['perplexity']:.2f}{bleu}"
                 f"{_source_words(record)}{' (best so far)' if record['best'] else ''}")

    def look(self, update: int, record: dict[str, float]) -> None:
        """Logs how much the source is used at an update without a validation, and prints it on a line."""
        if self.active:
            self._write("look", update, record)
            self._write_figures("valid", update, record)
            self.print_line(f"a first look at update {update}:{_source_words(record)}")

    def saved(self, update: int, saved: Saved) -> None:
        """Logs and prints how long a checkpoint took, which was complete by `update`."""
        if self.active:
            self._write("checkpoint", update, {"checkpoint": saved.update, "bytes": saved.size,
                                               "stall_seconds": saved.stall, "write_seconds": saved.seconds})
            self.print_line(f"checkpoint of update {saved.update}: {saved.size / 1e6:,.1f} MB, training waited "
                            f"{saved.stall:.2f} s, written in {saved.seconds:.2f} s")

    def probe(self, update: int, record: dict[str, float]) -> None:
        """Writes the finite values of a probe of the layers to TensorBoard."""
        if self.active:
            self._write_figures("probe", update, {k: v for k, v in record.items() if math.isfinite(v)})

    def event(self, update: int, message: str, **facts: Any) -> None:
        """Logs and prints an event, such as a resume, a skipped update or the end."""
        if self.active:
            self._write("event", update, {"message": message, **facts})
            self.print_line(message)

    def status(self, status: str, update: int, **facts: Any) -> None:
        """Replaces STATUS.json: the run's current state, or how it ended. "lost" is the last word: another thread says
        it, and a collective that fails after it does not replace it."""
        if not self.active:
            return
        with self._speaking:
            if self._status == "lost":
                return
            self._status = status
            file, content = self.folder / "STATUS.json", {"status": status, "update": update, **facts}
            if self.warning:
                content["warning"] = self.warning
            with self._reporting("STATUS.json"):
                try:
                    write_json(file, content)
                except OSError as error:
                    try:  # a full disk still has the room that the file takes now
                        with open(os.open(file, os.O_WRONLY | os.O_NOFOLLOW), "wb", buffering=0) as old:
                            old.truncate(old.write(as_json(content).encode()))
                    except OSError:
                        raise error from None

    def close(self) -> None:
        if self.active:
            self._bar.close()
            if self.tracking is not None:
                self.tracking.close(self._status)
            for file in (self._log, self._board):
                with self._reporting(file.path.name):
                    file.close()

    @contextmanager
    def _reporting(self, file: str) -> Iterator[None]:
        """Lets a run go on if one of its reports cannot be written, and says so once."""
        try:
            yield
        except OSError as error:
            if file not in self._failing:
                self.print_line(f"{self.folder / file} cannot be written: {error.strerror or error}; training "
                                "continues, and it is tried again with every report")
            self._failing.add(file)
        else:
            self._failing.discard(file)

    def _write(self, kind: str, update: int, record: dict[str, Any]) -> None:
        finite = {k: (v if not isinstance(v, float) or math.isfinite(v) else str(v)) for k, v in record.items()}
        line = json.dumps({"type": kind, "update": update, **finite}, ensure_ascii=False) + "\n"
        with self._reporting("log.jsonl"):
            self._log.write(line.encode())

    def _write_figures(self, group: str, update: int, figures: Mapping[str, float]) -> None:
        """Adds figures to TensorBoard, and to the trackers."""
        named = {f"{group}/{name}": value for name, value in figures.items()}
        self._add_to_board(*({"step": update, "summary": scalar(name, value)} for name, value in named.items()))
        if self.tracking is not None:
            self.tracking.log(update, named)

    def _add_to_board(self, *events: dict[str, Any]) -> None:
        records = io.BytesIO()
        for fields in events:
            RecordWriter(records).write(Event(wall_time=time.time(), **fields).SerializeToString())
        with self._reporting("tensorboard"):
            self._board.write(records.getvalue())


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


def _cut_log(path: Path, update: int) -> int:
    """Removes the lines of updates that will be repeated, and what a kill left of a last one.

    Returns:
        The number of other lines that are damaged.
    """
    if not path.is_file() or path.is_symlink():
        return 0
    position = end = damaged = suspects = 0
    with path.open("r+b") as file:
        for line in file:
            position += len(line)
            try:
                record = json.loads(line)
            except (ValueError, RecursionError):
                record = None
            if not is_record(record):
                suspects += 1
            elif record["update"] <= update:
                end, damaged = position, suspects
        file.truncate(end)
        file.seek(end - 1 if end else 0)
        if file.read(1) not in (b"", b"\n"):  # an editor left out the last line's end
            file.write(b"\n")
    return damaged


def _source_words(record: Mapping[str, Any]) -> str:
    """How much the source is used (see `source_use.py`), for a line; "" if the record does not say."""
    if "source_gain" not in record:
        return ""
    return (f" source {record['source_gain']:+.2f} common {record['encoder_common']:.2f} "
            f"attention {record['cross_attention_entropy']:.2f}")


def clock(seconds: float) -> str:
    """1:02:03 for 3,723 seconds."""
    minutes, s = divmod(int(seconds), 60)
    hours, m = divmod(minutes, 60)
    return f"{hours}:{m:02d}:{s:02d}" if hours else f"{m}:{s:02d}"
