"""Long trainings to their end: a plan of runs, taken in its order by the deepnmt command, one record for each.

A run is trained, averaged and scored by the commands that a user would type, so a plan that was stopped goes on where
it was: finished runs stand in the file of records, and an unfinished one resumes from its checkpoints.
"""

from __future__ import annotations

import os
import platform
import resource
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import yaml

from deepnmt import load
from deepnmt.config import load_recipe
from deepnmt.data.prepared import open_prepared
from deepnmt.data.text import read_lines
from deepnmt.errors import UserError
from deepnmt.evaluate.metrics import make_scorers
from deepnmt.files import markdown_table, read_numbered_log
from deepnmt.progress import print_status
from deepnmt.training.task import find_task
from studies import layers
from studies.plots import plot_comparison
from studies.runs import Record, fingerprint_of, is_of, json_lines, known_runs
from studies.scores import bleu, difference_of_runs, pack, sentence_counts, unpack, with_totals

_VALIDATION = ("update", "perplexity", "bleu", "source_gain", "encoder_common", "cross_attention_entropy")


@dataclass(frozen=True)
class Plan:
    """What a plan's file says.

    Attributes:
        recipe: of all runs.
        arms: name and settings of each kind of run, the most important first.
        seeds: of every arm, unless `only_first` names it.
        only_first: arms that are trained with the first seed alone.
    """

    recipe: Path
    arms: dict[str, list[str]]
    seeds: list[int]
    only_first: list[str]

    def runs(self) -> Iterator[tuple[str, int]]:
        """Arm and seed of every run, all arms with the first seed before any with the second."""
        for number, seed in enumerate(self.seeds):
            for arm in self.arms:
                if number == 0 or arm not in self.only_first:
                    yield arm, seed

    def fingerprint(self, arm: str, settings: Sequence[str]) -> str:
        """Of an arm's runs: of the settings of a machine only those that name the text. Raises `UserError` if the data
        are not prepared."""
        text = [setting for setting in settings if setting.startswith("data.")]
        recipe = load_recipe(str(self.recipe), [*self.arms[arm], *text])
        return fingerprint_of(recipe, find_task(recipe.task).open(recipe, False).fingerprint)


def read_plan(path: Path) -> Plan:
    """Raises `UserError`: the file cannot be read or is no plan."""
    if not path.exists():
        raise UserError(f"there is no file {path}; give a plan of long runs, such as studies/deep.yaml")
    try:
        tree = yaml.safe_load(path.read_text(encoding="utf-8"))
        return Plan(Path(tree["recipe"]), dict(tree["arms"]), list(tree["seeds"]), list(tree.get("only_first", [])))
    except (OSError, UnicodeDecodeError, yaml.YAMLError, KeyError, TypeError, ValueError) as error:
        raise UserError(f"{path} is no plan of long runs ({error}); it needs recipe, arms (name: list of settings) and "
                        "seeds, see studies/deep.yaml") from None


