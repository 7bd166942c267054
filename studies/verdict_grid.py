"""The runs that the doctor's verdict is fitted on: many small models, trained for a few hundred updates each.

Every run is one line of a JSON-lines file: the point of the grid, the features measured before training
(`doctor/verdict.py`), and the losses. The points are trained in a fixed shuffled order, so a stopped grid is an even
sample of the whole, and the same command trains the missing ones. All runs use the toy task and Adam with linear decay,
without dropout or label smoothing.
"""

from __future__ import annotations

import hashlib
import json
import math
import random
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

from deepnmt.config import Init, Precision, Recipe, check_recipe
from deepnmt.doctor.variants import fresh_model
from deepnmt.doctor.verdict import (
    FEATURES,
    SHIPPED,
    TRIAL,
    VerdictRule,
    other_sources,
    precision_features,
    static_features,
    trial_features,
    trial_rates,
    update_features,
)
from deepnmt.errors import UserError
from deepnmt.files import make_parent_folder, write_text
from deepnmt.model.blocks import BLOCKS
from deepnmt.model.transformer import Transformer
from deepnmt.optim import learning_rate
from studies.plots import plot_grid
from studies.runs import Record, Stacks, append_runs, block_pair, json_lines, read_runs
from studies.side_by_side import train_side_by_side
from studies.toy_task import ToyTask
from studies.verdict_fit import confusion, fit_rule, held_out, unpaired

Mark = Literal["source", "context"]

DEPTHS = (6, 12, 18, 36)
RATES = (1e-3, 3e-3, 1e-2, 3e-2)
PROBE = 8  # sentences to measure features on, for all batch sizes
OPTIMIZER, SCHEDULE = "adam", "linear"  # of all runs
_AVERAGED = 20  # last updates, whose mean loss is the final loss
_HELD_OUT = 0.3  # share of the runs


@dataclass(frozen=True)
class Settings:
    """What all runs of a grid share: model width, heads, FFN width, updates, updates of a warm-up, and the task. Runs
    with other settings do not count as finished."""

    width: int = 32
    heads: int = 4
    ffn: int = 64
    updates: int = 200
    warmup: int = 50
    task: ToyTask = field(default_factory=ToyTask)

    @classmethod
    def of(cls, record: Record) -> Settings:
        """The settings of a run's line."""
        return cls(**{**record["settings"], "task": ToyTask(**record["settings"]["task"])})

    @property
    def bars(self) -> dict[Mark, float]:
        """The final loss in nats a target token below which a run counts as learned.

        source: lower than any model can reach without the source, so the model translates. context: lower than any
        model can reach that knows only the symbols' frequencies, so it is not stuck, but may ignore the encoder.
        """
        return {"source": self.task.target_only, "context": self.task.frequencies_only}


@dataclass(frozen=True)
class Point(Stacks):
    """One run: blocks of encoder and decoder, layers of each, peak rate, with or without warm-up, sentences of a batch,
    seed, precision, `init` of both stacks."""

    rate: float
    warmup: bool
    sentences: int = 8
    seed: int = 1
    precision: Precision = "fp32"
    init: Init = "auto"

    @classmethod
    def of(cls, record: Record) -> Point:
        """The point of a run's line."""
        return cls(**record["point"])

    def as_dict(self) -> dict[str, Any]:
        """The point as written into the file, where fp32 and auto are left out."""
        defaults = {"precision": "fp32", "init": "auto"}
        return {name: value for name, value in asdict(self).items() if defaults.get(name) != value}

    @property
    def initialisation(self) -> str:
        """The meaning of `init` in encoder and decoder, as in `xavier/depth_scaled`."""
        return "/".join(self.initialisations(self.init))

    def recipe(self, settings: Settings) -> Recipe:
        """The recipe of the run; only its model, optimizer, schedule and training are used."""
        corpus = {"src": "-", "trg": "-"}
        stack = {"layers": self.layers, "init": self.init}
        return check_recipe({
            "run": "-", "seed": self.seed,
            "data": {"folder": "-", "src_lang": "src", "trg_lang": "trg", "train": corpus, "valid": corpus,
                     "filters": {"max_tokens": 60}},
            "batch": {"tokens": 64 * self.sentences},
            "model": {"width": settings.width, "heads": settings.heads, "ffn": settings.ffn, "dropout": 0.0,
                      "max_length": 64, "encoder": {**stack, "block": self.encoder},
                      "decoder": {**stack, "block": self.decoder}},
            "optimizer": {"name": OPTIMIZER, "lr": self.rate},
            "schedule": {"name": SCHEDULE, "warmup": settings.warmup if self.warmup else 0},
            "train": {"updates": settings.updates, "label_smoothing": 0.0, "clip": 0.0},
        }, "a point of the grid")

    def model(self, settings: Settings) -> Transformer:
        """The fresh model."""
        size = settings.task.vocabulary
        return fresh_model(self.recipe(settings).model, size, size, self.seed, [settings.task.batch(0, self.sentences)])


