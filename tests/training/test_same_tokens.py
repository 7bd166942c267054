"""The same eight micro-batches give the same update, however they are divided into processes and accumulation."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from tiny_engines import batches, build, export_state, recipe_of, step
from warm import Warm

from deepnmt.processes.process_group import processes

MICRO_BATCHES, UPDATES = 8, 5


def trial(folder: str, layout: str) -> None:
    """Runs on each rank. Adam's first moment after the first update is the gradient, times 0.1."""
    with processes(threads=1, group=True) as ranks:
        engine = build(recipe_of(layout, MICRO_BATCHES // ranks.world, clip=0.5), ranks)
        trace = [step(engine, batches(0, MICRO_BATCHES), ranks)]
        first = {state.name: state.kept["exp_avg"] for state in export_state(engine)}
        trace += [step(engine, batches(update, MICRO_BATCHES), ranks) for update in range(1, UPDATES)]
        if ranks.first:
            save_file(first, f"{folder}/moments")
            Path(folder, "trace.json").write_text(json.dumps(trace))
        engine.close()


@pytest.fixture(scope="module")
def control(tmp_path_factory: pytest.TempPathFactory, warm: Warm) -> Path:
    folder = tmp_path_factory.mktemp("local")
    warm.run(1, "test_same_tokens:trial", folder, "local")
    return folder


def test_token_counts_are_unequal() -> None:
    counts = {batch.tokens for update in range(UPDATES) for batch in batches(update, MICRO_BATCHES)}
    assert len(counts) > 4


@pytest.mark.parametrize(("world", "layout"), [
    (4, "zero1_fp32"), (8, "zero1_fp32"),  # one and two processes: tests/parallel/test_engines.py
    *([(1, "zero1_fp32"), (2, "zero1_fp32"), (4, "zero2_fp32"), (8, "zero3_fp32")] if os.environ.get("DEEPNMT_LONG")
      else []),
])
def test_sharing_changes_nothing(world: int, layout: str, control: Path, tmp_path: Path, warm: Warm) -> None:
    warm.run(world, "test_same_tokens:trial", tmp_path, layout)
    ours, theirs = (json.loads((folder / "trace.json").read_text()) for folder in (tmp_path, control))
    for mine, other in zip(ours, theirs, strict=True):
        assert mine[:2] == pytest.approx(other[:2], rel=1e-5) and mine[3]
    gradients, expected = load_file(tmp_path / "moments"), load_file(control / "moments")
    assert gradients.keys() == expected.keys()
    for name, gradient in expected.items():
        assert float((gradients[name] - gradient).norm() / gradient.norm()) <= 1e-5, name