def run_plan(plan: Plan, records: Path, output: Path, settings: list[str], seconds: float) -> str:
    """Takes the missing runs in order until the time is over; returns a sentence about what is left.

    Args:
        records: file of JSON lines, to which every finished run is added.
        output: folder of the run folders.
        settings: of this machine alone, such as the precision; part of every record.
        seconds: after which no run starts. A run that is under way is not ended.

    Raises:
        UserError: a command failed, or a run in `records` is of another plan.
    """
    done = set()
    fingerprints: dict[str, str] = {}
    for record in known_runs(records):
        arm, own = record["arm"], plan.arms.get(record["arm"])
        if own is not None:
            same = record["settings"][:len(own)] == own and record.get("recipe", str(plan.recipe)) == str(plan.recipe)
            if same and "fingerprint" in record:
                if arm not in fingerprints:
                    fingerprints[arm] = plan.fingerprint(arm, settings)
                same = is_of(record, fingerprints[arm])
            if not same:
                raise UserError(f"{records} has a run of {arm} with another recipe, other settings or other data than "
                                "the plan's; give another file with --runs, or another folder with --output")
        done.add((arm, record["seed"]))
    started = time.monotonic()
    missing = [run for run in plan.runs() if run not in done]
    while missing and time.monotonic() - started < seconds:
        arm, seed = missing.pop(0)
        print_status(f"{arm}, seed {seed}; {len(missing)} more after it")
        fingerprint = plan.fingerprint(arm, settings)  # before, as the recipe's file may change
        record = {**train_one(plan, arm, seed, output / f"{arm}_{seed}", settings), "fingerprint": fingerprint}
        with records.open("a", encoding="utf-8") as file:
            file.write(json_lines([record]))
        scores = ", ".join(f"{name} {score['bleu']:.1f}" for name, score in record["tests"].items())
        print_status(f"{arm}, seed {seed}: BLEU {scores}; {hours([record])} CPU hours")
    return f"{len(missing)} of {len(list(plan.runs()))} runs are missing" + (
        "; the same command takes them" if missing else "")


def train_one(plan: Plan, arm: str, seed: int, run: Path, settings: list[str]) -> Record:
    """Trains, averages and scores one run; returns its record. Of a run that was stopped in between, the CPU seconds
    are not known: None."""
    overrides = [*plan.arms[arm], *settings, f"seed={seed}", f"run={run}"]
    code, on = commit(), machine()  # what trains, though the checkout may move on meanwhile
    resumed = run.exists()
    cpu = 0.0
    for command in ("train", "average", "evaluate"):
        words = [str(run)] if command != "train" else [str(plan.recipe), *overrides]
        cpu += deepnmt(command, *words)
    log = [record for _, record in read_numbered_log(run / "log.jsonl")]
    last = [record for record in log if record["type"] == "train"][-1]
    return {
        "arm": arm, "seed": seed, "recipe": str(plan.recipe), "settings": [*plan.arms[arm], *settings], "commit": code,
        "machine": on, "cpu_seconds": None if resumed else round(cpu, 1),
        "updates": last["update"], "target_tokens": last["target_tokens"],
        "training_seconds": round(last["training_seconds"], 1),
        "training": [[record["update"], round(record["loss"], 4)] for record in log if record["type"] == "train"],
        "validations": [{key: record[key] for key in _VALIDATION if key in record}
                        for record in log if record["type"] == "valid"],
        "tests": dict(test_scores(run)),
        "layers": layers_of(run),
    }


def layers_of(run: Path) -> layers.Figures:
    """What each layer of a run's averaged model is worth; nothing of a model without an encoder."""
    recipe = load_recipe(run)
    if "encoder" not in recipe.model.sides:
        return {}
    valid = open_prepared(recipe).split("valid").truncated(recipe.model.max_length)
    trained = load(run, device="cpu")
    return layers.measure(trained.model, valid, recipe.batch.tokens, trained.device)


def test_scores(run: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """BLEU and chrF of each test set, and the counts of its sentences, from which BLEU of any selection follows."""
    lang = yaml.safe_load((run / "recipe.yaml").read_text(encoding="utf-8"))["data"]["trg_lang"]
    scorers = make_scorers(lang)
    for hypotheses in sorted((run / "scores").glob("*.hyp")):
        lines = list(read_lines(hypotheses))
        references = list(read_lines(hypotheses.with_suffix(".ref")))
        yield hypotheses.stem, {
            "bleu": round(scorers["bleu"].corpus_score(lines, [references]).score, 2),
            "chrf": round(scorers["chrf"].corpus_score(lines, [references]).score, 2),
            "counts": pack(sentence_counts(lines, references, scorers["bleu"]))}


def deepnmt(*words: str) -> float:
    """Runs a command of deepnmt; returns its CPU seconds. Raises `UserError` if it fails."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    code = subprocess.run([sys.executable, "-m", "deepnmt", *words], check=False, env=dict(os.environ)).returncode
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if code:
        raise UserError(f"`deepnmt {' '.join(words)}` ended with exit code {code}; see what it said above, and run the "
                        "same command again to go on")
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def machine() -> str:
    """The CPU's name, as Linux has it."""
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def commit() -> str:
    """The commit of this checkout."""
    return subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False,
                          cwd=Path(__file__).parent).stdout.strip()


