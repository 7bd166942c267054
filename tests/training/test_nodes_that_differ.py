"""Two processes that differ in recipe, data, code or run folder, as two machines may: both end with exit code 2 and one
sentence, in seconds. They are forked, and the second one is changed; tests/nodes has machines."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from run_files import losses
from warm import Warm, without_pictures

from deepnmt.cli import main

SECONDS = 60.0  # far below any timeout of a collective; most of it is waiting for a core
SETTINGS = ("model.encoder.block=pre_ln", "model.decoder.block=pre_ln", "train.valid_bleu=false")
PLACE = r"rank 1 of \S+"


def differ(recipe: str, runs: str, *changes: str) -> int:
    """Runs on each rank; `changes` are overrides, or names of functions here, of the second."""
    without_pictures()
    overrides = [f"run={runs}", "parallel.ds_config=ds_configs/zero1.json", *SETTINGS]
    if os.environ["RANK"] == "1":
        for change in changes:
            overrides += [change] if "=" in change else globals()[change]()
    return main("train", [recipe, *overrides])


def other_code() -> list[str]:
    from deepnmt.parallel import meeting

    meeting.code_hash = lambda: "f" * 64
    return []


def said(warm: Warm, codes: list[int]) -> str:
    """What both said; they have ended with `codes` in time, without a traceback and with one sentence."""
    found = warm.wait(SECONDS)
    text = warm.said()
    assert found == codes and "Traceback" not in text, text
    sentences = [line for line in text.splitlines() if line.startswith("deepnmt: ")]
    assert len(sentences) == (codes[0] != 0), text
    return sentences[0] if sentences else text


@pytest.mark.parametrize(("change", "phrase"), [
    ("optimizer.lr=0.02", "optimizer.lr is 0.005 on rank 0 of {host}, but 0.02 on rank 1 of {host}; start all"),
    ("seed=8", "seed is 7 on rank 0 of {host}, but 8 on rank 1 of {host}; start all"),
    ("train.updates=9", "train.updates is 12 on rank 0 of {host}, but 9 on rank 1 of {host}; start all"),
    ("train.save_every=5", "train.save_every is 3 on rank 0 of {host}, but 5 on rank 1 of {host}; start all"),
    ("model.encoder.layers=3", "model.encoder.layers is 2 on rank 0 of {host}, but 3 on rank 1 of {host}; start all"),
    ("parallel.ds_config=null", "parallel.ds_config is ds_configs/zero1.json on rank 0 of {host}, but None on rank 1"),
    ("run=elsewhere", "but elsewhere on rank 1 of {host}; start all machines with the same recipe and overrides; if "
     "only paths of files and folders differ, set parallel.same_paths=false"),
    ("other_code", "deepnmt's version and code is "),
])
def test_one_setting(change: str, phrase: str, prepared: Path, tmp_path: Path, warm: Warm) -> None:
    warm.start(2, "test_nodes_that_differ:differ", prepared / "recipe.yaml", tmp_path / "run", change)
    assert phrase.format(host=os.uname().nodename) in said(warm, [2, 2])
    assert not (tmp_path / "run").exists()
