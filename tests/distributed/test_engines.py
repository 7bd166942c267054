"""Every ZeRO stage computes what the plain engine computes, on one and on two processes, and takes its state back."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from ranks import run_on_ranks

from deepnmt.config import Recipe, check_recipe
from deepnmt.model.transformer import Transformer
from deepnmt.parallel.build import build_engine
from deepnmt.parallel.engine import Engine, MicroBatch
from deepnmt.parallel.launch import Ranks, processes

ROOT = Path(__file__).resolve().parents[2]
VOCAB, UPDATES, MICRO_BATCHES = 40, 4, 4


def recipe(layout: str, accumulation: int) -> Recipe:
    return check_recipe({
        "run": "unused", "seed": 3,
        "data": {"folder": "unused", "src_lang": "a", "trg_lang": "b", "train": {"tsv": "x"}, "valid": {"tsv": "x"}},
        "batch": {"accumulation": accumulation},
        "model": {"width": 16, "heads": 2, "ffn": 24, "dropout": 0.2, "encoder": {"block": "admin", "layers": 2},
                  "decoder": {"block": "b2t", "layers": 2}},
        "train": {"updates": 10, "clip": 0.5},
        "parallel": {"ds_config": None if layout == "local" else str(ROOT / "ds_configs" / f"{layout}.json")},
    }, "test")


def batches(update: int) -> list[MicroBatch]:
    """Four micro-batches of unequal sizes and lengths."""
    made: list[MicroBatch] = []
    for number in range(MICRO_BATCHES):
        draw = torch.Generator().manual_seed(100 * update + number)
        rows, source, target = 2 + number, 5 + 2 * number, 9 - number
        src = torch.randint(4, VOCAB, (rows, source), generator=draw)
        trg = torch.randint(4, VOCAB, (rows, target + 1), generator=draw)
        lengths = torch.full((rows,), source)
        lengths[0], src[0, 3:] = 3, 3
        trg_out = trg[:, 1:].clone()
        trg_out[0, 2:] = 3
        made.append((src, lengths, trg[:, :-1], trg_out, 1000 * update + number))
    return made


def steps(engine: Engine, ranks: Ranks, first: int, last: int) -> list[list[float]]:
    """Loss sum and gradient norm of each update."""
    trace = []
    for update in range(first, last):
        plan = batches(update)
        tokens = sum(int((b[3] != 3).sum()) for b in plan)
        stats = engine.train_step(plan[ranks.rank :: ranks.world], tokens, 1e-2)
        assert stats.applied
        trace.append([*ranks.sum([stats.loss / tokens]), stats.grad_norm])
    return trace


def build(layout: str, ranks: Ranks) -> Engine:
    settings = recipe(layout, MICRO_BATCHES // ranks.world)
    return build_engine(Transformer(settings.model, VOCAB, VOCAB, settings.seed, 0.1), settings, ranks)


def trial(folder: str, layout: str) -> None:
    """Runs on each rank: UPDATES updates, state out and into a fresh engine half-way, the same updates again."""
    with processes(threads=1, group=True) as ranks:
        whole = build(layout, ranks)
        start = {s.name: s.weight.clone() for s in whole.export_state()}
        trace = steps(whole, ranks, 0, 2)
        saved = list(whole.export_state())
        step = whole.optimizer_step
        trace += steps(whole, ranks, 2, UPDATES)
        end = {s.name: s.weight.clone() for s in whole.export_state()}
        other = build(layout, ranks)
        other.import_state({s.name: s.weight for s in saved},
                           {f"{s.name}.{k}": t for s in saved for k, t in
                            (("exp_avg", s.exp_avg), ("exp_avg_sq", s.exp_avg_sq))}, step)
        again = steps(other, ranks, 2, UPDATES)
        resumed = {s.name: s.weight for s in other.export_state()}
        same = all(torch.equal(end[name], resumed[name]) for name in end)
        if ranks.first:
            from safetensors.torch import save_file

            save_file(start, f"{folder}/start.safetensors")
            save_file(end, f"{folder}/end.safetensors")
            Path(folder, "trace.json").write_text(json.dumps(
                {"trace": trace, "again": again, "same": same, "step": step, "steps": whole.optimizer_step}))
        other.close()
        whole.close()


@pytest.fixture(scope="module")
def control(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("local")
    run_on_ranks(1, "test_engines:trial", str(folder), "local")
    return folder


# fp32 layouts differ from the control by the order of sums alone; bf16 rounds every weight and activation to 8 bits.
LAYOUTS = [(w, f"zero{s}_fp32", 1e-5) for s in (0, 1, 2, 3) for w in (1, 2)] + [(2, "zero1_bf16", 2e-2)]


@pytest.mark.parametrize(("world", "layout", "tolerance"), LAYOUTS)
def test_layout_equals_local_engine(world: int, layout: str, tolerance: float, control: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    run_on_ranks(world, "test_engines:trial", str(tmp_path), layout)
    ours, theirs = (json.loads((f / "trace.json").read_text()) for f in (tmp_path, control))
    for name, start in load_file(control / "start.safetensors").items():
        assert torch.equal(start, load_file(tmp_path / "start.safetensors")[name]), f"{name} starts differently"
    assert ours["steps"] == theirs["steps"] == UPDATES and ours["step"] == 2
    torch.testing.assert_close(torch.tensor(ours["trace"]), torch.tensor(theirs["trace"]), rtol=tolerance, atol=0)
    assert ours["again"] == ours["trace"][2:], "a restored engine must go on to the last bit"
    assert ours["same"]


def poisoned(folder: str, layout: str) -> None:
    """Runs on each rank: a NaN in one gradient of one process must not reach any weight, and is reported."""
    with processes(threads=1, group=True) as ranks:
        engine = build(layout, ranks)
        steps(engine, ranks, 0, 1)
        before = {s.name: (s.weight, s.exp_avg) for s in engine.export_state()}
        victim = next(p for name, p in engine.module.named_parameters() if name == "encoder.layers.1.ffn.fc1.bias")
        hook = victim.register_hook(lambda g: g * (float("nan") if ranks.first else 1.0))
        plan = batches(1)
        scale = engine.scaler_state()
        stats = engine.train_step(plan[ranks.rank :: ranks.world], 100, 1e-2)
        hook.remove()
        assert not stats.applied and stats.grad_norm == float("inf"), stats
        assert engine.optimizer_step == 1
        for s in engine.export_state():
            weight, moment = before[s.name]
            assert torch.equal(weight, s.weight) and torch.equal(moment, s.exp_avg), s.name
        if scale is not None:
            assert engine.scaler_state() == {"scale": scale["scale"] / 2, "clean": 0}
        steps(engine, ranks, 2, 3)
        engine.close()


@pytest.mark.parametrize("layout", ["local", "zero0_fp32", "zero1_fp32", "zero1_bf16"])
def test_non_finite_gradient_never_reaches_the_weights(layout: str, tmp_path: Path) -> None:
    run_on_ranks(1 if layout == "local" else 2, "test_engines:poisoned", str(tmp_path), layout)
