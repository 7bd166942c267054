"""What only a GPU can show: it computes what the CPU does, in every block, engine and search, and nothing stalls it.

    DS_ACCELERATOR=cuda python -m pytest tests/gpu

takes a few minutes of one GPU and no network. Without a GPU the same code runs on the CPU, on a few of the rows, so
that the first visit to a GPU does not find it broken; with DEEPNMT_LONG=1 on all of them.
"""

from __future__ import annotations

import os
import signal
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from run_files import losses, records
from small_models import BLOCKS, VOCAB, batch, batch_of, model_of, shapes
from tiny_engines import batches, build, export_state, parallel, recipe_with, step

from deepnmt.config import Recipe, load_recipe
from deepnmt.decode.next_tokens import LengthPenalty
from deepnmt.decode.search import beam_search, choose_greedily, decode_independently
from deepnmt.decode.steppers import CachedStepper
from deepnmt.model.init import new_model
from deepnmt.parallel import compiled
from deepnmt.parallel.deepspeed import supported_precisions
from deepnmt.processes.process_group import processes
from deepnmt.processes.ranks import Ranks
from deepnmt.training.status import FINISHED, PREEMPTED
from deepnmt.training.trainer import train

ON_GPU = os.environ.get("DS_ACCELERATOR") == "cuda"
ALL = ON_GPU or bool(os.environ.get("DEEPNMT_LONG"))
LAYOUTS = [(f"zero{stage}_{precision}", 0) for precision in ("bf16", "fp16", "fp32") for stage in range(4)]
LAYOUTS += [("zero1_bf16", 1), ("zero1_fp16", 1)]  # pipelines of one stage


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    """This process, prepared as training prepares it: allocator, attention, sums."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "environ", os.environ.copy())  # later tests must not use this group's port
        with processes(1, group=True, device="cuda" if ON_GPU else "cpu") as ranks:
            yield ranks


# -- the same as a CPU -------------------------------------------------------------------------------------------------


def computed(block: Any, device: torch.device) -> tuple[float, torch.Tensor]:
    """The loss of a small model without dropout, on sentences with padding, and all its gradients."""
    model = model_of(block).to(device)
    sums = model(batch_of(*batch([5, 9, 3], [4, 6, 7])).to(device))
    sums.loss.backward()
    gradients = [p.grad.flatten().cpu() for p in model.parameters() if p.grad is not None]
    return float(sums.loss.detach()), torch.cat(gradients)


@pytest.mark.parametrize("block", BLOCKS if ALL else BLOCKS[:2])
def test_a_block_computes_what_it_does_on_a_cpu(block: Any, ranks: Ranks) -> None:
    """In fp32, which a GPU must not round to tf32."""
    (loss, gradients), (there, theirs) = computed(block, torch.device("cpu")), computed(block, ranks.device)
    assert there == pytest.approx(loss, rel=1e-5)
    assert float((theirs - gradients).norm() / gradients.norm()) < 1e-4


@torch.no_grad()
@pytest.mark.parametrize("block", ["admin", *(["pre_ln", "dlcl"] if ALL else [])])
def test_a_search_finds_what_it_does_on_a_cpu(block: Any, ranks: Ranks) -> None:
    """Greedy and beam search in fp32."""
    found = []
    for device in (torch.device("cpu"), ranks.device):
        src, lengths = (tensor.to(device) for tensor in batch([5, 9, 3, 7], [1] * 4)[:2])
        model, limits = model_of(block).to(device), torch.full((4,), 12, device=device)
        penalty = LengthPenalty("average", 1.0)
        found.append(beam_search(CachedStepper(model, src, lengths, 3, 12), limits, 3, 2, penalty)
                     + decode_independently(CachedStepper(model, src, lengths, 1, 12), limits, 1, choose_greedily,
                                            penalty))
    for here, there in zip(*found, strict=True):
        assert [c.tokens for c in here] == [c.tokens for c in there]
        assert [c.score for c in here] == pytest.approx([c.score for c in there], abs=1e-4)


# -- engines -----------------------------------------------------------------------------------------------------------


def tiny(layout: str, stages: int = 0, dropout: float = 0.0, **train: Any) -> Recipe:
    """Two layers a side, three micro-batches an update."""
    return recipe_with(
        batch={"accumulation": 3}, loss_scale={"initial_power": 4}, train={"updates": 100, **train},
        model={"width": 16, "heads": 2, "ffn": 32, "dropout": dropout,
               "encoder": {"block": "admin", "layers": 2}, "decoder": {"block": "b2t", "layers": 2}},
        parallel=parallel(layout, stages))


def updates(engine: Any, ranks: Ranks, *numbers: int) -> list[tuple[float, float]]:
    """Loss a token and gradient norm of each update."""
    found = []
    for number in numbers:
        plan = [b.to(ranks.device) for b in batches(number, 3)]
        loss, norm, _, applied = step(engine, plan, ranks, 1e-3)
        assert applied
        found.append((loss, norm))
    return found


@pytest.mark.parametrize(("layout", "stages"), LAYOUTS if ALL else [("zero1_bf16", 0), ("zero3_fp32", 0)])
def test_an_engine_computes_what_the_local_one_does(layout: str, stages: int, ranks: Ranks) -> None:
    """Three updates; then it is filled from what it saves, and makes the fourth again."""
    precision = layout.rpartition("_")[2]
    if precision not in supported_precisions():
        pytest.skip(f"this device computes no {precision}")
    dropout = 0.2 if precision == "fp32" else 0.0  # a GPU's masks depend on the type
    local, engine = build(tiny("local", 0, dropout), ranks), build(tiny(layout, stages, dropout), ranks)
    near = {"fp32": 1e-5, "fp16": 5e-3, "bf16": 2e-2}[precision]
    for ours, theirs in zip(updates(local, ranks, 0, 1, 2), updates(engine, ranks, 0, 1, 2), strict=True):
        assert theirs == pytest.approx(ours, rel=near)
    saved = {s.name: s for s in export_state(engine)}
    moments = {name: tensor for s in saved.values() for name, tensor in s.moments.items()}
    fourth = updates(engine, ranks, 3)
    engine.fill(lambda name: saved[name].weight, lambda name: moments[name], step=3)
    assert updates(engine, ranks, 3)[0] == pytest.approx(fourth[0], rel=1e-6)
    engine.close()


def test_compiled_layers_train_to_the_same_losses(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    """By Inductor; on a CPU, where its compiler takes a minute, the graphs alone. Without dropout: a GPU's graphs
    draw other masks."""
    if not ALL:
        monkeypatch.setattr(compiled.compile_layers, "__defaults__", ("eager",))
    torch._dynamo.reset()
    found = []
    for wanted in (False, True):
        recipe = tiny("zero1_fp32" if ALL else "local")
        engine = build(recipe.model_copy(update={"parallel": recipe.parallel.model_copy(update={"compile": wanted})}),
                       ranks)
        found.append(updates(engine, ranks, 0, *((1, 2) if ALL else ())))
        engine.close()
    for ours, theirs in zip(*found, strict=True):
        assert theirs == pytest.approx(ours, rel=1e-4)


# -- speed -------------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not ON_GPU, reason="a CPU has no queue to wait for; test_dry_gpu.py counts waits on any machine")
def test_no_micro_batch_makes_the_host_wait(ranks: Ranks) -> None:
    """PyTorch itself tells of each wait."""
    model = new_model(shapes("admin", dropout=0.1), VOCAB, VOCAB, 1, 0.1).to(ranks.device).train()
    given = batch_of(*batch([5, 9, 3], [4, 6, 7])).to(ranks.device)
    model(given).loss.backward()  # the first call makes tables
    torch.cuda.set_sync_debug_mode("error")
    try:
        model(given).loss.backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_new_shapes_do_not_stall(ranks: Ranks) -> None:
    """An epoch has some 10,000 shapes, and cuDNN's attention would make a plan for each."""
    model = new_model(shapes("pre_ln", dropout=0.1), VOCAB, VOCAB, 1, 0.1).to(ranks.device)
    if ON_GPU:
        assert not torch.backends.cuda.cudnn_sdp_enabled()
        model = model.bfloat16()
    seconds = []
    for number in range(200 if ALL else 20):
        lengths = [3 + number % 20, 5 + number % 7, 4 + number // 10]
        given = batch_of(*batch(lengths, [n + 2 for n in lengths], number), key=number).to(ranks.device)
        begun = time.perf_counter()
        model(given).loss.backward()
        if ON_GPU:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begun)
    assert max(seconds[10:]) < 20 * statistics.median(seconds) + 0.05, sorted(seconds)[-5:]


