"""Measures speed: training against a plain PyTorch loop in each layout, and translation with and without the cache.

Every measurement runs in new processes. The layouts take turns in each round, so that other load on the machine affects
all of them alike; the result is the median of the rounds, with the range.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from deepnmt.batch import Batch
from deepnmt.checkpoint.checkpoint import find_checkpoint, load_model
from deepnmt.config import Model, Recipe, Translate, check_recipe
from deepnmt.data.batching import Position
from deepnmt.data.mixing import training_stream
from deepnmt.data.prepared import PreparedData, open_prepared
from deepnmt.decode.models import cast_weights
from deepnmt.decode.steppers import CachedStepper
from deepnmt.decode.translate import translate_shards
from deepnmt.errors import UserError
from deepnmt.files import make_parent_folder, write_json
from deepnmt.model.positions import sinusoids
from deepnmt.parallel.build import start_engine
from deepnmt.parallel.ds_config import layout_of
from deepnmt.processes.process_group import count_gpus
from deepnmt.processes.ranks import Ranks
from deepnmt.progress import print_status
from deepnmt.tokens import PAD
from studies.benchmarks.recomputing import RecomputingStepper
from studies.benchmarks.workers import answer_job, run_workers

# Ways to translate the test set: whether the cache is used, and changes to the recipe's `translate` settings.
TRANSLATIONS: dict[str, tuple[bool, dict[str, Any]]] = {
    "cached": (True, {}),
    "cached, patience 1": (True, {"patience": 1.0}),
    "cached, bf16": (True, {"precision": "bf16"}),
    "cached, patience 1, bf16": (True, {"patience": 1.0, "precision": "bf16"}),
    "no cache": (False, {}),
}
MICRO_BATCHES = 2  # at least, in every update and layout: two processes take one each, one process takes both


def placements(cores: int, gpus: int) -> list[tuple[int, int]]:
    """(processes, threads of each): one with all cores, and one per core, or per GPU if there are any."""
    many = (gpus, max(1, cores // gpus)) if gpus else (cores, 1)
    return list(dict.fromkeys([(1, cores), many]))


def _training_cases(placements: list[tuple[int, int]]) -> dict[str, tuple[str, int, int]]:
    """By name: engine ("torch" for the plain PyTorch loop, "local", or a DeepSpeed configuration and precision),
    processes, and threads of each."""
    cases = {}
    for count, threads in placements:
        where = f"{count} process{'es' if count > 1 else ''} x {threads} thread{'s' if threads > 1 else ''}"
        fp32 = ("local fp32", "local") if count == 1 else ("ZeRO-1 fp32", "zero1_fp32")
        for name, engine in (("torch.nn.Transformer fp32", "torch"), (f"deepnmt {fp32[0]}", fp32[1]),
                             ("deepnmt ZeRO-1 bf16", "zero1_bf16")):
            cases[f"{name}, {where}"] = engine, count, threads
    return cases


def benchmark(recipe: Recipe, updates: int, rounds: int, translate_run: Path | None, output: Path) -> None:
    """Times training (and, with a trained run, translation); prints a table and writes a JSON file.

    Args:
        recipe: for shape, batch.tokens and prepared data.
        updates: timed updates in each round, after an untimed pass over the same batches.
        translate_run: a run to translate its first test set with, by the settings of `recipe`.
        output: the JSON file.

    Raises:
        UserError: the prepared data are missing; `translate_run` has no complete checkpoint; `output` cannot be
            written.
    """
    open_prepared(recipe)
    if translate_run is not None:
        find_checkpoint(translate_run)
    make_parent_folder(output)
    places = placements(len(os.sched_getaffinity(0)), count_gpus())
    cases = _training_cases(places)
    micro_batches = max(MICRO_BATCHES, *(count for count, _ in places))
    trained: dict[str, list[float]] = {name: [] for name in cases}
    for number, (name, (engine, count, threads)) in product(range(1, rounds + 1), cases.items()):
        rate = _rate("train", count, threads, engine=engine, updates=updates, micro_batches=micro_batches,
                     recipe=recipe.model_dump())
        trained[name].append(rate)
        print_status(f"round {number}/{rounds}  {name:<52} {rate:9,.0f} target tokens/s")
    figures = {"training_target_tokens_per_second": trained}
    if translate_run is not None:
        translated: dict[str, list[float]] = {}
        settings = recipe.translate
        ways = [(way, cache, settings.model_copy(update=changes)) for way, (cache, changes) in TRANSLATIONS.items()
                if settings.method == "beam" or "patience" not in changes]
        for _, (way, cache, changed), (count, threads) in product(range(rounds), ways, places):
            name = f"{way}, {count} x {threads} threads"
            rate = _rate("translate", count, threads, run=str(translate_run), cache=cache,
                         settings=changed.model_dump())
            translated.setdefault(name, []).append(rate)
            print_status(f"{name:<62} {rate:9,.1f} sentences/s")
        figures["translation_sentences_per_second"] = translated
    for title, results in figures.items():
        plain = max((statistics.median(v) for k, v in results.items() if k.startswith("torch")), default=None)
        print(f"\n{title.replace('_', ' ')}")
        for name, rates in results.items():
            median = statistics.median(rates)
            ratio = f"  {median / plain:5.2f} x the best plain PyTorch loop" if plain else ""
            print(f"  {name:<52} {median:9,.1f}  ({min(rates):,.1f} to {max(rates):,.1f}){ratio}")
    write_json(output, {"machine": _machine(), "recipe": recipe.model_dump(), "updates": updates, **figures})


def _rate(job: str, count: int, threads: int, **settings: Any) -> float:
    """The rate of a job on `count` new processes."""
    return float(run_workers("studies.benchmarks.training", {"job": job, **settings}, count, threads))


def _work(job: dict[str, Any], ranks: Ranks) -> float:
    return _train_rate(job, ranks) if job["job"] == "train" else _translate_rate(job, ranks)


def _train_rate(job: dict[str, Any], ranks: Ranks) -> float:
    """Target tokens per second of the whole update loop, collating included.

    Every batch is used twice and timed the second time, because oneDNN compiles 16-bit products for each new shape, and
    a run meets few new shapes after its first epoch.
    """
    tree = job["recipe"]
    own = job["engine"] not in ("torch", "local")
    zero, _, precision = job["engine"].partition("_")
    tree["parallel"] |= {"ds_config": f"ds_configs/{zero}.json" if own else None,
                         "precision": precision if own else "fp32"}
    tree["batch"]["accumulation"] = job["micro_batches"] // ranks.world
    recipe = check_recipe(tree, "benchmark")
    data = open_prepared(recipe)
    source, target = data.vocabs()
    step: Callable[[list[Batch], int], object]
    if job["engine"] == "torch":
        step = PlainLoop(recipe, target.size, ranks).step
    else:
        engine = start_engine(recipe, layout_of(recipe, ranks.world), (source.size, target.size), ranks)
        step = lambda batches, tokens: engine.train_step(batches, tokens, 1e-4)  # noqa: E731
    stream = training_stream(recipe, data)
    total, started = 0, 0.0
    for update in range(2 * job["updates"]):
        if update % job["updates"] == 0:
            ranks.barrier()
            started, total, position = time.perf_counter(), 0, Position(0, 0)
        due = stream.update(position, job["micro_batches"], ranks.rank, ranks.world, ranks.device)
        step(due.batches, due.tokens)
        total, position = total + due.tokens, due.next
    ranks.barrier()
    return total / (time.perf_counter() - started)


def _translate_rate(job: dict[str, Any], ranks: Ranks) -> float:
    loaded = load_model(Path(job["run"]))
    data = PreparedData.open(loaded.recipe.data.folder)
    names = [name for name in data.splits if name.startswith("test.")]
    if not names:
        raise UserError(f"{loaded.recipe.data.folder} has no test set to translate; set data.test and prepare again")
    lines = data.split(names[0]).src_text()
    stepper = CachedStepper if job["cache"] else RecomputingStepper
    settings = Translate.model_validate(job["settings"])
    model = cast_weights(loaded.model, settings.precision).to(ranks.device)

    def run(texts: list[str]) -> None:
        for _ in translate_shards(model, loaded.vocabs, texts, settings, ranks, stepper=stepper):
            pass

    run(lines[:20])
    ranks.barrier()
    started = time.perf_counter()
    run(lines)
    ranks.barrier()
    return len(lines) / (time.perf_counter() - started)


class PlainLoop:
    """A plain PyTorch loop to compare with: `torch.nn.Transformer`, Adam, DistributedDataParallel, fp32."""

    def __init__(self, recipe: Recipe, vocab: int, ranks: Ranks) -> None:
        self.smoothing, self.ranks = recipe.train.label_smoothing, ranks
        module = PlainTransformer(recipe.model, vocab).to(ranks.device)
        self.module = DistributedDataParallel(module) if ranks.world > 1 else module
        self.optimizer = torch.optim.Adam(module.parameters(), lr=1e-4, betas=(0.9, 0.98), eps=1e-9)

    def step(self, batches: list[Batch], tokens: int) -> None:
        """One update; gradients of the sum over all processes, divided by the update's target tokens."""
        self.module.train()
        for batch in batches:
            logits = self.module(batch["src"], batch["src_lengths"], batch["trg_in"])
            loss = F.cross_entropy(logits.flatten(0, 1), batch["trg_out"].flatten(), ignore_index=PAD, reduction="sum",
                                   label_smoothing=self.smoothing)
            (loss * self.ranks.world / tokens).backward()
        nn.utils.clip_grad_norm_(self.module.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


class PlainTransformer(nn.Module):
    """`torch.nn.Transformer` with tied embeddings and output projection."""

    positions: torch.Tensor

    def __init__(self, model: Model, vocab: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab, model.width, padding_idx=PAD)
        nn.init.normal_(self.embedding.weight, std=model.width**-0.5)
        self.register_buffer("positions", sinusoids(model.max_length, model.width))
        self.dropout = nn.Dropout(model.dropout)
        self.transformer = nn.Transformer(
            model.width, model.heads, model.encoder.layers, model.decoder.layers, model.ffn, model.dropout,
            batch_first=True, norm_first=model.encoder.block == "pre_ln")
        # deepnmt has separate dropout rates for attention weights and inside the FFN; PyTorch uses the branches' rate.
        for layer in (*self.transformer.encoder.layers, *self.transformer.decoder.layers):
            layer.dropout.p = model.activation_dropout
            for attention in (child for child in layer.children() if isinstance(child, nn.MultiheadAttention)):
                attention.dropout = model.attention_dropout

    def forward(self, src: torch.Tensor, lengths: torch.Tensor, trg_in: torch.Tensor) -> torch.Tensor:
        """Logits [B, T, V]."""
        padding = torch.arange(src.size(1), device=src.device)[None, :] >= lengths[:, None]
        causal = nn.Transformer.generate_square_subsequent_mask(trg_in.size(1), device=src.device)
        hidden = self.transformer(self._input(src), self._input(trg_in), tgt_mask=causal, src_key_padding_mask=padding,
                                  memory_key_padding_mask=padding, tgt_is_causal=True)
        return F.linear(hidden, self.embedding.weight)

    def _input(self, ids: torch.Tensor) -> torch.Tensor:
        scale = self.embedding.embedding_dim**0.5
        return self.dropout(self.embedding(ids) * scale + self.positions[: ids.size(1)])


def _machine() -> dict[str, Any]:
    info = Path("/proc/cpuinfo").read_text(encoding="utf-8") if Path("/proc/cpuinfo").exists() else ""
    model = next((line.partition(":")[2].strip() for line in info.splitlines() if line.startswith("model name")), "?")
    return {"cpu": model, "cores": len(os.sched_getaffinity(0)), "avx512_bf16": "avx512_bf16" in info,
            "amx_bf16": "amx_bf16" in info, "gpus": [torch.cuda.get_device_name(n) for n in range(count_gpus())],
            "torch": torch.__version__, "load": os.getloadavg()[0]}


if __name__ == "__main__":
    answer_job(_work)
