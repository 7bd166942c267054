"""Engines with a tiny model, and micro-batches for them, for tests that compare layouts."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from small_models import batch_of
from torch import Tensor

from deepnmt.batch import Batch
from deepnmt.config import Recipe, check_recipe
from deepnmt.parallel.build import start_engine
from deepnmt.parallel.ds_config import layout_of
from deepnmt.parallel.engine import Engine
from deepnmt.processes.ranks import Ranks
from deepnmt.tokens import PAD

ROOT = Path(__file__).resolve().parents[2]
VOCAB = 40


def parallel(layout: str, stages: int = 0, **more: Any) -> dict[str, Any]:
    """The recipe's section for "local", or for a file of ds_configs and a precision, such as "zero3_offload_bf16"."""
    zero, _, precision = layout.rpartition("_")
    if layout == "local":
        return {"ds_config": None, **more}
    return {"ds_config": str(ROOT / "ds_configs" / f"{zero}.json"), "precision": precision, "pipeline_stages": stages,
            **more}


def options(layout: str, stages: int = 0) -> tuple[str, ...]:
    """The settings of `parallel` as on the command line."""
    return tuple(f"parallel.{name}={'null' if value is None else value}"
                 for name, value in parallel(layout, stages).items())


def recipe_with(**sections: Any) -> Recipe:
    """A recipe without files, with these sections."""
    data = {"folder": "unused", "src_lang": "a", "trg_lang": "b", "train": {"tsv": "x"}, "valid": {"tsv": "x"}}
    return check_recipe({"run": "unused", "seed": 3, "data": data, "train": {"updates": 10}, **sections}, "test")


def recipe_of(
    layout: str, accumulation: int = 1, stages: int = 0, loss_scale: dict[str, float] | None = None, **train: Any
) -> Recipe:
    """A recipe in a layout (see `parallel`). The FFN's width of 25 cannot be divided among 2 or 4 processes."""
    return recipe_with(
        batch={"accumulation": accumulation},
        model={"width": 16, "heads": 2, "ffn": 25, "dropout": 0.2,
               "encoder": {"block": "admin", "layers": 2}, "decoder": {"block": "b2t", "layers": 2}},
        train={"updates": 100, **train}, parallel=parallel(layout, stages), loss_scale=loss_scale or {})


def build(recipe: Recipe, ranks: Ranks) -> Engine:
    return start_engine(recipe, layout_of(recipe, ranks.world), (VOCAB, VOCAB), ranks)


def micro_batch(seed: int, rows: int, source: int, target: int, key: int, words: int = 2) -> Batch:
    """Random pairs of `source` and `target` tokens; with several rows, the first ends after 3 and `words` tokens."""
    generator = torch.Generator().manual_seed(seed)
    src, trg = (torch.randint(4, VOCAB, (rows, length), generator=generator) for length in (source, target + 1))
    lengths, trg_out = torch.full((rows,), source), trg[:, 1:].clone()
    if rows > 1:
        lengths[0], src[0, 3:], trg_out[0, words:] = 3, PAD, PAD
    return batch_of(src, lengths, trg[:, :-1], trg_out, key=key)


def batches(update: int, count: int) -> list[Batch]:
    """`count` micro-batches of unequal sizes, lengths and token counts."""
    return [micro_batch(100 * update + n, 1 + n % 5, 5 + 2 * (n % 3), 9 - n, 1000 * update + n, words=1)
            for n in range(count)]


def step(engine: Engine, plan: list[Batch], ranks: Ranks, rate: float = 1e-2) -> tuple[float, float, float, bool]:
    """One update on `plan`, shared among the processes: loss per token, gradient norm, scale, whether applied."""
    tokens = sum(batch.tokens for batch in plan)
    stats = engine.train_step(plan[engine.data_rank :: engine.data_world], tokens, rate)
    return stats.loss / tokens, stats.grad_norm, stats.loss_scale, stats.applied


@dataclass(frozen=True)
class ParameterState:
    """A whole parameter and its moments."""

    name: str
    weight: Tensor
    kept: dict[str, Tensor]

    @property
    def moments(self) -> dict[str, Tensor]:
        return {f"{self.name}.{moment}": tensor for moment, tensor in self.kept.items()}


def export_state(engine: Engine) -> list[ParameterState]:
    """Every parameter, put together from the parts of all processes; each element must be owned once. Collective."""
    mine = [replace(part, weight=part.weight.clone(), moments={m: t.clone() for m, t in part.moments.items()})
            for part in engine.owned()]
    world = dist.get_world_size() if dist.is_initialized() else 1
    everyone: list[Any] = [mine]
    if world > 1:
        everyone *= world
        dist.all_gather_object(everyone, mine)
    found: dict[str, ParameterState] = {}
    for part in (part for parts in everyone for part in parts):
        whole = found.get(part.name) or ParameterState(part.name, torch.full(part.shape, torch.nan), {
            moment: torch.full(part.shape, torch.nan) for moment in part.moments})
        found[part.name] = whole
        for tensor, values in ((whole.weight, part.weight), *((whole.kept[m], part.moments[m]) for m in part.moments)):
            slot = tensor.view(-1)[part.start : part.start + len(values)]
            assert len(values) == len(slot) and bool(slot.isnan().all()), f"{part.name} is owned by two processes"
            slot.copy_(values)
    for whole in found.values():
        assert not any(bool(t.isnan().any()) for t in (whole.weight, *whole.kept.values())), f"{whole.name} has gaps"
    return list(found.values())


def poison(engine: Engine, victim: str, plan: list[Batch], here: bool) -> None:
    """Checks that a NaN in the gradient of parameter `victim`, in the process with `here`, is reported and changes no
    weight.

    `plan`: micro-batches of all processes. One update must have been made before; the engine can be used afterwards.
    """
    before = {s.name: (s.weight, s.kept["exp_avg"]) for s in export_state(engine)}
    scale = engine.scaler_state()
    parameter = dict(engine.module.named_parameters()).get(victim) if here else None
    hook = parameter.register_hook(lambda grad: grad * float("nan")) if parameter is not None else None
    stats = engine.train_step(plan[engine.data_rank :: engine.data_world], 100, 1e-2)
    if hook is not None:
        hook.remove()
    assert not stats.applied and stats.grad_norm == float("inf"), stats
    assert engine.optimizer_step == 1
    for s in export_state(engine):
        weight, moment = before[s.name]
        assert torch.equal(weight, s.weight) and torch.equal(moment, s.kept["exp_avg"]), s.name
    if scale is not None:
        assert engine.scaler_state() == {"scale": scale["scale"] / 2, "clean": 0}


def fairseq_rule(overflows: list[bool], scale: float, window: int, floor: float) -> list[float]:
    """The scale each update is computed with, by the rule of fairseq's scaler with tolerance 0."""
    trace, last_overflow = [], -1
    for number, overflow in enumerate(overflows):
        trace.append(scale)
        if overflow:
            last_overflow = number
            scale = max(scale / 2, floor)
        elif (number - last_overflow) % window == 0:
            scale *= 2
    return trace


def without_keys(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """The values to compare, without the keys' bias: it does not change the softmax, so its gradient is rounding error,
    which Adam amplifies."""
    kept = torch.ones(len(tensor), dtype=torch.bool)
    if name.endswith("qkv.bias"):
        kept[len(tensor) // 3 : 2 * len(tensor) // 3] = False
    elif name.endswith("kv.bias"):
        kept[: len(tensor) // 2] = False
    return kept
