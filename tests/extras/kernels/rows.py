"""What is traced on a GPU that is not there; each function is a process of its own and prints its figures as JSON."""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any, cast

import torch
from fake_gpu import CUDA, ROOT, FakeTensorMode, Trace, begin, collectives, tracing, world
from small_models import BLOCKS

from deepnmt.batch import TRANSLATION, Batch
from deepnmt.config import Recipe, load_recipe
from deepnmt.data.batching import START, Update
from deepnmt.decode import translate
from deepnmt.decode.next_tokens import LengthPenalty
from deepnmt.decode.search import beam_search
from deepnmt.decode.steppers import CachedStepper
from deepnmt.device import upload
from deepnmt.extras.doctor import measures
from deepnmt.extras.doctor.nonfinite import first_non_finite
from deepnmt.extras.kernels import replacements
from deepnmt.model import overrides
from deepnmt.model.blocks import SIDES, Side
from deepnmt.model.sublayers import key_mask
from deepnmt.model.transformer import Transformer, build_layer
from deepnmt.parallel.build import start_engine
from deepnmt.parallel.ds_config import layout_of
from deepnmt.parallel.engine import LocalEngine
from deepnmt.processes.ranks import Ranks
from deepnmt.training.dry_run import memory_estimate
from deepnmt.training.state import TrainState
from deepnmt.training.updates import updates

LONG = bool(os.environ.get("DEEPNMT_LONG"))

VOCAB = 100
SMALL = ["model.width=64", "model.ffn=128", "model.heads=4", "model.encoder.layers=2", "model.decoder.layers=2",
         "train.clip=1.0", "batch.accumulation=2"]


def recipe_of(name: str, *changes: str) -> Recipe:
    return load_recipe(ROOT / "recipes" / f"{name}.yaml", list(changes))


def batch_of(sentences: int, source: int, target: int, key: int = 5) -> Batch:
    def ids(*size: int) -> torch.Tensor:
        return torch.zeros(*size, dtype=torch.int64, device=CUDA)

    tensors = (ids(sentences, source), ids(sentences), ids(sentences, target), ids(sentences, target))
    return Batch(dict(zip(TRANSLATION, tensors, strict=True)), key, sentences * target)


def take_update(engine: Any, recipe: Recipe, ranks: Ranks, batches: list[Batch]) -> None:
    """An update as training makes it, logs and the question for a signal included."""
    tokens = engine.data_world * sum(batch.tokens for batch in batches)

    def update(*_: Any) -> Update:
        fresh = [batch.with_tensors(**{name: upload(torch.zeros_like(tensor, device="cpu"), CUDA)
                                       for name, tensor in batch.tensors.items()}) for batch in batches]
        return Update(fresh, tokens, 0.0, START)

    stream = cast(Any, SimpleNamespace(update=update))
    next(updates(engine, stream, recipe, TrainState(), ranks))


def faults(found: dict[str, str], name: str, call: Callable[[], Any]) -> Any:
    """Calls; what it raises is kept by name."""
    try:
        return call()
    except Exception as error:
        places = [f"{frame.filename.rpartition('/')[2]}:{frame.lineno}" for frame in
                  traceback.extract_tb(error.__traceback__)[-4:]]
        found[name] = f"{type(error).__name__}: {str(error)[:300]} {places}"


def blocks() -> dict[str, Any]:
    """Every block by the local engine: an update, evaluation, what is saved, decoding; the doctor's probes of some."""
    found: dict[str, str] = {}
    waits: dict[str, Any] = {}
    for block in BLOCKS:
        recipe = recipe_of("demo/admin_18l-18l", *SMALL, f"model.encoder.block={block}", f"model.decoder.block={block}",
                           "admin.profile=null")
        with FakeTensorMode(allow_non_fake_inputs=True), torch.device(CUDA), tracing() as trace:
            waits[block] = traced_block(recipe, trace, {} if LONG or block in PROBED else None, block, found)
    return {"faults": found, "waits": waits}


PROBED = ("b2t", "admin", "dlcl")  # the others if DEEPNMT_LONG is set


