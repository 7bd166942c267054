"""Measures how an accelerator runs the recipes, within a budget of minutes, and writes a report.

The parts run in separate processes: the machine and its matrix products; updates of a 60L-12L model on random tokens in
fp16 and bf16; German to English on Tatoeba. That is either a training of limited time with averaging, translation and
scores, or 300 updates of a 60L-12L model in fp16, under ZeRO-1 and as a pipeline of one stage. To these belong updates
on random tokens with compiled layers. If a part fails or has too little time, the others still run. `toy` runs all
parts in a tiny size on a CPU.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

from deepnmt.config import Recipe, dump_recipe, load_recipe
from deepnmt.data.split import split_tsv
from deepnmt.errors import UserError
from deepnmt.files import markdown_table, read_log, write_json
from deepnmt.progress import print_status
from deepnmt.training.status import FINISHED, PREEMPTED
from studies.benchmarks.gpu_measure import MIN_TOKENS, OUT_OF_MEMORY
from studies.benchmarks.workers import module_command

Subject = Literal["training", "layouts"]
ToyCorpus = Callable[[Path], dict[str, int]]
TAIL = 12  # lines of a failed part's log to put into the report
SHUTDOWN = 5.0  # seconds from the last timed update to the end of its process


@dataclass(frozen=True)
class Size:
    """The size of a report.

    Attributes:
        machine, step: arguments of the functions in `gpu_measure.py`.
        deep, shallow: settings for the two recipes, as on a command line.
        updates: further settings of the deep one for updates on text.
        limits: seconds for each part (for the training: the fewest with which it is worth starting).
        later: seconds reserved for the parts after the training.
        finish: how many of these a stopped training may take to save and exit.
    """

    machine: dict[str, int]
    step: dict[str, int]
    deep: list[str]
    shallow: list[str]
    updates: list[str]
    limits: dict[str, float]
    later: float
    finish: float


FULL = Size(
    machine={"large": 8192, "tokens": 32768, "width": 512, "inner": 2048, "vocab": 32000},
    step={"vocab": 32000, "tokens": 32768, "length": 32, "warm_up": 4, "steps": 12},
    deep=[], shallow=[],
    updates=["train.updates=300", "schedule.warmup=100", "train.log_every=10", "train.validate_every=300",
             "train.save_every=300", "train.valid_bleu=false"],
    limits={"machine": 45, "step": 45, "compiled": 130, "prepare": 120, "updates": 220, "train": 40, "average": 20,
            "score": 50},
    later=50, finish=15,
)
TOY = Size(
    machine={"large": 128, "tokens": 128, "width": 16, "inner": 32, "vocab": 64},
    step={"vocab": 64, "tokens": 64, "length": 8, "warm_up": 1, "steps": 3},
    deep=["model.width=16", "model.heads=2", "model.ffn=32", "model.encoder.layers=5", "model.decoder.layers=1"],
    shallow=["model.width=16", "model.heads=2", "model.ffn=32", "model.encoder.layers=2", "model.decoder.layers=2",
             "vocab.size=300", "batch.tokens=512", "schedule.warmup=4", "train.updates=12", "train.log_every=2",
             "train.validate_every=6", "train.save_every=6", "train.valid_sentences=8", "translate.beam=2",
             "translate.max_extra=5", "average_last=2", "admin.tokens=512", "data.workers=1"],
    updates=["vocab.size=300", "batch.tokens=512", "train.updates=6", "schedule.warmup=4", "train.log_every=2",
             "train.validate_every=6", "train.save_every=6", "train.valid_bleu=false", "admin.tokens=512",
             "data.workers=1"],
    limits={"machine": 150, "step": 150, "compiled": 200, "prepare": 150, "updates": 150, "train": 30, "average": 100,
            "score": 100},
    later=60, finish=15,
)


@dataclass
class Part:
    """The outcome of a part of the report; `note`: why it failed or was skipped."""

    name: str
    status: Literal["done", "failed", "skipped"] = "done"
    seconds: float = 0.0
    note: str = ""
    figures: dict[str, Any] = field(default_factory=dict)


class Skip(Exception):  # noqa: N818 (a decision, not an error)
    """Raised to skip a part; the message is the reason."""


def gpu_report(
    output: Path, recipes: Path, tsv: Path | None = None, minutes: float = 8.0, budget: float = 590.0,
    toy: ToyCorpus | None = None, subject: Subject = "training",
) -> int:
    """Writes `report.json`, `report.md`, the parts' logs and the run into `output`.

    Args:
        output: a new or empty folder.
        recipes: the folder of `de-en_60l-12l.yaml` and `de-en_6l-6l.yaml`.
        tsv: Tatoeba's pairs, English first. None: the corpus of `toy`; without that, nothing is trained.
        minutes: of updates in the training; fewer if the budget ends earlier.
        budget: seconds for everything.
        toy: a function that writes a tiny corpus into a folder and returns its numbers of pairs; makes all sizes tiny.
        subject: what to do with the text: one training with a score, or some updates in each layout.

    Returns:
        1 if a part has failed, else 0.

    Raises:
        UserError: the folder is not empty; a recipe or the TSV is missing; minutes or budget are not above 0.
    """
    if minutes <= 0 or budget <= 0:
        raise UserError(f"--minutes is {minutes:g} and --budget {budget:g}; both must be above 0")
    if tsv is not None and not tsv.is_file():
        raise UserError(f"there is no file {tsv}; set --tsv to Tatoeba's pairs as TSV, English first, plain or .gz")
    if output.exists() and not (output.is_dir() and not any(output.iterdir())):
        raise UserError(f"{output} exists already; name a new folder with --output")
    report = Report(output.absolute(), recipes, tsv, minutes, budget, TOY if toy else FULL, toy, subject)
    output.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # so that `stop_jobs` runs
    try:
        return report.run()
    finally:
        report.stop_jobs()


@dataclass
class Report:
    """Runs the parts in order and keeps their outcomes; see `gpu_report`."""

    output: Path
    recipes: Path
    tsv: Path | None
    minutes: float
    budget: float
    size: Size
    toy: ToyCorpus | None
    subject: Subject
    parts: list[Part] = field(default_factory=list)
    jobs: list[Job] = field(default_factory=list)

    def __post_init__(self) -> None:
        def deep(precision: str, *more: str) -> Recipe:
            return load_recipe(self.recipes / "de-en_60l-12l.yaml", [
                *self.size.deep, *more, "parallel.ds_config=ds_configs/zero1.json", f"parallel.precision={precision}"])

        self.deep = {f"zero1_{precision}": deep(precision) for precision in ("fp16", "bf16")}
        self.compiled = {f"compiled zero1_{precision}": deep(precision, "parallel.compile=true")
                         for precision in ("bf16", "fp16")}
        self.layouts = {
            layout: deep("fp16", *self.size.updates, *self._path_settings(layout), f"parallel.pipeline_stages={stages}")
            for layout, stages in (("zero1_fp16", 0), ("pipeline_zero1_fp16", 1))
        }
        self.shallow = load_recipe(self.recipes / "de-en_6l-6l.yaml", [
            *self.size.shallow, *self._path_settings("run"), f"train.max_seconds={60.0 * self.minutes}"])
        self.started = time.monotonic()

    def _path_settings(self, run: str) -> list[str]:
        """Settings for the folder and the texts of a run of this report."""
        text = self.output / "text"
        corpora = {name: json.dumps({"src": str(text / f"{name}.de"), "trg": str(text / f"{name}.en")})
                   for name in ("train", "valid", "test")}
        return [f"run={json.dumps(str(self.output / run))}", f"data.folder={json.dumps(str(self.output / 'data'))}",
                f"data.train={corpora['train']}", f"data.valid={corpora['valid']}",
                f"data.test={{test: {corpora['test']}}}"]

    def run(self) -> int:
        """Runs every part, and writes the report after each. Updates are timed after `prepare` has ended, because both
        need the CPU cores, and before the training, which can use whatever time is left."""
        self.part("corpus", self._corpus)
        preparing = self._start_preparing()  # on the CPU, while the GPU computes matrix products
        self.part("machine", lambda: self._measure("machine", self.size.machine, "machine"))
        self.part("prepare", lambda: self._prepared(preparing))
        if self.subject == "training":
            self.step_rates()
            self.part("train", self._train, needs="prepare")
            self.part("average", lambda: self._command("average", "average"), needs="train")
            self.part("score", self._score, needs="average")
        else:
            for layout, recipe in self.layouts.items():
                self.part(f"updates {layout}", partial(
                    self._measure, "updates", {"recipe": recipe.model_dump()}, f"updates_{layout}"), needs="prepare")
            self.step_rates()
            for layout in self.compiled:
                self.part(f"60L-12L {layout}", partial(self.step, layout))
        print((self.output / "report.md").read_text(encoding="utf-8"))
        return int(any(part.status == "failed" for part in self.parts))

    def step_rates(self) -> None:
        for layout in self.deep:
            self.part(f"60L-12L {layout}", partial(self.step, layout))

    def stop_jobs(self) -> None:
        """Kills the processes that are still running."""
        for job in self.jobs:
            job.stop(0)

    def left(self) -> float:
        """Seconds left of the budget."""
        return self.budget - (time.monotonic() - self.started)

    def part(self, name: str, work: Callable[[], dict[str, Any]], needs: str | None = None) -> None:
        part, started = Part(name), time.monotonic()
        try:
            machine = next((part.figures for part in self.parts if part.name == "machine"), {})
            precision = name.rpartition("_")[2]
            if precision in ("fp16", "bf16") and precision not in machine.get("precisions", [precision]):
                raise Skip(f"this machine's {machine['device']} does not compute in {precision}")
            if needs is not None and self._named(needs).status != "done":
                raise Skip(f"needs the part {needs}, but that was {self._named(needs).status}")
            part.figures = work()
        except Skip as reason:
            part.status, part.note = "skipped", str(reason)
        except Exception as error:  # the other parts run whatever the error is
            part.status, part.note = "failed", f"{type(error).__name__}: {error}"
        part.seconds = time.monotonic() - started
        self.parts.append(part)
        print_status(f"{name}: {part.status} in {part.seconds:.0f} s{f' ({part.note})' if part.note else ''}")
        content = {"toy": self.toy is not None, "seconds": time.monotonic() - self.started, "budget": self.budget,
                   "parts": {part.name: asdict(part) for part in self.parts}}
        write_json(self.output / "report.json", content)
        (self.output / "report.md").write_text(markdown(content), encoding="utf-8")

    def _named(self, name: str) -> Part:
        return next(part for part in self.parts if part.name == name)

    # -- the parts ---------------------------------------------------------------------------------------------------

    def _corpus(self) -> dict[str, Any]:
        """Writes the texts for the recipes; returns their name and numbers of pairs."""
        text = self.output / "text"
        if self.tsv is not None:
            return {"name": "Tatoeba de-en", "pairs": split_tsv(self.tsv, text, (2, 1), ("de", "en"))}
        if self.toy is None:
            raise Skip("nothing is trained without --tsv, Tatoeba's pairs")
        return {"name": "demo grammar de-en", "pairs": self.toy(text)}

    def _start_preparing(self) -> Job | None:
        if self._named("corpus").status != "done":
            return None
        file = self.output / "recipe.yaml"
        file.write_text(dump_recipe(self.shallow), encoding="utf-8")
        return self._job("prepare", ["deepnmt", "prepare", str(file)])

    def _prepared(self, job: Job | None) -> dict[str, Any]:
        if job is None:
            raise Skip("there is no corpus")
        job.wait_for_success(self._limit("prepare"))
        return {}

    def step(self, layout: str) -> dict[str, Any]:
        """Times updates: with half the tokens if memory runs out, with the fewest if not even one update ends in time.
        For a device with time for some updates see `gpu_measure.timed_updates`."""
        recipe = {**self.deep, **self.compiled}[layout]
        arguments: dict[str, Any] = {"recipe": recipe.model_dump(), **self.size.step}
        limit = "compiled" if recipe.parallel.compile else "step"
        file = layout.replace(" ", "_")
        while True:
            tokens = arguments["tokens"]
            arguments["until"] = time.monotonic() + self._limit(limit) - SHUTDOWN
            try:
                return self._measure("step", arguments, f"step_{file}_{tokens}", limit)
            except (MemoryError, TooSlow) as reason:
                arguments["tokens"] = MIN_TOKENS if isinstance(reason, TooSlow) else tokens // 2
                if not MIN_TOKENS <= arguments["tokens"] < tokens:
                    raise

    def _measure(self, measure: str, arguments: dict[str, Any], name: str, limit: str = "") -> dict[str, Any]:
        """Runs a function of `gpu_measure.py` with these arguments in a separate process; returns its result. `limit`
        names the seconds it has, if it is not the function."""
        seconds = self._limit(limit or measure)
        task, answer = self.output / f"{name}_job.json", self.output / f"{name}.json"
        write_json(task, {"measure": measure, **arguments})
        self._job(name, ["studies.benchmarks.gpu_measure", str(task), str(answer)]).wait_for_success(seconds)
        return dict(json.loads(answer.read_text(encoding="utf-8")))

    def _train(self) -> dict[str, Any]:
        """Trains for `minutes` of updates, or until only the time reserved for later parts is left; then stops the run,
        which saves a checkpoint."""
        least, later = self.size.limits["train"], self.size.later
        if self.left() - later < least:
            raise Skip(f"{self.left():.0f} s of the budget are left, but the training and the parts after it need "
                       f"{least + later:.0f}")
        job = self._job("train", ["deepnmt", "train", str(self.output / "recipe.yaml")])
        code = job.end_within(self.left() - later, self.size.finish)
        if code not in (FINISHED, PREEMPTED):
            raise RuntimeError(job.failure(code))
        run = Path(self.shallow.run)
        status = json.loads((run / "STATUS.json").read_text(encoding="utf-8"))
        records = read_log(run / "log.jsonl")
        return {"settings": _settings(self.shallow), "status": status["status"], "updates": status["update"],
                "seconds_of_updates": status["seconds"], "seconds": time.monotonic() - job.started,
                "last": next((r for r in reversed(records) if r["type"] == "train"), None),
                "validations": [r for r in records if r["type"] == "valid"]}

    def _score(self) -> dict[str, Any]:
        self._command("score", "evaluate")
        scores: dict[str, Any] = json.loads((Path(self.shallow.run) / "scores.json").read_text(encoding="utf-8"))
        return scores

    def _command(self, name: str, command: str) -> dict[str, Any]:
        """Runs a deepnmt command on the trained run."""
        self._job(name, ["deepnmt", command, self.shallow.run]).wait_for_success(self._limit(name))
        return {}

    # -- processes ---------------------------------------------------------------------------------------------------

    def _limit(self, name: str) -> float:
        """Seconds that a part may take. Raises `Skip` if less than half of its limit is left of the budget."""
        limit = self.size.limits[name]
        if self.left() < limit / 2:
            raise Skip(f"{max(0.0, self.left()):.0f} s of the budget are left, but it may take {limit:.0f}")
        return min(limit, self.left())

    def _job(self, name: str, module: list[str]) -> Job:
        job = Job(name, module, self.output / f"{name}.log")
        self.jobs.append(job)
        return job


class TooSlow(RuntimeError):  # noqa: N818 (of the device, not of the program)
    """A part was stopped at its time limit."""


class Job:
    """A module run as a program in a separate process, with its output in a log file."""

    def __init__(self, name: str, module: list[str], log: Path) -> None:
        self.name, self.log, self.started, self.late = name, log, time.monotonic(), False
        with log.open("w", encoding="utf-8") as stream:
            self.process = subprocess.Popen(module_command(*module), stdout=stream, stderr=subprocess.STDOUT)

    def end_within(self, seconds: float, grace: float) -> int:
        """Waits for the exit code; after `seconds` terminates the process, after `grace` more seconds kills it."""
        try:
            return self.process.wait(max(0.0, seconds))
        except subprocess.TimeoutExpired:
            self.late = True
            return self.stop(grace)

    def stop(self, grace: float) -> int:
        """Terminates the process and, if it still runs after `grace` seconds, kills it; returns the exit code."""
        if self.process.poll() is None:
            self.process.terminate()
            try:
                return self.process.wait(grace)
            except subprocess.TimeoutExpired:
                self.process.kill()
        return self.process.wait()

    def wait_for_success(self, seconds: float) -> None:
        """Waits for exit code 0. Raises MemoryError if the device had too little memory, `TooSlow` if the time ran out,
        and RuntimeError for other failures."""
        code = self.end_within(seconds, 2.0)
        if code == OUT_OF_MEMORY:
            raise MemoryError(self.failure(code))
        if code:
            raise (TooSlow if self.late else RuntimeError)(self.failure(code))

    def failure(self, code: int) -> str:
        """A failure in words, with the end of the log."""
        tail = "\n".join(self.log.read_text(encoding="utf-8", errors="replace").splitlines()[-TAIL:])
        return f"{self.name} ended with code {code} after {time.monotonic() - self.started:.0f} s; {self.log}:\n{tail}"


def _settings(recipe: Recipe) -> dict[str, Any]:
    """The settings to quote with a score."""
    model = recipe.model
    return {"encoder": f"{model.encoder.layers}L {model.encoder.block}",
            "decoder": f"{model.decoder.layers}L {model.decoder.block}", "width": model.width, "ffn": model.ffn,
            "dropout": model.dropout, "vocab": recipe.vocab.size, "batch_tokens": recipe.batch.tokens,
            "ds_config": recipe.parallel.ds_config, "precision": recipe.parallel.precision,
            "beam": recipe.translate.beam, "average_last": recipe.average_last}


# -- the page ----------------------------------------------------------------------------------------------------------

_USE = ["model TFLOP/s", "MFU, nominal", "MFU, measured product", "peak GiB"]


def markdown(content: dict[str, Any]) -> str:
    """The report as a page: the figures, then the outcome of each part."""
    parts = content["parts"]
    figures = {name: part["figures"] for name, part in parts.items() if part["figures"]}
    lines = ["# Accelerator report" + (" (toy sizes: the figures mean nothing)" if content["toy"] else ""), ""]
    corpus, facts = figures.get("corpus", {}), figures.get("machine", {})
    if facts:
        lines += _machine(facts)
    if rates := [values for name, values in figures.items() if name.startswith("60L-12L")]:
        lines += _steps(rates, facts)
    if layouts := [values for name, values in figures.items() if name.startswith("updates ")]:
        lines += _layouts(layouts, corpus, facts)
    if "train" in figures:
        lines += _training(figures["train"], corpus, figures.get("score", {}))
    rows = [[name, part["status"], f"{part['seconds']:.0f}", part["note"].replace("\n", "<br>")]
            for name, part in parts.items()]
    lines += ["## Parts", "", markdown_table([["part", "", "seconds", "note"], *rows]), ""]
    return "\n".join([*lines, f"{content['seconds']:.0f} of {content['budget']:.0f} s"]) + "\n"


def _machine(facts: dict[str, Any]) -> list[str]:
    nominal = facts["nominal_tflops"]
    title = f"{facts['device']}, {facts['cores']} cores, torch {facts['torch']}, DeepSpeed {facts['deepspeed']}"
    rows = [[name, " x ".join(map(str, facts["matmul_shapes"][name])), f"{rate:.4g}",
             f"{rate / nominal:.0%}" if nominal else "-"] for name, rate in facts["matmul_tflops"].items()]
    table = markdown_table([["bf16 product", "shape", "TFLOP/s", "of the nominal peak"], *rows])
    return ["## Machine", "", title, "", table, ""]


def _steps(rates: list[dict[str, Any]], facts: dict[str, Any]) -> list[str]:
    """MFU: model FLOPs (`gpu_measure.model_flops`) a second over a peak."""
    rows = [[f"{rate['precision']}, ZeRO-{rate['stage']}"
             + (f", compiled in {rate['seconds_of_compiling']:.0f} s" if rate["seconds_of_compiling"] else ""),
             f"{rate['parameters']:,}", f"{rate['tokens']:,}",
             f"{1000 * rate['seconds_per_step']:,.1f} ({1000 * rate['fastest']:,.1f} to {1000 * rate['slowest']:,.1f}; "
             f"{rate['steps']})",
             f"{rate['source_tokens_per_second']:,.0f} + {rate['target_tokens_per_second']:,.0f}",
             *_use(rate, facts)] for rate in rates]
    head = ["60L-12L", "parameters", "tokens a side", "ms an update (median, range; number)",
            "source + target tokens/s", *_USE]
    length = rates[0]["length"]
    return ["## Updates", "", f"Random tokens, sentences of {length}, vocabulary {rates[0]['vocab']:,}; forward, "
            "backward and optimizer.", "", markdown_table([head, *rows]), ""]


def _use(rate: dict[str, Any], facts: dict[str, Any]) -> list[str]:
    """The columns `_USE`: use of the device's arithmetic and of its memory."""
    peaks = (facts.get("nominal_tflops"), facts["matmul_tflops"]["large"] if facts else None)
    return [f"{rate['model_tflops']:.4g}", *(f"{rate['model_tflops'] / peak:.1%}" if peak else "-" for peak in peaks),
            f"{rate['peak_memory_gib']:.1f}" if rate["peak_memory_gib"] is not None else "-"]


