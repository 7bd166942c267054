"""Measures how fast one device trains: matrix products, updates of a model on random tokens, and updates on real text.

`python -m studies.benchmarks.gpu_measure JOB ANSWER` runs one measurement in a separate process: JOB is a JSON file
with the name of a function and its arguments, ANSWER the JSON file for its result. `gpu_report.py` starts it.

`B` sentences, `S` source length, `T` target length, `D` width, `V` vocabulary.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from deepnmt.batch import TRANSLATION, Batch
from deepnmt.cli import end_process
from deepnmt.config import Model, check_recipe
from deepnmt.data.prepared import PreparedData
from deepnmt.files import read_log, write_json
from deepnmt.parallel.build import start_engine
from deepnmt.parallel.ds_config import layout_of
from deepnmt.parallel.engine import StepStats
from deepnmt.parallel.pipeline.partition import multiply_adds
from deepnmt.processes.process_group import processes
from deepnmt.processes.ranks import Ranks
from deepnmt.tokens import BOS, EOS, PAD
from deepnmt.training.trainer import train

# Dense bf16 TFLOP/s by a part of the device's name, from the manufacturer's data sheets; the first match counts.
NOMINAL_TFLOPS = {"H200": 989.4, "H100 PCIe": 756.0, "H100 NVL": 835.0, "H100": 989.4, "A100": 312.0}
OUT_OF_MEMORY = 3  # exit code; the report then tries a smaller batch
MIN_TOKENS = 2048  # of a micro-batch, per side; with fewer the rate means little


def model_flops(model: Model, vocab: int, sentences: int, source: float, target: float) -> float:
    """Floating-point operations of training on B sentences of S source and T target tokens, forward and backward.

    A matrix product of m multiply-adds (`multiply_adds` of a layer, DV a target token of the output projection) counts
    2m forward and twice that backward. Attention scores and the weighted sum take 4·L·D operations per query over L
    keys (causal ones T/2 on average), and 2.5 times that backward, because fused kernels recompute them. Element-wise
    operations, padding and the optimizer are left out.
    """
    n, m, e, d = model.encoder.layers, model.decoder.layers, model.shape("encoder")[0], model.shape("decoder")[0]
    encoder, decoder, crossing = multiply_adds(model)
    by_source = n * encoder + m * crossing
    by_target = m * decoder + d * vocab
    attended = e * n * source * source + d * m * target * (target / 2 + source)
    return sentences * (6.0 * (source * by_source + target * by_target) + 3.5 * 4 * attended)


def machine(large: int, tokens: int, width: int, inner: int, vocab: int) -> dict[str, Any]:
    """The machine's description and the rates of bf16 matrix products in TFLOP/s: one of `large`³, and those of a layer
    and of the output projection, whose inner dimension D is small."""
    with processes() as ranks:
        device = ranks.device
        shapes = {
            "large": (large, large, large),
            "query, key, value": (tokens, width, 3 * width),
            "attention output": (tokens, width, width),
            "ffn first": (tokens, width, inner),
            "ffn second": (tokens, inner, width),
            "output projection": (tokens // 8, width, vocab),
        }
        rates = {name: _product_tflops(*shape, device) for name, shape in shapes.items()}
        from deepnmt.parallel.deepspeed import supported_precisions

        return {**_facts(device), "precisions": supported_precisions(), "matmul_tflops": rates, "matmul_shapes": shapes}


def _facts(device: torch.device) -> dict[str, Any]:
    facts = {"device": platform.processor() or platform.machine(), "cores": len(os.sched_getaffinity(0)),
             "torch": torch.__version__, "deepspeed": version("deepspeed"), "python": platform.python_version(),
             "nominal_tflops": None}
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        nominal = next((rate for part, rate in NOMINAL_TFLOPS.items() if part in properties.name), None)
        facts |= {"device": properties.name, "memory_gib": properties.total_memory / 2**30, "cuda": torch.version.cuda,
                  "nominal_tflops": nominal}
    return facts


def _product_tflops(rows: int, inner: int, columns: int, device: torch.device, seconds: float = 0.2) -> float:
    """TFLOP/s of a bf16 product [rows, inner] x [inner, columns]: the median of five windows."""
    a = torch.randn(rows, inner, device=device, dtype=torch.bfloat16)
    b = torch.randn(inner, columns, device=device, dtype=torch.bfloat16)
    out = torch.empty(rows, columns, device=device, dtype=torch.bfloat16)
    once = _seconds(lambda: torch.mm(a, b, out=out), 3, device)
    count = max(1, int(seconds / 5 / once))
    windows = [_seconds(lambda: torch.mm(a, b, out=out), count, device) for _ in range(5)]
    return 2.0 * rows * inner * columns / statistics.median(windows) / 1e12


def _seconds(call: Callable[[], object], count: int, device: torch.device) -> float:
    """Mean seconds of `count` calls, after one untimed call."""
    call()
    wait(device)
    started = time.perf_counter()
    for _ in range(count):
        call()
    wait(device)
    return (time.perf_counter() - started) / count


def wait(device: torch.device) -> None:
    """Waits until the device has finished all its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def step(recipe: dict[str, Any], vocab: int, tokens: int, length: int, warm_up: int, steps: int, until: float
         ) -> dict[str, Any]:
    """Times whole updates (forward, backward, optimizer) of a recipe's model by its engine, each of one micro-batch of
    random tokens. If the recipe compiles, an update goes before that, and its seconds are told apart.

    Args:
        recipe: its settings; only model, optimizer, loss, clipping and layout matter.
        vocab: V, the size of the vocabulary of both sides.
        tokens: of a micro-batch, per side.
        length: of every sentence, per side, including eos.
        warm_up, steps: numbers of untimed and of timed updates.
        until: the deadline on this machine's `time.monotonic`; `timed_updates` does less work to meet it.
    """
    settings = check_recipe(recipe, "speed")
    with processes(settings.parallel.threads, group=True, device=settings.parallel.device) as ranks:
        layout = layout_of(settings, ranks.world)
        engine = start_engine(settings, layout, (vocab, vocab), ranks)
        taken: list[StepStats] = []

        @cache
        def batch_of(size: int, number: int) -> Batch:
            return random_batch(size // length, length, vocab, number, ranks)

        def update(size: int, number: int) -> float:
            batch = batch_of(size, number % 4)
            wait(ranks.device)
            started = time.perf_counter()
            taken.append(engine.train_step([batch], batch.tokens, 1e-5))
            wait(ranks.device)
            return time.perf_counter() - started

        compiling = update(tokens, 0) if settings.parallel.compile else None
        tokens, seconds = timed_updates(update, tokens, warm_up, steps, until)
        dropped = sum(not stats.applied for stats in taken[-len(seconds):])
        result = {"precision": layout.precision, "stage": layout.stage if layout.config else None,
                  "parameters": engine.parameters, "tokens": tokens // length * length, "length": length,
                  "vocab": vocab, "seconds_of_compiling": compiling,
                  "peak_memory_gib": _peak_memory(ranks.device),
                  "dropped": dropped, "loss_per_token": taken[-1].loss / (tokens // length * length)}
        engine.close()
    return {**result, **step_figures(settings.model, vocab, tokens // length, length, seconds)}


def _peak_memory(device: torch.device) -> float | None:
    """GiB; None on a CPU."""
    return torch.cuda.max_memory_allocated(device) / 2**30 if device.type == "cuda" else None


def timed_updates(
    update: Callable[[int, int], float], tokens: int, warm_up: int, steps: int, until: float
) -> tuple[int, list[float]]:
    """Runs updates until there are enough, or another one as long as the last would end after `until`.

    If time runs out early, the first half of the updates counts as warm-up. If there is no time for a second update,
    the tokens are halved until two fit, or until they reach `MIN_TOKENS`: then one update counts.

    Args:
        update: a function of an update's tokens and number that runs it and returns its seconds.
        tokens: of an update, if there is enough time.
        warm_up, steps: numbers of untimed and of timed updates, if there is enough time.
        until: the deadline on `time.monotonic`.

    Returns:
        The tokens of the timed updates, and the seconds of each.
    """
    seconds: list[float] = []
    while len(seconds) < warm_up + steps:
        seconds.append(update(tokens, len(seconds)))
        left = until - time.monotonic()
        if seconds[-1] <= left:
            continue
        if len(seconds) > 1 or tokens // 2 < MIN_TOKENS:
            break
        expected = seconds.pop()
        while 2 * expected > left and tokens // 2 >= MIN_TOKENS:
            tokens, expected = tokens // 2, expected / 2
    return tokens, seconds[min(warm_up, len(seconds) // 2):]


def step_figures(model: Model, vocab: int, sentences: int, length: int, seconds: Sequence[float]) -> dict[str, Any]:
    """Rates of the median update, from the times of updates on B sentences of `length` tokens per side."""
    median = statistics.median(seconds)
    flops = model_flops(model, vocab, sentences, length, length)
    return {"seconds_per_step": median, "fastest": min(seconds), "slowest": max(seconds), "steps": len(seconds),
            "source_tokens_per_second": sentences * length / median,
            "target_tokens_per_second": sentences * length / median,
            "model_tflop_per_step": flops / 1e12, "model_tflops": flops / median / 1e12}


def random_batch(sentences: int, length: int, vocab: int, seed: int, ranks: Ranks) -> Batch:
    """B sentences of `length` random tokens per side, the last one eos, without padding."""
    generator = torch.Generator().manual_seed(seed)
    src, trg_out = torch.randint(PAD + 1, vocab, (2, sentences, length), generator=generator)
    src[:, -1] = trg_out[:, -1] = EOS
    trg_in = torch.cat([torch.full((sentences, 1), BOS), trg_out[:, :-1]], dim=1)
    lengths = torch.full((sentences,), length)
    tensors = dict(zip(TRANSLATION, (src, lengths, trg_in, trg_out), strict=True))
    return Batch(tensors, seed, trg_out.numel()).to(ranks.device)


def updates(recipe: dict[str, Any]) -> dict[str, Any]:
    """Trains on real text in one layout; reports loss, loss scale, rate and memory.

    Rates are medians over the log's intervals, without the first, in which a device is still warming up. Model FLOPs
    (`model_flops`) are those of a pair of sentences of mean length.
    """
    settings = check_recipe(recipe, "gpu_layouts")
    with processes(settings.parallel.threads, group=True, device=settings.parallel.device) as ranks:
        code = train(settings, ranks)
        peak = _peak_memory(ranks.device)
    if code:
        sys.exit(code)
    log = read_log(Path(settings.run) / "log.jsonl")
    trained = [record for record in log if record["type"] == "train"]
    data = PreparedData.open(settings.data.folder)
    split, vocab = data.split("train"), data.vocabs()[1].size
    source, target = float(split.src_lengths.mean()), float(split.trg_lengths.mean())
    rate = statistics.median(record["target_tokens_per_second"] for record in trained[1:] or trained)
    flops = model_flops(settings.model, vocab, 1, source, target) / target
    scales = [record["loss_scale"] for record in trained]
    return {"ds_config": settings.parallel.ds_config, "precision": settings.parallel.precision,
            "stages": settings.parallel.pipeline_stages,
            "updates": trained[-1]["update"], "losses": [(r["update"], r["loss"]) for r in trained],
            "validation": next((r["loss"] for r in reversed(log) if r["type"] == "valid"), None),
            "loss_scales": {"first": scales[0], "lowest": min(scales), "highest": max(scales), "last": scales[-1]},
            "dropped": trained[-1]["skipped_updates"], "target_tokens_per_second": rate,
            "seconds_of_updates": trained[-1]["training_seconds"], "model_tflops": rate * flops / 1e12,
            "peak_memory_gib": peak}


def run_job(job: Path | str, answer: Path | str) -> int:
    """Runs the measurement that `job` names; the exit code is `OUT_OF_MEMORY` if the device has too little memory."""
    measurements: dict[str, Callable[..., dict[str, Any]]] = {"machine": machine, "step": step, "updates": updates}
    arguments = json.loads(Path(job).read_text(encoding="utf-8"))
    try:
        result = measurements[arguments.pop("measure")](**arguments)
    except torch.OutOfMemoryError as error:
        print(f"out of memory: {error}", file=sys.stderr)
        return OUT_OF_MEMORY
    write_json(Path(answer), result)
    return 0


if __name__ == "__main__":
    end_process(run_job(sys.argv[1], sys.argv[2]))
