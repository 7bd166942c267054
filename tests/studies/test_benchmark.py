"""The plain PyTorch loop that deepnmt is compared with: dropout, device and placements."""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny_run
import torch
from torch import nn

from deepnmt.config import Model, Stack
from deepnmt.errors import UserError
from deepnmt.processes.ranks import Ranks
from studies.benchmarks.training import PlainLoop, PlainTransformer, benchmark, placements


def plain(**rates: float) -> PlainTransformer:
    stack = Stack(layers=1)
    torch.manual_seed(1)
    return PlainTransformer(Model(width=8, heads=2, ffn=16, encoder=stack, decoder=stack).model_copy(update=rates), 20)


@pytest.mark.parametrize(("rates", "random"), [
    ({"dropout": 0.0}, False),
    ({"dropout": 0.0, "attention_dropout": 0.5}, True),
    ({"dropout": 0.0, "activation_dropout": 0.5}, True),
])
def test_each_dropout_rate_has_an_effect(rates: dict[str, float], random: bool) -> None:
    model = plain(**rates).train()
    ids = torch.arange(4, 16).view(2, 6)
    one, two = (model(ids, torch.tensor([6, 6]), ids) for _ in range(2))
    assert torch.equal(one, two) is not random


def test_dropout_applies_to_branches_and_embeddings_only() -> None:
    model = plain(dropout=0.3)
    attentions = [m for m in model.modules() if isinstance(m, nn.MultiheadAttention)]
    assert [attention.dropout for attention in attentions] == [0.0] * 3
    rates = {name: m.p for name, m in model.named_modules() if isinstance(m, nn.Dropout)}
    inner = [name for name in rates if name.endswith(".0.dropout")]
    assert len(inner) == 2 and all(rates.pop(name) == 0.0 for name in inner)
    assert len(rates) == 6 and set(rates.values()) == {0.3}  # 2 + 3 branches, the embeddings


def test_the_loop_computes_on_the_device_of_its_process(tmp_path: Path) -> None:
    """On the device `meta`, an operation with a CPU tensor would be an error."""
    device = torch.device("meta")
    loop = PlainLoop(tiny_run.recipe_of(tmp_path), 20, Ranks(0, 1, 0, 1, device))
    ids = torch.arange(4, 16, device=device).view(2, 6)
    assert loop.module(ids, torch.tensor([6, 5], device=device), ids).device == device


@pytest.mark.parametrize(("cores", "gpus", "expected"), [
    (2, 0, [(1, 2), (2, 1)]), (1, 0, [(1, 1)]), (16, 2, [(1, 16), (2, 8)]), (16, 1, [(1, 16)]),
    (2, 8, [(1, 2), (8, 1)]),
])
def test_placements(cores: int, gpus: int, expected: list[tuple[int, int]]) -> None:
    assert placements(cores, gpus) == expected


def test_a_file_that_cannot_be_written_is_reported_before_any_timing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("studies.benchmarks.training.open_prepared", lambda recipe: None)
    monkeypatch.delattr("studies.benchmarks.training.run_workers")
    (tmp_path / "mine").write_text("mine")
    for file in (tmp_path / "mine" / "b.json", tmp_path):
        with pytest.raises(UserError, match=rf"^file {file} cannot be written: .*; set --output to a file that can be"):
            benchmark(tiny_run.recipe_of(tmp_path), 1, 1, None, file)
