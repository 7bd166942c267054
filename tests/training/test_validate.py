"""Validation: every sentence counts once for any number of processes; many micro-batches a call; BLEU."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import sacrebleu
from ranks import played

from deepnmt.batch import Batch
from deepnmt.cli import main
from deepnmt.config import Translate, load_recipe, with_settings
from deepnmt.data.batching import plan_eval
from deepnmt.data.prepared import open_prepared
from deepnmt.decode.translate import translate_lines
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


@pytest.mark.parametrize(("world", "some"), [(1, range(20)), (2, range(20)), (3, range(20)), (2, range(7, 19))])
def test_every_sentence_once_in_full_calls(
    world: int, some: range, prepared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the whole text, and of one of its corpora."""
    monkeypatch.setattr(validation, "BATCHES_PER_CALL", 3)
    recipe = load_recipe(prepared / "recipe.yaml", ["batch.tokens=61"])  # 13 micro-batches: the last round is padded
    split = open_prepared(recipe).split("valid")
    engines: list[Any] = [Adding(rank, world) for rank in range(world)]
    sums = [validate.losses_of(recipe, split, some, engine, played(rank, world))
            for rank, engine in enumerate(engines)]
    expected = [sum(int(side[i].sum()) + 2 for i in some) for side in (split.targets, split.sources)]  # 2: eos
    lengths = split.src_lengths[some], split.trg_lengths[some]
    assert [sum(column) for column in zip(*sums)] == [*expected, int(lengths[1].sum())]
    rounds = math.ceil(len(plan_eval(*lengths, 61)) / world)
    calls = [min(3, rounds - done) for done in range(0, rounds, 3)]
    assert [engine.calls for engine in engines] == [calls] * world and max(calls) == 3


def test_bleu_is_that_of_sacrebleu(prepared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the right sentences, and by characters for Chinese, as in `deepnmt evaluate`."""
    recipe = load_recipe(prepared / "recipe.yaml", ["train.valid_sentences=6"])
    data, some = open_prepared(recipe), range(12, 20)
    valid, model = data.split("valid"), new_model(recipe.model, 300, 300, 1)
    texts = validate.translate_greedily(recipe, data, valid, some, model, Ranks.alone())
    assert (texts.sources, texts.references) == (valid.src_text()[12:18], valid.trg_text()[12:18])
    assert texts.hypotheses == [best[0].text for best in translate_lines(
        model, data.vocabs(), texts.sources, Translate(method="greedy"))]
    longer = [f"{reference} und noch {number}" for number, reference in enumerate(texts.references)]
    for lang, tokens in (("zh", "zh"), ("de", "13a")):
        bleu, signature = validate.bleu_of(texts._replace(hypotheses=longer), lang, Ranks.alone())
        assert bleu == sacrebleu.corpus_bleu(longer, [texts.references], tokenize=tokens).score < 95
        assert f"|tok:{tokens}|" in signature


def test_a_metric_of_which_less_is_better(prepared: Path) -> None:
    """The trainer keeps the lowest value."""
    recipe = load_recipe(prepared / "recipe.yaml", [
        "metrics={less: {command: 'x {hyp}', lower_is_better: true, in_validation: true}, "
        "more: {command: 'x {hyp}', in_validation: true}}", "train.best_by=less"])
    for by, sign in (("less", 1), ("more", -1), ("bleu", -1)):
        chosen = with_settings(recipe, {"train.best_by": by})
        assert validate._validation(chosen, [4.0, 3.0, 2.0], {by: 0.3}).value == sign * 0.3
    assert validate._validation(with_settings(recipe, {"train.best_by": "loss"}), [4.0, 3.0, 2.0], {}).value == 2.0


def test_a_figure_that_some_corpora_lack(prepared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The mean is of the others, but chooses no checkpoint."""
    recipe = load_recipe(prepared / "recipe.yaml", [
        "metrics={fluent: {command: 'x {hyp}', in_validation: true}}", "train.best_by=fluent",
        "train.valid_bleu=false"])
    data, found = open_prepared(recipe), iter([{"fluent": 0.2, "other": 1.0}, {"other": 3.0}] * 2)
    parts = {"one": range(12), "two": range(12, 20)}
    visitor = ModuleType("visitor")
    vars(visitor).update(measure=lambda recipe, data: lambda rows, model, ranks, texts: next(found))
    monkeypatch.setattr(validate, "visitor_modules", lambda kind: [visitor])
    monkeypatch.setattr(validate, "rows_of_corpora", lambda data: parts)
    monkeypatch.setattr(validate, "measure_validation_text", lambda *given: {})
    engine: Any = Adding(0, 1)
    engine.gather_model = lambda: new_model(recipe.model, 300, 300, 1)
    result = validate.validate(recipe, data, engine, Ranks.alone())
    assert result.figures == {"other": 2.0} and result.value == validate.WORST
    assert result.corpora["one"].value == -0.2
    by_other = with_settings(recipe, {"train.best_by": "loss"})
    result = validate.validate(by_other, data, engine, Ranks.alone())
    assert result.figures == {"fluent": 0.2, "other": 2.0} and result.value < validate.WORST


def test_a_validation_line_over_the_models_length(prepared: Path, tmp_path: Path) -> None:
    """It counts as far as the model goes."""
    words = [str(prepared / "recipe.yaml"), f"data.folder={tmp_path / 'data'}", "data.filters.max_tokens=9",
             "model.max_length=10", f"run={tmp_path / 'run'}", "train.updates=1", "train.validate_every=1"]
    assert main("prepare", words) == 0
    assert int(open_prepared(load_recipe(words[0], words[1:])).split("valid").trg_lengths.max()) > 10
    assert main("train", words) == 0


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
