"""ZeRO-3 with the optimizer's state on the host computes what ZeRO-3 computes, in every float type."""

from __future__ import annotations

import pytest
import torch
from tiny_engines import batches, build, export_state, recipe_of, step
from warm import Warm

from deepnmt.processes.process_group import processes
from deepnmt.processes.ranks import Ranks


def trial(precision: str) -> None:
    """Runs on each rank. Equal bit for bit without clipping; the norm is summed in another order, so clipping differs.
    """
    with processes(threads=1, group=True) as ranks:
        for clip, tolerance in ((0.0, 0.0), (0.5, 1e-5 if precision == "fp32" else 2e-3)):
            plain, offloaded = (updates(f"{layout}_{precision}", clip, ranks) for layout in ("zero3", "zero3_offload"))
            (losses, norms, weights), (others, other_norms, other_weights) = plain, offloaded
            assert len(set(losses)) == len(losses)
            assert others == pytest.approx(losses, rel=tolerance, abs=0)
            assert other_norms == pytest.approx(norms, rel=max(tolerance, 1e-6))
            assert clip or all(torch.equal(weight, other_weights[name]) for name, weight in weights.items())


def updates(layout: str, clip: float, ranks: Ranks) -> tuple[list[float], list[float], dict[str, torch.Tensor]]:
    """Losses and norms of two updates, and the weights after them."""
    engine = build(recipe_of(layout, 2, clip=clip), ranks)
    trace = [step(engine, batches(update, 4), ranks) for update in range(2)]
    weights = {state.name: state.weight for state in export_state(engine)}
    engine.close()
    return [loss for loss, *_ in trace], [norm for _, norm, *_ in trace], weights


@pytest.mark.parametrize("precision", [
    "fp32", *(pytest.param(bits, marks=pytest.mark.slow) for bits in ("bf16", "fp16"))])
def test_offload_changes_nothing(precision: str, warm: Warm) -> None:
    warm.run(2, "test_offload:trial", precision)
