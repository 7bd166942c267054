"""The study of spoken digits: its sentences, and a small one from the set to the table, which goes on."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from refusals import Tool

from studies.speech import HELD_OUT, SIZES, VOICES, make_set, run_study, sentences


def test_no_sentence_of_a_test_is_in_the_training() -> None:
    train = sentences(SIZES["train"], 1, 1)
    tests = sentences(SIZES["sentences"], 3, 3, frozenset(train))
    assert not set(train) & set(tests) and len(set(tests)) > 140
    assert {len(sentence.split()) for sentence in train} == {1, 2, 3, 4, 5}
    assert sentences(5, 1, 1) == train[:5] and HELD_OUT not in VOICES


def test_a_small_study_goes_on(tmp_path: Path) -> None:
    if not shutil.which("espeak-ng"):
        pytest.skip("espeak-ng, which says the digits, is not installed")
    small = {"train": 30, "valid": 4, "sentences": 4, "voice": 4}
    settings = ["train.updates=2", "train.validate_every=2", "train.save_every=1", "vocab.size=24", "average_last=2",
                "model.width=16", "model.heads=2", "model.ffn=16", "model.channels=8", "translate.beam=1"]
    table = run_study(tmp_path, settings, small)
    assert table.splitlines()[2].startswith("| sentences | 4 | ") and "| voice | 4 | " in table
    before = (tmp_path / "train.tsv").stat().st_mtime_ns
    make_set(tmp_path, small)
    assert (tmp_path / "train.tsv").stat().st_mtime_ns == before
    assert run_study(tmp_path, settings, small) == table


def test_the_study_needs_espeak(tmp_path: Path, study: Tool) -> None:
    done = study("speech", "--output", tmp_path, PATH=str(tmp_path))
    assert done.returncode == 2 and "espeak-ng, which is not installed; apt-get install espeak-ng" in done.stderr
