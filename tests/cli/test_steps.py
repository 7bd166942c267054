"""`deepnmt run`: distillation and back-translation from recipes alone, stopped and continued."""

from __future__ import annotations

import json
import os
import pty
import runpy
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from refusals import Refused

import deepnmt
from deepnmt.cli import main
from deepnmt.config import load_recipe
from deepnmt.data.text import read_lines
from deepnmt.steps import _steps, run_steps, starter

ROOT = Path(__file__).parents[2]
TINY = {"train": {"updates": 3, "save_every": 1, "validate_every": 3, "valid_sentences": 2}, "average_last": 2,
        "translate": {"beam": 1, "max_ratio": 1.0, "max_extra": 2}}


@pytest.fixture
def place(prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, threads: None) -> Path:
    """The current folder, empty."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(prepared: Path, name: str, langs: tuple[str, str], train: dict[str, Any]) -> str:
    """Writes NAME.yaml, a tiny recipe over 150 pairs of the demo's text, and returns its name. In `train` a language
    stands for its text."""
    for lang in langs:
        lines = (prepared / "text" / f"train.{lang}").read_text(encoding="utf-8").splitlines(keepends=True)
        Path(f"real.{lang}").write_text("".join(lines[:150]), encoding="utf-8")
    texts = {part: {side: str(prepared / "text" / f"{part}.{lang}")
                    for side, lang in zip(("src", "trg"), langs, strict=True)} for part in ("valid", "test")}
    tree = yaml.safe_load((prepared / "recipe.yaml").read_text(encoding="utf-8"))
    tree["data"] |= {"folder": f"data/{name}", "src_lang": langs[0], "trg_lang": langs[1], "train": train,
                     "valid": texts["valid"], "test": {}}
    tree["vocab"]["size"] = 150
    tree["run"] = f"runs/{name}"
    tree |= {key: {**tree.get(key, {}), **value} if isinstance(value, dict) else value for key, value in TINY.items()}
    Path(f"{name}.yaml").write_text(yaml.safe_dump(tree), encoding="utf-8")
    return f"{name}.yaml"


class Steps:
    """Runs commands in this process and keeps their first words. Until it was called `fail_at` times."""

    def __init__(self, fail_at: int = 1000) -> None:
        self.taken: list[str] = []
        self.fail_at = fail_at

    def __call__(self, words: list[str]) -> int:
        self.taken.append(f"{words[0]} {words[1].partition('.')[0]}")
        if len(self.taken) == self.fail_at:
            return 75
        return main(words[0], words[1:])

    def run(self, file: str) -> int:
        return run_steps(file, load_recipe(file), (), self)


TRAINED = ("prepare {0}", "train {0}", "average runs/{0}")


def steps_of(name: str) -> list[str]:
    return [step.format(name) for step in TRAINED]


def test_checkpoints_with_a_running_average_are_not_averaged(prepared: Path) -> None:
    """Else `average` would be taken, the mean of the weights, in place of what validations measured."""
    whole = ["prepare", "train", "average", "evaluate"]
    for ema, taken in (("null", whole), ("0.9", [step for step in whole if step != "average"])):
        recipe = load_recipe(prepared / "recipe.yaml", [f"train.ema={ema}"])
        assert [words[0] for words in _steps("my.yaml", recipe, [])] == taken


def test_distillation(prepared: Path, place: Path, refused: Refused) -> None:
    write(prepared, "teacher", ("en", "de"), {"src": "real.en", "trg": "real.de"})
    student = write(prepared, "student", ("en", "de"), {
        "src": "real.en", "trg": "made/train.de.gz", "translated_by": "teacher.yaml", "references": "real.de",
        "translate": {"beam": 2, "candidates": 2, "choose": "chrf"}})
    made = Path("made/train.de.gz")
    assert "or let deepnmt run make it" in refused("prepare", student)

    stopped = Steps(fail_at=4)
    assert stopped.run(student) == 75 and not made.exists()
    assert stopped.taken == [*steps_of("teacher"), "translate runs/teacher"]
    whole = Steps()
    assert whole.run(student) == 0
    assert whole.taken == [*steps_of("teacher"), "translate runs/teacher", *steps_of("student")]
    lines = list(read_lines(made))
    assert main("translate", ["runs/teacher", "--input", "real.en", "--output", "again.de", "--references", "real.de",
                              "translate.beam=2", "translate.candidates=2", "translate.choose=chrf"]) == 0
    assert lines == Path("again.de").read_text(encoding="utf-8").splitlines() and len(lines) == 150
    settings = json.loads(Path("data/student/manifest.json").read_text())["inputs"]["train"]
    assert {file["name"] for file in settings} == {"real.en", "train.de.gz"}

    again = Steps()
    assert again.run(student) == 0 and again.taken == steps_of("student")  # nothing is translated twice
    other = Path(student).read_text(encoding="utf-8").replace("beam: 2", "beam: 3")
    Path(student).write_text(other, encoding="utf-8")
    assert "made/train.de.gz was translated from another text, by another model" in refused("run", student)


def test_a_teacher_translates_with_another_program(prepared: Path, place: Path) -> None:
    """It is exported before; the output is packed, and as many lines as the source, with empty ones."""
    pytest.importorskip("ctranslate2")
    write(prepared, "teacher", ("en", "de"), {"src": "real.en", "trg": "real.de"})
    student = write(prepared, "student", ("en", "de"), {
        "real": {"src": "real.en", "trg": "real.de"},
        "made": {"src": "mono.en", "trg": "made.de.zst", "translated_by": "teacher.yaml",
                 "translate": {"backend": "ctranslate2", "finish": "best", "patience": 1.0, "beam": 2}}})
    Path("mono.en").write_text("".join(f"{line}\n\n" for line in read_lines(Path("real.en"))), encoding="utf-8")
    steps = Steps(fail_at=6)
    assert steps.run(student) == 75
    assert steps.taken == [*steps_of("teacher"), "export runs/teacher", "translate runs/teacher", "prepare student"]
    lines = list(read_lines(Path("made.de.zst")))
    assert len(lines) == 300 and not any(lines[1::2])


def test_scores_by_another_programs_search(prepared: Path, place: Path) -> None:
    """The run is exported before it is scored, and again when it was trained further."""
    pytest.importorskip("ctranslate2")
    file = write(prepared, "own", ("en", "de"), {"src": "real.en", "trg": "real.de"})
    tree = yaml.safe_load(Path(file).read_text(encoding="utf-8"))
    tree["data"]["test"] = {"held_out": tree["data"]["valid"]}
    tree["translate"] |= {"backend": "ctranslate2", "finish": "best", "patience": 1.0}
    Path(file).write_text(yaml.safe_dump(tree), encoding="utf-8")
    steps = Steps()
    assert steps.run(file) == 0
    assert steps.taken == [*steps_of("own"), "export runs/own", "evaluate runs/own"]
    again = Steps()
    assert again.run(file) == 0 and again.taken == [*steps_of("own"), "evaluate runs/own"]
    tree["train"]["updates"] += 1
    Path(file).write_text(yaml.safe_dump(tree), encoding="utf-8")
    longer = Steps()
    assert longer.run(file) == 0
    assert longer.taken == [*steps_of("own"), "export runs/own", "evaluate runs/own"]


def test_back_translation(prepared: Path, place: Path) -> None:
    write(prepared, "back", ("de", "en"), {"src": "real.de", "trg": "real.en"})
    mono = (prepared / "text" / "train.de").read_text(encoding="utf-8").splitlines(keepends=True)[150:200]
    Path("mono.de").write_text("".join(mono), encoding="utf-8")
    forward = write(prepared, "forward", ("en", "de"), {
        "real": {"src": "real.en", "trg": "real.de"},
        "bt": {"src": "back.en", "trg": "mono.de", "tag": "<BT>", "translated_by": "back.yaml",
               "translate": {"method": "sample", "top_k": 3}}})
    steps = Steps()
    assert steps.run(forward) == 0
    assert steps.taken == [*steps_of("back"), "translate runs/back", *steps_of("forward")]
    assert len(Path("back.en").read_text(encoding="utf-8").splitlines()) == 50
    assert json.loads(Path("back.en.source.json").read_text())["translate"] == {"method": "sample", "top_k": 3}
    manifest = json.loads(Path("data/forward/manifest.json").read_text())
    assert manifest["splits"]["train"]["corpora"].keys() == {"real", "bt"}
    assert sorted(manifest["settings"]["data.train.corpora"]) == [["bt", "<BT>"], ["real", None]]
    # a run in place of its recipe is taken as it is
    Path("back.en").unlink()
    tree = Path(forward).read_text(encoding="utf-8").replace("back.yaml", "runs/back")
    Path("other.yaml").write_text(tree, encoding="utf-8")
    steps = Steps(fail_at=2)
    assert steps.run("other.yaml") == 75 and steps.taken == ["translate runs/back", "prepare other"]


def test_mistakes(prepared: Path, place: Path, refused: Refused, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, langs, change in (
        ("a", ("en", "de"), {"trg": "a.de", "translated_by": "b.yaml"}),
        ("b", ("en", "de"), {"trg": "b.de", "translated_by": "a.yaml"}),
        ("third", ("en", "de"), {"trg": "made.de", "translated_by": "a.yaml"}),
        ("none", ("en", "de"), {"src": "none.en", "trg": "made.de", "translated_by": "a.yaml"}),
        ("wrong", ("en", "de"), {"trg": "made.de", "translated_by": "a.yaml", "translate": {"beams": 5}}),
        ("inside", ("en", "de"), {"trg": "real.en/made.de", "translated_by": "a.yaml"}),
        ("tagger", ("en", "de"), {"trg": "made.de", "translated_by": "bert/small_2l"}),
        ("some", ("en", "de"), {"src": ["real.en", "real.de"], "trg": "made.*", "translated_by": "a.yaml"}),
    ):
        write(prepared, name, langs, {"src": "real.en", **change})
    text = Path("a.yaml").read_text(encoding="utf-8").replace("src_lang: en", "src_lang: fr")
    Path("french.yaml").write_text(text.replace("b.yaml", "third.yaml"), encoding="utf-8")
    assert "in a circle, a.yaml -> b.yaml -> a.yaml" in refused("run", "a.yaml")
    assert "there is no text file none.en, which a.yaml is to translate" in refused("run", "none.yaml")
    assert "third.yaml (data.translated_by) translates en to de, but the recipe is for fr and de" in refused(
        "run", "french.yaml")
    assert "translate.beams: unknown setting; did you mean translate.beam?" in refused("run", "wrong.yaml")
    assert "file real.en/made.de cannot be written" in refused("run", "inside.yaml")
    monkeypatch.setenv("DEEPNMT_CORPORA", ".")
    assert "bert/small_2l (data.translated_by) has task: masked_lm, but" in refused("run", "tagger.yaml")
    assert "'src' names 2 files and 'trg' 1" in refused("run", "some.yaml")
    for launcher in ("", "no-such-program -m deepnmt", "'torchrun"):
        assert "which begins with no program" in refused("run", "a.yaml", "--launcher", launcher)
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)
    assert "--launcher" in refused("run", "a.yaml")


def test_a_step_is_a_process_that_gets_signals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SIGTERM to `deepnmt run` reaches the training that it has started, and the exit code comes back."""
    program = tmp_path / "launch.py"
    program.write_text("import signal, sys, time\nsignal.signal(signal.SIGTERM, lambda *_: sys.exit(75))\n"
                       f"open({str(tmp_path / 'ready')!r}, 'w').close()\ntime.sleep(60)\n", encoding="utf-8")
    code = ("import sys\nfrom deepnmt.steps import starter\n"
            f"sys.exit(starter({f'{sys.executable} {program}'!r})(['train', 'my.yaml']))")
    with subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True,
                          cwd=Path(__file__).parents[2]) as process:
        while not (tmp_path / "ready").exists():
            assert process.poll() is None
            time.sleep(0.02)
        os.kill(process.pid, signal.SIGTERM)
        said = process.communicate()[1]
    assert process.returncode == 75 and "train my.yaml" in said
    assert starter(None)(["prepare", str(tmp_path / "none.yaml")]) == 2
    for command in ("prepare", "average", "export"):  # several processes would write one folder
        assert starter("true")([command, str(tmp_path / "none.yaml")]) == 2


