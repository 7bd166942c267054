"""docs/guide/ quotes deepnmt correctly: its recipe is valid and has the printed sizes, and the messages that it
explains exist. Two of its pages run from a wheel; test_pages.py tests links, and that every command is accepted."""

from __future__ import annotations

import ast
import json
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
from installed import DRIVER, environment
from xopen import xopen

from deepnmt.cli import main
from deepnmt.config import load_recipe
from deepnmt.data.text import read_lines
from deepnmt.parallel.build import partition_of
from deepnmt.training.reporters import Console
from deepnmt.training.task import find_task

ROOT = Path(__file__).resolve().parents[2]
GUIDE = ROOT / "docs" / "guide"


def test_the_recipe_of_the_guide(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                 capsys: pytest.CaptureFixture[str]) -> None:
    page = (GUIDE / "your_own_text.md").read_text(encoding="utf-8")
    recipe, = re.findall(r"^```yaml\n(run: .*?)^```", page, flags=re.MULTILINE | re.DOTALL)
    (tmp_path / "my.yaml").write_text(recipe, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    assert main("train", ["my.yaml", "--dry-run"]) == 0
    printed = capsys.readouterr().out
    for figure in ("model", "parameters", "tokens per update", "layout"):
        line, = re.findall(rf"^# {figure} .*$", page, flags=re.MULTILINE)
        assert re.search("^" + re.escape(line) + "$", printed, flags=re.MULTILINE), (line, printed)


def strings(file: Path) -> list[str]:
    """The strings in a file's code, without docstrings; of an f-string its fixed parts."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    return [node.value for node in ast.walk(tree)
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings]


def test_messages_that_the_guide_explains_exist() -> None:
    """Each quoted symptom of when_a_run_fails.md, apart from its "...", is in the code."""
    page = (GUIDE / "when_a_run_fails.md").read_text(encoding="utf-8")
    quoted = re.findall(r"^\| \"([^\"]+)\" \|", page, flags=re.MULTILINE)
    code = "\n".join(text for file in (ROOT / "deepnmt").rglob("*.py") for text in strings(file))
    pieces = [piece.strip(" ,") for words in quoted for piece in words.split("...")]
    assert quoted and [piece for piece in pieces if piece not in code] == []


FIGURES = {"loss": "loss", "ppl": "perplexity", "lr": "learning_rate", "gnorm": "gradient_norm", "scale": "loss_scale",
           "epoch": "epoch", "BLEU": "bleu", "source": "source_gain", "common": "encoder_common",
           "attention": "cross_attention_entropy"}  # as on a line, and as in a record


def test_quoted_lines_of_a_run_are_as_a_run_prints_them(capsys: pytest.CaptureFixture[str]) -> None:
    """Lines of progress and validations in blocks of text: their figures, printed again, give the same line."""
    blocks = [block for page in sorted(GUIDE.glob("*.md"))
              for block in re.findall(r"^```text\n(.*?)^```", page.read_text(encoding="utf-8"), re.M | re.S)]
    lines = [line for line in "".join(blocks).splitlines() if re.match(r"update \d+/|validation at update ", line)]
    assert len(lines) >= 8
    for line in lines:
        record: dict[str, float] = {name: float(figure) for word, name in FIGURES.items()
                                    for figure in re.findall(rf" {word} ([-+.e\d]+)", line)}
        update, updates = re.findall(r"update (\d+)(?:/(\d+))?", line)[0]
        kind = "train" if updates else "valid"
        if updates:
            speed, minutes, seconds = re.findall(r"(\d+) tok/s ETA (\d+):(\d+)", line)[0]
            record |= {"target_tokens_per_second": float(speed), "seconds_left": 60 * int(minutes) + int(seconds),
                       "skipped_updates": 0}
        console = Console(0, int(updates or 0), find_task("translation").describe)
        console.record(kind, int(update), {**record, "best": "(best so far)" in line})
        assert capsys.readouterr().err.strip() == line


def test_the_quoted_table_of_stages() -> None:
    page = (GUIDE / "which_layout.md").read_text(encoding="utf-8")
    recipe = load_recipe("wmt14_en_de/60l-12l", ["model.encoder.block=admin", "model.decoder.block=admin",
                                                "parallel.ds_config=ds_configs/zero1.json",
                                                "parallel.precision=fp32", "parallel.pipeline_stages=4"])
    assert f"```text\n{partition_of(recipe, 32_000, 32_000).table(16)}\n```" in page


FEW = ["train.updates=2", "train.save_every=1", "train.validate_every=2", "schedule.warmup=1"]


@pytest.fixture
def place(prepared: Path, tmp_path: Path) -> Path:
    """A folder with a small recipe my.yaml, whose data are prepared, and with the texts that the pages name."""
    recipe = (prepared / "recipe.yaml").read_text(encoding="utf-8").replace(f"{prepared}/run", "runs/my")
    (tmp_path / "my.yaml").write_text(recipe.replace("beam: 2", "beam: 5"), encoding="utf-8")
    (tmp_path / "in.txt").write_text("the old dog sees the house\n\nthe cat sleeps\n", encoding="utf-8")
    (tmp_path / "begin.txt").write_text("der\n\n\n", encoding="utf-8")
    with xopen(tmp_path / "mono.de.zst", "w", threads=0) as stream:
        stream.write("the old dog sees the house\n\nthe cat sleeps\n")
    (tmp_path / "people.txt").write_text("der alte Hund sieht das Haus\n\ndie Katze schläft\n", encoding="utf-8")
    sides = [read_lines(prepared / "text" / f"train.{lang}") for lang in ("de", "en")]
    (tmp_path / "all.tsv").write_text("".join(f"{de}\t{en}\n" for de, en in zip(*sides)), encoding="utf-8")
    return tmp_path


def shape(text: str) -> str:
    """A text with a mark in place of each number."""
    return re.sub(r"\d[\d,.]*", "#", text)


def test_quoted_answers_have_the_shape_of_what_is_printed(
        place: Path, prepared: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Of `split`, `prepare` and `new`, whatever their numbers, which are those of another text."""
    monkeypatch.chdir(place)
    texts = [str(prepared / "text" / f"train.{lang}") for lang in ("de", "en")]
    assert main("split", ["all.tsv", "data/text", "--langs", "de", "en", "--valid", "25", "--test", "25"]) == 0
    assert main("prepare", ["my.yaml", "data.folder=data/again"]) == 0
    (place / "new").mkdir()
    monkeypatch.chdir(place / "new")
    assert main("new", ["my.yaml", "--src", texts[0], "--trg", texts[1]]) == 0
    said = shape("".join(capsys.readouterr()).replace("test.held_out", "test.test"))
    begins = {"your_own_text": ("pairs: ", "training the vocab", "test.test: ", "train: ", "valid: ", "an epoch is "),
              "new_recipe": ("5,000 pairs", "data/my/text", "my.yaml: ", "next: ")}
    for page, words in begins.items():
        blocks = re.findall(r"^```text\n(.*?)^```", (GUIDE / f"{page}.md").read_text(encoding="utf-8"), re.M | re.S)
        lines = [line for line in "".join(blocks).splitlines() if line.startswith(words)]
        assert len(lines) == len(words), lines
        pieces = [piece for line in lines for piece in line.removesuffix("...").strip(" ;,").split("; ")]
        assert [piece for piece in pieces if "left out" not in piece and shape(piece) not in said] == [], said


def commands(page: str) -> list[list[str]]:
    """The words of the commands in a page's bash blocks, without what follows a `>` or a `#`."""
    blocks = re.findall(r"^```bash\n(.*?)^```", (GUIDE / f"{page}.md").read_text(encoding="utf-8"), re.M | re.S)
    lines = "".join(blocks).replace("\\\n", " ").splitlines()
    return [shlex.split(re.split(r" [>#] ?", line)[0]) for line in lines]


def test_two_pages_run_from_the_wheel(place: Path, installed: Path) -> None:
    """In a new shell's environment and in their order, but for launchers: the README's and those of `--help` run."""
    def drive(page: str) -> int:
        lines = [words[1:] for words in commands(page) if words[:1] == ["deepnmt"]]
        for words in lines:
            if words[0] == "train":
                words += FEW
            if "jsonl" in words:
                words += ["--output", "nbest.jsonl"]
        done = subprocess.run([installed / "python", "-c", DRIVER, json.dumps(lines)], cwd=place, check=False,
                              env=environment(installed), capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
        return len(lines)

    assert drive("your_own_text") >= 9
    for name in ("other", "baseline"):
        shutil.copytree(place / "runs" / "my", place / "runs" / name)
    assert drive("translate_and_score") >= 11
