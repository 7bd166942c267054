"""The runs that the doctor's verdict is learned from: many small models, trained for a few hundred updates each.

Every run is one line of a JSON-lines file: the point of the grid, the features measured before training
(`analysis/verdict.py`), and what the loss did. Points are done in a shuffled order that is always the same, so a grid
that was stopped is an even sample of the whole, and the same command goes on with what is missing.
"""

from __future__ import annotations

import hashlib
import json
import math
import random
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from deepnmt.config import Init, Precision
from deepnmt.doctor.variants import block_pair
from deepnmt.doctor.verdict import FEATURES, SHIPPED, VerdictRule
from deepnmt.errors import UserError
from deepnmt.files import drop_partial_line, make_folder_of, write_text
from deepnmt.model.blocks import BLOCKS
from studies.verdict_fit import Fitted, confusion, fit_rule, held_out, unpaired
from studies.verdict_plots import plot_grid
from studies.verdict_points import (
    OPTIMIZER,
    SCHEDULE,
    Mark,
    Point,
    Settings,
    marked,
    measure_points,
    point_features,
    point_recipe,
    run_points,
)

DEPTHS = (6, 12, 18, 36)
RATES = (1e-3, 3e-3, 1e-2, 3e-2)
_SHAPE = {"point", "settings", "features", "final"}  # of a line, among others
_BEGINS = '{"point": '
_HELD_OUT = 0.3  # of the runs, which the rule is judged on


def grid(
    blocks: Iterable[str], depths: Iterable[int], rates: Iterable[float], sentences: Iterable[int],
    seeds: Iterable[int], precisions: Iterable[Precision] = ("fp32",), inits: Iterable[Init] = ("auto",),
) -> list[Point]:
    """All points, shuffled. `blocks` are words as in `Point.name`.

    Raises:
        UserError: a block that does not exist.
    """
    points = [Point(encoder, decoder, layers, rate, warmup, size, seed, precision, init)
              for encoder, decoder in map(block_pair, blocks) for layers in depths for rate in rates
              for warmup in (True, False) for size in sentences for seed in seeds for precision in precisions
              for init in inits]
    random.Random(1).shuffle(points)
    return points


def make_grid(
    output: Path, blocks: list[str] | None, depths: list[int] | None, rates: list[float] | None, sentences: list[int],
    seeds: list[int], precisions: list[Precision], inits: list[Init], max_seconds: float, threads: int,
) -> int:
    """The runs of a command line (None: all blocks, `DEPTHS`, `RATES`); returns how many are left."""
    torch.set_num_threads(threads)
    points = grid(blocks or list(BLOCKS), depths or DEPTHS, rates or RATES, sentences, seeds, precisions, inits)
    return run_grid(points, Settings(), output, max_seconds)


def fit_grid(runs: Path, ship: bool, mark: Mark = "source", splits: int = 20) -> str:
    """Fits the rule on a file of runs; writes `verdict.json`, `verdict.md` and `verdict.png` beside it.

    Args:
        ship: also put the rule where deepnmt looks for its own.
        mark: what counts as learned, see `Settings.bars`.
        splits: random ones, on which the fit is judged as well.

    Raises:
        UserError: too few runs, a file of something else, or one beside which nothing can be written.
    """
    records = [marked(record, Settings().bars[mark]) for record in _some_runs(runs)]
    _require_features(records, FEATURES, runs)
    for name in ("verdict.json", "verdict.md", "verdict.png"):
        make_folder_of(runs.with_name(name), "RUNS")
    fitted = fit_rule(records, _HELD_OUT, splits)
    held, others = fitted.held, fitted.splits
    facts = {
        "runs": len(records) - held.total, "held_out_runs": held.total, "held_out_accuracy": held.accuracy,
        "confusion": asdict(held), "accuracy_on_a_block_left_out": fitted.unseen,
        "accuracy_on_random_splits": {"mean": fmean(others), "least": min(others), "most": max(others)},
        "learned": sum(bool(record["learned"]) for record in records), "fit": fitted.recipe,
        "settings": records[0]["settings"], "mark": mark, "bar": records[0]["bar"], "optimizer": OPTIMIZER,
        "inits": _inits(records), "schedule": SCHEDULE,
        "dropout": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0, "weight_decay": 0.0, "clip": 0.0,
        "label_smoothing": 0.0,
        "precisions": sorted({record["point"].get("precision", "fp32") for record in records}),
        "fitted_points": sorted({_digest(r) for r in records if not held_out(r, _HELD_OUT)}),
    }
    rule = replace(fitted.rule, facts=facts)
    rule.save(runs.with_name("verdict.json"))
    if ship:
        rule.save(SHIPPED)
    plot_grid(records, runs.with_name("verdict.png"))
    text = report(rule, fitted)
    runs.with_name("verdict.md").write_text(text + "\n", encoding="utf-8")
    return text


