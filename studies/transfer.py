"""Whether the best learning rate stays where it was when a model becomes deeper or wider, with `model.tuned_at` and
without: the best of seven rates at each size, by the validation loss, with several seeds.

A run is a line of JSON; the same command adds the missing ones.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

from deepnmt.config import Recipe
from deepnmt.data.prepared import open_prepared
from deepnmt.extras.doctor.coordinates import Size, at_size
from studies.runs import Record, fingerprint_of, make_missing, short_run

RATES = 7  # each twice the one before; the recipe's is in the middle
SMALL = Size(64, 4, 4)
# by what they show; the first is the one that was tuned
GROUPS: dict[str, list[Size]] = {
    "depth": [SMALL, Size(64, 8, 8), Size(64, 16, 16), Size(64, 32, 32)],
    "width": [SMALL, Size(128, 4, 4), Size(256, 4, 4)],
    "one stack": [SMALL, Size(64, 32, 2), Size(64, 2, 32)],
}


def rates_of(recipe: Recipe) -> list[float]:
    """The rates that are tried."""
    return [recipe.optimizer.lr * 2.0**step for step in range(-(RATES // 2), RATES // 2 + 1)]


def planned(recipe: Recipe, seeds: int) -> list[Record]:
    """All runs, the small ones first; the smallest model is the same with and without the rule."""
    sizes = dict.fromkeys(size for group in GROUPS.values() for size in group)
    return [{"size": list(size), "carried": carried, "rate": rate, "seed": seed}
            for seed in range(1, seeds + 1) for size in sizes for carried in (True, False) for rate in rates_of(recipe)
            if carried or size != SMALL]


def run_all(recipe: Recipe, records: Path, seeds: int, updates: int, seconds: float) -> str:
    """Trains the missing runs until the time is over; returns what they say.

    Args:
        records: file of JSON lines, to which every run is added.

    Raises:
        UserError: the recipe's data are not prepared, or its block cannot carry a rate over.
    """
    at_size(recipe, SMALL, SMALL)
    runs = [run | {"updates": updates} for run in planned(recipe, seeds)]
    fingerprint = fingerprint_of(recipe, open_prepared(recipe).fingerprint, settings_of(runs[0]))
    done = make_missing(records, runs, partial(train, recipe), fingerprint, seconds)
    return report([record for record in done if record["updates"] == updates])


def settings_of(run: Record) -> dict[str, Any]:
    """The settings of a run, but for the size."""
    return {"seed": run["seed"], "optimizer.lr": run["rate"], "train.updates": run["updates"],
            "train.validate_every": run["updates"], "train.save_every": run["updates"], "train.valid_bleu": False,
            "train.log_every": max(1, run["updates"] // 4)}


def train(recipe: Recipe, run: Record) -> Record:
    """Trains one run; its validation loss and what the source is worth, null if it diverged, and its CPU seconds."""
    started = time.process_time()
    sized = at_size(recipe, Size(*run["size"]), SMALL if run["carried"] else None)
    log = short_run(sized, settings_of(run))
    loss = gain = None
    if log and log[-1]["update"] == run["updates"]:
        loss, gain = (_finite(log[-1].get(name)) for name in ("loss", "source_gain"))
    seconds = round(time.process_time() - started, 1)
    return {"loss": loss, "gain": None if loss is None else gain, "cpu_seconds": seconds}


def _finite(value: float | str | None) -> float | None:
    """A figure of a log, which has text for what is not finite; None for that."""
    return float(value) if value is not None and math.isfinite(float(value)) else None


def best_rate(records: Sequence[Record], size: Size, carried: bool) -> tuple[float, float, bool] | None:
    """The rate with the lowest mean loss over the seeds, that loss, and whether a rate at the end of the range is best;
    None without a rate that never diverged."""
    carried = carried or size == SMALL
    tried: dict[float, list[float | None]] = {}
    for record in records:
        if record["size"] == list(size) and record["carried"] == carried:
            tried.setdefault(record["rate"], []).append(record["loss"])
    means = {rate: fmean(loss for loss in losses if loss is not None)
             for rate, losses in tried.items() if None not in losses}
    if not means:
        return None
    best = min(means, key=lambda rate: means[rate])
    return best, means[best], best in (min(tried), max(tried))


def report(records: Sequence[Record]) -> str:
    """A table in Markdown: the best rate at every size, by how many steps of 2 it moved, and its loss."""
    hours = sum(record["cpu_seconds"] for record in records) / 3600
    lines = [f"{len(records)} runs of {len({record['seed'] for record in records})} seeds; {hours:.2f} CPU hours", "",
             "| over | width | layers | best rate, carried over | steps | loss | best rate without | steps | loss |",
             "|---|---|---|---|---|---|---|---|---|"]
    start = best_rate(records, SMALL, True)
    for axis, sizes in GROUPS.items():
        for size in sizes:
            cells = []
            for carried in (True, False):
                found = best_rate(records, size, carried)
                if found is None or start is None:
                    cells += ["–", "–", "–"]
                    continue
                rate, loss, at_end = found
                steps = round(math.log2(rate / start[0]))
                cells += [f"{rate:.3g}{' (at the end)' if at_end else ''}", f"{steps:+d}", f"{loss:.3f}"]
            lines.append(f"| {axis} | {size.width} | {size.encoder_layers}-{size.decoder_layers} | "
                         f"{' | '.join(cells)} |")
    return "\n".join(lines)
