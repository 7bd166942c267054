"""`deepnmt tune`: a search on a small copy of a recipe, and its best points on the deep one."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import variance
from typing import Any

from deepnmt.api import read_recipe
from deepnmt.config import Recipe, TunedAt
from deepnmt.errors import UserError
from deepnmt.evaluate.significance import student_t
from deepnmt.extras.tune.commands import LEAST
from deepnmt.extras.tune.page import plot_trials, rows_of
from deepnmt.extras.tune.plan import (
    Budget,
    Point,
    anchors,
    at_height,
    box_of,
    check_stages,
    fitting,
    own_point,
    settings_of,
    small_layers,
    spread,
    tuned_at,
    words,
)
from deepnmt.extras.tune.trials import AGAIN, Record, TimeIsOver, Trials, layers_of, result
from deepnmt.extras.tune.written import file_to_write, write_tuned
from deepnmt.files import make_run_folder, markdown_table, reporting, table, write_json, write_text
from deepnmt.training.task import find_task


@dataclass(frozen=True)
class Candidate:
    """A point with its trials, of one length and depth, which differ in their seeds."""

    point: Point
    records: Sequence[Record]


def tune(
    recipe: Recipe, budget: Budget, origin: str, write: Path | None, *, processes: int, replace: bool
) -> str:
    """Searches, and writes the recipe with the best settings.

    Args:
        origin: where the recipe is from: a file, a shipped name or the folder of a run.
        write: the file to write; None: beside the recipe.
        processes: that training will use.
        replace: whether a file of that name may be there.

    Returns:
        The table and what was chosen.

    Raises:
        UserError: the data are not prepared, a file is there already, a stage of the text ends by epochs or patience,
            or no trial used its source.
    """
    output = Path(recipe.run) / "tune"
    summary = output / "tune.json"
    written = None
    with suppress(OSError, ValueError, AttributeError):  # there is none yet, or it is damaged
        written = json.loads(summary.read_bytes()).get("written")
    file = file_to_write(origin, write, written, replace)
    task = find_task(recipe.task)
    task.check(recipe)
    check_stages(recipe)
    data = task.open(recipe, True)
    make_run_folder(output)
    trials = Trials(recipe, small_copy(recipe), output, str(getattr(data, "fingerprint", "")), budget, processes)
    over = ""
    try:
        search(trials)
    except TimeIsOver:
        planned = trials.stages.runs if trials.stages else budget.runs
        over = (f"The {budget.seconds / 60:g} minutes are over after {len(trials.done)} of {planned} trials; "
                "the same command with more of them goes on.")
    rows = rows_of(trials)
    with reporting(str(output), AGAIN):
        write_text(output / "tune.md", f"{markdown_table(rows)}\n")
    best = choose(trials)
    if best is None:
        raise UserError(f"{failure(trials)}, so no recipe is written ({output / 'tune.md'} has the trials); give "
                        f"longer ones, for example --updates {min(2 * budget.updates, recipe.train.updates)}, or "
                        f"another block (docs/guide/which_block.md). {over}".rstrip())
    with reporting(str(output), AGAIN):
        plot_trials(trials, output / "tune.png", Path(recipe.run).absolute().name)
    report = [table(rows, 2), *sentences(trials, best)]
    if over:
        report.append(over)
    report.append(str(output / "tune.png"))
    if best.point == own_point(recipe):
        report.append(f"The settings of {origin} are the best of those tried, so no recipe is written.")
        return "\n".join(report)
    tuned = read_recipe(recipe, {**settings_of(recipe, best.point, recipe.train.updates),
                                 "run": f"{recipe.run.rstrip('/')}_tuned"})
    text = write_tuned(file, origin, tuned)
    with reporting(str(output), AGAIN):
        write_json(summary, {"point": dict(best.point), "file": str(file), "written": text})
    report += [f"{file}: {words(best.point)}; run: {tuned.run}", f"next: {shlex.join(['deepnmt', 'run', str(file)])}"]
    return "\n".join(report)


def small_copy(recipe: Recipe) -> Recipe:
    """The recipe with fewer layers, see `small_layers`."""
    layers = small_layers(recipe)
    if all(recipe.model.stack(side).layers == count for side, count in layers.items()):
        return recipe
    factors, freeze = recipe.optimizer.lr_factors, recipe.train.freeze
    changes: dict[str, Any] = {f"model.{side}.layers": count for side, count in layers.items()}
    changes["optimizer.lr_factors"] = {at_height(recipe, part): factor for part, factor in factors.items()}
    changes["train.freeze"] = list(dict.fromkeys(at_height(recipe, part) for part in freeze))
    if getattr(recipe.train, "guided_layer", 0):
        changes["train.guided_layer"] = 0
    if recipe.admin.profile:
        changes["admin.profile"] = None
    return read_recipe(recipe, changes)


def depth_of(trials: Trials) -> float:
    """How many times as deep as its copy the model is."""
    return layers_of(trials.recipe) / layers_of(trials.small)


def failure(trials: Trials) -> str:
    """A clause on what is wrong with all the trials of the last stage."""
    if not trials.by_source:
        return "no trial had a finite loss"
    if candidates_of(trials, ("deep",)):
        return "no trial on the deep model used its source"
    return "no trial used its source"


def search(trials: Trials) -> None:
    """All trials, stage by stage. Each is decided by the records before it, so that a stopped search goes on as it
    would have gone. Raises `TimeIsOver`."""
    recipe, budget = trials.recipe, trials.budget
    first = anchors(recipe)
    begun = trials.run("search", first[0], budget.half, recipe.seed)
    trials.stages = plan = fitting(budget, LEAST, depth_of(trials), begun["seconds"])
    tried = [Candidate(first[0], [begun])]
    around = (plan.first - len(first)) // 3  # of the first trials, near the best
    box = box_of(recipe)
    for number in range(1, plan.first):
        point = first[number] if number < len(first) else spread(box, number)
        if number >= plan.first - around:
            point = spread(box, number, ranked(trials, tried)[0].point)
        tried.append(Candidate(point, [trials.run("search", point, budget.half, recipe.seed)]))

    longer: list[Candidate] = []
    for candidate in distinct(ranked(trials, tried))[: plan.again]:
        record = trials.run("longer", candidate.point, budget.updates, recipe.seed)
        longer.append(Candidate(candidate.point, [record]))
    finalists = ranked(trials, longer)[:2]
    for number in range(1, plan.seeds // 2 + 1):
        for place, candidate in enumerate(finalists):
            record = trials.run("seeds", candidate.point, budget.updates, recipe.seed + number)
            finalists[place] = Candidate(candidate.point, [*candidate.records, record])
    if plan.deep:
        carry(trials, ranked(trials, finalists), plan.deep)


def carry(trials: Trials, finalists: Sequence[Candidate], count: int) -> None:
    """Tries the finalists on the deep model, without a rule that carries them also at lower rates as long as these are
    better, and the recipe as it is."""
    recipe, updates = trials.recipe, trials.budget.updates

    def run(point: Point) -> Candidate:
        return Candidate(point, [trials.run("deep", point, updates, recipe.seed, deep=True)])

    theory = carries(recipe)
    if theory:
        finalists = [Candidate({**one.point, "carried": 1.0}, one.records) for one in finalists]
    winner = finalists[0].point
    best = run(winner)
    tried = [best]
    if winner != own_point(recipe):
        tried.append(run(own_point(recipe)))
    if not theory and recipe.model.tuned_at == TunedAt():
        scale = 1.0
        room = count
        if len(finalists) > 1 and count > 3:
            room -= 1  # the last is the other finalist's
        while len(tried) < room:
            scale /= 2
            lower = run(scaled(winner, scale))
            tried.append(lower)
            if trials.worth(lower.records) <= trials.worth(best.records) and trials.worth(best.records)[0]:
                break
            best = lower
    factors = [1.0] if theory else [best.point["lr"] / winner["lr"], 1.0, 0.5]
    for finalist in finalists[1:]:
        for factor in factors:
            point = scaled(finalist.point, factor)
            if len(tried) < count and all(point != candidate.point for candidate in tried):
                tried.append(run(point))


def carries(recipe: Recipe) -> bool:
    """Whether `model.tuned_at` can carry rates from the copy to the recipe, which has none of its own."""
    if recipe.model.tuned_at != TunedAt():
        return False
    try:
        read_recipe(recipe, tuned_at(recipe))
    except UserError:
        return False
    return True


def scaled(point: Point, factor: float) -> Point:
    """The point with another rate."""
    return {**point, "lr": float(f"{factor * point['lr']:.2g}")}


def ranked(trials: Trials, candidates: Sequence[Candidate]) -> list[Candidate]:
    """The best first."""
    return sorted(candidates, key=lambda candidate: trials.worth(candidate.records), reverse=True)


def distinct(candidates: Sequence[Candidate]) -> list[Candidate]:
    """The first candidate of each point."""
    first: list[Candidate] = []
    for candidate in candidates:
        if all(candidate.point != earlier.point for earlier in first):
            first.append(candidate)
    return first


def candidates_of(trials: Trials, stage: Sequence[str]) -> list[Candidate]:
    """The points of some stages with their trials."""
    records = [record for record in trials.done if record["stage"] in stage]
    candidates = []
    for first in distinct([Candidate(record["point"], [record]) for record in records]):
        of_point = [record for record in records if record["point"] == first.point]
        candidates.append(Candidate(first.point, of_point))
    return candidates


def choose(trials: Trials) -> Candidate | None:
    """The best point of the last stage that has been reached; None if its model does not use its source. With seeds,
    only points that have all of them."""
    for stage in (("deep",), ("longer", "seeds"), ("search",)):
        candidates = candidates_of(trials, stage)
        if not candidates:
            continue
        most = max(len(candidate.records) for candidate in candidates)
        complete = [candidate for candidate in candidates if len(candidate.records) == most]
        best = ranked(trials, complete)[0]
        if trials.worth(best.records)[0]:
            return best
        return None
    return None


def sentences(trials: Trials, best: Candidate) -> list[str]:
    """Sentences on what was chosen by what, how much of it is noise, and how it came to the deep model."""
    what = "what the source is worth"
    if not trials.by_source:
        what = (f"the loss of the validation text, since task: {trials.recipe.task} does not measure what a source is "
                "worth")
    lines = [f"Chosen by {what}: {words(best.point)} ({result(best.records[0])})."]
    repeated = [candidate for candidate in candidates_of(trials, ("longer", "seeds")) if len(candidate.records) > 1]
    squares, freedom = 0.0, 0
    for candidate in repeated:
        worths = [trials.worth([record])[1] for record in candidate.records]
        if all(map(math.isfinite, worths)):
            squares += (len(worths) - 1) * variance(worths)
            freedom += len(worths) - 1
    deep = candidates_of(trials, ("deep",))
    if not freedom:
        lines.append("No point was tried with several seeds, so it is not known how much of this is noise.")
    else:
        noise = math.sqrt(squares / freedom)
        lines.append(f"Seeds on the small copy differ by ± {noise:.3f}.")
        rivals = [candidate for candidate in ranked(trials, deep or repeated) if candidate.point != best.point]
        if rivals and trials.worth(rivals[0].records)[0]:
            lead = trials.worth(best.records)[1] - trials.worth(rivals[0].records)[1]
            seeds = 1 / len(best.records) + 1 / len(rivals[0].records)
            if lead < student_t(freedom) * noise * math.sqrt(seeds):
                lines.append(f"The next best, {words(rivals[0].point)}, is {lead:.3f} behind: not to be told from it.")
    if depth_of(trials) == 1:
        lines.append("The model is as shallow as its copy would be, so the rates are its own.")
    elif not deep:
        lines.append("They were not tried on the deep model, where the best rate may be a half or a quarter.")
    elif "carried" in best.point or trials.recipe.model.tuned_at != TunedAt():
        lines.append("model.tuned_at carries the rates from fewer layers to these (docs/guide/new_recipe.md).")
    elif any("carried" in candidate.point for candidate in deep):
        lines.append("What model.tuned_at carries from the small copy was no better.")
    else:
        lines.append("No theory carries these rates over depth, so the best were tried on the deep model itself, at "
                    "lower rates, too: from 6 to 18 layers the best rate of B2T fell to a quarter and that of Post-LN "
                    "to a half, those of Pre-LN, DLCL, ReZero and T-Fixup stayed (studies/block_runs.jsonl). The "
                    "factors and the warm-up's share of the updates are carried as they are.")
    return lines
