"""`--help` prints every command, and its examples work unchanged."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from installed import environment
from xopen import xopen

import deepnmt.plots  # noqa: F401  # pictures are drawn: none are in what is imported later
from deepnmt.cli import COMMANDS, main
from deepnmt.errors import UserError
from deepnmt.processes.process_group import free_port
from studies import __main__ as studies

ROOT = Path(__file__).resolve().parents[2]
# Functions that would run for minutes or write the demo's corpus: they fail once the arguments are accepted.
LONG = {"reproduce": "studies.papers.reproduce", "layouts": "studies.benchmarks.layouts.compare_layouts",
        "pipeline-idle": "studies.benchmarks.layouts.measure_idle", "saves": "studies.benchmarks.saves.measure_saves",
        "verdict-runs": "studies.verdict_text.run_all", "collapse": "studies.collapse.run_draws",
        "deep-blocks": "studies.deep_blocks.measure_all", "data-at-scale": "studies.benchmarks.data_at_scale.made_up",
        "peers": "studies.benchmarks.data_at_scale.made_up",
        "speech": "studies.speech.run_study",
        "demo": "deepnmt.extras.demo.run.make_corpus",
        "get": "deepnmt.extras.fetch.fetch.fetch_texts", "run": "deepnmt.steps.run_steps"}
# Messages that an example may end with if there is no text, data or checkpoint.
WANTED = ("no training has begun there", "there is nothing to compare", "there is no text file",
          "there is no input file", "there is no file", "there is no prepared data in",
          "there is no folder", "there are 0;", "has 0 runs; a rule needs", "verdict.json cannot be read",
          "holds no whole one", "has no log.jsonl", "no checkpoint in", "a.de cannot be read",
          "my.yaml exists already", "not here", "is a command of task")


def refuse(*_: object, **__: object) -> None:
    raise UserError("not here")


def program(command: str) -> tuple[str, Callable[..., int]]:
    """What a user types before the command, and the function that runs it."""
    return (studies.PROGRAM, studies.main) if command in studies.STUDIES else ("deepnmt", main)


def examples(command: str, capsys: pytest.CaptureFixture[str]) -> list[list[str]]:
    """The words of the lines that `--help` ends with."""
    typed, run = program(command)
    with pytest.raises(SystemExit) as ended:
        run(command, ["--help"])
    text = capsys.readouterr().out
    assert ended.value.code == 0 and f"usage: {typed} {command}" in text
    return [shlex.split(line) for line in text.partition("examples:\n")[2].split("\n\n")[0].splitlines()]


def after_the_program(example: list[str], command: str) -> list[str]:
    """The arguments of an example, after a valid launcher, program and command."""
    launchers = (["deepspeed", "--quiet", "--num_accelerators", "2", "--module"],
                 ["torchrun", "--nproc_per_node", "2", "-m"], [])
    typed = program(command)[0].split()
    begin = next([*words, *typed, command] for words in launchers if example[: len(words)] == words)
    assert example[: len(begin)] == begin, example
    return example[len(begin) :]


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A folder with a recipe my.yaml and the folders of two runs of it, but no text, data or checkpoint. Only the
    variables that recipes use are set."""
    (tmp_path / "my.yaml").write_text((ROOT / "recipes" / "demo" / "admin_18l-18l.yaml").read_text(encoding="utf-8"))
    for name in ("my", "other"):
        (tmp_path / "runs" / name).mkdir(parents=True)
        shutil.copy(tmp_path / "my.yaml", tmp_path / "runs" / name / "recipe.yaml")
    monkeypatch.delenv("DEEPNMT_DEMO", raising=False)
    for file in (ROOT / "recipes").rglob("*.yaml"):
        for name in re.findall(r"\$\{(\w+)\}", file.read_text(encoding="utf-8")):
            monkeypatch.setenv(name, str(tmp_path))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(autouse=True)
