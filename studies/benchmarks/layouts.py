"""Compares the same updates in several layouts (losses, gradient norms, memory, seconds), and measures a pipeline's
idle time.

Every layout runs in new processes, on the same random batches of a recipe's shape. An Admin model is profiled first, on
the batches of the first update, by all processes of the layout together.
"""

from __future__ import annotations

import json
import re
import resource
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from deepnmt.batch import Batch
from deepnmt.config import Recipe, check_recipe
from deepnmt.errors import UserError
from deepnmt.files import make_parent_folder, make_run_folder, table, write_json
from deepnmt.model.admin_profile import measure
from deepnmt.parallel.build import partition_of, start_engine
from deepnmt.parallel.ds_config import layout_of
from deepnmt.parallel.engine import Engine
from deepnmt.processes.ranks import Ranks
from deepnmt.progress import print_status
from deepnmt.tokens import PAD
from studies.benchmarks.gpu_measure import random_batch
from studies.benchmarks.workers import answer_job, run_workers
from studies.plots import plot_idle_time


@dataclass(frozen=True)
class Layout:
    """A layout. `config`: "local", or a file of ds_configs/ and a precision; `stages` 0: no pipeline."""

    config: str
    processes: int
    stages: int = 0

    @property
    def name(self) -> str:
        pipeline = f", {self.stages} stage{'' if self.stages == 1 else 's'}" if self.stages else ""
        return f"{self.config} x {self.processes}{pipeline}"


def parse_layout(text: str) -> Layout:
    """Parses `local`, `zero3_fp32:2` (configuration:processes) or `pipeline_zero1_fp32:4/2` (:processes/stages).

    Raises:
        UserError: the text has another form.
    """
    match = re.fullmatch(r"(\w+)(?::([1-9]\d*)(?:/([1-9]\d*))?)?", text)
    if not match:
        raise UserError(
            f"layout {text!r} is not of the form local, CONFIG:PROCESSES or CONFIG:PROCESSES/STAGES, for example "
            "zero3_fp32:2 or pipeline_zero1_fp32:4/2"
        )
    processes = int(match[2] or 1)
    return Layout(match[1], processes, int(match[3] or (processes if match[1].startswith("pipeline") else 0)))


