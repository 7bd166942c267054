"""Operations in the place of the model's own (`parallel.overrides`): used where a recipe lists them, and only there."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from refusals import user_error
from tiny_engines import batches, build, parallel, recipe_with

from deepnmt import api
from deepnmt.model import dropout, overrides, sublayers
from deepnmt.parallel.ds_config import layout_of
from deepnmt.processes.ranks import Ranks

CPU = torch.device("cpu")


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The calls of a set of operations, `counting`, which computes by the plain ones; `broken` fits no machine."""
    found: list[str] = []

    def counting(name: str) -> Any:
        def make(plain: Any) -> Any:
            def run(*given: Any) -> Any:
                found.append(name)
                return plain(*given)

            return run

        return make

    def refuse(device: torch.device) -> None:
        raise overrides.UserError(f"no {device.type} can run it")

    visitor, sets = ModuleType("room.overrides"), {name: ModuleType(f"room.{name}") for name in ("one", "two")}
    vars(visitor).update(SETS={"counting": "one", "broken": "two"}, __package__="room")
    plain = ((dropout, "dropout"), (sublayers, "self_attention"), (sublayers, "attend_step"))
    vars(sets["one"]).update(check=lambda device: None,
                             REPLACEMENTS=[(owner, name, counting(name)) for owner, name in plain])
    vars(sets["two"]).update(check=refuse, REPLACEMENTS=[])
    for module in (ModuleType("room"), *sets.values()):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(overrides, "visitor_modules", lambda kind: [visitor])
    yield found
    overrides.restore()


def test_a_recipe_that_lists_operations_trains_with_them(calls: list[str]) -> None:
    """Another one of the same process does not; losses are those of the plain operations."""
    losses = []
    for names in ([], ["counting"], []):
        engine = build(recipe_with(parallel=parallel("local", overrides=names), model={"width": 16, "heads": 2}),
                       Ranks.alone())
        losses.append(engine.train_step(batches(0, 1), 10, 1e-2).loss)
        assert set(calls) == ({"dropout", "self_attention"} if names else set())
        calls.clear()
    assert losses[0] == losses[1] == losses[2]


def test_training_in_python_puts_the_plain_ones_back(calls: list[str]) -> None:
    plain = sublayers.self_attention
    with pytest.raises(KeyboardInterrupt), api._process_restored():
        overrides.use(["counting"], CPU)
        assert sublayers.self_attention is not plain
        raise KeyboardInterrupt
    assert sublayers.self_attention is plain


def test_operations_that_are_not_there_are_refused(calls: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """By the layout, and so by --dry-run; also where the folder of all of them was deleted."""
    with user_error("parallel.overrides lists cuting.*set it to counting or broken, or leave it out"):
        layout_of(recipe_with(parallel={"overrides": ["cuting"]}), 1)
    with user_error("no cpu can run it"):
        overrides.use(["broken"], CPU)
    monkeypatch.setattr(overrides, "visitor_modules", lambda kind: [])
    with user_error("parallel.overrides lists counting.*no set is installed; leave it out"):
        layout_of(recipe_with(parallel={"overrides": ["counting"]}), 1)
    overrides.use([], CPU)
