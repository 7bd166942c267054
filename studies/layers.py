"""What a block bears, and what it passes on from layer to layer: short runs of one recipe.

rate_ramp     the learning rate grows by 1 % in each update until the loss rises; what it was when the loss was lowest.
              Chen et al. 2026 (Keel) report such maxima.
layer_worth   after training: the variance of each layer's output, the norm of its gradient, and how much the validation
              loss rises when the layer is left out, as in Sun et al. 2025, The Curse of Depth.

A run is a line of JSON; the same command adds the missing ones.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any

from torch import nn

from deepnmt.batch import Batch
from deepnmt.config import Recipe
from deepnmt.data.batching import START, Stream, collate, plan_eval
from deepnmt.data.prepared import PreparedData, open_prepared
from deepnmt.extras.doctor.measures import gradients, ranges
from deepnmt.extras.doctor.probes import block_of, layers_of, plain_loss
from deepnmt.files import make_parent_folder, markdown_table
from deepnmt.model.blocks import SIDES
from deepnmt.model.hooks import hooks
from deepnmt.model.transformer import Transformer
from deepnmt.parallel.build import start_engine
from deepnmt.parallel.ds_config import Layout
from deepnmt.parallel.engine import Engine
from deepnmt.processes.process_group import processes
from deepnmt.processes.ranks import Ranks
from deepnmt.progress import print_status
from deepnmt.training.profile import profile_for
from deepnmt.training.state import TrainState
from deepnmt.training.updates import updates
from studies.runs import Record, append_runs, block_pair, read_runs
from studies.variants import Variant, same_settings, shared_settings

BLOCKS = ("post_ln", "pre_ln", "deepnorm", "t_fixup", "lns", "peri_ln", "keel", "siamese", "sub_ln", "mix_ln",
          "block_attn_res", "mhc")
FIRST_RATE, RATIO, MOST_UPDATES = 1e-4, 1.01, 800  # the last rate would be 0.28
# Updates of a mean loss, and nats above the lowest mean that count as a rise. Batches are of sentences of one length,
# so that a mean of ten rises by their order alone: Pre-LN, LNS and Peri-LN all "rose" in update 375.
WINDOW, RISE = 50, 0.3
VALIDATION_BATCHES = 8
SIDE_FIGURES = ("variance", "gradient", "worth")

Measure = Callable[[Recipe, Ranks], dict[str, Any]]


def study(
    recipe: Recipe, measure: Measure, words: Sequence[str], depths: Sequence[int], seeds: Sequence[int], file: Path,
    seconds: float = math.inf,
) -> list[Record]:
    """Makes the missing runs of a file until the time is over; returns all of these blocks, depths and seeds.

    Args:
        measure: `rate_ramp` or `layer_worth`.
        words: blocks, or pairs as in `post_ln/pre_ln`.

    Raises:
        UserError: an unknown block, data that are not prepared, or a file of another kind.
    """
    deadline = time.monotonic() + seconds
    ramp = measure is rate_ramp
    length, rate = (MOST_UPDATES, FIRST_RATE) if ramp else (recipe.train.updates, recipe.optimizer.lr)
    wanted = [Variant(*block_pair(word), layers, recipe.schedule.warmup, length, rate, seed)
              for layers, word, seed in product(depths, words, seeds)]
    recipes = [variant.recipe(recipe) for variant in wanted]  # so that a fault ends the study before its first run
    settings = shared_settings(recipe, open_prepared(recipe))
    make_parent_folder(file, "--runs")
    runs = read_runs(file, f"the study {measure.__name__}", {"study", "system", "settings"},
                     lambda run: Variant(**run["system"]), None, "repair it", "give another file with --runs")
    known = {Variant(**run["system"]): run for run in runs
             if run["study"] == measure.__name__ and same_settings(run["settings"], settings)}

    def missing() -> Iterator[list[Record]]:
        for variant, made in zip(wanted, recipes, strict=True):
            if variant in known or time.monotonic() > deadline:
                continue
            started = time.process_time()
            with processes(recipe.parallel.threads or 1) as ranks:
                found = measure(made, ranks)
            known[variant] = {"study": measure.__name__, "system": asdict(variant), "settings": settings, **found,
                              "cpu_seconds": round(time.process_time() - started, 1)}
            print_status(variant.text)
            yield [known[variant]]

    for _ in append_runs(file, missing()):
        pass
    return [known[variant] for variant in wanted if variant in known]


def _begin(recipe: Recipe, ranks: Ranks) -> tuple[PreparedData, Engine, Stream]:
    data = open_prepared(recipe)
    source, target = (vocab.size for vocab in data.vocabs())
    engine = start_engine(recipe, Layout(), (source, target), ranks, profile_for(recipe, data, ranks))
    return data, engine, Stream(data.split("train"), recipe.batch.tokens, recipe.seed)


# -- the highest rate --------------------------------------------------------------------------------------------------


def rate_ramp(recipe: Recipe, ranks: Ranks) -> dict[str, Any]:
    """Trains at FIRST_RATE · RATIO^t in update t, from 0, until the loss rises; returns the number of updates after
    which its mean was lowest, the rate of the last of them, the mean, and after how many it had risen, if it did."""
    _, engine, stream = _begin(recipe, ranks)
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


def ramp_table(runs: Sequence[Record]) -> str:
    """A row for each block and depth: the rates of its seeds at the lowest loss, and those losses."""
    rows = [("block", "layers", "seeds", "rate at the lowest loss", "lowest loss", "not risen")]
    groups: dict[tuple[str, int], list[Record]] = {}
    for run in runs:
        groups.setdefault(_place(run), []).append(run)
    for (blocks, layers), own in groups.items():
        rates = sorted(run["rate"] for run in own)
        range_of = " to ".join(dict.fromkeys((f"{rates[0]:.2g}", f"{rates[-1]:.2g}")))
        rows.append((blocks, f"{layers}L-{layers}L", str(len(own)), range_of,
                     f"{fmean(run['loss'] for run in own):.2f}", str(sum(run["risen"] is None for run in own))))
    return markdown_table(rows)


def _place(run: Record) -> tuple[str, int]:
    variant = Variant(**run["system"])
    return variant.blocks, variant.layers


# -- layer by layer ----------------------------------------------------------------------------------------------------


def layer_worth(recipe: Recipe, ranks: Ranks) -> dict[str, Any]:
    """Trains the recipe to its end; returns for each side a list over its layers of `SIDE_FIGURES`, and the validation
    loss in nats a token. `worth` is what the loss rises by without the layer."""
    data, engine, stream = _begin(recipe, ranks)
    state = TrainState()
    for done in updates(engine, stream, recipe, state, ranks):
        if done.give_up or state.update == recipe.train.updates:
            break
    model = engine.gather_model()
    engine.close()
    split = data.split("valid").truncated(recipe.model.max_length)
    plan = plan_eval(split.src_lengths, split.trg_lengths, recipe.batch.tokens)
    numbers = range(0, len(plan), max(1, len(plan) // VALIDATION_BATCHES))
    batches = [collate(split, plan[number], 0, ranks.device) for number in numbers]
    return {**profile(model, batches), "dropped": state.skipped}


def profile(model: Transformer, batches: Sequence[Batch]) -> dict[str, Any]:
    """The figures of `layer_worth` of a model; variance and gradient are those of the middle batch."""
    middle, whole = batches[len(batches) // 2], loss_of(model, batches)
    sizes, slopes = ranges(model, middle), gradients(model, middle).outputs
    found: dict[str, Any] = {"valid": whole}
    for side in SIDES:
        layers = layers_of(model, side)
        names = [f"{side}.layers.{index}" for index in range(len(layers))]
        figures = ([sizes[name]["variance"] for name in names], [slopes[f"{name}.ffn"] for name in names],
                   [loss_without(layer, model, batches) - whole for layer in layers])
        found[side] = dict(zip(SIDE_FIGURES, figures, strict=True))
    return found


def loss_of(model: Transformer, batches: Sequence[Batch]) -> float:
    """The plain loss in nats a target token."""
    return sum(plain_loss(model, batch) * batch.tokens for batch in batches) / sum(batch.tokens for batch in batches)


def loss_without(layer: nn.Module, model: Transformer, batches: Sequence[Batch]) -> float:
    """The loss when the stream passes a layer by, as with LayerDrop."""
    with hooks() as handles:
        handles.append(layer.register_forward_hook(
            lambda module, inputs, output: block_of(module).skip(inputs[0], output)))
        return loss_of(model, batches)


def worth_table(runs: Sequence[Record]) -> str:
    """A row for each run and side: variance and gradient of the last layer over those of the first; the median worth of
    a layer, the largest, and the share of layers worth less than 0.01 nats."""
    rows = [("block", "layers", "seed", "side", "variance, last / first", "gradient, first / last", "median worth",
             "largest", "below 0.01", "validation")]
    for run in runs:
        blocks, layers = _place(run)
        for side in SIDES:
            variance, gradient, worth = (run[side][name] for name in SIDE_FIGURES)
            idle = sum(value < 0.01 for value in worth) / len(worth)
            rows.append((blocks, f"{layers}L-{layers}L", str(run["system"]["seed"]), side,
                         _ratio(variance[-1], variance[0]), _ratio(gradient[0], gradient[-1]),
                         f"{sorted(worth)[len(worth) // 2]:+.3f}",
                         f"{max(worth):+.2f}", f"{100 * idle:.0f} %", f"{run['valid']:.2f}"))
    return markdown_table(rows)


def _ratio(above: float, below: float) -> str:
    return f"{above / below:.2g}" if below else "–"
