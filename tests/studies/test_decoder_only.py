"""The comparison of an encoder-decoder with a decoder alone: equal parameters, equal tokens, one line a run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from refusals import Refused

from deepnmt.cli import main as deepnmt
from deepnmt.config import Model, load_recipe
from deepnmt.data.prepared import PreparedData
from deepnmt.tasks.language_model.text import PreparedText
from deepnmt.training.dry_run import count_parameters
from studies.__main__ import main
from studies.decoder_only import CLOSE, equal_model


@pytest.mark.parametrize("changes", [
    {}, {"tied": "decoder"}, {"tied": "none"}, {"encoder": {"layers": 60}, "decoder": {"layers": 12}},
    {"encoder": {"layers": 2, "block": "b2t"}, "decoder": {"layers": 4, "block": "dlcl"}, "width": 96, "ffn": 200}],
    ids=str)
def test_a_decoder_alone_has_as_many_parameters(changes: dict[str, object]) -> None:
    model = Model.model_validate({"width": 64, "heads": 4, "ffn": 128, **changes})
    alone = equal_model(model, 500)
    assert alone.sides == ("decoder",) and alone.decoder.layers == model.encoder.layers + model.decoder.layers
    assert count_parameters(alone, 500, 500) == pytest.approx(count_parameters(model, 500, 500), rel=CLOSE / 2)


def test_the_models_read_the_same_and_every_run_is_a_line(
        prepared: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
        refused: Refused) -> None:
    monkeypatch.setattr("studies.long_runs.deepnmt", lambda command, *words: float(deepnmt(command, list(words))))
    words = [str(prepared / "recipe.yaml"), "train.updates=6", "train.save_every=3", "translate.beam=1",
             "average_last=1", "--output", str(tmp_path), "--seeds", "3", "--alone", "optimizer.lr=0.002"]
    assert main("decoder-only", [*words, "--seconds", "0"]) == 0
    said = capsys.readouterr().out
    assert "encoder-decoder" in said and "no run is done yet" in said
    assert main("decoder-only", words) == 0
    scores, layers = capsys.readouterr().out.rstrip().split("\n\n")[-2:]
    records = [json.loads(line) for line in (tmp_path / "runs.jsonl").read_text().splitlines()]
    arms = ["encoder_decoder", "decoder_only_target", "decoder_only_both"]
    rows = [line.split(" | ")[0] for line in scores.splitlines()[-3:]]
    assert [record["arm"] for record in records] == arms and rows == [f"| {arm}" for arm in arms]
    assert [record["layers"] == {} for record in records] == [False, True, True] and "decoder_only" not in layers
    two, one = (load_recipe(tmp_path / "runs" / f"{arm}_3") for arm in arms[:2])
    pairs, text = PreparedData.open(two.data.folder), PreparedText.open(one)
    assert pairs.vocabs()[1].fingerprint == text.vocab.fingerprint
    for split in ("train", "valid"):
        both = pairs.split(split)
        assert int(both.src_lengths.sum() + both.trg_lengths.sum()) == text.counts(split)["tokens"]
    assert one.optimizer.lr == 0.002 != two.optimizer.lr and one.seed == two.seed == 3
    assert main("decoder-only", words) == 0
    assert len((tmp_path / "runs.jsonl").read_text().splitlines()) == 3
    said = refused("decoder-only", *words, "optimizer.lr=0.003")
    assert "has a run of decoder_only_target with another recipe, other settings or other data than the plan's" in said


def test_other_recipes_are_refused(prepared: Path, refused: Refused, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEEPNMT_CORPORA", "corpora")
    assert "needs a recipe of task: translation" in refused("decoder-only", "recipes/multi30k/pairs_6l.yaml")
    said = refused("decoder-only", prepared / "recipe.yaml", "batch.update_tokens=500")
    assert "batch.update_tokens: null; give such a recipe" in said
