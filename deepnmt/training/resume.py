"""Whether a run may resume: no other process trains it and the checkpoint fits the recipe; and which settings have
changed."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from deepnmt.checkpoint.checkpoint import (
    STATE,
    has_moments,
    is_checkpoint,
    list_checkpoints,
    load_state,
    newest_checkpoint,
    recover_checkpoints,
    verify_files,
)
from deepnmt.config import Change, Fact, Recipe, changed_settings, load_recipe
from deepnmt.config.choices import OPTIMIZERS
from deepnmt.config.plugins import same_plugins
from deepnmt.errors import UserError
from deepnmt.files import make_run_folder, sha256, write_json
from deepnmt.folders import MANIFEST, DamagedFolder, read_json
from deepnmt.optim.optimizers import moment_names
from deepnmt.parallel.ds_config import data_ranks
from deepnmt.processes.agreement import agree_on_folder
from deepnmt.processes.ranks import Ranks
from deepnmt.progress import print_status
from deepnmt.training.state import TrainState

LOCK_WAIT = 120.0  # seconds to wait for processes that are stopping and still save
_NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)  # errors of a file system without locks


@contextmanager
def run_lock(run: Path, ranks: Ranks) -> Iterator[None]:
    """Holds the lock `RUN/.lock`, on rank 0, which also cleans up after a killed save. Collective.

    The system releases the lock when the process ends in any way; the file stays, and means nothing by itself. On a
    file system without locks nothing is locked.

    Raises:
        UserError: on every rank; not all machines see the same folder, other processes still train there after
            `LOCK_WAIT` seconds, the run folder is a checkpoint or cannot be written to, or a checkpoint that a kill
            left renamed cannot get its name back.
    """
    with ExitStack() as held:
        def take() -> None:
            if ranks.first:
                if is_checkpoint(run):  # whose recipe.yaml would be written over
                    raise UserError(f"run is {run}, which is a checkpoint; set run to the folder of its run, where "
                                    "training resumes from the newest, or to another folder")
                make_run_folder(run)
                _take_lock(run / ".lock", held)
                recover_checkpoints(run / "checkpoints")

        ranks.raise_everywhere(take)
        agree_on_folder(run, ranks)
        yield


@contextmanager
def telling_refusal(run: Path, ranks: Ranks) -> Iterator[None]:
    """Says in the STATUS.json of a run that an attempt to resume it has failed, if what is within raises an exception.

    The run's lock is held. Without this the last attempt's word would stay: who starts a run anew as long as it reads
    "preempted" would do so for ever.
    """
    try:
        yield
    except Exception as error:
        if ranks.first and (run / "STATUS.json").is_file():
            with suppress(DamagedFolder, OSError):
                status = read_json(run, "STATUS.json")
                if status.get("status") != "finished":  # which it is, whatever the mistake was
                    write_json(run / "STATUS.json", {"status": "failed", "update": status.get("update"),
                                                     "error": f"{type(error).__name__}: {error}"})
        raise


def _take_lock(file: Path, stack: ExitStack) -> None:
    """Locks `file` until `stack` is closed and writes the holder into it. Waits `LOCK_WAIT` seconds for another holder.

    Raises:
        UserError: another process still holds the lock, or this one has no permission.
    """
    until, waiting = time.monotonic() + LOCK_WAIT, False
    try:
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
        stack.callback(os.close, descriptor)
        while not _locked(descriptor):
            holder = os.pread(descriptor, 200, 0).decode(errors="replace").strip()
            other = f"another process{holder and f' ({holder})'} is training in {file.parent}"
            if time.monotonic() >= until:
                raise UserError(f"{other}; wait until it has ended, stop it, or train into another folder with "
                                f"run=FOLDER; if its machine died and left the lock, delete {file}")
            if not waiting:
                print_status(f"{other}; waiting up to {LOCK_WAIT:g} s for it to end")
            waiting = True
            time.sleep(min(0.5, LOCK_WAIT))
    except OSError as error:
        if error.errno in _NO_LOCKS:
            return
        raise UserError(f"{file} cannot be locked: {error.strerror}; if no other run uses it, delete it or make it "
                        "writable, else train into another folder with run=FOLDER") from None
    _write_holder(descriptor, file.parent, f"process {os.getpid()} on {socket.gethostname()}\n")
    stack.callback(_write_holder, descriptor, file.parent, "")


def _locked(descriptor: int) -> bool:
    """Tries to take the lock; returns whether it did. Raises `OSError` if the file cannot be locked at all."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _write_holder(descriptor: int, folder: Path, text: str) -> None:
    """Writes the lock's holder into its file, and gives the file the permissions of its folder."""
    with suppress(OSError):  # the lock works without it
        if os.fstat(descriptor).st_uid == os.geteuid():
            os.fchmod(descriptor, 0o600 | 0o666 & folder.stat().st_mode)
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, text.encode(), 0)


