"""Whether a run may go on: nobody else is training it, the checkpoint suits the recipe; and what is another from there
on."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from deepnmt.checkpoint import MOMENTS, load_state
from deepnmt.config import Recipe, changed_settings, load_recipe
from deepnmt.errors import UserError
from deepnmt.monitor import make_run_folder
from deepnmt.optim import moments_of
from deepnmt.parallel.build import data_ranks
from deepnmt.parallel.launch import Ranks

# Settings, or groups of them, that a run keeps: another value would make it another run, or come too late to count.
_FIXED = ("seed", "model", "vocab", "data.subword_variants", "data.subword_alpha", "data.filters", "batch.tokens",
          "admin", "train.best_by")


@contextmanager
def only_trainer(run: Path, ranks: Ranks) -> Iterator[None]:
    """Holds the lock `RUN/.lock`, while processes train there, by rank 0. Collective.

    The system lets go of it when that process ends in whatever way; the file stays and means nothing. Where the file
    system has no locks there is none.

    Raises:
        UserError: on every rank; others are training there, or the run folder cannot be written to.
    """
    with ExitStack() as held:
        fault = ""
        if ranks.first:
            try:
                make_run_folder(run)
                fcntl.flock(held.enter_context(open(run / ".lock", "a")), fcntl.LOCK_EX | fcntl.LOCK_NB)
            except UserError as error:
                fault = str(error)
            except BlockingIOError:
                fault = (f"another process is training in {run}; wait until it has ended, or train into another folder "
                         "with run=FOLDER")
            except OSError:  # no locks here
                pass
        if fault := ranks.broadcast_bytes(fault.encode()).decode():
            raise UserError(fault)
        yield


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
    if moments_of(begun.optimizer) != moments_of(recipe.optimizer):
        fixed += ["optimizer.name", "optimizer.momentum"]
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