def with_layout(recipe: Recipe, layout: Layout, micro_batches: int, vocab: int) -> Recipe:
    """The recipe in a layout, with `micro_batches` per update over all its processes.

    Raises:
        UserError: the layout is impossible, the micro-batches cannot be shared evenly, or the vocabulary is too small.
    """
    if vocab <= PAD + 1:
        raise UserError(f"--vocab is {vocab}, must be {PAD + 2} or more: the first {PAD + 1} are special tokens")
    tree = recipe.model_dump()
    tree["parallel"].pop("precision")  # the layout's name has it
    tree["parallel"] |= {"ds_config": None if layout.config == "local" else f"ds_configs/{layout.config}.json",
                         "pipeline_stages": layout.stages}
    data_world = layout.processes // (layout.stages or 1)
    if data_world and micro_batches % data_world:
        raise UserError(
            f"--micro-batches is {micro_batches}, must be a multiple of {data_world}, the data-parallel ranks of "
            f"{layout.name}"
        )
    tree["batch"]["accumulation"] = max(1, micro_batches // max(1, data_world))
    made = check_recipe(tree, layout.name)
    layout_of(made, layout.processes)
    return made


def compare_layouts(
    recipe: Recipe, layouts: list[Layout], updates: int, micro_batches: int, tokens: int, vocab: int, threads: int,
    output: Path | None = None,
) -> list[dict[str, Any]]:
    """Takes the same updates in each layout, prints a table and writes JSON into `output`, if given.

    Args:
        updates: number of updates.
        micro_batches: per update, over all processes.
        tokens: of a micro-batch, per side.
        vocab: V, the vocabulary size of both sides.
        threads: of each process.

    Raises:
        UserError: before the first layout runs, if one is impossible, the vocabulary is too small or `output` cannot be
            written; later, if this machine does not support a precision.
    """
    recipes = [with_layout(recipe, layout, micro_batches, vocab) for layout in layouts]
    if output is not None:
        make_parent_folder(output)
    rows = []
    for layout, made in zip(layouts, recipes, strict=True):
        print_status(f"{layout.name} ...")
        job = {"recipe": made.model_dump(), "updates": updates, "micro_batches": micro_batches, "tokens": tokens,
               "vocab": vocab, "idle": False}
        rows.append({"layout": asdict(layout), "name": layout.name,
                     **run_workers(__name__, job, layout.processes, threads)})
    head = ["layout", "loss of each update", "gradient norm", "peak GiB per process", "s per update", "largest ω"]
    cells = [[row["name"], " ".join(f"{loss:.5f}" for loss in row["losses"]), f"{row['norms'][-1]:.6f}",
              " ".join(f"{peak:.2f}" for peak in row["peak_gib"]), f"{row['seconds']:.1f}",
              f"{max(row['omega'].values()):.5f}" if row["omega"] else "-"] for row in rows]
    print(table([head, *cells]))
    if output is not None:
        write_json(output, {"recipe": recipe.model_dump(), "rows": rows})
    return rows


def measure_idle(
    recipe: Recipe, config: str, stages: int, counts: list[int], tokens: int, vocab: int, threads: int, folder: Path
) -> list[dict[str, Any]]:
    """Compares a pipeline's idle time with (P - 1) / (M + P - 1) for growing numbers M of micro-batches per update.

    A stage's idle time is the share of an update, up to the end of the last pass in any stage, that it does not spend
    in forward and backward passes (see `BusyClock`); the median of three updates.

    Prints a table; writes `idle.json` and `idle.png` into `folder`. Raises `UserError` if a layout is impossible or the
    folder cannot be written.
    """
    layout = Layout(config, stages, stages)
    recipes = [with_layout(recipe, layout, count, vocab) for count in counts]
    make_run_folder(folder, "--output")
    rows = []
    print("micro-batches  idle, each stage    mean   formula   expected for these stages")
    for count, made in zip(counts, recipes, strict=True):
        job = {"recipe": made.model_dump(), "updates": 4, "micro_batches": count, "tokens": tokens, "vocab": vocab,
               "idle": True}
        idle = run_workers(__name__, job, stages, threads)["idle"]
        shares = {"mean": sum(idle) / stages, "formula": (stages - 1) / (count + stages - 1),
                  "expected": partition_of(made, vocab, vocab).bubble(count)}
        rows.append({"micro_batches": count, "idle": idle, **shares})
        each = " ".join(f"{100 * share:5.1f}%" for share in idle)
        print(f"{count:13}  {each:<18} {'    '.join(f'{100 * share:5.1f}%' for share in shares.values())}", flush=True)
    write_json(folder / "idle.json", {"layout": asdict(layout), "recipe": recipe.model_dump(), "rows": rows})
    plot_idle_time(rows, stages, folder / "idle.png")
    return rows


def run_updates(job: dict[str, Any], ranks: Ranks) -> dict[str, Any]:
    """Takes the updates of one layout, in each of its processes."""
    recipe = check_recipe(job["recipe"], "layouts")
    vocabs = (job["vocab"], job["vocab"])
    profile = None
    if recipe.model.profiled:
        profile = measure(recipe.model, *vocabs, recipe.seed, _batches(job, 0, ranks)[ranks.rank :: ranks.world], ranks,
                          settings=recipe.admin)
    engine = start_engine(recipe, layout_of(recipe, ranks.world), vocabs, ranks, profile)
    busy = BusyClock(engine) if job["idle"] else None
    losses, norms, seconds, idle = [], [], [], [0.0]
    for update in range(job["updates"]):
        batches = _batches(job, update, ranks)
        tokens = sum(batch.tokens for batch in batches)
        ranks.barrier()
        started = time.perf_counter()
        stats = engine.train_step(batches[engine.data_rank :: engine.data_world], tokens, 1e-4)
        ranks.barrier()
        seconds.append(time.perf_counter() - started)
        if busy:
            worked, ended = busy.take()
            share = 1 - worked / ranks.max([ended - started])[0]
            idle = [*idle, share] if update > 1 else [share]  # the first counts only if there is no other
        losses.append(stats.loss / tokens)
        norms.append(stats.grad_norm)
    cuda = ranks.device.type == "cuda"
    peak = (torch.cuda.max_memory_allocated(ranks.device) if cuda else own_peak()) / 2**30
    each = [json.loads(own) for own in ranks.gather_bytes(json.dumps([peak, statistics.median(idle)]).encode()) or []]
    engine.close()
    return {"losses": losses, "norms": norms, "seconds": min(seconds), "peak_gib": [peak for peak, _ in each],
            "idle": [share for _, share in each], "omega": profile.omega if profile else {}}


def own_peak() -> float:
    """The peak memory of this process in bytes.

    `ru_maxrss` is the second choice, because on Linux it includes the peak of the parent process.
    """
    status = Path("/proc/self/status")
    peak = status.read_text().partition("VmHWM:")[2] if status.is_file() else ""
    if not peak:  # not Linux, or a kernel without VmHWM (gVisor)
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return 1024 * int(peak.split()[0])


def resident() -> int:
    """The memory of this process in bytes, at present."""
    return 1024 * int(Path("/proc/self/status").read_text().partition("VmRSS:")[2].split()[0])


def _batches(job: dict[str, Any], update: int, ranks: Ranks) -> list[Batch]:
    """All micro-batches of an update, with five sentence lengths in turn."""
    lengths = [min(24, job["tokens"]) + n % 5 for n in range(job["micro_batches"])]
    return [random_batch(max(1, job["tokens"] // length), length, job["vocab"], 1000 * update + n, ranks)
            for n, length in enumerate(lengths)]


class BusyClock:
    """Times a pipeline's stage: seconds in forward and backward passes, and the end of the last pass.

    The formula (P - 1) / (M + P - 1) describes these passes only, from the start of the first to the end of the last in
    any stage. The gradient sums over processes and the optimizer's step after them count neither as work nor as idle
    time.
    """

    def __init__(self, engine: Engine) -> None:
        self.seconds = self.last = 0.0
        engine.time_instructions(self.add)  # type: ignore[attr-defined]

    def add(self, seconds: float) -> None:
        self.seconds += seconds
        self.last = time.perf_counter()

    def take(self) -> tuple[float, float]:
        """The seconds since the last call of this method, and when the last pass ended (perf_counter)."""
        seconds, self.seconds = self.seconds, 0.0
        return seconds, self.last


if __name__ == "__main__":
    answer_job(run_updates)
