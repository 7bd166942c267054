"""README.md keeps its word: its commands run, in their order."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from installed import environment

from deepnmt.config.sections import Recipe
from deepnmt.processes.process_group import free_port

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```bash\n(.*?)^```", README, flags=re.MULTILINE | re.DOTALL)


RECIPE = re.search(r"^```yaml\n(.*?)^```", README, flags=re.MULTILINE | re.DOTALL)
SETUP = ("make", "source", "python3", ".venv/bin/pip")  # commands that install; the tests run in what they made


def commands() -> list[str]:
    """The lines of the code blocks, without their comments."""
    lines = [re.split(r"\s+# ", line)[0].strip() for line in "".join(BLOCKS).replace("\\\n", "").splitlines()]
    return [line for line in lines if line and line.split()[0] not in SETUP]


def test_readme_has_the_commands_that_are_tested_here() -> None:
    assert {command.split()[1] for command in commands() if command.startswith("deepnmt ")} == {
        "new", "run", "translate", "report"}
    assert {command.split()[0] for command in commands()} == {"deepnmt", "deepspeed"}


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
    """A folder with the two plain files that the README begins with, and a text to translate."""
    folder = tmp_path_factory.mktemp("workplace")
    for language in ("en", "de"):
        shutil.copy(prepared / "text" / f"train.{language}", folder / f"a.{language}")
    (folder / "in.txt").write_text("der alte Hund sieht das Haus\n\ndie Katze schläft\n", encoding="utf-8")
    return folder


def shrink(file: Path) -> None:
    """Makes the recipe that `deepnmt new` has written small. The README's example of a deep model fits into it."""
    tree: dict[str, Any] = yaml.safe_load(file.read_text(encoding="utf-8"))
    assert RECIPE
    Recipe.model_validate(tree | {"model": tree["model"] | yaml.safe_load(RECIPE[1])["model"]})
    tree["vocab"] |= {"size": 300}
    tree["data"] |= {"subword_variants": 0}
    tree["model"] |= {"width": 16, "heads": 2, "ffn": 32}
    for side in ("encoder", "decoder"):
        tree["model"][side]["layers"] = 2
    tree["admin"] = {"tokens": 256}
    tree["batch"] |= {"tokens": 256}
    tree["schedule"] |= {"warmup": 1}
    tree["train"] |= {"updates": 5, "save_every": 1, "keep_last": 2, "validate_every": 5}
    tree["translate"] |= {"beam": 1, "max_ratio": 1.0, "max_extra": 2}
    tree["average_last"] = 2
    tree["parallel"] = {}  # on every machine the same
    file.write_text(yaml.safe_dump(tree), encoding="utf-8")


def run_command(command: str, folder: Path, installed: Path) -> str:
    """Runs a command as it stands, but for a port of its own, with deepnmt from the wheel; returns what it prints."""
    if command.startswith("deepspeed "):
        command = command.replace("deepspeed ", f"deepspeed --master_port {free_port()} ", 1)
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=600, check=False,
                          cwd=folder, env=environment(installed))
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def test_every_command_runs_in_order(workplace: Path, installed: Path) -> None:
    answers = {}
    for command in commands():
        answers[command] = run_command(command, workplace, installed)
        if command.startswith("deepnmt new"):
            shrink(workplace / "my.yaml")
    run = workplace / "runs" / "my"
    assert (workplace / "data" / "my" / "prepared" / "manifest.json").is_file()
    [dry] = re.findall(r"`(deepnmt train [^`]*--dry-run)`", README)
    described = run_command(dry, workplace, installed)
    assert "18L-2L" in described and "memory per process" in described
    assert (workplace / "out.txt").read_text(encoding="utf-8").count("\n") == 3
    assert "BLEU" in answers["deepnmt run my.yaml"]
    for name in ("recipe.yaml", "checkpoints/update-00000005/manifest.json", "averaged/manifest.json", "log.jsonl",
                 "curve.png", "scores.json", "STATUS.json"):
        assert (run / name).stat().st_size > 0, name
    assert (run / "curve.png").stat().st_size > 5000
    assert list((run / "tensorboard").glob("events*"))
    assert re.search(r"\|version:", (run / "scores.json").read_text(encoding="utf-8"))


def test_contributing_names_the_variables_that_more_tests_are_behind() -> None:
    page = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    texts = [file.read_text(encoding="utf-8") for file in (ROOT / "tests").rglob("*.py")]
    behind = {name for text in texts for name in re.findall(r"environ\.get\(\"(DEEPNMT_[A-Z]+)\"", text)}
    assert behind and [name for name in behind if f"`{name}=" not in page] == []


def test_the_installed_program_is_this_one(tmp_path: Path) -> None:
    installed = Path(sys.executable).parent / "deepnmt"
    if not installed.exists():
        pytest.skip("deepnmt is not installed here; make test installs it")
    (tmp_path / "recipe.yaml").write_text("tran: {}", encoding="utf-8")
    done = subprocess.run([str(installed), "train", str(tmp_path / "recipe.yaml")], capture_output=True, text=True,
                          check=False, cwd=ROOT)  # rejected before torch is imported
    assert done.returncode == 2 and "tran: unknown setting" in done.stderr, done.stderr