# -- running -----------------------------------------------------------------------------------------------------------


def grid(
    blocks: Iterable[str] | None, depths: Iterable[int] | None, rates: Iterable[float] | None, sentences: Iterable[int],
    seeds: Iterable[int], precisions: Iterable[Precision] = ("fp32",), inits: Iterable[Init] = ("auto",),
) -> list[Point]:
    """All points, shuffled. `blocks` have the form of `Point.blocks`. None means all blocks, `DEPTHS` or `RATES`.

    Raises:
        UserError: a block is unknown.
    """
    points = [Point(encoder, decoder, layers, rate, warmup, size, seed, precision, init)
              for encoder, decoder in map(block_pair, blocks or BLOCKS) for layers in depths or DEPTHS
              for rate in rates or RATES for warmup in (True, False) for size in sentences for seed in seeds
              for precision in precisions for init in inits]
    random.Random(1).shuffle(points)
    return points


def run_grid(points: list[Point], settings: Settings, output: Path, max_seconds: float = math.inf) -> int:
    """Trains the points that are missing in `output`, appending a line for each; returns how many are left.

    Points that differ only in rate and warm-up are trained side by side. None starts after `max_seconds`.

    Raises:
        UserError: a point is impossible, or the file cannot be written; in both cases before any training.
    """
    done = {_key(record) for record in read_grid(output)}
    missing = [p for p in points if _key({"point": p.as_dict(), "settings": asdict(settings)}) not in done]
    groups: dict[Point, list[Point]] = {}
    for point in missing:
        point.recipe(settings)
        groups.setdefault(replace(point, rate=0.0, warmup=False), []).append(point)
    make_parent_folder(output, "RUNS")
    deadline, left = time.monotonic() + max_seconds, len(missing)

    def results() -> Iterator[list[Record]]:
        for group in groups.values():
            if time.monotonic() > deadline:
                return
            yield run_points(group, settings)

    for records in append_runs(output, results()):
        left -= len(records)
        point = Point.of(records[0])
        print(f"{point.blocks} {point.layers}L: {sum(r['learned'] for r in records)} of {len(records)} learned "
              f"({sum(r['seconds'] for r in records):.0f} s), {left} runs left", flush=True)
    return left


def run_points(points: list[Point], settings: Settings) -> list[Record]:
    """Measures and trains runs that differ only in rate and warm-up; returns their records.

    In a record `losses` are means of ten updates each, `final` is the mean of the last 20, and 1e9 means not
    finite.
    """
    started = time.monotonic()
    task, size = settings.task, points[0].sentences
    recipes = [point.recipe(settings) for point in points]
    measured = measure_points(points, settings)
    updates = range(1, settings.updates + 1)
    curves = zip(*train_side_by_side(
        [points[0].model(settings)] * len(points), (task.batch(update, size) for update in updates),
        ([learning_rate(r.optimizer.lr, r.schedule, update, settings.updates) for r in recipes] for update in updates),
        recipes[0].optimizer, points[0].precision, recipes[0].loss_scale), strict=True)

    def mean(losses: Sequence[float]) -> float:
        value = sum(losses) / len(losses)
        return value if math.isfinite(value) else 1e9

    records = [{
        "point": point.as_dict(), "settings": asdict(settings), "features": values,
        "losses": [round(mean(losses[start : start + 10]), 4) for start in range(0, len(losses), 10)],
        "final": mean(losses[-_AVERAGED:]),
    } for point, values, losses in zip(points, measured, curves, strict=True)]
    seconds = round((time.monotonic() - started) / len(points), 2)
    return [marked({**record, "seconds": seconds}, settings.bars["source"]) for record in records]


def marked(record: Record, bar: float) -> Record:
    """The record, judged by this bar."""
    return {**record, "bar": bar, "learned": record["final"] < bar}


