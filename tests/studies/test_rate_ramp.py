"""The study of the highest rate: its rule by hand, and runs of one block."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from deepnmt.config import Recipe, load_recipe, with_settings
from deepnmt.errors import UserError
from studies import rate_ramp


def recipe_of(prepared: Path) -> Recipe:
    return load_recipe(prepared / "recipe.yaml", ["parallel.threads=1", "train.updates=2", "schedule.warmup=0"])


def test_when_a_loss_has_risen() -> None:
    """It falls for 40 updates, and rises from then on by 0.1 each."""
    means = [6 - 0.1 * t for t in range(41)] + [2 + 0.1 * t for t in range(1, 9)]
    risen = [rate_ramp.risen(means[:end]) for end in range(len(means) + 1)]
    assert risen.index(True) == 41 + 4 and all(risen[45:])  # after 3 it is 0.3 above, no more
    assert rate_ramp.lowest(means) == 41
    assert rate_ramp.risen([5.0, math.nan]) and not rate_ramp.risen([5.0, 5.2]) and not rate_ramp.risen([])
    assert rate_ramp.lowest([5.0, math.nan]) == 1


def test_a_text_that_is_read_otherwise_is_refused(prepared: Path, tmp_path: Path) -> None:
    recipe = with_settings(recipe_of(prepared), {"batch.update_tokens": 4000})
    with pytest.raises(UserError, match=r"^batch\.update_tokens is 4000, but each run of a study reads the whole text"):
        rate_ramp.study(recipe, ["keel"], [1], [1], tmp_path / "runs.jsonl")


def test_a_ramp_ends_when_the_loss_rises(
    prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At a rate four times as high in each update it does so soon; the second call trains nothing."""
    monkeypatch.setattr(rate_ramp, "RATIO", 4.0)
    words, file = ["keel"], tmp_path / "runs.jsonl"
    [run] = rate_ramp.study(recipe_of(prepared), words, [1], [1], file)
    assert run["risen"] is not None and run["update"] <= run["risen"] < rate_ramp.MOST_UPDATES
    assert run["rate"] == pytest.approx(1e-4 * 4.0 ** (run["update"] - 1))
    first = file.read_text(encoding="utf-8")
    assert rate_ramp.study(recipe_of(prepared), words, [1], [1], file) == [run]
    assert file.read_text(encoding="utf-8") == first and len(first.splitlines()) == 1
    assert rate_ramp.table([run]).splitlines()[2].startswith("| keel | 1L-1L | 1 | ")
