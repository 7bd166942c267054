"""docs/results/: every command on the pages is understood today, up to where text, data or a run would be needed."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from deepnmt.cli import main
from deepnmt.errors import UserError
from studies import __main__ as studies

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted((ROOT / "docs" / "results").glob("*.md"))
# Prints the words of each command in place of running it, so that bash expands variables and loops.
ECHO = "".join(f'{name}() {{ printf "%s\\037" {name} "$@"; printf "\\036"; }}\n' for name in ("python", "make"))
# What would begin to work once its arguments are understood.
LONG = ("studies.papers.reproduce", "studies.benchmarks.layouts.compare_layouts",
        "studies.benchmarks.layouts.measure_idle", "studies.verdict_grid.run_grid", "studies.verdict_grid.fit_grid",
        "studies.verdict_grid.judge_runs", "deepnmt.gpu_report.report.gpu_report")
WANTED = ("there is no text file", "there is no file", "there is no prepared data in", "there is no folder",
          "there is no recipe runs/", "not here")


def commands(page: Path) -> list[list[str]]:
    """The words of the commands in a page's bash blocks."""
    blocks = re.findall(r"^```bash\n(.*?)^```", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    done = subprocess.run(["bash", "-euc", ECHO + "".join(blocks)], capture_output=True, text=True, check=True,
                          env={"DEEPNMT_CORPORA": "corpora"})
    return [words.split("\037")[:-1] for words in done.stdout.split("\036")[:-1]]


EVERY = [pytest.param(words, id=f"{page.stem}-{number}")
         for page in PAGES for number, words in enumerate(commands(page))]


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """A folder with nothing but `recipes/`."""
    (tmp_path / "recipes").symlink_to(ROOT / "recipes")
    monkeypatch.setenv("DEEPNMT_CORPORA", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def refuse(*_: object, **__: object) -> None:
    raise UserError("not here")


@pytest.mark.parametrize("words", EVERY)
def test_a_command_is_understood(words: list[str], elsewhere: None, capsys: pytest.CaptureFixture[str],
                                 monkeypatch: pytest.MonkeyPatch) -> None:
    for name in LONG:
        monkeypatch.setattr(name, refuse)
    if words[0] == "make":
        assert re.search(rf"^{words[1]}:", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE)
    elif words[1:3] == ["-m", "pytest"]:
        chosen = [word for word in words[3:] if word.startswith("tests/")]
        text = "".join((ROOT / word).read_text(encoding="utf-8") for word in chosen if word.endswith(".py"))
        assert chosen and all((ROOT / word).exists() for word in chosen)
        names = words[words.index("-k") + 1].split() if "-k" in words else []
        assert all(re.search(rf"def test\w*{name}|\"{name}\"", text) for name in names if name not in ("and", "not"))
    else:
        run: Callable[..., int] = main
        if words[1:3] == ["-m", "studies"]:
            run, name, rest = studies.main, words[3], words[4:]
        else:
            found = re.search(r'main\("([a-z-]+)"\)', (ROOT / words[1]).read_text(encoding="utf-8"))
            assert found
            name, rest = found[1], words[2:]
        code = run(name, rest)
        said = capsys.readouterr().err
        assert code == 0 or (code == 2 and any(want in said for want in WANTED)), said