def measure_points(points: list[Point], settings: Settings) -> list[dict[str, float]]:
    """The features of runs that differ only in rate and warm-up, measured in fp32 on a batch of `PROBE` sentences."""
    model, batch = points[0].model(settings), settings.task.batch(0, PROBE)
    recipes = {point.rate: point.recipe(settings) for point in points}
    static = static_features(model, batch)
    update = {rate: update_features(model, batch, recipe) for rate, recipe in recipes.items()}
    rates = [[*trial_rates(point.rate, settings.warmup if point.warmup else 0), 0.0, 0.0] for point in points]
    trials = zip(*train_side_by_side([model] * len(points), [batch] * (TRIAL + 1) + [other_sources(batch)],
                                     zip(*rates, strict=True), recipes[points[0].rate].optimizer), strict=True)
    return [{**static, **update[point.rate], **trial_features(list(losses), batch), **point_features(point, settings)}
            for point, losses in zip(points, trials, strict=True)]


def point_features(point: Point, settings: Settings) -> dict[str, float]:
    """The features that depend on the point only, not on a model."""
    return {"rate": math.log10(point.rate), "warmup": float(point.warmup),
            "tokens": math.log10(settings.task.batch(0, point.sentences).tokens), **precision_features(point.precision)}


def measure_again(runs: Path) -> int:
    """Measures the features that old runs lack and writes them into the file; returns the number of measured runs.

    The losses stay, because features are measured before training and do not change it. Features that depend on the
    point only are filled in without measuring.
    """
    records = _some_runs(runs)
    make_parent_folder(runs, "RUNS")
    groups: dict[tuple[Point, str], list[Record]] = {}
    for record in records:
        point = Point.of(record)
        record["features"] |= point_features(point, Settings.of(record))
        if set(record["features"]) != set(FEATURES):
            settings = json.dumps(record["settings"], sort_keys=True)
            groups.setdefault((replace(point, rate=0.0, warmup=False), settings), []).append(record)
    done = 0
    for group in groups.values():
        points = list(map(Point.of, group))
        for record, values in zip(group, measure_points(points, Settings.of(group[0])), strict=True):
            record["features"] = values
        done += len(group)
        write_text(runs, json_lines(records))
        print(f"{points[0].blocks} {points[0].layers}L: {done} runs measured", flush=True)
    write_text(runs, json_lines(records))
    return done


def read_grid(path: Path) -> list[Record]:
    """The runs of a grid's file, see `read_runs`."""
    return read_runs(path, "a verdict grid", {"point", "settings", "features", "final"},
                     lambda record: (Point.of(record).initialisation, Settings.of(record)), '{"point": ',
                     "give the file of a verdict grid", "give a file that verdict-grid run wrote")


def _some_runs(runs: Path) -> list[Record]:
    """`read_grid`; raises `UserError` if there are no runs."""
    if not (records := read_grid(runs)):
        raise UserError(f"{f'{runs} has no runs' if runs.exists() else f'there is no file {runs}'}; make runs with "
                        f"python -m studies verdict-grid run {runs}")
    return records


def _key(record: Record) -> str:
    return json.dumps([record["point"], record["settings"]], sort_keys=True)


# -- fitting and judging -----------------------------------------------------------------------------------------------