def _layouts(layouts: list[dict[str, Any]], corpus: dict[str, Any], facts: dict[str, Any]) -> list[str]:
    """Losses in label-smoothed nats a target token; the loss scale at the first logged update, its lowest and last."""
    rows = []
    for run in layouts:
        (first, first_loss), (last, last_loss) = run["losses"][0], run["losses"][-1]
        scales = run["loss_scales"]
        rows.append([f"{Path(run['ds_config']).stem}_{run['precision']}"
                     + (f", {run['stages']} stage(s)" if run["stages"] else ""), f"{run['updates']:,}",
                     f"{first_loss:.3f} (to {first}), {last_loss:.3f} (to {last})",
                     "-" if run["validation"] is None else f"{run['validation']:.4f}",
                     f"{scales['first']:g}, {scales['lowest']:g}, {scales['last']:g}", f"{run['dropped']:.0f}",
                     f"{run['target_tokens_per_second']:,.0f}", *_use(run, facts)])
    head = ["60L-12L", "updates", "training loss", "validation loss", "loss scale: first, lowest, last", "dropped",
            "target tokens/s", *_USE]
    return ["## Updates on text", "", f"{corpus['name']}, {corpus['pairs']['train']:,} pairs.", "",
            markdown_table([head, *rows]), ""]


