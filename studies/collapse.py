"""What makes the encoder collapse: many short trainings with settings drawn at random, and a model fitted on them.

Every run draws all settings at once and independently, so the fit tells apart what a change of one setting at a time
cannot: whether the encoder's rate decides or its ratio to the decoder's. A run is a line of JSON; the same command adds
the missing ones.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any
from unittest.mock import patch

import numpy as np

from deepnmt.config import Recipe
from deepnmt.data.prepared import open_prepared
from deepnmt.model.blocks import Block
from deepnmt.plots import COLOURS, GREY, LEGEND, panels, save
from studies.runs import Record, fingerprint_of, make_missing, short_run

UPDATES = 300
LEVELS: dict[str, list[Any]] = {
    "block": ["post_ln", "pre_ln", "admin", "b2t", "deepnorm", "t_fixup"],
    "layers": [3, 6, 12],
    "width": [48, 96],
    "decoder_rate": [5e-4, 1e-3, 2e-3, 4e-3],  # of its layers, at the peak
    "encoder_rate": [1e-4, 3e-4, 1e-3, 3e-3],
    "embedding_rate": [1e-3, 2e-3, 4e-3, 8e-3],
    "warmup": [30, 100, 200],  # updates
    "accumulation": [1, 1, 1, 4],  # micro-batches an update
    "beta2": [0.98, 0.999],
    "clip": [0.0, 1.0],
    "smoothing": [0.0, 0.1],
}
# What the draws from this number on vary besides; those before it have the first level.
FURTHER_FROM = 180
FURTHER: dict[str, list[Any]] = {
    "epsilon": [1e-9, 1e-5],
    "without_biases": [0, 1],
    "depth_scaled": [0, 1],  # every initial matrix times layers^-1/2
    "untied": [0, 1],  # a table each for source, target and output
}
# The draws from this number on are pairs with equal settings, but for the initial size of the embeddings.
PAIRS_FROM = 252
EMBEDDING_SCALES = [1.0, 1 / 3]
LOGARITHMIC = ("layers", "width", "decoder_rate", "encoder_rate", "embedding_rate", "warmup", "accumulation", "epsilon")
COLLAPSED = 0.9  # the common vector's share from which the encoder counts as collapsed


def draw(number: int) -> dict[str, Any]:
    """The settings of a run, the same for a number at all times. Blocks take turns, so that each has equally many."""
    if number >= PAIRS_FROM:
        pair = number // 2
        blocks = [block for block in LEVELS["block"] if block != "t_fixup"]  # which has a scale of its own
        return draw(pair) | {"block": blocks[pair % len(blocks)], "seed": 1 + pair % 3,
                             "embedding_scale": EMBEDDING_SCALES[number % 2]}
    drawn = random.Random(number)
    settings = {name: drawn.choice(levels) for name, levels in LEVELS.items()}
    for name, levels in FURTHER.items():
        settings[name] = drawn.choice(levels) if number >= FURTHER_FROM else levels[0]
    return settings | {"block": LEVELS["block"][number % len(LEVELS["block"])]}


def recipe_settings(drawn: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a recipe for a draw."""
    rate = drawn["embedding_rate"]
    factors = {side: drawn[f"{side}_rate"] / rate for side in ("encoder", "decoder")}
    init = "depth_scaled" if drawn["depth_scaled"] else "auto"
    stacks = {f"model.{side}.{name}": drawn[name] for side in factors for name in ("block", "layers")}
    return stacks | {
        "seed": drawn.get("seed", 1), "model.width": drawn["width"], "model.ffn": 2 * drawn["width"],
        "model.encoder.init": init, "model.decoder.init": init, "model.tied": "none" if drawn["untied"] else "all",
        "optimizer.lr": rate, "optimizer.lr_factors": factors, "optimizer.betas": [0.9, drawn["beta2"]],
        "optimizer.eps": drawn["epsilon"],
        "schedule.name": "constant", "schedule.warmup": drawn["warmup"], "batch.accumulation": drawn["accumulation"],
        "train.updates": UPDATES, "train.clip": drawn["clip"], "train.label_smoothing": drawn["smoothing"],
        "train.validate_every": UPDATES // 3, "train.save_every": UPDATES, "train.log_every": 50,
        "train.valid_bleu": False, "train.freeze": ["*bias"] if drawn["without_biases"] else [],
    }


