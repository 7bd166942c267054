"""A run with `init: published`: it keeps the setting to its end, and its checkpoints serve every command."""

from __future__ import annotations

from pathlib import Path

import pytest

from deepnmt.checkpoint.checkpoint import load_model
from deepnmt.cli import main

WORDS = ("model.encoder.block=fixup", "model.encoder.init=published", "model.decoder.block=looks_linear",
         "model.decoder.init=published", "model.tied=none", "train.save_every=2", "train.validate_every=2")


def test_a_run_with_other_scalars_and_rows(
    prepared: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    words = [str(prepared / "recipe.yaml"), f"run={run}", *WORDS]
    assert main("train", [*words, "train.updates=4"]) == 0
    capsys.readouterr()
    assert main("train", [*words, "train.updates=6", "model.encoder.init=auto"]) == 2
    assert "model.encoder.init: published -> auto" in capsys.readouterr().err
    assert main("train", [*words, "train.updates=6"]) == 0
    assert "resuming from" in capsys.readouterr().err
    assert main("average", [str(run)]) == 0
    model = load_model(run).model
    assert model.get_parameter("encoder.norm.scale").shape == (1,)
    assert model.get_parameter("decoder.layers.0.ffn.fc1.weight").shape == (32, 16)
    assert main("translate", [str(run), "--input", str(prepared / "text" / "test.en"), "--output",
                              str(tmp_path / "test.de")]) == 0
    assert len((tmp_path / "test.de").read_text(encoding="utf-8").splitlines()) == 20
    capsys.readouterr()
    assert main("fold", [str(run)]) == 0
    assert "decoder (looks_linear) as post_ln; logits of random sentences differ by at most" in capsys.readouterr().out
    assert main("diagnose", [str(run), "--tokens", "60"]) == 0
