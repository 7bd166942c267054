"""The figures of a dry run."""

from __future__ import annotations

from typing import get_args

import pytest

from deepnmt.config import Block, Model
from deepnmt.dry_run import count_parameters
from deepnmt.model.transformer import Transformer


@pytest.mark.parametrize("tied", ["all", "none"])
@pytest.mark.parametrize("block", get_args(Block))
def test_parameters_are_counted_without_building_all_layers(block: Block, tied: str) -> None:
    model = Model.model_validate({"width": 8, "heads": 2, "ffn": 12, "max_length": 4, "tied": tied,
                                  "encoder": {"block": block, "layers": 5}, "decoder": {"block": block, "layers": 4}})
    target = 20 if tied == "all" else 30
    built = Transformer(model, 20, target, 1)
    assert count_parameters(model, 20, target) == sum(p.numel() for p in built.parameters())
