"""The probe of training reads the same figures in every layout."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tiny_engines import VOCAB, batches, parallel, recipe_with, step
from warm import Warm

from deepnmt.extras.doctor.training_probe import TrainingProbe
from deepnmt.parallel.build import start_engine
from deepnmt.parallel.ds_config import layout_of
from deepnmt.processes.process_group import processes

MICRO_BATCHES = 2


def trial(folder: str, layout: str) -> None:
    """Runs on each rank: the figures of the fourth update."""
    with processes(threads=1, group=True) as ranks:
        stages = ranks.world if layout.startswith("pipeline") else 0
        recipe = recipe_with(
            batch={"accumulation": MICRO_BATCHES * max(1, stages) // ranks.world},
            model={"width": 16, "heads": 2, "ffn": 24, "dropout": 0.2,
                   "encoder": {"block": "admin_closed_form", "layers": 3}, "decoder": {"block": "fixup", "layers": 2}},
            train={"updates": 10, "clip": 0.5}, parallel=parallel(layout.removeprefix("pipeline_"), stages))
        engine = start_engine(recipe, layout_of(recipe, ranks.world), (VOCAB, VOCAB), ranks)
        for update in range(3):
            step(engine, batches(update, MICRO_BATCHES), ranks)
        probe = TrainingProbe(engine.module, recipe.model, 1)
        with probe.watching(True):
            scale = step(engine, batches(3, MICRO_BATCHES), ranks)[2]
        figures = probe.read(scale * engine.data_world, ranks.sum, ranks.max)
        engine.close()
        if ranks.first:
            Path(folder, f"{layout}.json").write_text(json.dumps(figures), encoding="utf-8")


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory, warm: Warm) -> dict[str, float]:
    folder = tmp_path_factory.mktemp("local")
    warm.run(1, "test_probe_layouts:trial", folder, "local")
    return json.loads((folder / "local.json").read_text())


@pytest.mark.parametrize(("layout", "tolerance"), [
    ("zero3_fp32", 1e-4), ("pipeline_zero1_fp32", 1e-4), ("zero1_fp16", 2e-2)])
def test_figures_are_those_of_the_local_engine(
    layout: str, tolerance: float, local: dict[str, float], tmp_path: Path, warm: Warm
) -> None:
    warm.run(2, "test_probe_layouts:trial", tmp_path, layout)
    figures = json.loads((tmp_path / f"{layout}.json").read_text())
    # 6 of each of 3 + 2 layers; of each sub-layer 3 with LayerNorms (encoder), 2 without (decoder)
    assert len(figures) == 6 * 5 + 3 * 2 * 3 + 2 * 3 * 2
    assert figures == pytest.approx(local, rel=tolerance, abs=0.01 * tolerance)