# -- a run -------------------------------------------------------------------------------------------------------------


def trained(prepared: Path, run: Path, ranks: Ranks, stop_in: int = 0) -> dict[int, float]:
    """Trains 12 updates under ZeRO-1 in bf16, or stops in one; the losses."""
    layout = [f"parallel.{name}={value}" for name, value in parallel("zero1_bf16").items()]
    recipe = load_recipe(prepared / "recipe.yaml", [f"run={run}", *layout, "train.deterministic=true"])

    @contextmanager
    def around(number: int) -> Iterator[None]:
        if number == stop_in:
            os.kill(os.getpid(), signal.SIGTERM)
        yield

    assert train(recipe, ranks, watch=lambda *_: around) == (PREEMPTED if stop_in else FINISHED)
    return losses(run)


def test_a_run_says_where_it_is_and_resumes_to_the_same_bits(prepared: Path, ranks: Ranks, tmp_path: Path) -> None:
    """With `train.deterministic`."""
    whole = trained(prepared, tmp_path / "whole", ranks)
    assert records(tmp_path / "whole", "event")[0]["device"].startswith(str(ranks.device))
    trained(prepared, tmp_path / "parts", ranks, stop_in=7)
    assert trained(prepared, tmp_path / "parts", ranks) == whole and len(whole) == 12
