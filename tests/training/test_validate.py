"""Validation: every sentence counts once for any number of processes; many micro-batches a call; BLEU."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from ranks import played

from deepnmt.batch import Batch
from deepnmt.config import Translate, load_recipe
from deepnmt.data.batching import plan_eval
from deepnmt.data.prepared import open_prepared
from deepnmt.decode.translate import Hypothesis, translate_lines
from deepnmt.model.init import new_model
from deepnmt.processes.ranks import Ranks
from deepnmt.tasks.translation import validate
from deepnmt.training import validation


class Adding:
    """An engine whose loss is the sum of the target ids and whose plain loss is the sum of the source ids."""

    def __init__(self, rank: int, world: int) -> None:
        self.data_rank, self.data_world = rank, world
        self.calls: list[int] = []

    def evaluate(self, batches: Sequence[Batch]) -> list[tuple[float, float]]:
        self.calls.append(len(batches))
        return [(float(out[out != 3].sum()), float(src[src != 3].sum()))
                for src, out in ((batch["src"], batch["trg_out"]) for batch in batches)]


@pytest.mark.parametrize("world", [1, 2, 3])
def test_every_sentence_once_in_full_calls(world: int, prepared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(validation, "BATCHES_PER_CALL", 3)
    recipe = load_recipe(prepared / "recipe.yaml", ["batch.tokens=61"])  # 13 micro-batches: the last round is padded
    split = open_prepared(recipe).split("valid")
    engines: list[Any] = [Adding(rank, world) for rank in range(world)]
    sums = [validate.losses_of(recipe, split, range(len(split)), engine, played(rank, world))
            for rank, engine in enumerate(engines)]
    eos = 2 * len(split)
    expected = [sum(int(side[i].sum()) for i in range(len(split))) + eos for side in (split.targets, split.sources)]
    assert [sum(column) for column in zip(*sums)] == [*expected, int(split.trg_lengths.sum())]
    rounds = math.ceil(len(plan_eval(split.src_lengths, split.trg_lengths, 61)) / world)
    calls = [min(3, rounds - done) for done in range(0, rounds, 3)]
    assert [engine.calls for engine in engines] == [calls] * world and max(calls) == 3


def test_bleu_is_that_of_the_target_language(prepared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chinese is scored by characters, as in `deepnmt evaluate`."""
    data = open_prepared(load_recipe(prepared / "recipe.yaml"))
    hypotheses = [[Hypothesis("\u4f60\u597d", 0, 0, 2, True)]]
    monkeypatch.setattr(validate, "translate_shards", lambda *_, **__: iter(hypotheses))
    model: Any = None
    for lang, tokens in (("zh", "zh"), ("de", "13a")):
        recipe = load_recipe(prepared / "recipe.yaml", [f"data.trg_lang={lang}", "train.valid_sentences=1"])
        valid = data.split("valid")
        texts = validate.translate_greedily(recipe, data, valid, range(20), model, Ranks.alone())
        assert f"|tok:{tokens}|" in validate.bleu_of(texts, lang, Ranks.alone())[1]


def test_truncated_lines_cause_no_warning_in_validation(
        prepared: Path, caplog: pytest.LogCaptureFixture) -> None:
    recipe = load_recipe(prepared / "recipe.yaml", ["train.valid_sentences=2"])
    data = open_prepared(recipe)
    split, vocabs = data.split("valid"), data.vocabs()
    model = new_model(recipe.model.model_copy(update={"max_length": 4}), vocabs[0].size, vocabs[1].size, 1)
    assert len(validate.translate_greedily(recipe, data, split, range(20), model, Ranks.alone()).hypotheses) == 2
    assert caplog.records == []
    translate_lines(model, vocabs, split.src_text()[:2], Translate(method="greedy"))
    assert [record.getMessage().split(" has ")[0] for record in caplog.records] == ["line 1", "line 2"]
