"""What is generated is up to date, links to files are valid, and every command on a page is accepted, up to the point
where it needs text, data or a run."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

from deepnmt.cli import COMMANDS, main
from deepnmt.config.choices import BLOCKS
from deepnmt.config.sections import Recipe
from deepnmt.errors import UserError
from studies import __main__ as studies

ROOT = Path(__file__).resolve().parents[2]


def script(path: str) -> ModuleType:
    """A script of the repository outside any package, as a module."""
    spec = importlib.util.spec_from_file_location(Path(path).stem, ROOT / path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


PAGES: list[Path] = script(".ci/prose.py").pages()


def test_every_generated_file_is_up_to_date() -> None:
    generated = script("docs/generate.py").generated()
    assert {path.name for path in generated} == {"blocks.md", "blocks.svg", "recipe.schema.json"}
    assert {*(ROOT / "deepnmt").rglob("*.schema.json")} <= {*generated}
    old = [path for path, text in generated.items() if not path.is_file() or path.read_text(encoding="utf-8") != text]
    assert old == [], "run python docs/generate.py and commit the result"


def test_the_site_has_every_setting_and_every_command() -> None:
    generate = script("docs/generate.py")
    settings, helps = (generate.filled(f"reference/{page}", (ROOT / "docs/reference" / f"{page}.md").read_text("utf-8"))
                       for page in ("recipe", "commands"))
    rows = set(re.findall(r"^\| `(\w+)` \|", settings, re.MULTILINE))
    again = " ".join(re.findall(r"^As in .*?\.$", settings, re.MULTILINE | re.DOTALL))  # rows that stand elsewhere
    rows |= set(re.findall(r"`(\w+)`", again))
    assert {name for _, section in generate.sections_in("", Recipe) for name in section.model_fields} <= rows
    assert set(re.findall(r"^##+ (\S+)$", helps, re.MULTILINE)) >= {*COMMANDS, *studies.STUDIES}


def test_pages_count_the_blocks() -> None:
    texts = {page: page.read_text(encoding="utf-8") for page in PAGES if page.name != "CHANGELOG.md"}
    counts = {(page.name, int(count)) for page, text in texts.items()
              for count in re.findall(r"\b(?:the|all|has) (\d+) (?:residual )?blocks", text)}
    assert ("README.md", len(BLOCKS)) in counts and {count for _, count in counts} == {len(BLOCKS)}, counts


# -- links -------------------------------------------------------------------------------------------------------------


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_are_valid(page: Path) -> None:
    text = re.sub(r"^```.*?^```|`[^`\n]*`", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    for link in re.findall(r"\]\((?!https?:)([^)\s]+)", text):
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        assert target.exists(), link
        assert not anchor or target.suffix != ".md" or anchor in anchors(target), link


# -- commands ----------------------------------------------------------------------------------------------------------

# Bash expands variables and loops; its path has no programs, so every command calls this function. A record is written
# at once, since the commands of a pipe run at the same time.
RECORD = """\
PATH=/nowhere
command_not_found_handle() { local record; printf -v record '%s\\037' "$@"; printf '%s\\036' "$record" >> words; }
cd() { :; }
source() { :; }
"""
# Functions that would start long work once the arguments are accepted.
LONG = ("studies.papers.reproduce", "studies.benchmarks.layouts.compare_layouts",
        "studies.benchmarks.layouts.measure_idle", "studies.benchmarks.saves.measure_saves",
        "studies.verdict_text.run_all", "studies.verdict_text.propose_all", "studies.verdict_text.fit_runs",
        "studies.verdict_text.judge_runs", "studies.verdict_text.learn_runs",
        "studies.benchmarks.gpu_report.gpu_report",
        "studies.collapse.run_draws", "studies.deep_blocks.measure_all",
        "studies.benchmarks.data_at_scale.made_up", "deepnmt.extras.demo.run.make_corpus",
        "deepnmt.extras.fetch.fetch.fetch_texts")
WANTED = ("there is no text file", "there is no input file", "there is no file", "there is no prepared data in",
          "there is no folder", "but there is no such folder", "there is no recipe or run folder runs/",
          "there is no recipe student.yaml", "there is no recipe m30k.yaml", "there is no recipe my_tuned.yaml",
          "exists already; give", "$ deepnmt prepare", "there is no text in", "begins with no program on the PATH",
          "no checkpoint in", "there are 0;", "is a command of task: classify",
          "holds no whole one", "has no log.jsonl", "not here")


# Programs of others that pages call.
OTHERS = ("pip", "python", "python3", "git", "paste", "head", "zcat", "cut", "curl", "tensorboard", "fairseq-train")


def commands(page: Path, folder: Path) -> list[list[str]]:
    """The words of every command in a page's bash blocks."""
    blocks = re.findall(r"^```bash\n(.*?)^```", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    blocks = [re.sub(r"^\.venv/bin/", "", block, flags=re.MULTILINE) for block in blocks]  # else a file to Bash
    subprocess.run(["bash", "-ec", RECORD + "".join(blocks)], check=True, cwd=folder,
                   env={"DEEPNMT_CORPORA": "corpora"})
    words = folder / "words"
    return [command.split("\037")[:-1] for command in words.read_text().split("\036")[:-1]] if words.exists() else []


def ours(words: list[str]) -> tuple[Callable[..., int], list[str]] | None:
    """The function that runs a command, after any launcher, and its arguments; None if it is not one of ours."""
    if words[:3] == ["python", "-m", "studies"]:
        return studies.main, words[3:]
    for number, word in enumerate(words):
        if word == "deepnmt" and (not number or words[number - 1] in ("-m", "--module", "python")):
            return main, words[number + 1:]
        if word.startswith("tools/"):
            command = re.search(r'entry\("([a-z-]+)"\)', (ROOT / word).read_text(encoding="utf-8"))
            assert command, word
            return main, [command[1], *words[number + 1:]]
    return None


def refuse(*_: object, **__: object) -> None:
    raise UserError("not here")


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """A folder with the recipes, the layouts and a recipe `my.yaml`, but no text, data or checkpoint."""
    for name in ("recipes", "ds_configs"):
        (tmp_path / name).symlink_to(ROOT / name)
    recipe = (ROOT / "recipes" / "demo" / "admin_18l-18l.yaml").read_text(encoding="utf-8")
    recipe = recipe.replace("runs/demo", "runs/my").replace("beam: 4", "beam: 5")
    (tmp_path / "my.yaml").write_text(recipe, encoding="utf-8")
    monkeypatch.setenv("DEEPNMT_CORPORA", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    for name in LONG:
        monkeypatch.setattr(name, refuse)
    threads = torch.get_num_threads()
    yield tmp_path
    torch.set_num_threads(threads)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_are_accepted(page: Path, elsewhere: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words in commands(page, elsewhere):
        for run in re.findall(r"\bruns/[\w-]+(?![\w.-])", " ".join(words)):
            (elsewhere / run).mkdir(parents=True, exist_ok=True)
            shutil.copy(elsewhere / "my.yaml", elsewhere / run / "recipe.yaml")
        if (command := ours(words)) is not None:
            run_command, (name, *rest) = command
            code = run_command(name, [*rest, "--dry-run"] if name == "train" and "--dry-run" not in rest else rest)
            said = capsys.readouterr().err
            assert code == 0 or (code == 2 and any(want in said for want in WANTED)), f"{' '.join(words)}\n{said}"
            assert "ds_config: there is no file" not in said, words
        elif words[0] == "make":
            assert all(re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE)
                       for target in words[1:] if "=" not in target), words
        elif "pytest" in words:
            chosen = [word for word in words if word.startswith("tests/")]
            text = "".join((ROOT / word).read_text(encoding="utf-8") for word in chosen if word.endswith(".py"))
            assert all((ROOT / word).exists() for word in chosen), words
            names = words[words.index("-k") + 1].split() if "-k" in words else []
            assert all(re.search(rf"def test\w*{name}|\"{name}\"", text) for name in names
                       if name not in ("and", "not")), words
        elif words[0] == "python" and words[1].endswith(".py"):
            assert (ROOT / words[1]).exists(), words
        else:
            assert words[0] in OTHERS, words
