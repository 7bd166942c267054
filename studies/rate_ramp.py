"""The highest learning rate that a block bears: it grows by 1 % in each update until the loss rises.

Chen et al. 2026 (Keel) report such maxima. A run is a line of JSON; the same command adds the missing ones.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any

from deepnmt.config import Recipe
from deepnmt.data.batching import START, Stream
from deepnmt.data.prepared import open_prepared
from deepnmt.files import make_parent_folder, markdown_table
from deepnmt.parallel.build import start_engine
from deepnmt.parallel.ds_config import Layout
from deepnmt.processes.process_group import processes
from deepnmt.processes.ranks import Ranks
from deepnmt.progress import print_status
from deepnmt.training.profile import profile_for
from studies.runs import Record, append_runs, block_pair, read_runs
from studies.variants import Variant, same_settings, shared_settings

BLOCKS = ("post_ln", "pre_ln", "deepnorm", "t_fixup", "lns", "peri_ln", "keel", "siamese", "sub_ln", "mix_ln",
          "block_attn_res", "mhc")
STUDY = "rate_ramp"  # in the lines of the file
FIRST_RATE, RATIO, MOST_UPDATES = 1e-4, 1.01, 800  # the last rate would be 0.28
# Updates of a mean loss, and nats above the lowest mean that count as a rise. Batches are of sentences of one length,
# so that a mean of ten rises by their order alone: Pre-LN, LNS and Peri-LN all "rose" in update 375.
WINDOW, RISE = 50, 0.3


def study(
    recipe: Recipe, words: Sequence[str], depths: Sequence[int], seeds: Sequence[int], file: Path,
    seconds: float = math.inf,
) -> list[Record]:
    """Makes the missing runs of a file until the time is over; returns all of these blocks, depths and seeds.

    Args:
        words: blocks, or pairs as in `post_ln/pre_ln`.

    Raises:
        UserError: an unknown block, data that are not prepared, or a file of another kind.
    """
    deadline = time.monotonic() + seconds
    wanted = [Variant(*block_pair(word), layers, recipe.schedule.warmup, MOST_UPDATES, FIRST_RATE, seed)
              for layers, word, seed in product(depths, words, seeds)]
    recipes = [variant.recipe(recipe) for variant in wanted]  # so that a fault ends the study before its first run
    settings = shared_settings(recipe, open_prepared(recipe))
    make_parent_folder(file, "--runs")
    runs = read_runs(file, f"the study {STUDY}", {"study", "system", "settings"},
                     lambda run: Variant(**run["system"]), None, "repair it", "give another file with --runs")
    known = {Variant(**run["system"]): run for run in runs
             if run["study"] == STUDY and same_settings(run["settings"], settings)}

    def missing() -> Iterator[list[Record]]:
        for variant, made in zip(wanted, recipes, strict=True):
            if variant in known or time.monotonic() > deadline:
                continue
            started = time.process_time()
            with processes(recipe.parallel.threads or 1) as ranks:
                found = ramp(made, ranks)
            known[variant] = {"study": STUDY, "system": asdict(variant), "settings": settings, **found,
                              "cpu_seconds": round(time.process_time() - started, 1)}
            print_status(variant.text)
            yield [known[variant]]

    for _ in append_runs(file, missing()):
        pass
    return [known[variant] for variant in wanted if variant in known]


def ramp(recipe: Recipe, ranks: Ranks) -> dict[str, Any]:
    """Trains at FIRST_RATE · RATIO^t in update t, from 0, until the loss rises; returns the number of updates after
    which its mean was lowest, the rate of the last of them, the mean, and after how many it had risen, if it did."""
    data = open_prepared(recipe)
    source, target = (vocab.size for vocab in data.vocabs())
    engine = start_engine(recipe, Layout(), (source, target), ranks, profile_for(recipe, data, ranks))
    stream = Stream(data.split("train"), recipe.batch.tokens, recipe.seed)
    losses: list[float] = []
    means: list[float] = []
    position = START
    while not risen(means) and len(means) < MOST_UPDATES:
        update = stream.update(position, recipe.batch.entries(1), 0, 1, ranks.device)
        stats = engine.train_step(update.batches, update.tokens, FIRST_RATE * RATIO ** len(means))
        losses.append(stats.nll / update.tokens if stats.applied else math.nan)
        means.append(fmean(losses[-WINDOW:]))
        position = update.next
    engine.close()
    best = lowest(means)
    return {"update": best, "rate": FIRST_RATE * RATIO ** (best - 1), "loss": round(means[best - 1], 4),
            "risen": len(means) if risen(means) else None}


def lowest(means: Sequence[float]) -> int:
    """The number of updates after which the mean was lowest."""
    return 1 + min(range(len(means)), key=lambda index: (math.isnan(means[index]), means[index]))


def risen(means: Sequence[float]) -> bool:
    """Whether the last mean is not finite, or RISE above the lowest."""
    return bool(means) and not means[-1] <= means[lowest(means) - 1] + RISE


def table(runs: Sequence[Record]) -> str:
    """A row for each block and depth: the rates of its seeds at the lowest loss, and those losses."""
    rows = [("block", "layers", "seeds", "rate at the lowest loss", "lowest loss", "not risen")]
    groups: dict[tuple[str, int], list[Record]] = {}
    for run in runs:
        variant = Variant(**run["system"])
        groups.setdefault((variant.blocks, variant.layers), []).append(run)
    for (blocks, layers), own in groups.items():
        rates = sorted(run["rate"] for run in own)
        range_of = " to ".join(dict.fromkeys((f"{rates[0]:.2g}", f"{rates[-1]:.2g}")))
        rows.append((blocks, f"{layers}L-{layers}L", str(len(own)), range_of,
                     f"{fmean(run['loss'] for run in own):.2f}", str(sum(run["risen"] is None for run in own))))
    return markdown_table(rows)