def same_threads() -> Iterator[None]:
    """Restores the number of threads, which commands set to the machine's cores."""
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("command", [*COMMANDS, *studies.STUDIES])
def test_every_example_is_accepted(
        command: str, elsewhere: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Its arguments and recipe are accepted; then it ends because text, data or checkpoints are missing."""
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent))  # of torchrun
    if command in LONG:
        monkeypatch.setattr(LONG[command], refuse)
    lines = examples(command, capsys)
    assert lines
    for example in lines:
        words = after_the_program(example, command)
        if "<" in words:
            words = words[: words.index("<")]
        if command == "train" and "--dry-run" not in words:
            words.append("--dry-run")
        code = program(command)[1](command, words)
        said = capsys.readouterr().err
        assert code == (0 if command in ("train", "recipes") else 2), said
        assert code == 0 or any(want in said for want in WANTED), said


# Examples that `test_every_example_runs_from_the_wheel` leaves out, by how they begin, and why.
NOT_RUN = {
    "deepnmt get": "needs a network; tests/extras/fetch/test_fetch.py has a server of its own",
    "deepnmt demo": "takes minutes; tests/project/test_wheel.py runs a smaller one",
    "deepnmt sample": "needs a language model; tests/tasks/language_model",
    "deepnmt classify": "needs a classifier; tests/tasks/classify",
    "deepnmt seeds": "needs a classifier; tests/tasks/classify",
    "deepnmt serve": "stays; tests/extras/serve and tests/extras/test_tutorial.py",
    "deepnmt import": "needs a model of OPUS-MT; tests/extras/export/test_imports.py makes one",
    "deepnmt run multi30k/student_6l-2l": "takes hours; tests/project/test_steps.py trains such a chain",
    "deepnmt diagnose my.yaml model.encoder.block=pre_ln model.decoder.block=pre_ln --coordinates":
        "takes minutes; tests/extras/doctor/test_coordinates.py",
    "deepnmt tune": "needs a text that can be learned; tests/extras/tune/test_tune.py",
    "deepnmt run my.yaml --launcher": "starts eight processes",
    "deepnmt prepare my.yaml vocab.size=4000": "wants more text than there is here",
}
# Runs lines of examples, each in its folder, and tells by its exit code and last words which one failed.
DRIVER = """
import json, os, sys
from deepnmt.cli import main
for folder, words, given in json.loads(sys.argv[1]):
    os.chdir(folder)
    sys.stdin = open(given or os.devnull)
    code = main(words[0], words[1:])
    if code:
        sys.exit(f"exit code {code}: {words}")
"""


@pytest.fixture
def workplace(prepared: Path, tmp_path: Path) -> Path:
    """A folder with my.yaml, whose data are prepared, and all texts that examples name; `new/` has texts alone."""
    tree: dict[str, Any] = yaml.safe_load((prepared / "recipe.yaml").read_text(encoding="utf-8"))
    tree["run"] = "runs/my"
    tree["model"]["encoder"]["block"] = tree["model"]["decoder"]["block"] = "admin"
    tree["parallel"] |= {"ds_config": "ds_configs/zero1.json"}
    tree["train"] |= {"updates": 4, "save_every": 1, "validate_every": 1, "keep_best": 3, "checkpoint_form": "shards"}
    (tmp_path / "my.yaml").write_text(yaml.safe_dump(tree), encoding="utf-8")
    (tmp_path / "in.txt").write_text("the old dog sees the house\n\nthe cat sleeps\n", encoding="utf-8")
    (tmp_path / "begin.txt").write_text("der\n\n\n", encoding="utf-8")
    with xopen(tmp_path / "in.de.zst", "w", threads=0) as stream:
        stream.write("the old dog sees the house\n\nthe cat sleeps\n")
    (tmp_path / "contrastive.tsv").write_text("the cat sleeps\tdie Katze schläft\n", encoding="utf-8")
    for name in ("test.en", "test.de"):
        shutil.copy(prepared / "text" / name, tmp_path)
    for name in ("a.de", "b.de"):  # the runs' own test set, "translated"
        shutil.copy(prepared / "text" / "test.de", tmp_path / name)
    new = tmp_path / "new"
    new.mkdir()
    sides = [(prepared / "text" / f"train.{lang}").read_text(encoding="utf-8") for lang in ("en", "de")]
    pairs = "".join(f"{one}\t{other}\n" for one, other in zip(*map(str.splitlines, sides), strict=True))
    for name, text in (("corpus.en", sides[0]), ("corpus.de", sides[1]), ("corpus.txt.gz", sides[1]),
                       ("corpus2.txt.gz", sides[0]), ("pairs.tsv.gz", pairs), ("deu-eng.tsv.gz", pairs)):
        with xopen(new / name, "w") as file:
            file.write(text)
    return tmp_path


def test_every_example_runs_from_the_wheel(
        workplace: Path, installed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Training under torchrun, then all commands without a launcher on that run, where the checkout cannot be seen.
    What is not run is in NOT_RUN. `deepspeed` trains from the wheel in test_readme.py; two processes profile in
    test_admin_ranks.py, and check the cluster in test_check_cluster.py."""
    env = environment(installed)
    (launcher, *words), = [words for words in examples("train", capsys) if words[0] == "torchrun"]
    done = subprocess.run([installed / launcher, "--master_port", str(free_port()), *words], capture_output=True,
                          text=True, timeout=600, check=False, env=env, cwd=workplace)
    assert done.returncode == 0 and "finished after 4 updates" in done.stderr, f"{done.stdout}\n{done.stderr}"
    shutil.copytree(workplace / "runs/my", workplace / "runs/other")

    lines, left_out = [], set()
    for command in COMMANDS:
        for number, words in enumerate(examples(command, capsys)):
            begin = next((begin for begin in NOT_RUN if " ".join(words).startswith(begin)), None)
            if words[0] != "deepnmt" or begin:
                left_out |= {begin} - {None}
                continue
            folder = workplace
            if command in ("copy", "new", "split"):  # they refuse to write what is there
                folder = workplace / f"{command}-{number}"
                shutil.copytree(workplace / "new", folder)
            if words[1] == "diagnose" and number < 2:  # test_diagnose.py tries other recipes
                words += ["--minutes", "0"]
            if words[1] == "profile":  # runs/my has begun with its own
                words += ["run=runs/profiled"]
            arguments, _, given = (" ".join(map(shlex.quote, words[1:]))).partition(" '<' ")
            lines.append((str(folder), shlex.split(arguments), given))
    assert left_out == set(NOT_RUN), "an example has changed"
    lines.sort(key=lambda line: line[1][0] != "consolidate")  # before one process trains: its checkpoints are whole
    for there, words in {  # what an example needs and another command writes
            "nbest.jsonl": "translate runs/my --input in.txt --output nbest.jsonl --format jsonl translate.beam=5 "
                           "translate.nbest=5", "comparison.html": "evaluate runs/other"}.items():
        lines.insert(next(n for n, line in enumerate(lines) if there in line[1]), (str(workplace), words.split(), ""))
    done = subprocess.run([installed / "python", "-c", DRIVER, json.dumps(lines)], capture_output=True, text=True,
                          timeout=600, check=False, env=env, cwd=workplace)
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    assert (workplace / "out.txt").read_text(encoding="utf-8").count("\n") == 3
    assert (workplace / "runs" / "my" / "report.html").is_file()
    for name in ("averaged", "folded", "folded-best"):
        assert (workplace / "runs" / "my" / name / "manifest.json").is_file(), name


def test_the_example_of_prepare_works_next_to_the_demo(
        elsewhere: Path, prepared: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In a folder with the demo's text, and data prepared from it with another vocabulary."""
    (elsewhere / "data" / "demo").mkdir(parents=True)
    for name, there in (("text", "text"), ("prepared", "data")):
        (elsewhere / "data" / "demo" / name).symlink_to(prepared / there)
    words = [word.replace("4000", "2000") for word in after_the_program(examples("prepare", capsys)[1], "prepare")]
    assert main("prepare", [*words, "data.workers=1"]) == 0, capsys.readouterr().err


@pytest.mark.parametrize("command", ["average", "evaluate", "report", "score", "serve", "status", "translate"])
def test_the_setting_that_help_names_has_an_effect(
        command: str, elsewhere: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(command, ["--help"])
    named = re.search(r"to change, for example ((?:\S+=\S+ )+)", " ".join(capsys.readouterr().out.split()))
    assert named and main(command, ["runs/my", *named[1].split()]) == 2
    said = capsys.readouterr().err
    assert "has no effect" not in said and "unknown setting" not in said and "has a fault" not in said


def test_help_has_what_a_task_offers_by_other_words(capsys: pytest.CaptureFixture[str]) -> None:
    for command, words in (("new", ("--tsv FILE", "--text FILE")), ("import", ("Marian", "Llama"))):
        with pytest.raises(SystemExit):
            main(command, ["--help"])
        text = capsys.readouterr().out
        assert all(word in text for word in words) and text.count("examples:") == 2


def test_help_lists_every_command_in_groups(capsys: pytest.CaptureFixture[str]) -> None:
    for run, commands in ((main, COMMANDS), (studies.main, studies.STUDIES)):
        assert run(None, ["--help"]) == 0
        text = capsys.readouterr().out
        listed = re.findall(r"^  ([a-z-]+) +(\S.*)$", text, flags=re.MULTILINE)
        assert [name for name, _ in listed] == list(commands) and all(text.endswith(".") for _, text in listed)
    steps = ["recipes", "copy", "new", "run", "get", "split", "prepare", "profile", "train", "status", "average",
             "translate", "score", "evaluate", "report", "serve"]
    assert [name for name in COMMANDS if name in steps] == steps


def test_versions_without_torch() -> None:
    script = ("import sys\nfrom deepnmt.cli import main\nassert main(None, ['--version']) == 0\n"
              "assert not {'torch', 'numpy', 'deepspeed'} & sys.modules.keys()")
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=ROOT)
    assert re.fullmatch(r"deepnmt \d\S*\ntorch \d\S*\ndeepspeed \d\S*\n", done.stdout)
