"""The training job: killed, stopped or resumed, it goes on to the last bit; what it leaves; what it refuses."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file
from torch import equal

from deepnmt.config import load_recipe
from deepnmt.parallel.launch import processes
from deepnmt.train.log import Monitor
from deepnmt.train.trainer import train as train_here

ROOT = Path(__file__).resolve().parents[2]
Tool = Callable[..., "subprocess.CompletedProcess[str]"]


def losses(run: Path) -> dict[int, float]:
    """Training loss by update."""
    records = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    return {r["update"]: r["loss"] for r in records if r["type"] == "train"}


def weights(run: Path, update: int) -> dict[str, object]:
    return dict(load_file(run / "checkpoints" / f"update-{update:08d}" / "weights.safetensors"))


def same(a: dict[str, object], b: dict[str, object]) -> bool:
    return a.keys() == b.keys() and all(equal(a[k], b[k]) for k in a)  # type: ignore[arg-type]


def command(recipe: Path, processes: int, *overrides: str) -> list[str]:
    tools = str(ROOT / "tools" / "train.py")
    if processes == 1:
        return [sys.executable, tools, str(recipe), *overrides]
    launcher = str(Path(sys.executable).parent / "deepspeed")
    return [launcher, "--quiet", "--num_accelerators", str(processes), "--master_port", str(29600 + os.getpid() % 300),
            tools, str(recipe), *overrides]


def train(recipe: Path, processes: int, *overrides: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    return subprocess.run(command(recipe, processes, *overrides), capture_output=True, text=True, timeout=600,
                          check=False, cwd=ROOT, env=env)


@pytest.mark.parametrize(("processes", "layout"), [(1, "null"), (2, "ds_configs/zero1.json")])
def test_stopped_run_goes_on_to_the_last_bit(prepared: Path, tmp_path: Path, processes: int, layout: str) -> None:
    recipe, whole, broken = prepared / "recipe.yaml", tmp_path / "whole", tmp_path / "broken"
    options = (f"parallel.ds_config={layout}",)
    done = train(recipe, processes, f"run={whole}", *options)
    assert done.returncode == 0, done.stderr
    # ends after 6 updates (a checkpoint) as far as the loop is concerned, then goes on under the full recipe
    first = train(recipe, processes, f"run={broken}", "train.updates=6", *options)
    assert first.returncode == 0, first.stderr
    (broken / "admin_profile.json").unlink()  # the checkpoint holds what training goes on from
    second = train(recipe, processes, f"run={broken}", *options)
    assert second.returncode == 0, second.stderr
    assert "train.updates: 6 -> 12" in second.stderr
    assert losses(whole) == losses(broken) and len(losses(whole)) == 12
    assert same(weights(whole, 12), weights(broken, 12))
    assert (whole / "curve.png").stat().st_size > 5000
    assert json.loads((whole / "STATUS.json").read_text())["status"] == "finished"
    assert list((whole / "tensorboard").glob("events*"))


def test_killed_run_goes_on_to_the_last_bit(prepared: Path, tmp_path: Path) -> None:
    recipe, whole, broken = prepared / "recipe.yaml", tmp_path / "whole", tmp_path / "broken"
    assert train(recipe, 1, f"run={whole}", "train.updates=40").returncode == 0
    running = subprocess.Popen(command(recipe, 1, f"run={broken}", "train.updates=40"), cwd=ROOT,
                               stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    wait_for_update(broken, 8, running)  # kill -9 in the middle of an update soon after; test_kill.py has more of them
    running.kill()
    running.wait()
    done = train(recipe, 1, f"run={broken}", "train.updates=40")
    assert done.returncode == 0, done.stderr
    assert "going on from" in done.stderr
    assert losses(whole) == losses(broken)
    assert same(weights(whole, 40), weights(broken, 40))


def wait_for_update(run: Path, update: int, running: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and running.poll() is None:
        if (run / "log.jsonl").exists() and f'"type": "train", "update": {update},' in (run / "log.jsonl").read_text():
            return
        time.sleep(0.01)
    raise AssertionError(f"update {update} was not seen")


def test_sigterm_saves_and_says_so(prepared: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    running = subprocess.Popen(command(prepared / "recipe.yaml", 1, f"run={run}", "train.updates=5000"), cwd=ROOT,
                               stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    wait_for_update(run, 4, running)
    running.send_signal(signal.SIGTERM)
    assert running.wait(timeout=120) == 75
    status = json.loads((run / "STATUS.json").read_text())
    assert status["status"] == "preempted"
    assert (run / "checkpoints" / f"update-{status['update']:08d}" / "manifest.json").exists()


def test_damaged_checkpoint_is_passed_over(prepared: Path, tmp_path: Path) -> None:
    recipe, run = prepared / "recipe.yaml", tmp_path / "run"
    assert train(recipe, 1, f"run={run}").returncode == 0
    *_, whole, newest = sorted((run / "checkpoints").glob("update-*"))
    file = newest / "weights.safetensors"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(bytes(data))
    done = train(recipe, 1, f"run={run}")
    assert done.returncode == 0, done.stderr
    assert "weights.safetensors" in done.stdout + done.stderr and f"going on from {whole}\n" in done.stderr


def test_the_status_is_as_new_as_the_progress_line_and_an_untried_deepspeed_is_told_once(
    prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = []
    monkeypatch.setattr(Monitor, "train", lambda monitor, update, *_: found.append(
        (update, json.loads((monitor.folder / "STATUS.json").read_text()))))
    monkeypatch.setattr("deepnmt.parallel.settings.version", lambda _: "0.19.99")
    recipe = load_recipe(prepared / "recipe.yaml", [f"run={tmp_path / 'run'}", "train.updates=3",
                                                    "parallel.ds_config=ds_configs/zero1.json"])
    with processes(1, group=True) as ranks:
        assert train_here(recipe, ranks) == 0
    assert found == [(update, {"status": "running", "update": update}) for update in (1, 2, 3)]
    assert capsys.readouterr().err.count("DeepSpeed 0.19.99 is installed") == 1


@pytest.mark.parametrize("processes", [1, 2])
def test_data_with_a_flipped_bit_is_refused(prepared: Path, tmp_path: Path, processes: int) -> None:
    shutil.copytree(prepared / "data", tmp_path / "data")
    file = tmp_path / "data" / "valid.trg.tokens"
    data = bytearray(file.read_bytes())
    data[0] ^= 1
    file.write_bytes(bytes(data))
    done = train(prepared / "recipe.yaml", processes, f"run={tmp_path / 'run'}", f"data.folder={tmp_path / 'data'}",
                 "parallel.ds_config=ds_configs/zero1.json")
    assert done.returncode == 2 and done.stderr.count("valid.trg.tokens differs from its manifest") == 1, done.stderr
    assert "Traceback" not in done.stderr and not (tmp_path / "run").exists()


@pytest.mark.parametrize(("override", "said"), [
    ("model.width=32", "model.width: 16 -> 32"),
    ("seed=8", "seed: 7 -> 8"),
    ("batch.tokens=512", "batch.tokens: 256 -> 512"),
])
def test_resume_refuses_what_would_be_another_run(prepared: Path, trained: Path, override: str, said: str) -> None:
    done = train(prepared / "recipe.yaml", 1, f"run={trained}", override)
    assert done.returncode == 2 and said in done.stderr and "Traceback" not in done.stderr


def test_two_processes_need_a_layout(prepared: Path, tmp_path: Path) -> None:
    done = train(prepared / "recipe.yaml", 2, f"run={tmp_path}", "parallel.ds_config=null")
    assert done.returncode != 0
    assert done.stderr.count("parallel.ds_config is null") == 1 and "Traceback" not in done.stderr


def test_dry_run_counts_what_is_built(prepared: Path, tool: Tool, trained: Path) -> None:
    done = tool("train", prepared / "recipe.yaml", "--dry-run")
    assert done.returncode == 0, done.stderr
    count = sum(t.numel() for t in load_file(trained / "checkpoints/update-00000012/weights.safetensors").values())
    assert f"{count:,}" in done.stdout
    assert "updates per epoch" in done.stdout and "memory per process" in done.stdout


@pytest.fixture(scope="module")
def trained(prepared: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("trained") / "run"
    done = train(prepared / "recipe.yaml", 1, f"run={run}")
    assert done.returncode == 0, done.stderr
    return run