def fit_grid(runs: Path, ship: bool, mark: Mark = "source", splits: int = 20) -> str:
    """Fits the rule on a file of runs; writes `verdict.json`, `verdict.md` and `verdict.png` next to it.

    Args:
        ship: also replaces deepnmt's own rule.
        mark: when a run counts as learned, see `Settings.bars`.
        splits: number of further random splits to test the fit on.

    Raises:
        UserError: there are too few runs, the file is of another kind, or its folder cannot be written.
    """
    records = [marked(record, Settings().bars[mark]) for record in _some_runs(runs)]
    _require_features(records, FEATURES, runs)
    for name in ("verdict.json", "verdict.md", "verdict.png"):
        make_parent_folder(runs.with_name(name), "RUNS")
    fitted = fit_rule(records, _HELD_OUT, splits)
    held, others = fitted.held, fitted.splits
    inits: dict[str, set[str]] = {}
    for point in map(Point.of, records):
        inits.setdefault(f"{point.encoder}/{point.decoder}", set()).add(point.initialisation)
    rule = replace(fitted.rule, facts={
        "runs": len(records) - held.total, "held_out_runs": held.total, "held_out_accuracy": held.accuracy,
        "confusion": asdict(held), "accuracy_on_a_block_left_out": fitted.unseen,
        "accuracy_on_random_splits": {"mean": fmean(others), "least": min(others), "most": max(others)},
        "learned": sum(bool(record["learned"]) for record in records), "fit": fitted.recipe,
        "settings": records[0]["settings"], "mark": mark, "bar": records[0]["bar"], "optimizer": OPTIMIZER,
        "inits": {blocks: sorted(used) for blocks, used in inits.items()}, "schedule": SCHEDULE,
        "dropout": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0, "weight_decay": 0.0, "clip": 0.0,
        "label_smoothing": 0.0, "precisions": sorted({Point.of(record).precision for record in records}),
        "fitted_points": sorted({digest(record) for record in records if not held_out(record, _HELD_OUT)}),
    })
    rule.save(runs.with_name("verdict.json"))
    if ship:
        rule.save(SHIPPED)
    plot_grid(records, runs.with_name("verdict.png"))
    text = "\n".join([
        f"learned: {rule.facts['learned']} runs, with a final loss below {records[0]['bar']:.3f} ({mark})",
        f"{fitted.recipe}, on {rule.facts['runs']} runs",
        f"accuracy on {held.total} held-out runs: {100 * held.accuracy:.1f} %", held.table(),
        f"on {len(others)} other splits of the same size: {100 * fmean(others):.1f} % on average, "
        f"{100 * min(others):.1f} to {100 * max(others):.1f} %",
        "accuracy on the runs of a block that was left out of the fit:",
        *(f"  {name:<24}{100 * value:5.1f} %" for name, value in fitted.unseen.items())])
    runs.with_name("verdict.md").write_text(text + "\n", encoding="utf-8")
    return text


def digest(record: Record) -> str:
    """A short hash of a run's settings and its point without the precision; identifies the runs of a rule's fit."""
    return hashlib.sha256(_key({**record, "point": unpaired(record)}).encode()).hexdigest()[:12]


def judge_runs(runs: Path, rule_file: Path | None = None) -> str:
    """Tests a finished rule (None: deepnmt's own) on runs that it was not fitted on; counts and leaves out the others.

    Returns:
        Lines: the accuracy, the confusion table, and the accuracy by batch size, depth, rate, precision,
        initialisation and blocks.

    Raises:
        UserError: there are no runs, or only those of the rule's fit; the file is of another kind; the rule is missing.
    """
    records = _some_runs(runs)
    rule = VerdictRule.load(rule_file or SHIPPED)
    fresh, lines = records, []
    if "fitted_points" not in rule.facts:
        lines.append("the rule does not record which runs it was fitted on; some of these may be among them")
    else:
        fitted = set(rule.facts["fitted_points"])
        fresh = [record for record in records if digest(record) not in fitted]
        if not fresh:
            raise UserError(f"the rule was fitted on all {len(records)} runs of {runs}, so they cannot test it; make "
                            "others with python -m studies verdict-grid run, for example with --seeds 2")
        if left_out := len(records) - len(fresh):
            lines.append(f"left out: {left_out} runs that the rule was fitted on")
    _require_features(fresh, rule.names, runs)
    mark: Mark = rule.facts.get("mark", "source")
    fresh = [marked(record, Settings.of(record).bars[mark]) for record in fresh]
    result = confusion(rule, fresh)
    lines += [f"learned: {sum(bool(record['learned']) for record in fresh)} of {result.total} runs",
              f"accuracy: {100 * result.accuracy:.1f} %", result.table()]
    kinds: dict[str, Callable[[Point], str]] = {
        "sentences per batch": lambda point: str(point.sentences),
        "layers of each stack": lambda point: str(point.layers),
        "peak rate": lambda point: f"{point.rate:g}", "precision": lambda point: point.precision,
        "initialisation": lambda point: point.initialisation, "blocks": lambda point: point.blocks}
    for kind, of in kinds.items():
        groups: dict[str, list[Record]] = {}
        for record in fresh:
            groups.setdefault(of(Point.of(record)), []).append(record)
        lines.append(f"by {kind}:")
        lines += [f"  {name:<24}{100 * confusion(rule, group).accuracy:5.1f} % of {len(group)}"
                  for name, group in groups.items()]
    return "\n".join(lines)


def _require_features(records: Sequence[Record], names: Iterable[str], runs: Path) -> None:
    """Raises `UserError` if a run lacks one of these features."""
    lacking = {name for record in records for name in names if name not in record["features"]}
    if lacking:
        raise UserError(f"{runs} has runs without {', '.join(sorted(lacking))}; add what is missing, without "
                        f"training again, with python -m studies verdict-grid measure {runs}")
