"""The profile of real data is the same on one process and on several, and every process starts from the same ω."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from ranks import run_on_ranks

from deepnmt.config import Recipe, load_recipe
from deepnmt.data.prepare import prepare
from deepnmt.data.prepared import PreparedData
from deepnmt.demo.corpus import make_corpus
from deepnmt.errors import UserError
from deepnmt.model.admin import AdminProfile
from deepnmt.parallel.launch import free_port, processes
from deepnmt.train.profile import first_micro_batches, profile, profile_for

ROOT = Path(__file__).resolve().parents[2]
RECIPE = """
run: {run}
data: {{folder: {folder}/data, src_lang: en, trg_lang: de, workers: 1,
  train: {{src: {folder}/text/train.en, trg: {folder}/text/train.de}},
  valid: {{src: {folder}/text/valid.en, trg: {folder}/text/valid.de}}}}
vocab: {{size: 300}}
batch: {{tokens: 256}}
admin: {{tokens: 900}}
model: {{width: 16, heads: 2, ffn: 32, dropout: 0.1, encoder: {{layers: 2}}, decoder: {{layers: 2}}}}
train: {{updates: 1}}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("profile")
    make_corpus(folder / "text", pairs=400, valid=20, test=20)
    prepare(recipe(folder, "unused"), progress=False)
    return folder


def recipe(folder: Path, run: str, *overrides: str) -> Recipe:
    """The run's settings. Ranks do this at the same moment: none may meet another's half-written file."""
    path = folder / f"{run}.yaml"
    mine = path.with_suffix(f".{os.getpid()}")
    mine.write_text(RECIPE.format(run=folder / run, folder=folder))
    mine.replace(path)
    return load_recipe(path, list(overrides))


def job(folder: str, run: str) -> None:
    """Runs on each rank: the job, then what a training process would start from."""
    with processes(threads=1) as ranks:
        settings = recipe(Path(folder), run)
        profile(settings, ranks)
        data = PreparedData.open(settings.data.folder)
        started = profile_for(settings, data, ranks)
        assert started is not None
        keys = [batch[4] for batch in first_micro_batches(settings, data, ranks)]
        Path(folder, f"{run}.{ranks.rank}.json").write_text(json.dumps([started.encoder, started.decoder, keys]))


def test_profile_does_not_depend_on_the_processes(folder: Path) -> None:
    job(str(folder), "alone")
    run_on_ranks(2, "test_admin_ranks:job", str(folder), "two")
    alone, first, second = (json.loads((folder / f"{n}.json").read_text()) for n in ("alone.0", "two.0", "two.1"))
    assert first[:2] == second[:2], "ranks must start from the same numbers, to the last bit"
    for stack in (0, 1):
        assert first[stack] == pytest.approx(alone[stack], rel=1e-12)
    assert sorted(first[2] + second[2]) == alone[2] == list(range(len(alone[2]))) and len(first[2]) > 0 < len(second[2])
    settings = recipe(folder, "alone")
    one, two = (AdminProfile.load(folder / n / "admin_profile.json", settings.model) for n in ("alone", "two"))
    assert one.provenance == two.provenance
    assert [one.encoder, one.decoder] == alone[:2] and [two.encoder, two.decoder] == first[:2]
    tokens = PreparedData.open(settings.data.folder).split("train").trg_lengths
    assert one.provenance["target_tokens"] <= 900 < tokens.sum()
    assert (folder / "two" / "admin_profile.png").read_bytes().startswith(b"\x89PNG")


def test_the_tool_runs_alone_and_under_the_launcher(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = recipe(folder, "tool")
    tool, file = str(ROOT / "tools" / "profile_admin.py"), str(folder / "tool.yaml")
    monkeypatch.setattr(sys, "argv", [tool, file])
    threads = torch.get_num_threads()
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(tool, run_name="__main__")
    torch.set_num_threads(threads)
    alone = AdminProfile.load(folder / "tool" / "admin_profile.json", settings.model)
    assert ended.value.code == 0 and capsys.readouterr().out.startswith("encoder  ω_1 1.000")
    launcher = Path(sys.executable).parent / "deepspeed"
    done = subprocess.run(
        [str(launcher), "--quiet", "--num_accelerators", "2", "--master_port", str(free_port()), tool, file,
         f"run={folder}/launched"], capture_output=True, text=True, check=False, cwd=ROOT,
        env={**os.environ, "PATH": f"{launcher.parent}{os.pathsep}{os.environ['PATH']}"})
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("encoder  ω_1") == 1, "only the first process talks"
    launched = AdminProfile.load(folder / "launched" / "admin_profile.json", settings.model)
    assert launched.encoder == pytest.approx(alone.encoder, rel=1e-6)
    assert launched.decoder == pytest.approx(alone.decoder, rel=1e-6) and launched.provenance == alone.provenance


def test_profile_for_reads_the_recipes_file(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with processes(threads=1) as ranks:
        settings = recipe(folder, "read")
        path = profile(settings, ranks)
        table = capsys.readouterr().out
        data = PreparedData.open(settings.data.folder)
        content = json.loads(path.read_text())
        content["omega"]["encoder.layers.1.ffn"] = 7.0
        path.write_text(json.dumps(content))
        read = profile_for(recipe(folder, "read", f"admin.profile={path}"), data, ranks)
        none = profile_for(recipe(folder, "none", "model.encoder.block=b2t", "model.decoder.block=pre_ln"), data, ranks)
        with pytest.raises(UserError, match="only admin is profiled"):
            profile(recipe(folder, "none", "model.encoder.block=b2t", "model.decoder.block=pre_ln"), ranks)
        few = first_micro_batches(recipe(folder, "few", "admin.tokens=1"), data, ranks)
        every = first_micro_batches(recipe(folder, "every", "admin.tokens=65536"), data, ranks)
    assert none is None
    assert read is not None and read.encoder[3] == 7.0
    assert table.startswith("encoder  ω_1 1.000  ω_2 ") and "\ndecoder  ω_1 1.000" in table
    assert len(few) == 1, "one micro-batch is taken whatever its size"
    assert sum(len(batch[0]) for batch in every) == len(data.split("train")), "the second epoch adds nothing new"
