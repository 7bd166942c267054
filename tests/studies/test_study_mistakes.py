"""Mistakes with the files that studies read and write: one sentence, and nothing started, written or lost."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from refusals import Refused

from studies import blocks as block_study

ROOT = Path(__file__).resolve().parents[2]
GRID = '{"point": {"encoder": "b2t"}, "settings": {"width": 32}, "features": {"layers": 1.8}, "learned": true}'
BLOCKS = ["train.updates=2", "parallel.threads=1", "--depths", "1", "--blocks", "post_ln"]


@pytest.fixture(autouse=True)
def _nothing_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(block_study, "run_variant")


@pytest.fixture
def sentence(refused: Refused) -> Refused:
    """`refused`, with a message of one sentence."""

    def run(*words: object) -> str:
        message = refused(*words)
        assert message.startswith("deepnmt: ") and message.count("\n") == 1
        return message

    return run


def run_of(**changes: Any) -> dict[str, Any]:
    """An older line of a study, with settings of no recipe."""
    settings = {"optimizer": {"weight_decay": 0, "lr": 1e-3}, "train": {"updates": 2}, "seed": 1, "admin": {}}
    run = {"system": {"encoder": "admin", "decoder": "admin", "layers": 1}, "settings": settings, "parameters": 3,
           "losses": [2.5], "dropped": 0, "ended": True, "valid": 2.5, "exchanged": None, "frequencies": 3.0,
           "even": 4.0}
    return {**run, **changes}


@pytest.mark.parametrize("line", [GRID, "7", json.dumps(run_of(system="admin")), json.dumps(run_of(settings=[])),
                                  json.dumps(run_of(settings={"optimizer": {}})), "{}"])
def test_runs_of_another_kind_are_rejected(line: str, prepared: Path, tmp_path: Path, sentence: Refused) -> None:
    text = f'{{"system": {{"enc\n{json.dumps(run_of())}\n{line}\n'  # the partial line of a kill, a run, and the other
    (tmp_path / "runs.jsonl").write_text(text)
    message = sentence("compare-blocks", prepared / "recipe.yaml", *BLOCKS, "--output", tmp_path)
    assert f"{tmp_path}/runs.jsonl, line 3, is not a run of a block study" in message
    assert "set --output to a new" in message
    assert (tmp_path / "runs.jsonl").read_text() == text and len(list(tmp_path.iterdir())) == 1


def test_runs_that_cannot_be_read(prepared: Path, tmp_path: Path, sentence: Refused) -> None:
    (tmp_path / "bytes").mkdir()
    (tmp_path / "bytes" / "runs.jsonl").write_bytes(b"\xff\n")
    (tmp_path / "folder" / "runs.jsonl").mkdir(parents=True)
    for name, fault in (("bytes", "cannot be read as JSON lines: "), ("folder", "cannot be written: Is a directory")):
        message = sentence("compare-blocks", prepared / "recipe.yaml", *BLOCKS, "--output", tmp_path / name)
        assert f"{tmp_path}/{name}/runs.jsonl {fault}" in message


def test_a_study_for_several_processes_writes_nothing(prepared: Path, tmp_path: Path, sentence: Refused) -> None:
    output = tmp_path / "blocks"
    for words in ([prepared / "recipe.yaml", "parallel.ds_config=ds_configs/zero1.json", *BLOCKS],
                  [ROOT / "recipes" / "demo" / "admin_18l-18l.yaml"]):
        message = sentence("compare-blocks", *words, "--output", output)
        assert "parallel.ds_config is ds_configs/zero1.json, but each run of a study trains on one" in message
    assert not output.exists()


def test_a_message_names_the_option_of_the_output(prepared: Path, tmp_path: Path, sentence: Refused) -> None:
    mine = tmp_path / "mine"
    mine.write_text("mine")
    for words in (["compare-blocks", prepared / "recipe.yaml", *BLOCKS], ["reproduce", "corollaries"]):
        assert sentence(*words, "--output", mine) == (
            f"deepnmt: folder {mine} cannot be written: File exists; set --output to a folder that can be\n")
    assert mine.read_text() == "mine"


@pytest.mark.parametrize("line", ['{"update": 1, "loss": 2.0}', "[1, 2]", '{"type": "train", "update": 1}',
                                  '{"type": "train", "update": null, "loss": 2.0}',
                                  '{"type": "train", "update": 1, "loss": "low"}'])
def test_a_log_of_another_kind_is_rejected(line: str, tmp_path: Path, sentence: Refused) -> None:
    sound = '{"type": "train", "update": 1, "loss": 2.0}\n'
    (tmp_path / "log.jsonl").write_text(f"{sound}{line}\n")
    message = sentence("compare", tmp_path, "--output", tmp_path / "picture.png")
    assert f"{tmp_path}/log.jsonl, line 2, is not from the log of a training" in message
    assert "give a run folder" in message
    assert not (tmp_path / "picture.png").exists()