def _training(training: dict[str, Any], corpus: dict[str, Any], scores: dict[str, Any]) -> list[str]:
    last = training["last"] or {}
    rows = [["corpus", f"{corpus['name']}: " + ", ".join(f"{k} {v:,}" for k, v in corpus["pairs"].items())],
            ["settings", ", ".join(f"{k} {v}" for k, v in training["settings"].items())],
            ["training", f"{training['updates']:,} updates, {training['seconds_of_updates']:.0f} s of updates, "
             f"{training['seconds']:.0f} s in all; {training['status']}"]]
    if last:
        rows.append(["at the end", f"epoch {last['epoch']}, {last['target_tokens_per_second']:,.0f} target tokens/s, "
                     f"{last['skipped_updates']} updates dropped"])
    if training["validations"]:
        rows.append(["validation (loss, greedy BLEU)", ", ".join(
            f"{v['update']:,}: {v['loss']:.3f}" + (f" {v['bleu']:.1f}" if "bleu" in v else "")
            for v in training["validations"])])
    if scores:
        rows += [[name, f"{scores[key]:.2f} ({scores[key + '_signature']})"]
                 for name, key in (("**test BLEU**", "bleu"), ("test chrF", "chrf"))]
    return ["## Training", "", markdown_table([["", ""], *rows]), ""]