def traced_block(recipe: Recipe, trace: Trace, probed: dict[str, Any] | None, block: str, found: dict[str, str]
                 ) -> dict[str, int]:
    """Runs everything with one block; returns what an update of two micro-batches made the host wait for."""
    model = Transformer(recipe.model, VOCAB, VOCAB, 1, after_build=lambda part: None)
    batch, engine = batch_of(4, 9, 7), LocalEngine(model, recipe, CUDA)
    trace.waits.clear()
    calls: dict[str, Callable[[], Any]] = {"update": lambda: engine.train_step([batch, batch], 56, 1e-3)}
    faults(found, f"{block} update", calls.pop("update"))
    waits = dict(sorted(trace.waits.items()))
    calls["evaluation"] = lambda: engine.evaluate([batch])
    calls["owned"] = lambda: [part.weight.new_empty(1, device=CUDA) for part in engine.owned()]
    if probed is not None:
        calls |= {
            "dependency": lambda: [measures.dependency(model, batch, side) for side in SIDES],
            "similarity": lambda: [measures.layer_similarity(model, batch, side) for side in SIDES],
            "gradients": lambda: measures.gradients(model, batch),
            "ranges": lambda: measures.ranges(model, batch),
            "noise": lambda: measures.noise_change(model, batch, trials=1),
            "non-finite": lambda: first_non_finite(model, [batch]),
        }
    calls["decoding"] = lambda: decode(model, batch)
    for name, call in calls.items():
        faults(found, f"{block} {name}", call)
    return waits


@torch.no_grad()
def decode(model: Any, batch: Batch) -> None:
    model.eval()
    src, lengths, beams = batch["src"], batch["src_lengths"], 3
    sentences = len(src)
    cache = model.start_cache(model.encode(src, lengths), lengths, beams, 6)
    model.step(torch.zeros(sentences, dtype=torch.int64), cache)
    cache.reorder(torch.arange(sentences * beams))
    model.logits(model.step(torch.zeros(sentences * beams, dtype=torch.int64), cache))
    cache.select([0, 1])
    model.logits(model.step(torch.zeros(2 * beams, dtype=torch.int64), cache))


# DeepSpeed's file, precision, processes, rank and stages.
LAYOUTS = [
    *((f"zero{stage}", "bf16", 8, 0, 0) for stage in range(4)),
    ("zero1", "bf16", 2, 1, 0), ("zero1", "fp16", 2, 0, 0), ("zero0", "fp16", 1, 0, 0), ("zero2", "fp32", 2, 0, 0),
    ("zero3", "bf16", 1, 0, 0), ("zero3_offload", "bf16", 2, 0, 0),
    ("zero1", "bf16", 1, 0, 1), ("zero0", "fp16", 2, 0, 2), ("zero1", "bf16", 2, 1, 2),
    *(("zero1", "bf16", 8, rank, 4) for rank in (0, 2, 6)),
]
if LONG:
    LAYOUTS += [row for precision, size in (("bf16", 1), ("bf16", 2), ("fp32", 2), ("fp16", 2)) for stage in range(4)
                if (row := (f"zero{stage}", precision, size, 0, 0)) not in LAYOUTS]


def layouts() -> dict[str, Any]:
    """Every layout: start, update, evaluation, what is saved and read, and the whole model."""
    found: dict[str, str] = {}
    waits: dict[str, Any] = {}
    messages: dict[str, Any] = {}
    for config, precision, size, rank, stages in LAYOUTS:
        name = f"{config} {precision} {rank}/{size}" + f" {stages} stages" * bool(stages)
        recipe = recipe_of("demo/admin_18l-18l", *SMALL, "model.encoder.block=b2t", "model.decoder.block=b2t",
                           f"parallel.ds_config={ROOT}/ds_configs/{config}.json", f"parallel.precision={precision}",
                           f"parallel.pipeline_stages={stages}",
                           *(() if stages else ("model.encoder.layers=1", "model.decoder.layers=1")))

        def run(name: str = name, recipe: Recipe = recipe, size: int = size, rank: int = rank, stages: int = stages
                ) -> None:
            with world(rank, size) as ranks, FakeTensorMode(allow_non_fake_inputs=True), torch.device(CUDA), \
                    tracing() as trace, offloading("offload" in name) as place:
                batch = batch_of(4, 9, 7)
                engine: Any = start_engine(recipe, layout_of(recipe, size), (VOCAB, VOCAB), ranks)
                place.enter_context(torch.device("cpu" if "offload" in name else CUDA))
                trace.waits.clear()
                collectives.clear()
                take_update(engine, recipe, ranks, [batch, batch])
                waits[name], messages[name] = dict(sorted(trace.waits.items())), dict(sorted(collectives.items()))
                if stages:  # else two events of every update would be kept
                    assert not engine.engine.timers("train_batch").event_timers
                engine.evaluate([batch])
                parts = {part.name: part for part in engine.owned()}
                assert all(part.weight.dtype == torch.float32 for part in parts.values())
                engine.fill(lambda key: torch.zeros(dict(engine_shapes(engine))[key]), step=3)
                engine.gather_model()
                engine.close()

        faults(found, name, run)
    probed = "__compatible_ops__" in vars(sys.modules["deepspeed.ops"])
    return {"faults": found, "waits": waits, "messages": messages, "probed": probed}