def run_draws(recipe: Recipe, records: Path, first: int, count: int, seconds: float) -> str:
    """Trains the missing ones of `count` draws until the time is over; returns what all runs of the file say that are
    of this recipe and data.

    Args:
        records: file of JSON lines, to which every run is added.

    Raises:
        UserError: the recipe's data are not prepared.
    """
    fingerprint = fingerprint_of(recipe, open_prepared(recipe).fingerprint, recipe_settings(draw(0)))
    runs = [{"number": number} for number in range(first, first + count)]
    return report(make_missing(records, runs, lambda run: train_draw(recipe, run["number"]), fingerprint, seconds))


def train_draw(recipe: Recipe, number: int) -> Record:
    """Trains one draw; returns its record. Of a run that diverged it has the validations before."""
    drawn, started = draw(number), time.process_time()
    with _scaled_embeddings(drawn.get("embedding_scale", 1.0)):
        log = short_run(recipe, recipe_settings(drawn))
    names = ("update", "source_gain", "encoder_common", "decoder_common", "cross_attention_entropy", "perplexity")
    return {"number": number, "drawn": drawn, "cpu_seconds": round(time.process_time() - started, 1),
            "validations": [{name: record[name] for name in names if name in record} for record in log]}


def _scaled_embeddings(scale: float) -> Any:
    """While this context lasts, embeddings begin at `scale` times their size."""
    return patch.object(Block, "embedding_gain", staticmethod(lambda position: scale))


def _finished(records: Sequence[Record]) -> list[Record]:
    """Those that did not diverge before."""
    finished = []
    for record in records:
        last = record["validations"][-1] if record["validations"] else {}
        if last.get("update") == UPDATES and math.isfinite(float(last.get("encoder_common", "nan"))):
            finished.append(record)
    return finished


def report(records: Sequence[Record]) -> str:
    """Tables in Markdown: what each setting's levels came to, and the fit on all settings together."""
    finished = _finished(records)
    ended = [record for record in finished if record["number"] < PAIRS_FROM]
    pairs = report_pairs(finished)
    if not ended:
        return pairs or "no run has ended yet"
    last = {record["number"]: record["validations"][-1] for record in ended}
    lines = [f"{len(finished)} runs ended of {len(records)}; "
             f"{sum(record['cpu_seconds'] for record in records) / 3600:.2f} CPU hours", "",
             "| setting | level | runs | collapsed | common | gain |", "|---|---|---|---|---|---|"]
    for name, levels in (LEVELS | FURTHER).items():
        for level in dict.fromkeys(levels):
            group = [last[record["number"]] for record in ended if _level(record, name) == level]
            if group:
                collapsed = sum(end["encoder_common"] > COLLAPSED for end in group)
                lines.append(f"| {name} | {level} | {len(group)} | {100 * collapsed / len(group):.0f} % | "
                             f"{fmean(end['encoder_common'] for end in group):.2f} | "
                             f"{fmean(end['source_gain'] for end in group):+.2f} |")
    lines += ["", "Gain in nats that a setting adds, all others equal (least squares), with its standard error:", "",
              "| setting | from the lowest to the highest level | error |", "|---|---|---|"]
    lines += [f"| {name} | {effect:+.2f} | {error:.2f} |" for name, effect, error in effects(ended)]
    lines += ["", "The share of the variance that block, depth, width and batch explain, and with them the rates:",
              "", "| rates | R² of common | R² of the gain |", "|---|---|---|"]
    gains = explained(ended, "source_gain")
    lines += [f"| {name} | {share:.2f} | {gains[name]:.2f} |"
              for name, share in explained(ended, "encoder_common").items()]
    return "\n".join([*lines, "", pairs] if pairs else lines)


def report_pairs(records: Sequence[Record]) -> str:
    """A sentence on what the smaller embeddings changed in the pairs of runs; empty if there is one pair or none."""
    gains = {record["number"]: record["validations"][-1]["source_gain"] for record in records
             if record["number"] >= PAIRS_FROM}
    changes = [gains[number + 1] - gains[number] for number in sorted(gains)
               if number % 2 == 0 and number + 1 in gains]
    if len(changes) < 2:
        return ""
    error = stdev(changes) / math.sqrt(len(changes))
    return (f"Embeddings that begin at a third of their size: {fmean(changes):+.2f} ± {error:.2f} nats of gain "
            f"({len(changes)} pairs of runs)")


def _level(record: Record, name: str) -> Any:
    """The level that a run has of a setting; the oldest runs do not record the first of those that vary later."""
    return record["drawn"].get(name, FURTHER[name][0] if name in FURTHER else None)


