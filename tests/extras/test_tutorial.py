"""docs/guide/tutorial.md: its recipes are whole, and its commands run in their order, with smaller models."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from warm import Warm, kill, waiting

import deepnmt
from deepnmt.cli import main
from deepnmt.config import check_recipe, load_recipe
from deepnmt.data.text import read_lines
from deepnmt.steps import run_steps

for package in ("ctranslate2", "uvicorn"):
    pytest.importorskip(package, reason=f"{package} is not installed; pip install {package}")
PAGE = (Path(__file__).resolve().parents[2] / "docs" / "guide" / "tutorial.md").read_text(encoding="utf-8")
RECIPES = dict(zip(("teacher", "student"), re.findall(r"^```yaml\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL),
                   strict=True))
INSTALL, TEXT, RUN, EXPORT, SERVE, CURL = re.findall(r"^```bash\n(.*?)\n```", PAGE, re.MULTILINE | re.DOTALL)
SMALL: dict[str, Any] = {
    "vocab": {"size": 150}, "batch": {"tokens": 512}, "schedule": {"warmup": 1}, "parallel": {"threads": 1},
    "average_last": 2,
    "train": {"updates": 6, "save_every": 2, "validate_every": 6, "valid_sentences": 2},
    "translate": {"beam": 2, "max_ratio": 1.0, "max_extra": 2}}


def words(command: str) -> list[str]:
    """The words of a command after `deepnmt`."""
    program, *rest = shlex.split(command.replace("\\\n", ""))
    assert program == "deepnmt"
    return rest


def step(words: list[str]) -> int:
    return main(words[0], words[1:])


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, threads: None) -> Path:
    """The current folder, with the text and the recipes of the page, made small."""
    monkeypatch.chdir(tmp_path)
    code = shlex.split(TEXT)
    assert code[:2] == ["python", "-c"]
    exec(code[2].replace("20_000", "150"), {})
    for file in (Path("text", f"{name}.{lang}") for name in ("valid", "test") for lang in ("en", "de")):
        file.write_text("".join(f"{line}\n" for line in list(read_lines(file))[:12]), encoding="utf-8")
    for name, text in RECIPES.items():
        tree = yaml.safe_load(text)
        check_recipe(tree, name)  # it is whole as it stands
        tree |= {key: {**tree.get(key, {}), **value} if isinstance(value, dict) else value
                 for key, value in SMALL.items()}
        if name == "student":  # a model that has learned nothing has ties, at which the export's beams may part
            tree["train"] |= {"updates": 60, "save_every": 20, "validate_every": 60}
        tree["model"] |= {"width": 16, "heads": 2, "ffn": 32}
        tree["model"]["encoder"]["layers"], tree["model"]["decoder"]["layers"] = 2, 1
        Path(f"{name}.yaml").write_text(yaml.safe_dump(tree), encoding="utf-8")
    return tmp_path


def serve(*arguments: str) -> int:
    """What the server's process calls."""
    return main("serve", list(arguments))


def test_the_whole_way(place: Path, warm: Warm, capsys: pytest.CaptureFixture[str]) -> None:
    command, recipe = words(RUN)
    assert command == "run" and run_steps(recipe, load_recipe(recipe), (), step) == 0
    for run in ("teacher", "student"):
        assert "bleu" in json.loads(Path("runs", run, "scores.json").read_text())["sets"]["test"]
    made, sources = (Path("text", name).read_bytes().count(b"\n") for name in ("teacher.de", "train.en"))
    assert made == sources == 150
    assert step(words(EXPORT)) == 0
    assert "weights in int8" in capsys.readouterr().out

    arguments = words(SERVE)
    assert arguments[:2] == ["serve", "runs/student"]
    [pid] = warm.start(1, "test_tutorial:serve", str(place / arguments[1]), *arguments[2:], "--port=0")
    try:
        for _ in waiting(120, "the server"):
            said = warm.said() if warm.log.exists() else ""
            if address := re.search(r"serving .* at http://127.0.0.1:(\d+)\n", said):
                break
            assert "Error" not in said, said
        assert shutil.which("curl"), "apt-get install curl"
        asked = subprocess.run(["bash", "-c", CURL.replace(":8000/", f":{address[1]}/")], stdout=subprocess.PIPE,
                               text=True, timeout=600, check=True).stdout
    finally:
        kill(pid)
        warm.wait()
    sentences = json.loads(re.search(r"-d '(.*)'", CURL)[1])["text"]  # type: ignore[index]
    settings = yaml.safe_load("\n".join(word.removeprefix("translate.").replace("=", ": ") for word in arguments[2:]))
    answer = json.loads(asked)["translations"]
    assert len(answer) == 2 and answer == deepnmt.load("runs/student").translate(sentences, **settings)
