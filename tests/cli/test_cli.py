"""All commands: unknown and missing arguments, Ctrl-C, how a process ends."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from deepnmt.cli import COMMANDS, main
from deepnmt.config.choices import FORMATS
from studies import __main__ as studies

NEEDS = "needs a recipe (a YAML file) or the folder of a run, for example: deepnmt"


@pytest.mark.parametrize(("words", "said"), [
    ("trian my.yaml", "unknown command 'trian'; did you mean train? see deepnmt --help"),
    ("eval my.yaml", "unknown command 'eval'; did you mean evaluate? see deepnmt --help"),
    ("check_cluster", "unknown command 'check_cluster'; did you mean check-cluster? see deepnmt --help"),
    ("gpu-report --toy", "the command gpu-report has become python -m studies gpu-report, in a checkout of the "
     "repository"),
    ("publish", "unknown command 'publish'; see deepnmt --help"),
    ("train", f"train {NEEDS} train my.yaml; see deepnmt train --help"),
    ("train --dry-run", f"train {NEEDS} train my.yaml; see deepnmt train --help"),
    ("prepare", f"prepare {NEEDS} prepare my.yaml; see deepnmt prepare --help"),
    ("split pairs.tsv", "split needs FOLDER and --langs, for example: deepnmt split pairs.tsv.gz data/my/text "
     "--langs en de; see deepnmt split --help"),
    ("split a b c --langs en de", "unexpected argument c; see deepnmt split --help"),
    ("train my.yaml --dryrun", "unknown option --dryrun; did you mean --dry-run? see deepnmt train --help"),
    ("train my.yaml --check=best", "unknown option --check; see deepnmt train --help"),
    ("translate runs/my --check=best", "unknown option --check; did you mean --checkpoint? see deepnmt translate "
     "--help"),
    ("translate runs/my --format json", f"--format is 'json', must be one of {', '.join(FORMATS)}; did you mean jsonl? "
     "see deepnmt translate --help"),
    ("translate runs/my --input", "--input: expected one argument; see deepnmt translate --help"),
    ("average runs/my --last three", "--last is 'three', must be a whole number; see deepnmt average --help"),
    ("diagnose my.yaml --minutes x", "--minutes is 'x', must be a number; see deepnmt diagnose --help"),
])
def test_unknown_or_missing_arguments(words: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(None, words.split()) == 2
    assert capsys.readouterr() == ("", f"deepnmt: {said}\n")


@pytest.mark.parametrize("command", [*COMMANDS, *studies.STUDIES])
def test_an_unknown_option_is_named_in_one_line(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    typed, run = (studies.PROGRAM, studies.main) if command in studies.STUDIES else ("deepnmt", main)
    assert run(command, ["--nonsense=1"]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and said.startswith("deepnmt: ")
    assert said.endswith(f"; see {typed} {command} --help\n")


def test_without_arguments_the_commands_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(None, []) == 2
    assert "usage: deepnmt COMMAND" in capsys.readouterr().out


@pytest.mark.parametrize("error", [
    RuntimeError("can't start new thread"), BlockingIOError(11, "Resource temporarily unavailable"),
    RuntimeError("std::system_error: Resource temporarily unavailable"), RuntimeError("our own mistake")])
def test_a_limit_of_threads_is_said(
        error: Exception, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def busy(_: list[str]) -> int:
        raise error

    monkeypatch.setitem(COMMANDS, "evaluate", busy)
    if "our own" in str(error):
        with pytest.raises(RuntimeError, match="our own mistake"):
            main(None, ["evaluate", "run"])
        return
    assert main(None, ["evaluate", "run"]) == 2
    assert capsys.readouterr().err.startswith("deepnmt: the system starts no more threads or processes: a limit is")


def test_a_path_that_the_system_does_not_take(capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("train", "translate", "average", "evaluate"):
        assert main(None, [command, "a" * 300]) == 2
        assert "aaa...: File name too long; give another path" in capsys.readouterr().err


@pytest.mark.parametrize(("local_rank", "said"), [("0", "deepnmt: interrupted\n"), ("1", "")])
def test_ctrl_c(
        local_rank: str, said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def pressed(_: list[str]) -> int:
        raise KeyboardInterrupt

    monkeypatch.setitem(COMMANDS, "prepare", pressed)
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("LOCAL_RANK", local_rank)
    assert main(None, ["prepare", "recipe.yaml"]) == 130
    assert capsys.readouterr() == ("", said)


def test_a_process_ends_before_python_is_taken_apart() -> None:
    """What was printed, was left open or is to be done at the end is not lost."""
    program = (
        "import atexit, os, sys, deepnmt.cli as cli\n"
        "class Late:\n"
        "    def __del__(self): os.write(1, b'taken apart')\n"
        "late = Late()\n"
        "atexit.register(print, 'at the end')\n"
        "cli.COMMANDS['prepare'] = lambda words: print('printed') or 76\n"
        "cli.entry('prepare')\n")
    ended = subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, check=False)
    assert (ended.returncode, ended.stdout) == (76, "printed\nat the end\n")


def test_control_c_during_the_import_of_the_commands_gives_no_traceback() -> None:
    program = (
        "import os, signal, sys\n"
        "from deepnmt.__main__ import entry\n"
        "class Pressed:\n"
        "    def find_spec(self, name, *others): name == 'deepnmt.cli' and os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.meta_path.insert(0, Pressed())\n"
        "entry()\n")
    ended = subprocess.run([sys.executable, "-c", program], stderr=subprocess.PIPE, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (-signal.SIGINT, "")