def explained(records: Sequence[Record], figure: str) -> dict[str, float]:
    """The share of a figure's variance that least squares explain by block, depth, width and batch, with each of
    several combinations of the rates' logarithms."""
    def logarithm(name: str) -> np.ndarray:
        return np.array([math.log(record["drawn"][name]) for record in records])

    encoder, decoder, embeddings = (logarithm(f"{part}_rate") for part in ("encoder", "decoder", "embedding"))
    common = [np.ones(len(records)), *(logarithm(name) for name in ("layers", "width", "accumulation"))]
    for block in LEVELS["block"][1:]:
        common.append(np.array([float(record["drawn"]["block"] == block) for record in records]))
    rates = {"none": [], "the encoder's": [encoder], "encoder's / decoder's": [encoder - decoder],
             "encoder's / embeddings'": [encoder - embeddings], "decoder's and embeddings'": [decoder, embeddings],
             "all three": [encoder, decoder, embeddings]}
    values = np.array([record["validations"][-1][figure] for record in records])
    variance = float(((values - values.mean()) ** 2).sum())
    shares = {}
    for name, columns in rates.items():
        design = np.stack([*common, *columns], axis=1)
        weights, _, _, _ = np.linalg.lstsq(design, values, rcond=None)
        shares[name] = 1 - float(((values - design @ weights) ** 2).sum()) / max(variance, 1e-12)
    return shares


def effects(records: Sequence[Record]) -> list[tuple[str, float, float]]:
    """Of each setting: the gain, in nats, that its range adds by a linear fit on all settings, and the error of that.

    Ordered settings enter by their place from 0 to 1 between the extremes, rates and sizes by their logarithm; a block
    by an indicator against `admin`.
    """
    names, columns = ["intercept"], [np.ones(len(records))]
    for name, levels in (LEVELS | FURTHER).items():
        values = [_level(record, name) for record in records]
        if name == "block":
            for block in levels:
                if block != "admin":
                    names.append(f"{block} in place of admin")
                    columns.append(np.array([float(value == block) for value in values]))
            continue
        if len(set(values)) == 1:
            continue  # nothing to compare
        scale = math.log if name in LOGARITHMIC else float
        low, high = scale(min(levels)), scale(max(levels))
        names.append(name)
        columns.append(np.array([(scale(value) - low) / (high - low) for value in values]))
    design = np.stack(columns, axis=1)
    gains = np.array([record["validations"][-1]["source_gain"] for record in records])
    weights, _, _, _ = np.linalg.lstsq(design, gains, rcond=None)
    freedom = max(1, len(records) - len(names))
    noise = float(((gains - design @ weights) ** 2).sum()) / freedom
    errors = np.sqrt(noise * np.diag(np.linalg.pinv(design.T @ design)))
    return [(name, float(weight), float(error)) for name, weight, error in zip(names, weights, errors, strict=True)]


def plot(records: Sequence[Record], path: Path) -> None:
    """Draws what the source is worth against the encoder's rate, with a panel for each block."""
    blocks, rates = LEVELS["block"], LEVELS["encoder_rate"]
    figure, each = panels(blocks, "the encoder's peak rate", "gain, nats a target token",
                          "What the source is worth after 300 updates, by the encoder's rate", columns=3)
    for axes, block in zip(each, blocks, strict=True):
        runs = [record for record in _finished(records) if record["drawn"]["block"] == block]
        for collapsed, name in ((False, "a run"), (True, "a run whose encoder has collapsed")):
            group = [record for record in runs
                     if (record["validations"][-1]["encoder_common"] > COLLAPSED) == collapsed]
            axes.plot([record["drawn"]["encoder_rate"] * _jitter(record["number"]) for record in group],
                      [record["validations"][-1]["source_gain"] for record in group], linestyle="",
                      marker="x" if collapsed else "o", markersize=4, color=COLOURS[collapsed],
                      label=name if axes is each[0] else None)
        gains = {rate: [record["validations"][-1]["source_gain"] for record in runs
                        if record["drawn"]["encoder_rate"] == rate] for rate in rates}
        means = {rate: fmean(group) for rate, group in gains.items() if group}
        axes.plot(list(means), list(means.values()), color=GREY, linewidth=1,
                  label="mean of a rate" if axes is each[0] else None)
        axes.set_xscale("log")
        axes.set_xticks(rates, [f"{rate:g}" for rate in rates])
        axes.set_xticks([], minor=True)
        axes.set_xlim(rates[0] / 1.5, rates[-1] * 1.5)
    figure.legend(loc="outside lower center", ncols=3, **LEGEND)
    save(figure, path)


def _jitter(number: int) -> float:
    """Tells runs of one rate apart in the picture: a factor between 0.8 and 1.25."""
    return 1.25 ** random.Random(number).uniform(-1, 1)