def _inits(records: Iterable[dict[str, Any]]) -> dict[str, list[str]]:
    """The initialisations that runs of each pair of blocks had."""
    found: dict[str, set[str]] = {}
    for point in (Point(**record["point"]) for record in records):
        found.setdefault(f"{point.encoder}/{point.decoder}", set()).add(point.initialisation)
    return {blocks: sorted(inits) for blocks, inits in found.items()}


def _digest(record: dict[str, Any]) -> str:
    """A short name of a run's point, precision apart, and settings, by which a rule knows what it was fitted on."""
    return hashlib.sha256(_key({**record, "point": unpaired(record)}).encode()).hexdigest()[:12]


def report(rule: VerdictRule, fitted: Fitted) -> str:
    """What was fitted and how well it does, in lines."""
    facts, held, splits = rule.facts, fitted.held, fitted.splits
    lines = [f"learned: final loss below {facts['bar']:.3f} ({facts['mark']}), {facts['learned']} runs did",
             f"{fitted.recipe}, on {facts['runs']} runs",
             f"accuracy on {held.total} runs held out: {100 * held.accuracy:.1f} %", held.table(),
             f"on {len(splits)} other splits of the same size: {100 * fmean(splits):.1f} % on average, "
             f"{100 * min(splits):.1f} to {100 * max(splits):.1f} %",
             "accuracy on the runs of a block that was left out of the fit:",
             *(f"  {name:<24}{100 * value:5.1f} %" for name, value in fitted.unseen.items())]
    return "\n".join(lines)


def judge_runs(runs: Path, rule_file: Path | None = None) -> str:
    """What a finished rule (None: deepnmt's own) says of runs that it was not fitted on: a frozen rule's real test.

    Runs that it was fitted on are left out and counted.

    Returns:
        Lines: the accuracy, the confusion table, and the accuracy by batch size, depth, rate, precision,
        initialisation and blocks.

    Raises:
        UserError: no runs, none but what the rule was fitted on, a file of something else, or no such rule.
    """
    made = _some_runs(runs)
    rule = VerdictRule.load(rule_file or SHIPPED)
    fresh, notes = _fresh_runs(made, rule, runs)
    _require_features(fresh, rule.names, runs)
    mark: Mark = rule.facts.get("mark", "source")
    records = [marked(record, Settings.of(record["settings"]).bars[mark]) for record in fresh]
    found = confusion(rule, records)
    lines = [*notes, f"learned: {sum(bool(r['learned']) for r in records)} of {found.total} runs",
             f"accuracy: {100 * found.accuracy:.1f} %", found.table()]
    kinds: dict[str, Callable[[Point], str]] = {
        "sentences a batch": lambda point: f"{point.sentences}",
        "layers of each stack": lambda point: f"{point.layers}", "peak rate": lambda point: f"{point.rate:g}",
        "precision": lambda point: point.precision, "initialisation": lambda point: point.initialisation,
        "blocks": lambda point: point.name}
    for kind, of in kinds.items():
        groups: dict[str, list[dict[str, Any]]] = {}
        for record in records:
            groups.setdefault(of(Point(**record["point"])), []).append(record)
        lines.append(f"by {kind}:")
        lines += [f"  {name:<24}{100 * confusion(rule, group).accuracy:5.1f} % of {len(group)}"
                  for name, group in groups.items()]
    return "\n".join(lines)


def _require_features(records: Sequence[dict[str, Any]], names: Iterable[str], runs: Path) -> None:
    """Raises `UserError` where a run was written before one of these features was measured."""
    lacking = {name for record in records for name in names if name not in record["features"]}
    if lacking:
        raise UserError(f"{runs} has runs without {', '.join(sorted(lacking))}; add it, without training them again, "
                        f"with python -m studies verdict-grid measure {runs}")


def _fresh_runs(made: list[dict[str, Any]], rule: VerdictRule, runs: Path) -> tuple[list[dict[str, Any]], list[str]]:
    """The runs that the rule was not fitted on, and what is to be said of the others."""
    if "fitted_points" not in rule.facts:
        return made, ["the rule does not tell what it was fitted on; some of these runs may be among it"]
    fitted = set(rule.facts["fitted_points"])
    fresh = [record for record in made if _digest(record) not in fitted]
    if not fresh:
        raise UserError(f"the rule was fitted on all {len(made)} runs of {runs}, which says nothing; make others with "
                        "python -m studies verdict-grid run, for example with --seeds 2")
    left_out = len(made) - len(fresh)
    return fresh, [f"left out: {left_out} runs that the rule was fitted on"] if left_out else []


