"""What every command line has in common: a word that is no command, Ctrl-C."""

from __future__ import annotations

import pytest

from deepnmt.cli import COMMANDS, main


@pytest.mark.parametrize(("word", "said"), [
    ("trian", "there is no command 'trian'; did you mean train? deepnmt --help lists what there is"),
    ("xyz", "there is no command 'xyz'; deepnmt --help lists what there is"),
])
def test_a_word_that_is_no_command(word: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(None, [word, "recipe.yaml"]) == 2
    assert capsys.readouterr() == ("", f"deepnmt: {said}\n")


def test_without_a_word_there_is_the_list(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(None, []) == 2
    assert "usage: deepnmt COMMAND" in capsys.readouterr().out


@pytest.mark.parametrize(("local_rank", "said"), [("0", "deepnmt: interrupted\n"), ("1", "")])
def test_ctrl_c(
        local_rank: str, said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def pressed(_: list[str]) -> int:
        raise KeyboardInterrupt

    monkeypatch.setitem(COMMANDS, "prepare", pressed)
    monkeypatch.setenv("LOCAL_RANK", local_rank)
    assert main(None, ["prepare", "recipe.yaml"]) == 130
    assert capsys.readouterr() == ("", said)