@contextmanager
def offloading(wanted: bool) -> Iterator[ExitStack]:
    """Where DeepSpeed offloads, what it names no device for is on the CPU, from its start on; but not the model."""
    from deepnmt.parallel.zero import ZeroEngine

    kept = {name: getattr(ZeroEngine, name) for name in ("_start", "_create_optimizer_state", "fill")}

    def on_cpu(method: Callable[..., None]) -> Callable[..., None]:
        def run(*args: Any, **named: Any) -> None:
            with torch.device("cpu"):
                method(*args, **named)

        return run

    for name, method in kept.items() if wanted else ():
        setattr(ZeroEngine, name, on_cpu(method))
    with ExitStack() as place:
        yield place
    for name, method in kept.items():
        setattr(ZeroEngine, name, method)


def engine_shapes(engine: Any) -> dict[str, tuple[int, ...]]:
    return {name: tuple(getattr(p, "ds_shape", p.shape)) for name, p in engine.local.items()}


DEEP = {"encoder": 60, "decoder": 12}


def counts(*settings: str) -> dict[str, Any]:
    """Launches, bytes and memory of an update of 60L-12L with 28,672 tokens a side, as on eight GPUs; and of decoding
    with 12 and with 100 layers."""
    configs = [("zero1", "bf16"), *([("zero1", "fp16"), ("zero0", "bf16")] if LONG else [])]
    found: dict[str, Any] = {f"{zero} {precision}": update_of(zero, precision, *settings)
                             for zero, precision in configs}
    found["layers"] = {side: layer_of(side) for side in SIDES}
    found["decoding"] = decoding("60l-12l", 100, 256, 10, "model.encoder.layers=2")  # which a step does not see
    found["deepest"] = decoding("100l-100l", 30)
    return found


def counts_with_kernels() -> dict[str, Any]:
    """The same with `parallel.overrides: [triton]`, of which only shapes are traced."""
    replacements.check = lambda device: None
    overrides.use(["triton"], CUDA)
    return counts("parallel.overrides=[triton]")


def update_of(zero: str, precision: str, *more: str) -> dict[str, Any]:
    """Figures of an update, and the memory that `--dry-run` says. All but the last are sums over layers, so they follow
    from models of two and three layers; DEEPNMT_LONG traces the whole depth."""
    settings = (f"parallel.ds_config={ROOT}/ds_configs/{zero}.json", f"parallel.precision={precision}",
                "train.clip=0.1", *more)
    if LONG:
        found = traced_update(DEEP, *settings)
    else:
        least = dict.fromkeys(DEEP, 2)
        found = traced_update(least, *settings)
        slopes = {side: traced_update({**least, side: 3}, *settings) for side in DEEP}
        for slope in slopes.values():
            slope.subtract(found)
        for side, slope in slopes.items():
            found.update({name: (DEEP[side] - least[side]) * count for name, count in slope.items()})
    recipe = recipe_of("wmt14_en_de/60l-12l", *settings)
    estimate = memory_estimate(recipe, layout_of(recipe, 8), found["parameters"], recipe.vocab.size, "cuda")
    return {"micro_batch": round(found["micro_batch"]), "update": round(found["update"]),
            "gigabytes": round(found["bytes"] / 1e9), "peak": found["peak"], "estimate": sum(estimate.values()),
            "waits": {name.removeprefix("waits "): n for name, n in found.items() if name.startswith("waits ")}}


