"""DeepSpeed's bf16 optimizer on its flat buffers, as on a GPU: the same as by DeepSpeed's own way, to the bit."""

from __future__ import annotations

from typing import Any

import torch
from tiny_engines import batches, build, export_state, recipe_of
from warm import Warm

from deepnmt.parallel import deepspeed, flat
from deepnmt.parallel.engine import StepStats
from deepnmt.processes.process_group import processes
from deepnmt.processes.ranks import Ranks

CLIPPED, DROPPED = 0.5, 2  # a norm that most updates exceed; the update with a NaN


def run(ranks: Ranks, stages: int) -> tuple[list[StepStats], dict[str, torch.Tensor]]:
    """Four updates of two micro-batches; then the weights and moments."""
    engine: Any = build(recipe_of("zero1_bf16", 2, stages, clip=CLIPPED), ranks)
    found = []
    for update in range(4):
        plan = batches(update, 2 * engine.data_world)
        hook = next(iter(engine.local.values())).register_hook(lambda g: g * torch.nan) if update == DROPPED else None
        found.append(engine.train_step(plan[engine.data_rank :: engine.data_world], 60, 1e-2,
                                       lambda: (1.0, float(ranks.rank))))
        if hook:
            hook.remove()
    state = {name: tensor for each in export_state(engine) for name, tensor in
             ({each.name: each.weight} | each.moments).items()}
    engine.close()
    return found, state


def compare(world: str) -> None:
    """Runs on each rank."""
    with processes(threads=1, group=True) as ranks:
        for stages in (0, 2) if int(world) > 1 else (0,):
            flat.on_gpu = lambda _: True
            ours, state = run(ranks, stages)
            deepspeed.update_flat = lambda *_: None
            theirs, expected = run(ranks, stages)
            deepspeed.update_flat = flat.update_flat
            assert ours == theirs, (ours, theirs)
            assert [each.applied for each in ours] == [update != DROPPED for update in range(4)]
            assert any(each.applied and each.grad_norm > CLIPPED for each in ours)
            assert all(each.flags == [ranks.world, sum(range(ranks.world))] for each in ours)
            assert state.keys() == expected.keys()
            assert [name for name, tensor in expected.items() if not torch.equal(state[name], tensor)] == []


def test_equals_deepspeeds_own_way(warm: Warm) -> None:
    """With two processes also in a pipeline of two stages, where one has parameter groups that the other lacks."""
    for world in (1, 2):
        warm.run(world, "test_flat:compare", world)
