"""Whether a run may go on: nobody else is training it, the checkpoint suits the recipe; and what is another from there
on."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from deepnmt.checkpoint.checkpoint import MOMENTS, load_state, recover_checkpoints
from deepnmt.config import Recipe, changed_settings, load_recipe
from deepnmt.errors import UserError
from deepnmt.files import make_run_folder
from deepnmt.optim import MOMENT_SETTINGS, moment_names
from deepnmt.parallel.settings import data_ranks
from deepnmt.progress import print_status
from deepnmt.ranks import Ranks

# Settings, or groups of them, that a run keeps: another value would make it another run, or come too late to count.
_FIXED = ("seed", "model", "vocab", "data.subword_variants", "data.subword_alpha", "data.filters", "batch.tokens",
          "admin", "train.best_by")

LOCK_WAIT = 120.0  # seconds for processes that were told to stop, and still save, to let go of the run
_NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)  # what a file system without locks answers


@contextmanager
def run_lock(run: Path, ranks: Ranks) -> Iterator[None]:
    """Holds the lock `RUN/.lock`, while processes train there, by rank 0, which first clears up after a killed save.
    Collective.

    The system lets go of the lock when that process ends in whatever way; the file stays and means nothing. Where the
    file system has no locks there is none.

    Raises:
        UserError: on every rank; others are training there and go on for `LOCK_WAIT` seconds, the run folder cannot be
            written to, or a checkpoint that a kill left aside cannot be given its name back.
    """
    with ExitStack() as held:
        def take() -> None:
            if ranks.first:
                make_run_folder(run)
                _take_lock(run / ".lock", held)
                recover_checkpoints(run / "checkpoints")

        ranks.raise_everywhere(take)
        yield


def _take_lock(file: Path, held: ExitStack) -> None:
    """Locks `file` until `held` is left, and writes into it who holds it. Waits `LOCK_WAIT` seconds for another holder.

    Raises:
        UserError: another process holds it still, or this one may not lock it.
    """
    until, waiting = time.monotonic() + LOCK_WAIT, False
    try:
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        held.callback(os.close, descriptor)
        while not _locked(descriptor):
            holder = os.pread(descriptor, 200, 0).decode(errors="replace").strip()
            other = f"another process{holder and f' ({holder})'} is training in {file.parent}"
            if time.monotonic() >= until:
                raise UserError(f"{other}; wait until it has ended, stop it, or train into another folder with "
                                f"run=FOLDER; if it ended with its machine and still counts, delete {file}")
            if not waiting:
                print_status(f"{other}; waiting {LOCK_WAIT:g} s for its end")
            waiting = True
            time.sleep(min(0.5, LOCK_WAIT))
    except OSError as error:
        if error.errno in _NO_LOCKS:
            return
        raise UserError(f"{file} cannot be locked: {error.strerror}; if nobody trains there, delete it or give write "
                        "permission for it, else train into another folder with run=FOLDER") from None
    _write_holder(descriptor, file.parent, f"process {os.getpid()} on {socket.gethostname()}\n")
    held.callback(_write_holder, descriptor, file.parent, "")


def _locked(descriptor: int) -> bool:
    """Whether the lock is this process's now. Raises `OSError` where there can be none."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _write_holder(descriptor: int, folder: Path, text: str) -> None:
    """Writes who holds the lock into its file, which whoever may write to the folder may write to."""
    with suppress(OSError):  # the lock holds without it
        if os.fstat(descriptor).st_uid == os.geteuid():
            os.fchmod(descriptor, 0o600 | 0o666 & folder.stat().st_mode)
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, text.encode(), 0)


def changes_since(checkpoint: Path, recipe: Recipe, fingerprint: str, world: int) -> list[str]:
    """The settings that take effect from `checkpoint` on, as `key: old -> new`, and so what follows from the number of
    processes.

    Args:
        fingerprint: of the prepared data.
        world: processes that the run goes on with.

    Raises:
        UserError: a setting that a run keeps was changed, training cannot go on from this checkpoint, or the data are
            others.
    """
    begun, state = load_recipe(checkpoint / "recipe.yaml"), load_state(checkpoint)
    changes = changed_settings(begun, recipe)
    fixed = list(_FIXED)
    if moment_names(begun.optimizer) != moment_names(recipe.optimizer):
        fixed += MOMENT_SETTINGS
    if state.loss_scale is not None:  # the run has a later one than its first
        fixed.append("loss_scale.initial_power")
    refused = [c for c in changes if any(c.partition(":")[0].startswith(f) for f in fixed)]
    if refused:
        raise UserError(f"{recipe.run} holds a run begun with other settings:\n  " + "\n  ".join(refused)
                        + "\nput them back, or train into another folder with run=FOLDER")
    if not (checkpoint / MOMENTS).exists():
        raise UserError(f"{checkpoint} is an average, which training cannot go on from; take it out of "
                        f"{checkpoint.parent}")
    if state.extra["data_fingerprint"] != fingerprint:
        raise UserError(f"{recipe.data.folder} was prepared anew from other text since {checkpoint} was written; "
                        "restore it, or train into another folder with run=FOLDER")
    before = state.extra["processes"]
    if before != world:
        changes.append(f"processes: {before} -> {world}")
    were, are = (data_ranks(of, count) * of.batch.accumulation for of, count in ((begun, before), (recipe, world)))
    if were != are:
        changes.append(f"micro-batches of an update: {were} -> {are}")
    return changes
