"""How long checkpoints stop training, how long they take to write, and what memory they need, by layout."""

from __future__ import annotations

import json
import shutil
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

from deepnmt.checkpoint.checkpoint import TrainingState
from deepnmt.checkpoint.saving import Saver, in_shards
from deepnmt.config import Recipe, check_recipe, dump_recipe
from deepnmt.files import make_parent_folder, table, write_json
from deepnmt.parallel.build import start_engine
from deepnmt.parallel.ds_config import layout_of
from deepnmt.processes.ranks import Ranks
from deepnmt.progress import print_status
from studies.benchmarks.gpu_measure import random_batch
from studies.benchmarks.layouts import Layout, own_peak, resident, with_layout
from studies.benchmarks.workers import answer_job, run_workers


def measure_saves(
    recipe: Recipe, layouts: list[Layout], saves: int, tokens: int, vocab: int, threads: int, output: Path | None = None
) -> list[dict[str, Any]]:
    """Saves some checkpoints in each layout while it makes updates on random batches; prints a table and writes JSON
    into `output`, if given.

    Args:
        saves: number of checkpoints.
        tokens: of a micro-batch, per side; every process has one an update, in a pipeline one for each stage.
        vocab: V, the vocabulary size of both sides.
        threads: of each process.

    Raises:
        UserError: a layout is impossible or `output` cannot be written.
    """
    recipes = [with_layout(recipe, layout, layout.processes, vocab) for layout in layouts]
    if output is not None:
        make_parent_folder(output)
    rows = []
    for layout, made in zip(layouts, recipes, strict=True):
        print_status(f"{layout.name} ...")
        with tempfile.TemporaryDirectory() as folder:
            job = {"recipe": made.model_dump(), "saves": saves, "tokens": tokens, "vocab": vocab, "folder": folder}
            rows.append({"layout": asdict(layout), "name": layout.name,
                         **run_workers(__name__, job, layout.processes, threads)})
    head = ["layout", "form", "MB", "stall of each, s", "written in, s", "s per update alone", "while writing",
            "MB copied by each process", "MB more memory", "peak GB"]
    cells = [[row["name"], row["form"], f"{row['bytes'] / 1e6:,.0f}", " ".join(f"{s:.2f}" for s in row["stalls"]),
              " ".join(f"{s:.1f}" for s in row["writes"]), f"{row['update']:.2f}", f"{row['beside']:.2f}",
              " ".join(f"{size / 1e6:,.0f}" for size in row["copied"]),
              " ".join(f"{size / 1e6:,.0f}" for size in row["grown"]),
              " ".join(f"{size / 1e9:.1f}" for size in row["peak"])] for row in rows]
    print(table([head, *cells]))
    if output is not None:
        write_json(output, {"recipe": recipe.model_dump(), "rows": rows})
    return rows


def run_saves(job: dict[str, Any], ranks: Ranks) -> dict[str, Any]:
    """Makes updates and saves in one layout, in each of its processes."""
    recipe, folder = check_recipe(job["recipe"], "saves"), Path(job["folder"])
    engine = start_engine(recipe, layout_of(recipe, ranks.world), (job["vocab"], job["vocab"]), ranks)

    def update(number: int) -> float:
        length = min(24, job["tokens"])
        batches = [random_batch(max(1, job["tokens"] // length), length, job["vocab"], 100 * number + n, ranks)
                   for n in range(recipe.batch.accumulation)]
        tokens = engine.data_world * sum(batch.tokens for batch in batches)
        ranks.barrier()
        started = time.perf_counter()
        engine.train_step(batches, tokens, 1e-4)
        ranks.barrier()
        return time.perf_counter() - started

    alone = [update(number) for number in range(3)]
    before = resident()
    saver = Saver(folder, ranks, engine.owned(), in_shards(recipe, engine.parameters, ranks.world))
    stalls, writes, beside, size = [], [], list[float](), 0
    for number in range(job["saves"]):
        ranks.barrier()
        started = time.perf_counter()
        saver.save(engine.owned(), TrainingState(number + 1, 0, 0, 0, None, {}), dump_recipe(recipe), {})
        stalls.append(ranks.max([time.perf_counter() - started])[0])
        while not saver.done():
            beside.append(update(3 + number))
        saved = saver.wait()
        assert saved is not None
        writes.append(saved.seconds)
        size = saved.size or size
        ranks.barrier()
        if ranks.first:
            shutil.rmtree(folder / f"update-{number + 1:08d}")
    own = json.dumps([sum(slot.nbytes for slot in saver._copy), resident() - before, own_peak()])
    each = [json.loads(one) for one in ranks.gather_bytes(own.encode()) or []]
    saver.close()
    engine.close()
    return {"form": "shards" if saver.sharded else "one file", "bytes": size, "stalls": stalls, "writes": writes,
            "update": median(alone), "beside": median(beside or [0.0]), "copied": [copied for copied, *_ in each],
            "grown": [grown for _, grown, _ in each], "peak": [peak for *_, peak in each],
            "parameters": engine.parameters}


if __name__ == "__main__":
    answer_job(run_saves)
