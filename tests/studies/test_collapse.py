"""The study of the encoder's collapse: draws that stay, a run of one, and a fit that finds what was planted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import deepnmt
import studies.collapse as collapse
from deepnmt.config import load_recipe


def test_draws_stay_and_cover_every_level() -> None:
    assert collapse.draw(7) == collapse.draw(7)
    drawn = [collapse.draw(number) for number in range(120)]
    for name, levels in collapse.LEVELS.items():
        assert {settings[name] for settings in drawn} == set(levels)
    further = [collapse.draw(number) for number in range(collapse.FURTHER_FROM, collapse.FURTHER_FROM + 60)]
    for name, levels in collapse.FURTHER.items():
        assert {settings[name] for settings in drawn} == {levels[0]}
        assert {settings[name] for settings in further} == set(levels)
    assert sum(settings["block"] == "admin" for settings in drawn) == 20


def test_a_run_is_recorded_once(prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collapse, "UPDATES", 3)
    monkeypatch.setattr(collapse, "LEVELS", collapse.LEVELS | {"warmup": [1], "layers": [1], "width": [16]})
    recipe = load_recipe(prepared / "recipe.yaml")
    collapse.run_draws(recipe, tmp_path / "runs.jsonl", 0, 1, 600)
    first = (tmp_path / "runs.jsonl").read_text(encoding="utf-8")
    text = collapse.run_draws(recipe, tmp_path / "runs.jsonl", 0, 1, 600)
    assert (tmp_path / "runs.jsonl").read_text(encoding="utf-8") == first and len(first.splitlines()) == 1
    assert text.startswith("1 runs ended of 1") and "| block | post_ln | 1 |" in text
    monkeypatch.setattr(collapse, "train_draw", lambda recipe, number: json.loads(first) | {"fingerprint": "another"})
    other = load_recipe(prepared / "recipe.yaml", ["batch.tokens=512"])
    assert collapse.run_draws(other, tmp_path / "runs.jsonl", 0, 1, 600).startswith("1 runs ended of 1;")
    assert len((tmp_path / "runs.jsonl").read_text(encoding="utf-8").splitlines()) == 2, "a run of another recipe"
    old = json.loads(first)
    for name in collapse.FURTHER:
        del old["drawn"][name]  # as in the oldest runs
    assert collapse.report([old]) == text
    collapse.plot(json.loads(f"[{first}]"), tmp_path / "runs.png")
    assert (tmp_path / "runs.png").stat().st_size > 10_000


def test_pairs_differ_in_the_size_of_the_embeddings_alone(prepared: Path, tmp_path: Path,
                                                          monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(collapse.PAIRS_FROM, collapse.PAIRS_FROM + 40, 2):
        full, small = collapse.draw(number), collapse.draw(number + 1)
        assert {name for name in full if full[name] != small[name]} == {"embedding_scale"}
        assert full["block"] != "t_fixup"  # it scales them itself
    monkeypatch.setattr(collapse, "UPDATES", 3)
    monkeypatch.setattr(collapse, "LEVELS", collapse.LEVELS | {"warmup": [1], "layers": [1], "width": [16]})
    runs = tmp_path / "runs.jsonl"
    text = collapse.run_draws(load_recipe(prepared / "recipe.yaml"), runs, collapse.PAIRS_FROM, 4, 600)
    records = [json.loads(line) for line in runs.read_text(encoding="utf-8").splitlines()]
    ends = [record["validations"][-1]["perplexity"] for record in records]
    assert ends[0] != ends[1] and ends[2] != ends[3]
    assert text.startswith("Embeddings that begin at a third") and text.endswith("(2 pairs of runs)")
    assert collapse.report([{**records[0], "number": 0}, *records]).endswith(f"\n\n{text}")


@pytest.mark.parametrize("block", collapse.LEVELS["block"])
def test_every_block_takes_the_further_settings(prepared: Path, block: str) -> None:
    recipe = load_recipe(prepared / "recipe.yaml")
    highest = {name: levels[-1] for name, levels in (collapse.LEVELS | collapse.FURTHER).items()} | {"block": block}
    changed = deepnmt.api.read_recipe(recipe, collapse.recipe_settings(highest))
    assert changed.model.tied == "none" and changed.model.encoder.init == "depth_scaled"
    assert changed.optimizer.eps == 1e-5 and changed.train.freeze == ["*bias"]


def test_the_fit_finds_what_was_planted() -> None:
    """A gain that falls by 0.5 over the encoder's rates, and by nothing over the others."""
    records = []
    for number in range(300):
        drawn = collapse.draw(number)
        steps = collapse.LEVELS["encoder_rate"]
        fall = 0.5 * (steps.index(drawn["encoder_rate"]) / (len(steps) - 1))
        records.append({"drawn": drawn, "validations": [{"source_gain": 0.7 - fall}]})
    effects = {name: effect for name, effect, _ in collapse.effects(records)}
    assert effects.pop("encoder_rate") == pytest.approx(-0.5, abs=0.02)
    assert effects.pop("intercept") == pytest.approx(0.7, abs=0.02)
    assert max(map(abs, effects.values())) < 0.02
    shares = collapse.explained(records, "source_gain")
    assert shares["the encoder's"] > 0.99 > shares["encoder's / decoder's"] > 0.3
    assert max(shares["none"], shares["decoder's and embeddings'"]) < 0.1
