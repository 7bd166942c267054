"""The profile of real data does not depend on the number of processes, and every process starts from the same ω."""

from __future__ import annotations

import json
import runpy
import sys
from functools import partial
from pathlib import Path

import pytest
from tiny_engines import options
from warm import Warm

from deepnmt.config import Recipe, load_recipe
from deepnmt.data.mixing import training_stream
from deepnmt.data.prepared import PreparedData
from deepnmt.errors import UserError
from deepnmt.model.admin_profile import AdminProfile
from deepnmt.processes.process_group import processes
from deepnmt.training.profile import first_micro_batches, profile, profile_for

TOOL = str(Path(__file__).resolve().parents[2] / "tools" / "profile_admin.py")


def recipe_of(file: str, run: str, *overrides: str) -> Recipe:
    return load_recipe(file, [f"run={run}", "admin.tokens=900", *overrides])


def job(file: str, run: str) -> None:
    """Runs on each rank: the profile job, then the ω that a training process would start from."""
    with processes(threads=1) as ranks:
        settings = recipe_of(file, run)
        profile(settings, ranks)
        data = PreparedData.open(settings.data.folder)
        started = profile_for(settings, data, ranks)
        assert started is not None
        keys = [batch.key for batch in first_micro_batches(training_stream(settings, data), settings, ranks)]
        Path(f"{run}.{ranks.rank}.json").write_text(json.dumps([started.encoder, started.decoder, keys]))


def test_profile_does_not_depend_on_the_processes(prepared: Path, tmp_path: Path, warm: Warm) -> None:
    recipe = str(prepared / "recipe.yaml")
    job(recipe, str(tmp_path / "alone"))
    warm.run(2, "test_admin_ranks:job", recipe, tmp_path / "two")
    alone, first, second = (json.loads((tmp_path / f"{n}.json").read_text()) for n in ("alone.0", "two.0", "two.1"))
    assert first[:2] == second[:2], "ranks must start from the same numbers, to the last bit"
    for stack in (0, 1):
        assert first[stack] == pytest.approx(alone[stack], rel=1e-12)
    assert sorted(first[2] + second[2]) == alone[2] == list(range(len(alone[2]))) and len(first[2]) > 0 < len(second[2])
    settings = load_recipe(recipe)
    one, two = (AdminProfile.load(tmp_path / n / "admin_profile.json", settings.model) for n in ("alone", "two"))
    assert one.provenance == two.provenance
    assert [one.encoder, one.decoder] == alone[:2] and [two.encoder, two.decoder] == first[:2]
    tokens = PreparedData.open(settings.data.folder).split("train").trg_lengths
    assert one.provenance["target_tokens"] <= 900 < tokens.sum()
    assert (tmp_path / "two" / "admin_profile.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(("layout", "stages"), [("zero3_fp32", 0), ("zero1_fp32", 2)], ids=["zero3-2", "pipeline-2"])
def test_training_measures_the_same_profile_in_other_layouts(
    layout: str, stages: int, prepared: Path, tmp_path: Path, warm: Warm
) -> None:
    recipe = str(prepared / "recipe.yaml")
    job(recipe, str(tmp_path / "alone"))
    warm.train(2, recipe, f"run={tmp_path / 'two'}", "admin.tokens=900", "train.updates=1", "train.valid_bleu=false",
               *options(layout, stages))
    assert warm.wait() == [0, 0], warm.said()
    one, two = (AdminProfile.load(tmp_path / n / "admin_profile.json", load_recipe(recipe).model)
                for n in ("alone", "two"))
    assert two.encoder == pytest.approx(one.encoder, rel=1e-6) and two.decoder == pytest.approx(one.decoder, rel=1e-6)
    assert two.provenance == one.provenance and max(one.decoder) > 1.1


def run_tool(*words: str) -> None:
    """Runs on each rank."""
    sys.argv = [TOOL, *words]
    runpy.run_path(TOOL, run_name="__main__")


def test_the_tool_runs_on_one_process_and_on_two(
    prepared: Path, tmp_path: Path, warm: Warm, threads: None, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = str(prepared / "recipe.yaml")
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setattr("deepnmt.cli.end_process", sys.exit)  # this process goes on
    with pytest.raises(SystemExit) as ended:
        run_tool(recipe, f"run={tmp_path}/alone")
    assert ended.value.code == 0 and capsys.readouterr().out.startswith("encoder  ω_1 1.000")
    warm.run(2, "test_admin_ranks:run_tool", recipe, f"run={tmp_path}/launched")
    assert warm.said().count("encoder  ω_1") == 1, "only the first process talks"
    alone, launched = (AdminProfile.load(tmp_path / n / "admin_profile.json", load_recipe(recipe).model)
                       for n in ("alone", "launched"))
    assert launched.encoder == pytest.approx(alone.encoder, rel=1e-6)
    assert launched.decoder == pytest.approx(alone.decoder, rel=1e-6) and launched.provenance == alone.provenance


def test_profile_for_reads_the_recipes_file(
    prepared: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = partial(recipe_of, str(prepared / "recipe.yaml"), str(tmp_path))
    settings, unprofiled = made(), made("model.encoder.block=b2t", "model.decoder.block=pre_ln")
    with processes(threads=1) as ranks:
        path = profile(settings, ranks)
        table = capsys.readouterr().out
        data = PreparedData.open(settings.data.folder)
        content = json.loads(path.read_text())
        content["omega"]["encoder.layers.1.ffn"] = 7.0
        path.write_text(json.dumps(content))
        read = profile_for(made(f"admin.profile={path}"), data, ranks)
        assert profile_for(unprofiled, data, ranks) is None
        with pytest.raises(UserError, match="only admin is profiled"):
            profile(unprofiled, ranks)
        stream = training_stream(settings, data)
        few, every = (first_micro_batches(stream, made(f"admin.tokens={tokens}"), ranks) for tokens in (1, 65536))
    assert read is not None and read.encoder[3] == 7.0
    assert table.startswith("encoder  ω_1 1.000  ω_2 ") and "\ndecoder  ω_1 1.000" in table
    assert len(few) == 1, "one micro-batch is taken whatever its size"
    assert sum(len(batch["src"]) for batch in every) == len(data.split("train")), "each sentence counts once"