def report(file: Path, picture: Path | None, only: Sequence[str] = ()) -> str:
    """The table of the arms in Markdown, each compared with the first, and one of their layers where those were
    measured.

    A score is the mean over seeds, ± their standard deviation if there are several. A difference has its p, see
    `scores.difference_of_runs`.

    Args:
        file: the records.
        picture: a PNG to write, with the validation perplexity of each arm's first seed.
        only: the arms to report, in this order, as ARM or ARM=LABEL, which stands in its place; none: all, in the order
            in which they came to an end.

    Raises:
        UserError: there is no record, or none of an arm.
    """
    if not file.exists() or not file.stat().st_size:
        raise UserError(f"there is no file {file} with runs; train some first, without --report")
    arms: dict[str, list[Record]] = {}
    for _, record in read_numbered_log(file):
        arms.setdefault(record["arm"], []).append(record)
    labels = {}
    for word in only or arms:
        name, _, label = word.partition("=")
        if name not in arms:
            raise UserError(f"--arms has {name}, but {file} has {', '.join(arms)}")
        labels[label or name] = arms[name]
    arms = labels
    beside = next(iter(arms))
    tests = list(arms[beside][0]["tests"])
    rows = [["arm", "seeds", *(f"{test}: BLEU, chrF" for test in tests), "perplexity", "CPU hours", "commit",
             *(f"{test}: BLEU beside {beside}, p" for test in tests)]]
    for name, runs in arms.items():
        row = [name, str(len(runs))]
        for test in tests:
            row.append(", ".join(mean_and_deviation([run["tests"][test][metric] for run in runs])
                                 for metric in ("bleu", "chrf")))
        row.append(mean_and_deviation([run["validations"][-1]["perplexity"] for run in runs], digits=2))
        row.append(hours(runs))
        row.append(", ".join(sorted({run["commit"] for run in runs})))
        for test in tests:
            row.append("" if name == beside else compare(runs, arms[beside], test))
        rows.append(row)
    if picture:
        curves = {name: {point["update"]: point["perplexity"] for point in runs[0]["validations"][1:]}
                  for name, runs in arms.items()}
        seeds = sorted({runs[0]["seed"] for runs in arms.values()})
        title = f"Trained to their end, seed {' or '.join(map(str, seeds))}"
        plot_comparison(curves, picture, title, "validation perplexity", logarithmic=True)
    measured = {name: [run["layers"] for run in runs if run.get("layers")] for name, runs in arms.items()}
    measured = {name: own for name, own in measured.items() if own}
    return "\n\n".join([markdown_table(rows), *([layers.table(measured)] if measured else [])])


def mean_and_deviation(values: list[float], digits: int = 1) -> str:
    """As `38.5 ± 0.2`; of one value there is no deviation."""
    mean = f"{fmean(values):.{digits}f}"
    return mean if len(values) == 1 else f"{mean} ± {stdev(values):.{digits}f}"


def hours(runs: list[Record]) -> str:
    """The CPU hours of runs, if all are known."""
    seconds = [run["cpu_seconds"] for run in runs]
    return "unknown" if None in seconds else mean_and_deviation([each / 3600 for each in seconds], digits=2)


def compare(runs: list[Record], others: list[Record], test: str) -> str:
    """The difference of two arms' BLEU on a test set, and its p."""
    ours, theirs = ([with_totals(unpack(run["tests"][test]["counts"])) for run in arm] for arm in (runs, others))
    gain = difference_of_runs(ours, theirs, bleu)
    return f"{gain.value:+.2f}, {gain.p:.2g}"