def traced_update(layers: dict[str, int], *settings: str) -> Counter[str]:
    recipe = recipe_of("wmt14_en_de/60l-12l", *settings, *(f"model.{side}.layers={n}" for side, n in layers.items()))
    vocab, layout = recipe.vocab.size, layout_of(recipe, 8)
    with world(0, 8) as ranks, FakeTensorMode(allow_non_fake_inputs=True), torch.device(CUDA), tracing() as trace:
        engine = start_engine(recipe, layout, (vocab, vocab), ranks, initialise=False)
        trace.clear()
        batches = [batch_of(1024, 28, 28, key) for key in (1, 2)]
        begun: list[tuple[int, int]] = []
        module = cast(Any, engine).module
        module.register_forward_pre_hook(lambda *_: begun.append((trace.launches, trace.moved)))
        trace.clear()
        take_update(engine, recipe, ranks, batches)
        (first, first_bytes), (second, second_bytes) = begun
        return Counter(
            micro_batch=second - first, update=trace.launches - 2 * (second - first), bytes=second_bytes - first_bytes,
            peak=trace.peak, parameters=engine.parameters,
            **{f"waits {name}": count for name, count in trace.waits.items()})


def layer_of(side: Side) -> dict[str, float]:
    """Launches of a layer of 60L-12L in bf16, forward and backward, and what its operations move that are no matrix
    product and no attention, in numbers of the model's width for each token."""
    recipe = recipe_of("wmt14_en_de/60l-12l")
    width = recipe.model.width
    with FakeTensorMode(allow_non_fake_inputs=True), torch.device(CUDA), tracing() as trace:
        layer = build_layer(recipe.model, side, 1, 1).bfloat16().train()
        x, memory = (torch.zeros(1024, 28, width, dtype=torch.bfloat16, requires_grad=True) for _ in range(2))
        mask = key_mask(batch_of(1024, 28, 28)["src_lengths"], 28, x.dtype)
        grad = torch.zeros_like(x)
        trace.clear()
        layer(x, *[memory] * (side == "decoder"), mask, 1).backward(grad)
        moved = sum(size for name, size in trace.bytes.items() if "mm" not in name and "attention" not in name)
    return {"launches": trace.launches, "element_wise": round(moved / x.numel() / x.element_size(), 1)}


@torch.no_grad()
def decoding(name: str, length: int, sentences: int = 0, steps: int = 2, *changes: str) -> dict[str, Any]:
    """A search's first steps for sentences of `length` tokens on a GPU of 80 GB; as many as fit, if not given.
    Launches are those of a step, on the mean over eight, waits those of eight."""
    recipe = recipe_of(f"wmt14_en_de/{name}", *changes)
    settings, vocab = recipe.translate, recipe.vocab.size
    with FakeTensorMode(allow_non_fake_inputs=True), torch.device(CUDA), tracing() as trace:
        model = Transformer(recipe.model, vocab, vocab, 1, after_build=lambda part: None).eval()
        longest = translate.most_steps(model, settings, length)
        asked = settings.batch_tokens // (length * settings.beam)
        weights = trace.held
        torch.cuda.mem_get_info = lambda *_: (int(80e9 - 2.5 * 2**30) - weights, int(80e9))
        if not sentences:
            sentences = min(asked, translate.sentences_that_fit(model, length, longest, settings.beam))
        batch = batch_of(sentences, length, 1)
        begun: list[tuple[float, int]] = []

        class Counted(CachedStepper):
            def step(self, tokens: torch.Tensor) -> torch.Tensor:
                begun.append((trace.launches, trace.waits.total()))
                return super().step(tokens)

        stepper = Counted(model, batch["src"], batch["src_lengths"], settings.beam, longest)
        limits = torch.zeros(sentences, dtype=torch.int64)
        limits.known = [steps] * sentences  # type: ignore[attr-defined]
        beam_search(stepper, limits, settings.beam, 1, LengthPenalty("average", 1.0))
        stepper.select(list(range(1, sentences // 2)))
        counted = min(8, len(begun) - 1)
        launches, waits = (after - before for after, before in zip(begun[-1], begun[-1 - counted], strict=True))
    return {"sentences": sentences, "asked": asked, "peak": trace.peak, "waits": waits,
            "launches": round(launches / counted, 1)}


if __name__ == "__main__":
    begin()
    print(json.dumps(globals()[sys.argv[1]]()))
    sys.stdout.flush()
    os._exit(0)  # what answers for CUDA cannot be taken down in order
