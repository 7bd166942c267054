"""A new block is one class and one name; the rest of deepnmt needs no change. The class is the one in the guide."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import tiny_engines

from deepnmt.model.blocks import BLOCKS, Block
from deepnmt.ranks import Ranks

PAGE = Path(__file__).resolve().parents[2] / "docs" / "guide" / "add_a_block.md"


def block_of_the_page() -> type[Block]:
    """The class in docs/guide/add_a_block.md."""
    code, = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    names: dict[str, object] = {"__name__": "guide"}
    exec(compile(code, str(PAGE), "exec"), names)
    block, = (value for value in names.values() if isinstance(value, type) and value.__module__ == "guide")
    assert issubclass(block, Block)
    return block


def test_the_block_in_the_guide_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    block = block_of_the_page()
    monkeypatch.setitem(BLOCKS, "own", block)
    recipe, ranks = tiny_engines.recipe_of("local"), Ranks.alone()
    stack = recipe.model.encoder.model_copy(update={"block": "own"})  # past the config's list of words
    model = recipe.model.model_copy(update={"encoder": stack, "decoder": stack})
    engine = tiny_engines.build(recipe.model_copy(update={"model": model}), ranks)
    losses = [tiny_engines.step(engine, tiny_engines.batches(1, 2), ranks)[0] for _ in range(5)]
    assert isinstance(engine.module.get_submodule("decoder.layers.1.rule"), block) and losses[-1] < 0.8 * losses[0]