@pytest.mark.parametrize(("number", "name"), [(9, "SIGKILL"), (15, "SIGTERM"), (40, "signal 40")])
def test_a_step_that_a_signal_ends_is_told(number: int, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert starter(f"sh -c 'kill -{number} $$'")(["train", "my.yaml"]) == 128 + number
    assert capsys.readouterr().err.endswith(f"\ntrain was ended by {name}\n")


def interrupted_step(folder: Path) -> list[str]:
    """The command of a process with a step that writes `ready`, and ends with 7 if it is interrupted just once."""
    program = folder / "launch.py"
    program.write_text(f"""
import os, time
try:
    open({str(folder / 'ready')!r}, "w").close()
    time.sleep(60)
except KeyboardInterrupt:
    time.sleep(0.3)
    os._exit(7)
""", encoding="utf-8")
    return [sys.executable, "-c", f"import sys\nsys.path.insert(0, {str(ROOT)!r})\nfrom deepnmt.steps import starter\n"
            f"sys.exit(starter({f'{sys.executable} {program}'!r})(['train', 'my.yaml']))"]


def test_ctrl_c_reaches_a_step_once(tmp_path: Path) -> None:
    """A terminal sends it to its whole process group; a second one would interrupt what the step cleans up."""
    command = interrupted_step(tmp_path)
    child, terminal = pty.fork()  # in a session of its own, whose terminal this is
    if child == 0:
        os.execv(command[0], command)
    while not (tmp_path / "ready").exists():
        assert os.waitpid(child, os.WNOHANG) == (0, 0)
        time.sleep(0.02)
    os.write(terminal, b"\x03")
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    os.close(terminal)


def test_an_interrupt_that_no_terminal_sent_is_handed_on(tmp_path: Path) -> None:
    """As of a notebook or a scheduler, which know the first process alone."""
    with subprocess.Popen(interrupted_step(tmp_path), stderr=subprocess.PIPE, start_new_session=True) as process:
        while not (tmp_path / "ready").exists():
            assert process.poll() is None
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        process.communicate()
    assert process.returncode == 7


def test_processes_that_prepare_do_not_run_the_program_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """They import their parent's program, as `multiprocessing` does with this name."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "argv", ["deepnmt", "none"])
    assert "entry" in runpy.run_path(str(Path(deepnmt.__file__).with_name("__main__.py")), run_name="__mp_main__")
