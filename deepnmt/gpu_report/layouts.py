"""Updates on real text in one layout, in a process of its own: what they do to the loss, the loss scale and memory.

`python -m deepnmt.gpu_report.layouts JOB ANSWER`: JOB is a JSON file with the settings of a recipe whose data is
prepared; ANSWER is the JSON file to write. `report.py` starts it.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from deepnmt.config import Recipe, check_recipe
from deepnmt.data.prepared import PreparedData
from deepnmt.files import read_log, write_json
from deepnmt.gpu_report.speed import OUT_OF_MEMORY, model_flops
from deepnmt.parallel.launch import processes
from deepnmt.train.trainer import train


def figures(recipe: Recipe, log: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """A run's figures from the records of its log.

    Rates are the median interval's, the first left out, in which a device still settles. Model FLOPs
    (`speed.model_flops`) are those of a pair of sentences of mean length.
    """
    trained = [record for record in log if record["type"] == "train"]
    data = PreparedData.open(recipe.data.folder)
    split, vocab = data.split("train"), data.vocabs()[1].size
    source, target = float(split.src_lengths.mean()), float(split.trg_lengths.mean())
    rate = statistics.median(record["target_tokens_per_second"] for record in trained[1:] or trained)
    flops = model_flops(recipe.model, vocab, 1, source, target) / target
    scales = [record["loss_scale"] for record in trained]
    return {"ds_config": recipe.parallel.ds_config, "precision": recipe.parallel.precision,
            "stages": recipe.parallel.pipeline_stages,
            "updates": trained[-1]["update"], "losses": [(r["update"], r["loss"]) for r in trained],
            "validation": next((r["loss"] for r in reversed(log) if r["type"] == "valid"), None),
            "loss_scales": {"first": scales[0], "lowest": min(scales), "highest": max(scales), "last": scales[-1]},
            "dropped": trained[-1]["skipped_updates"], "target_tokens_per_second": rate,
            "seconds_of_updates": trained[-1]["training_seconds"], "model_tflops": rate * flops / 1e12}


def work(job: Path | str, answer: Path | str) -> int:
    """Trains the job's recipe; the exit code is `OUT_OF_MEMORY` where the device has too little."""
    recipe = check_recipe(json.loads(Path(job).read_text(encoding="utf-8")), "gpu_layouts")
    try:
        with processes(recipe.parallel.threads, group=True) as ranks:
            code = train(recipe, ranks)
            cuda = ranks.device.type == "cuda"
            peak = torch.cuda.max_memory_allocated(ranks.device) / 2**30 if cuda else None
    except torch.OutOfMemoryError as error:
        print(f"out of memory: {error}", file=sys.stderr)
        return OUT_OF_MEMORY
    if code:
        return code
    log = read_log(Path(recipe.run) / "log.jsonl")
    write_json(Path(answer), {**figures(recipe, log), "peak_memory_gib": peak})
    return 0


if __name__ == "__main__":
    sys.exit(work(sys.argv[1], sys.argv[2]))
