"""A run saved under any layout resumes under any other as if the layout had never changed.

Every layout resumes from its own state and from that of the layout before it in the table; if DEEPNMT_LONG is set, from
those of all ten, and for 20 updates instead of 3. The states are checkpoints in shards, written while the updates after
them are made; each process reads no more than it keeps.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from unittest.mock import patch

import pytest
import tiny_run
import torch
from safetensors.torch import load_file, save_file
from tiny_engines import batches, build, export_state, recipe_of, step
from warm import Warm

from deepnmt.checkpoint.checkpoint import moments_in, weights_in
from deepnmt.checkpoint.saving import Saver
from deepnmt.checkpoint.tensors import Tensors
from deepnmt.parallel.engine import Engine
from deepnmt.processes.process_group import processes
from deepnmt.processes.ranks import Ranks

# name: processes, layout, pipeline stages. A new layout is one more row.
LAYOUTS = {
    "local": (1, "local", 0),
    "zero1-2": (2, "zero1_fp32", 0),
    "zero2-2": (2, "zero2_fp32", 0),
    "zero3-2": (2, "zero3_fp32", 0),
    "pipeline-2": (2, "zero1_fp32", 2),
    "pipeline-2-zero0": (2, "zero0_fp32", 2),
    "zero3-4": (4, "zero3_fp32", 0),
    "offload-2": (2, "zero3_offload_fp32", 0),
    "pipeline-4": (4, "zero1_fp32", 4),
    "pipeline-2x2": (4, "zero1_fp32", 2),
}
SLOW = ("zero3-4", "offload-2", "pipeline-4", "pipeline-2x2")
LONG = bool(os.environ.get("DEEPNMT_LONG"))
MICRO_BATCHES, SAVED, MORE = 4, (6 if LONG else 2), (20 if LONG else 3)


def sources_of(target: str) -> list[str]:
    """The layouts from whose states a layout resumes."""
    names = list(LAYOUTS)
    return names if LONG else [names[names.index(target) - 1], target]


def engine_of(name: str, ranks: Ranks) -> Engine:
    world, layout, stages = LAYOUTS[name]
    return build(recipe_of(layout, MICRO_BATCHES * max(stages, 1) // world, stages), ranks)


def losses(engine: Engine, ranks: Ranks, first: int, last: int) -> list[float]:
    found = []
    for update in range(first, last):
        loss, _, _, applied = step(engine, batches(update, MICRO_BATCHES), ranks)
        assert applied
        found.append(loss)
    return found


def save(folder: str, name: str) -> None:
    """Runs on each rank: makes some updates and saves; then makes the uninterrupted updates to compare with."""
    with processes(threads=1, group=True) as ranks:
        engine = engine_of(name, ranks)
        losses(engine, ranks, 0, SAVED)
        states = export_state(engine)
        step_saved = engine.optimizer_step
        saver = Saver(Path(folder, name), ranks, engine.owned(), True)
        saver.save(engine.owned(), tiny_run.state_of(SAVED), "", {})
        after = losses(engine, ranks, SAVED, SAVED + MORE)
        saver.wait()
        saver.close()
        if ranks.first:
            save_file({state.name: state.weight for state in states}, f"{folder}/{name}.weights")
            save_file({k: t for state in states for k, t in state.moments.items()}, f"{folder}/{name}.moments")
            Path(folder, f"{name}.json").write_text(json.dumps({"step": step_saved, "losses": after}))
        engine.close()


def resume(folder: str, name: str) -> None:
    """Runs on each rank: resumes from one state after the other, each time in a fresh engine."""
    found = {}
    with processes(threads=1, group=True) as ranks:
        for source in sources_of(name):
            engine = engine_of(name, ranks)
            weights, moments = load_file(f"{folder}/{source}.weights"), load_file(f"{folder}/{source}.moments")
            step = json.loads(Path(folder, f"{source}.json").read_text())["step"]
            saved = Path(folder, source, f"update-{SAVED:08d}")
            with patch.object(Tensors, "part", autospec=True, side_effect=Tensors.part) as read:
                engine.fill(weights_in(saved), moments_in(saved), step)
            numbers = sum(stop - start for _, _, start, stop in (call.args for call in read.call_args_list))
            back = export_state(engine)
            exact = all(torch.equal(state.weight, weights[state.name]) for state in back)
            exact = exact and all(torch.equal(t, moments[k]) for state in back for k, t in state.moments.items())
            found[source] = {"exact": exact, "step": engine.optimizer_step, "read": ranks.sum([numbers])[0],
                             "stored": sum(state.weight.numel() + sum(t.numel() for t in state.kept.values())
                                           for state in back),
                             "losses": losses(engine, ranks, SAVED, SAVED + MORE)}
            engine.close()
        if ranks.first:
            Path(folder, f"to-{name}.json").write_text(json.dumps(found))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("anywhere")


@pytest.mark.parametrize("target", [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in LAYOUTS])
def test_resumes_from_every_layout(target: str, folder: Path, warm: Warm) -> None:
    for name in ("local", *sources_of(target)):
        if not (folder / f"{name}.json").exists():  # each is saved once, by the first test that needs it
            warm.run(LAYOUTS[name][0], "test_resume_anywhere:save", folder, name)
    warm.run(LAYOUTS[target][0], "test_resume_anywhere:resume", folder, target)
    whole = json.loads((folder / "local.json").read_text())["losses"]
    assert len(set(whole)) == MORE
    found = json.loads((folder / f"to-{target}.json").read_text())
    assert [*found] == sources_of(target)
    for source, went in found.items():
        assert went["exact"] and went["step"] == SAVED, f"{source} to {target}: the state did not arrive whole"
        assert went["losses"] == pytest.approx(whole, abs=1e-4), f"{source} to {target}"
        tied = LAYOUTS[target][2] > 1  # both ends of a pipeline keep the tied table
        assert (went["read"] > went["stored"]) if tied else (went["read"] == went["stored"]), f"{source} to {target}"
        assert went["read"] < 2 * went["stored"], f"{source} to {target}: processes read what they do not keep"
    own = json.loads((folder / f"{target}.json").read_text())["losses"]
    assert found[target]["losses"] == own, "in its own layout it resumes bit for bit"
