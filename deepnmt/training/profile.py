"""`deepnmt profile`: measures Admin's ω on the first batch of a recipe, shared among all processes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np

from deepnmt.batch import Batch
from deepnmt.checkpoint.checkpoint import list_checkpoints
from deepnmt.config import Recipe
from deepnmt.config.choices import BLOCKS
from deepnmt.config.fields import either
from deepnmt.data.batching import Stream
from deepnmt.data.mixing import training_stream
from deepnmt.data.prepared import PreparedData, open_prepared
from deepnmt.errors import UserError
from deepnmt.files import make_run_folder, reporting
from deepnmt.model.admin_profile import AdminProfile, measure
from deepnmt.processes.agreement import agree_on_contents, agree_on_recipe
from deepnmt.processes.ranks import Ranks
from deepnmt.progress import print_status


def profile(recipe: Recipe, ranks: Ranks) -> Path:
    """Measures ω; rank 0 writes `admin_profile.json` and `.png` into the run folder and prints a table. Collective.

    Returns:
        The path of the JSON file.

    Raises:
        UserError: neither stack is Admin, the recipe already names a file with ω, there is no prepared data, or the
            run folder cannot be written to or has checkpoints.
    """
    if recipe.task != type(recipe).default("task"):
        raise UserError(f"the recipe has task: {recipe.task}, whose ω are measured when a run begins; train without a "
                        "profile")
    if not recipe.model.profiled:
        names = either(BLOCKS.where(lambda block: block.profiled))
        raise UserError(f"{recipe.model.blocks}, but only {names} is profiled; set one of them to {names}, or train "
                        "without a profile")
    if recipe.admin.profile is not None:
        raise UserError(f"admin.profile is {recipe.admin.profile}, which training reads instead of measuring; set "
                        "admin.profile=null to measure, or train with the file as it is")
    if recipe.train.init_from is not None:
        raise UserError(f"train.init_from is {recipe.train.init_from}, which has trained ω, so none are measured; "
                        "train without a profile, or set train.init_from=null")
    agree_on_recipe(recipe, ranks)
    data = ranks.raise_everywhere(partial(open_prepared, recipe))
    ranks.raise_everywhere(lambda: data.verify() if ranks.local_rank == 0 else None)
    agree_on_contents(recipe, None, data.fingerprint, {}, ranks)
    ranks.raise_everywhere(lambda: _make_folder(Path(recipe.run)) if ranks.first else None)
    measured = profile_for(recipe, data, ranks)
    if measured and ranks.first:
        save_profile(measured, Path(recipe.run))
        print(table(measured), flush=True)
    return Path(recipe.run) / "admin_profile.json"


def _make_folder(run: Path) -> None:
    if list_checkpoints(run / "checkpoints"):
        raise UserError(f"{run} has begun with the ω of its admin_profile.json, which would be overwritten; give "
                        "another folder with run=FOLDER")
    make_run_folder(run)


def save_profile(profile: AdminProfile, run: Path) -> None:
    """Writes `admin_profile.json` and `.png`."""
    from deepnmt.plots import plot_admin_profile  # importing matplotlib takes a second

    with reporting(f"Admin's profile in {run}", "free disk space, or set run to another folder"):
        profile.save(run / "admin_profile.json")
        plot_admin_profile(profile, run / "admin_profile.png")


def profile_for(recipe: Recipe, data: PreparedData, ranks: Ranks) -> AdminProfile | None:
    """The initial ω of a new run: read from `admin.profile`, else measured; None if neither stack is Admin.

    Collective; every rank returns the same numbers.
    """
    source, target = data.vocabs()
    return profile_on(recipe, (source.size, target.size), lambda: training_stream(recipe, data), ranks,
                      data.fingerprint)


def profile_on(
    recipe: Recipe, vocabs: tuple[int, int], stream: Callable[[], Stream], ranks: Ranks, data: str
) -> AdminProfile | None:
    """The same for any data, of which `stream` makes the training micro-batches. Collective.

    Args:
        vocabs: source and target vocabulary sizes.
        data: their fingerprint, stored with the result.
    """
    if not recipe.model.profiled:
        return None
    if recipe.admin.profile is not None:
        return AdminProfile.load(recipe.admin.profile, recipe.model)
    if ranks.first:
        stacks = " and ".join(f"{recipe.model.stack(side).layers} {side} layers" for side in recipe.model.sides
                              if recipe.model.stack(side).facts.profiled)
        print_status(f"profiling {stacks} on the first {recipe.admin.tokens:,} target tokens")
    batches = first_micro_batches(stream(), recipe, ranks)
    return measure(recipe.model, *vocabs, recipe.seed, batches, ranks, settings=recipe.admin, data=data,
                   show=ranks.first)


def first_micro_batches(stream: Stream, recipe: Recipe, ranks: Ranks) -> list[Batch]:
    """This rank's share of the batch to profile, on its device.

    The batch is the run's first micro-batches: as many as have at most `admin.tokens` target tokens together, at least
    one, and none of the second epoch. Ranks take them in turn, so the last ranks may get none.
    """
    plan = stream.plan(0)
    tokens = np.add.reduceat(stream.split(0).trg_lengths[plan.order], plan.starts[:-1], dtype=np.int64)
    count = max(1, int((tokens.cumsum() <= recipe.admin.tokens).sum()))
    return [stream.batch(0, index, ranks.device) for index in range(ranks.rank, count, ranks.world)]


def table(profile: AdminProfile) -> str:
    """A line for each stack, with ω at the first three sub-layers, some between, and the last."""
    lines = []
    for name, values in (("encoder", profile.encoder), ("decoder", profile.decoder)):
        count = len(values)
        depths = sorted({1, 2, 3, count // 4, count // 2, 3 * count // 4, count} & set(range(1, count + 1)))
        if depths:
            lines.append(f"{name}  " + "  ".join(f"ω_{depth} {values[depth - 1]:.3f}" for depth in depths))
    return "\n".join(lines)