def agree_on_checkpoint(checkpoints: Path, ranks: Ranks) -> Path | None:
    """The newest undamaged checkpoint, which rank 0 finds; None if there is none. Collective.

    Raises:
        UserError: on every rank; there are checkpoints but all are damaged, so that a new run would overwrite them; or
            a machine sees another checkpoint of that name.
    """
    def find() -> bytes:
        newest = newest_checkpoint(checkpoints, on_skip=lambda why: print(f"skipped: {why}", flush=True))
        if newest is None and list_checkpoints(checkpoints):
            raise UserError(f"every checkpoint in {checkpoints} is damaged, so the run cannot resume; restore a good "
                            "copy, train into another folder with run=FOLDER, or delete them to start over")
        return f"{newest.name} {sha256(newest / MANIFEST)}".encode() if newest else b""

    newest = ranks.raise_everywhere(lambda: find() if ranks.first else b"")
    name, _, manifest = ranks.broadcast_bytes(newest).decode().partition(" ")

    def compare() -> None:
        file = checkpoints / name / MANIFEST
        try:
            fault = "" if sha256(file) == manifest else "is not the one that process 0 sees"
        except OSError as error:
            fault = f"cannot be read ({error.strerror})"
        if fault:
            raise UserError(f"{file} {fault} on {socket.gethostname()}; all machines must see the same run folder")

    if name:
        ranks.raise_everywhere(compare)
    return checkpoints / name if name else None


def read_state(
    checkpoint: Path, recipe: Recipe, fingerprints: Sequence[str], ranks: Ranks
) -> tuple[list[Change], TrainState]:
    """What has changed since a checkpoint, see `changes_since`, and its state, on every rank, with the first of the
    fingerprints. Collective.

    Raises:
        UserError: on every rank; see `changes_since`, or one of them cannot read a file of it.
    """
    def read() -> tuple[list[Change], TrainState]:
        changes = changes_since(checkpoint, recipe, fingerprints, ranks.world)
        for name in verify_files(checkpoint, ())["files"]:
            try:
                with open(checkpoint / name, "rb") as file:
                    file.read(1)
            except OSError as error:
                raise UserError(f"{checkpoint / name} cannot be read on {socket.gethostname()}: {error.strerror}; all "
                                "machines must see the same run folder") from None
        state = TrainState.from_saved(load_state(checkpoint))
        return changes, replace(state, processes=ranks.world, data_fingerprint=fingerprints[0])

    return ranks.raise_everywhere(read)


def changes_since(checkpoint: Path, recipe: Recipe, fingerprints: Sequence[str], world: int) -> list[Change]:
    """The settings that differ from those of `checkpoint`, and likewise the number of processes and of micro-batches an
    update.

    Args:
        fingerprints: of the prepared data: today's, and those that older versions gave it.
        world: the number of processes now.

    Raises:
        UserError: a setting was changed that must not change, `checkpoint` is an average, or the run was trained on
            other data.
    """
    begun, state = load_recipe(checkpoint / "recipe.yaml"), load_state(checkpoint)
    if same_plugins(begun.plugins, recipe.plugins):  # whose files may have moved
        begun = begun.model_copy(update={"plugins": recipe.plugins})
    changes = changed_settings(begun, recipe)
    fixed = [Fact.FIXED]
    if recipe.batch.update_tokens is None:
        fixed.append(Fact.MICRO_BATCH)
    keeps, needs = (not OPTIMIZERS[of.optimizer.name].whole_matrices for of in (begun, recipe))
    if moment_names(begun) != moment_names(recipe) or (needs and not keeps):  # Muon's exp_avg_sq of a matrix stays 0
        fixed.append(Fact.MOMENTS)
    if state.loss_scale is not None:
        fixed.append(Fact.LOSS_SCALE)

    by = recipe.train.best_by
    measured = {  # by what else the validations before were compared
        "loss": r"train\.(label_smoothing|objective)",
        "bleu": r"train\.valid_sentences|data\.(valid\..*)?trg_lang",
    }.get(by, rf"train\.valid_sentences|metrics\.{re.escape(by)}\.lower_is_better")

    def is_fixed(key: str) -> bool:
        of_an_epoch = key.startswith("data.train.") and recipe.is_marked(key, Fact.EPOCH)
        return of_an_epoch or bool(re.fullmatch(measured, key)) or any(recipe.is_marked(key, fact) for fact in fixed)

    rejected = [change for change in changes if is_fixed(change.key)]
    if rejected:
        raise UserError(f"{recipe.run} holds a run begun with other settings:\n  " + "\n  ".join(map(str, rejected))
                        + "\nrestore them, or train into another folder with run=FOLDER")
    if not has_moments(checkpoint):
        raise UserError(f"{checkpoint} is an average, and training cannot resume from one; move it out of "
                        f"{checkpoint.parent}")
    try:
        TrainState.from_saved(state)
    except (KeyError, TypeError) as error:
        raise DamagedFolder(checkpoint, f"{STATE} is not that of a run ({error!r})") from None
    if state.extra["data_fingerprint"] not in fingerprints:
        raise UserError(f"{checkpoint} was trained on other data than {recipe.data.folder} holds now; restore that "
                        "data, or train into another folder with run=FOLDER")
    before = state.extra["processes"]
    if before != world:
        changes.append(Change("processes", before, world))
    were, are = (of.batch.entries(data_ranks(of, count)) for of, count in ((begun, before), (recipe, world)))
    if were != are:
        changes.append(Change("micro-batches of an update", were, are))
    return changes
