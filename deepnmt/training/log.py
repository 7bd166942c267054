"""How a run reports: its monitor, which keeps the status and calls the reporters."""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from deepnmt.checkpoint.saving import Saved
from deepnmt.files import make_run_folder
from deepnmt.training.reporters import Console, Describe, LogFile, Reporter, StatusFile, TensorBoard


class Monitor:
    """Reports a run's progress, on rank 0. On other ranks every method does nothing.

    Args:
        folder: the run folder; `log.jsonl`, `tensorboard/` and `STATUS.json` are written there.
        active: whether this process reports.
        update: the update a run resumes from; log lines of later updates, from a killed attempt, are removed.
        updates: the number of updates planned.
        describe: what a progress line says of a record's figures.

    Raises:
        UserError: the folder cannot be made or written to.
    """

    def __init__(self, folder: Path, active: bool, update: int, updates: int,
                 describe: Describe = lambda record: "") -> None:
        self.folder, self.active, self.first = folder, active, update
        self.begin()
        self.warning: str | None = None  # stands in STATUS.json
        self.reporters: list[Reporter] = []
        self._failing: set[tuple[str, str]] = set()  # reporters, and what they fail at
        self._status = "running"
        self._speaking = threading.Lock()
        if not active:
            return
        make_run_folder(folder)
        self._console = Console(update, updates, describe)
        log, board = LogFile(folder / "log.jsonl"), TensorBoard(folder / "tensorboard", update)
        with self._attempt(log, "record"):
            if damaged := log.resume(update):
                self.print_line(f"{folder / 'log.jsonl'} has {damaged} damaged line(s), which readers of it leave out")
        with self._attempt(board, "record"):
            board.begin()
        self.reporters = [StatusFile(folder / "STATUS.json"), log, board, self._console]

    def begin(self) -> None:
        """The updates begin: the ETA counts the time from here, so without that of the start."""
        self._passed = deque([(self.first, time.monotonic())])  # updates, and when

    def print_line(self, message: str) -> None:
        """Prints a line to standard error, above the progress bar."""
        if self.active:
            self._console.print(message)

    def train(self, update: int, record: dict[str, float], updates_left: int, at_most: float = math.inf) -> None:
        """Reports the training figures of one interval.

        The ETA assumes that the `updates_left` updates go as fast as the later half of those so far, validations and
        checkpoints included, but is at most `at_most` seconds.
        """
        while len(self._passed) > 1 and self._passed[1][0] <= (self.first + update) / 2:
            self._passed.popleft()
        (begin, since), now = self._passed[0], time.monotonic()
        self._passed.append((update, now))
        left = min((now - since) / max(1, update - begin) * updates_left, at_most)
        self.status("running", update)
        self._record("train", update, {**record, "seconds_left": round(left, 1)})

    def valid(self, update: int, record: dict[str, Any]) -> None:
        """Reports the figures of a validation."""
        self.status("running", update)
        self._record("valid", update, record)

    def look(self, update: int, record: dict[str, float]) -> None:
        """Reports figures of an update without a validation."""
        self._record("look", update, record)

    def saved(self, update: int, saved: Saved) -> None:
        """Reports how long a checkpoint took, which was complete by `update`."""
        self._record("checkpoint", update, {"checkpoint": saved.update, "bytes": saved.size,
                                            "stall_seconds": saved.stall, "write_seconds": saved.seconds})

    def probe(self, update: int, record: dict[str, float]) -> None:
        """Reports a probe of the layers."""
        self._record("probe", update, record)

    def event(self, update: int, message: str, **facts: Any) -> None:
        """Reports an event, such as a resume, a skipped update or the end."""
        self._record("event", update, {"message": message, **facts})

    def status(self, status: str, update: int, **facts: Any) -> None:
        """Reports the run's current state, or how it ended. "lost" is the last word: another thread says it, and a
        collective that fails after it does not replace it."""
        with self._speaking:
            if self._status == "lost":
                return
            self._status = status
            content = {"status": status, "update": update, **facts}
            if self.warning:
                content["warning"] = self.warning
            self._tell("status", content)

    def close(self) -> None:
        """Ends all reporters."""
        self._tell("close", self._status)

    def _record(self, kind: str, update: int, record: Mapping[str, Any]) -> None:
        self._tell("record", kind, update, record)

    def _tell(self, method: str, *arguments: Any) -> None:
        for reporter in self.reporters:
            with self._attempt(reporter, method):
                getattr(reporter, method)(*arguments)

    @contextmanager
    def _attempt(self, reporter: Reporter, method: str) -> Iterator[None]:
        """Lets a run go on if one of its reports cannot be written, and says so once, until the same works again."""
        failing = (reporter.name, method)
        try:
            yield
        except OSError as error:
            if failing not in self._failing:
                self.print_line(f"{self.folder / reporter.name} cannot be written: {error.strerror or error}; training "
                                "continues, and it is tried again with every report")
            self._failing.add(failing)
        else:
            self._failing.discard(failing)
