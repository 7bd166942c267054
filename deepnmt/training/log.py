"""How a run reports: a progress line, a JSON-lines log, TensorBoard, and a status file."""

from __future__ import annotations

import json
import math
import sys
import time
from pathlib import Path
from typing import Any

from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

from deepnmt.files import make_run_folder, write_json, write_text
from deepnmt.progress import print_status


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
        if not active:
            return
        make_run_folder(folder)
        self._log = _reopen_log(folder / "log.jsonl", update)
        self._board = SummaryWriter(str(folder / "tensorboard"), purge_step=update + 1)
        self._bar = tqdm(total=updates, initial=update, unit="update", dynamic_ncols=True,
                         disable=not sys.stderr.isatty(), bar_format="{n_fmt}/{total_fmt} |{bar:12}| {desc}")

    def print_line(self, message: str) -> None:
        """Prints a line to standard error, above the progress bar."""
        if self.active:
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
        self._write("train", update, record)
        for name, value in record.items():
            self._board.add_scalar(f"train/{name}", value, update)
        text = (f"epoch {record['epoch']:.0f} loss {record['loss']:.3f} ppl {record['perplexity']:.2f} "
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
        self._write("valid", update, record)
        for name, value in record.items():
            if isinstance(value, (int, float)):
                self._board.add_scalar(f"valid/{name}", value, update)
        bleu = f" BLEU {record['bleu']:.1f}" if "bleu" in record else ""
        self.print_line(f"validation at update {update}: loss {record['loss']:.4f} ppl {record['perplexity']:.2f}{bleu}"
                 f"{' (best so far)' if record['best'] else ''}")

    def probe(self, update: int, record: dict[str, float]) -> None:
        """Writes the finite values of a probe of the layers to TensorBoard."""
        if self.active:
            for name, value in record.items():
                if math.isfinite(value):
                    self._board.add_scalar(f"probe/{name}", value, update)

    def event(self, update: int, message: str, **facts: Any) -> None:
        """Logs and prints an event, such as a resume, a skipped update or the end."""
        if self.active:
            self._write("event", update, {"message": message, **facts})
            self.print_line(message)

    def status(self, status: str, update: int, **facts: Any) -> None:
        """Replaces STATUS.json: the run's current state, or how it ended."""
        if self.active:
            write_json(self.folder / "STATUS.json", {"status": status, "update": update, **facts})

    def close(self) -> None:
        if self.active:
            self._bar.close()
            self._log.close()
            self._board.close()

    def _write(self, kind: str, update: int, record: dict[str, Any]) -> None:
        finite = {k: (v if not isinstance(v, float) or math.isfinite(v) else str(v)) for k, v in record.items()}
        self._log.write(json.dumps({"type": kind, "update": update, **finite}, ensure_ascii=False) + "\n")
        self._log.flush()


def _reopen_log(path: Path, update: int) -> Any:
    """Opens the log for appending, after removing lines of updates that will be repeated."""
    if path.exists():
        kept = []
        for line in path.read_text(encoding="utf-8").splitlines():
            try:
                if json.loads(line)["update"] <= update:
                    kept.append(line)
            except (ValueError, KeyError):  # a line that a kill left incomplete
                continue
        write_text(path, "".join(line + "\n" for line in kept))
    return path.open("a", encoding="utf-8")


def clock(seconds: float) -> str:
    """1:02:03 for 3,723 seconds."""
    minutes, s = divmod(int(seconds), 60)
    hours, m = divmod(minutes, 60)
    return f"{hours}:{m:02d}:{s:02d}" if hours else f"{m}:{s:02d}"
