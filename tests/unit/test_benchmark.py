"""The plain loop that deepnmt is timed against does the work that the recipe asks for, and no more."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from deepnmt.benchmark import PlainTransformer
from deepnmt.config import Model, Stack


def plain(**rates: float) -> PlainTransformer:
    stack = Stack(layers=1)
    torch.manual_seed(1)
    return PlainTransformer(Model(width=8, heads=2, ffn=16, encoder=stack, decoder=stack).model_copy(update=rates), 20)


@pytest.mark.parametrize(("rates", "random"), [
    ({"dropout": 0.0}, False),
    ({"dropout": 0.0, "attention_dropout": 0.5}, True),
    ({"dropout": 0.0, "activation_dropout": 0.5}, True),
])
def test_each_rate_drops_what_it_speaks_of(rates: dict[str, float], random: bool) -> None:
    model = plain(**rates).train()
    ids = torch.arange(4, 16).view(2, 6)
    one, two = (model(ids, torch.tensor([6, 6]), ids) for _ in range(2))
    assert torch.equal(one, two) is not random


def test_dropout_is_of_branches_and_embeddings_alone() -> None:
    model = plain(dropout=0.3)
    attentions = [m for m in model.modules() if isinstance(m, nn.MultiheadAttention)]
    assert [attention.dropout for attention in attentions] == [0.0] * 3
    rates = {name: m.p for name, m in model.named_modules() if isinstance(m, nn.Dropout)}
    inner = [name for name in rates if name.endswith(".0.dropout")]
    assert len(inner) == 2 and all(rates.pop(name) == 0.0 for name in inner)
    assert len(rates) == 6 and set(rates.values()) == {0.3}  # 2 + 3 branches, the embeddings
