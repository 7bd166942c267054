"""ZeRO-3 with the optimizer's state on the host computes what ZeRO-3 computes, in every float type."""

from __future__ import annotations

import pytest
import torch
from tiny_engines import batches, build, recipe_of, step
from warm import Warm

from deepnmt.parallel.launch import processes


def trial(precision: str) -> None:
    """Runs on each rank: the same updates with and without offload, to the last bit on a CPU."""
    with processes(threads=1, group=True) as ranks:
        traces, weights = [], []
        for layout in (f"zero3_{precision}", f"zero3_offload_{precision}"):
            engine = build(recipe_of(layout, 2, clip=0.5), ranks)
            traces.append([step(engine, batches(update, 4), ranks) for update in range(5)])
            weights.append({state.name: state.weight for state in engine.export_state()})
            engine.close()
        plain, offloaded = traces
        assert plain == offloaded and len({loss for loss, *_ in plain}) == 5
        assert all(torch.equal(weight, weights[1][name]) for name, weight in weights[0].items())


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_offload_changes_nothing(precision: str, warm: Warm) -> None:
    warm.run(2, "test_offload:trial", precision)
