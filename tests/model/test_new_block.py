"""A new block is one class and one word: nothing else in deepnmt knows its name."""

from __future__ import annotations

import pytest
import tiny_engines
from torch import Tensor

from deepnmt.model.blocks import BLOCKS, Block, Branch
from deepnmt.ranks import Ranks


class Halved(Block):
    """x ← LN_i(x + F_i(x) / 2)."""

    def join(self, i: int, x: Tensor, f: Branch) -> Tensor:
        return self.norms[i](x + f(x) / 2)


def test_a_block_of_ones_own_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(BLOCKS, "halved", Halved)
    recipe, ranks = tiny_engines.recipe_of("local"), Ranks.alone()
    stack = recipe.model.encoder.model_copy(update={"block": "halved"})  # past the config's list of words
    model = recipe.model.model_copy(update={"encoder": stack, "decoder": stack})
    engine = tiny_engines.build(recipe.model_copy(update={"model": model}), ranks)
    losses = [tiny_engines.step(engine, tiny_engines.batches(1, 2), ranks)[0] for _ in range(5)]
    assert isinstance(engine.module.get_submodule("decoder.layers.1.rule"), Halved) and losses[-1] < 0.8 * losses[0]