def run_grid(points: list[Point], settings: Settings, output: Path, max_seconds: float = math.inf) -> int:
    """Does the points that `output` does not have yet, appending a line for each; returns how many are left.

    Points that differ in rate and warm-up only are trained side by side. No more are begun once `max_seconds` have
    passed.

    Raises:
        UserError: an impossible point, or a file that cannot be written; nothing is begun then.
    """
    done = {_key(record) for record in read_runs(output)}
    wanted = [p for p in points if _key({"point": p.as_dict(), "settings": settings.as_dict()}) not in done]
    groups: dict[tuple[object, ...], list[Point]] = {}
    for point in wanted:
        point_recipe(point, settings)
        shared = (point.encoder, point.decoder, point.layers, point.sentences, point.seed, point.precision, point.init)
        groups.setdefault(shared, []).append(point)
    make_folder_of(output, "RUNS")
    drop_partial_line(output)
    started, left = time.monotonic(), len(wanted)
    with output.open("a", encoding="utf-8") as file:
        for group in groups.values():
            if time.monotonic() - started > max_seconds:
                return left
            records = run_points(group, settings)
            left -= len(group)
            file.write("".join(json.dumps(record) + "\n" for record in records))
            file.flush()
            print(f"{group[0].name} {group[0].layers}L: {sum(r['learned'] for r in records)} of {len(group)} learned "
                  f"({sum(r['seconds'] for r in records):.0f} s), {left} runs left", flush=True)
    return left


def measure_anew(runs: Path) -> int:
    """Measures again, in place, the runs that were made before a feature was thought of; returns how many.

    Their losses stay: what is measured comes before the training and does not change it. A feature that the point
    alone settles is just written in.
    """
    records = _some_runs(runs)
    make_folder_of(runs, "RUNS")
    for record in records:
        record["features"] |= point_features(Point(**record["point"]), Settings.of(record["settings"]))
    groups: dict[str, list[int]] = {}
    for place, record in enumerate(records):
        if set(record["features"]) != set(FEATURES):
            shared = {name: value for name, value in record["point"].items() if name not in ("rate", "warmup")}
            groups.setdefault(json.dumps([shared, record["settings"]], sort_keys=True), []).append(place)
    done = 0
    for places in groups.values():
        points = [Point(**records[place]["point"]) for place in places]
        settings = Settings.of(records[places[0]]["settings"])
        for place, values in zip(places, measure_points(points, settings), strict=True):
            records[place]["features"] = values
        done += len(places)
        _write_runs(runs, records)
        print(f"{points[0].name} {points[0].layers}L: {done} runs measured", flush=True)
    _write_runs(runs, records)
    return done


def _write_runs(path: Path, records: Iterable[dict[str, Any]]) -> None:
    write_text(path, "".join(json.dumps(record) + "\n" for record in records))


def _some_runs(runs: Path) -> list[dict[str, Any]]:
    """`read_runs`, or `UserError` where there are none."""
    if not (found := read_runs(runs)):
        raise UserError(f"{f'{runs} has 0 runs' if runs.exists() else f'there is no file {runs}'}; make runs with "
                        f"python -m studies verdict-grid run {runs}")
    return found


def read_runs(path: Path) -> list[dict[str, Any]]:
    """The records of a grid's file; the half line of a kill is left out.

    Raises:
        UserError: it cannot be read, or has a line of something else.
    """
    if not path.exists():
        return []
    records = []
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read as lines of JSON: {error}; give the file of a verdict grid") from None
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
            if not record.keys() >= _SHAPE:
                raise KeyError
            Point(**record["point"]).initialisation, Settings.of(record["settings"])
        except (ValueError, TypeError, KeyError, AttributeError):
            if number == len(lines) and line.startswith(_BEGINS[: len(line)]) and not _is_json(line):
                break  # the half line of a kill
            raise UserError(f"{path}, line {number}, is not a run of a verdict grid, which has "
                            f"{', '.join(sorted(_SHAPE))}; give a file that verdict-grid run wrote") from None
        records.append(record)
    return records


def _is_json(line: str) -> bool:
    try:
        json.loads(line)
    except ValueError:
        return False
    return True


def _key(record: dict[str, Any]) -> str:
    return json.dumps([record["point"], record["settings"]], sort_keys=True)
