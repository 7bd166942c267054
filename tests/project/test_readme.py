"""README.md keeps its word: its commands run, in their order."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from deepnmt.cli import COMMANDS
from deepnmt.parallel.launch import free_port

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```bash\n(.*?)^```", README, flags=re.MULTILINE | re.DOTALL)


def commands() -> list[str]:
    """The lines of the code blocks, and what a comment says may be given instead."""
    found = []
    for line in "".join(BLOCKS).splitlines():
        command, _, comment = line.partition("#")
        found.append(command.strip())
        if comment.strip().startswith("or: "):
            found.append(comment.strip().removeprefix("or: "))
    return [command for command in found if command]


def test_readme_has_the_commands_that_are_tested_here() -> None:
    programs = {Path(word).name for command in commands() for word in command.split() if word.endswith(".py")}
    assert programs == {"prepare_data.py", "train.py", "average_checkpoints.py", "translate.py", "evaluate.py"}
    assert {command.split()[0] for command in commands()} == {"make", "python", "deepspeed"}


@pytest.mark.parametrize(("target", "program"), [
    ("demo", "tools/demo.py recipes/demo/admin_18l-18l.yaml"),
    ("test", "-m pytest"),
    ("demo-clean", "rm -rf runs/demo"),
])
def test_make_targets(target: str, program: str) -> None:
    assert f"make {target}" in README
    command = ["make", "-n", "--no-print-directory", target]  # the suite itself may run under make
    planned = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    assert program in planned.stdout.splitlines()[-1]


@pytest.fixture(scope="module")
def workplace(prepared: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An empty folder with `my.yaml`, a text to translate and the project's `tools`."""
    folder = tmp_path_factory.mktemp("workplace")
    tree: dict[str, Any] = yaml.safe_load((prepared / "recipe.yaml").read_text(encoding="utf-8"))
    tree["run"], tree["data"]["folder"] = "runs/my", "data/my"
    tree["parallel"] |= {"ds_config": "ds_configs/zero1.json"}
    tree["train"] |= {"updates": 5, "save_every": 1, "validate_every": 5}
    copied = yaml.safe_load((ROOT / "recipes" / "demo" / "admin_18l-18l.yaml").read_text(encoding="utf-8"))
    tree["average_last"] = copied["average_last"]  # the recipe that is copied
    tree["train"] |= {name: copied["train"][name] for name in ("keep_last", "keep_best")}
    (folder / "my.yaml").write_text(yaml.safe_dump(tree), encoding="utf-8")
    (folder / "in.txt").write_text("the old dog sees the house\n\nthe cat sleeps\n", encoding="utf-8")
    (folder / "tools").symlink_to(ROOT / "tools")
    return folder


def said_by(command: str, folder: Path) -> str:
    """Runs a command as it stands, but for a port of its own; returns its standard output."""
    program, *arguments = shlex.split(command)
    if program == "deepspeed":
        arguments = ["--master_port", str(free_port()), *arguments]
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run([shutil.which(program, path=path) or program, *arguments], capture_output=True, text=True,
                          timeout=600, check=False, cwd=folder, env={**os.environ, "PATH": path})
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def test_every_command_runs_in_order(workplace: Path) -> None:
    said = {command: said_by(command, workplace) for command in commands() if not command.startswith("make ")}
    run = workplace / "runs" / "my"
    assert len(said) == len([command for command in commands() if not command.startswith("make ")])
    assert (workplace / "data" / "my" / "manifest.json").is_file()
    described = next(text for command, text in said.items() if "--dry-run" in command)
    assert "updates per epoch" in described and "memory per process" in described
    assert (workplace / "out.txt").read_text(encoding="utf-8").count("\n") == 3
    assert "BLEU" in said["python tools/evaluate.py runs/my"]
    for name in ("recipe.yaml", "checkpoints/update-00000005/manifest.json", "averaged/manifest.json", "log.jsonl",
                 "curve.png", "admin_profile.json", "admin_profile.png", "scores.json", "STATUS.json"):
        assert (run / name).stat().st_size > 0, name
    assert (run / "curve.png").stat().st_size > 5000
    assert list((run / "tensorboard").glob("events*"))
    assert re.search(r"\|version:", (run / "scores.json").read_text(encoding="utf-8"))


def test_readme_names_the_variables_that_more_tests_are_behind() -> None:
    texts = [file.read_text(encoding="utf-8") for file in (ROOT / "tests").rglob("*.py")]
    behind = {name for text in texts for name in re.findall(r"environ\.get\(\"(DEEPNMT_[A-Z]+)\"", text)}
    assert behind and [name for name in behind if f"`{name}=" not in README] == []


def test_installed_names_are_commands(tmp_path: Path) -> None:
    named = re.search(r"`deepnmt ([a-z|]+)`", README)
    assert named and set(named[1].split("|")) <= COMMANDS.keys()
    installed = Path(sys.executable).parent / "deepnmt"
    if not installed.exists():
        pytest.skip("deepnmt is not installed here; make test installs it")
    (tmp_path / "recipe.yaml").write_text("tran: {}", encoding="utf-8")
    done = subprocess.run([str(installed), "train", str(tmp_path / "recipe.yaml")], capture_output=True, text=True,
                          check=False, cwd=ROOT)  # refused before torch is imported
    assert done.returncode == 2 and "tran: unknown setting" in done.stderr, done.stderr
