"""Every name of a choice has its class or function, and its row says what they do."""

from __future__ import annotations

from collections.abc import Collection

import pytest

from deepnmt.config import Fact, Recipe, choices, load_recipe
from deepnmt.config.choices import Choices
from deepnmt.config.fields import way_to
from deepnmt.data import subword_variants
from deepnmt.decode import formats
from deepnmt.errors import UserError
from deepnmt.evaluate import metrics
from deepnmt.model import blocks, objective, positions, published, sublayers
from deepnmt.optim import optimizers, schedules
from deepnmt.training import trainer
from deepnmt.training.task import Task, find_task


@pytest.mark.parametrize(("names", "implemented"), [
    (choices.BLOCKS, blocks.BLOCKS),
    (choices.BLOCKS.where(lambda block: block.published), published.PUBLISHED),
    (choices.NORMS, blocks.NORMS),
    (choices.ACTIVATIONS, sublayers.ACTIVATIONS),
    (choices.POSITIONS, positions.POSITIONS),
    (choices.VOCAB_KINDS.where(lambda kind: kind.samples), subword_variants.SAMPLERS),
    (choices.OPTIMIZERS, optimizers.OPTIMIZERS),
    (choices.SCHEDULES, schedules.SCHEDULES),
    (choices.OBJECTIVES, objective.OBJECTIVES),
    (choices.TASKS, [name for name in choices.TASKS if isinstance(find_task(name), Task)]),
    (choices.METRICS, metrics.SCORERS),
    (choices.FORMATS, formats.WRITERS),
])
def test_each_name_has_its_implementation(names: Collection[str], implemented: Collection[str]) -> None:
    assert set(names) == set(implemented)


def test_the_rows_of_blocks_say_what_the_classes_do() -> None:
    for name, block in blocks.BLOCKS.items():
        row = choices.BLOCKS[name]
        assert row.profiled == block.profiled
        assert row.gated == (block.feed_forward in (sublayers.FeedForward, sublayers.NormedFeedForward))


def test_the_rows_of_activations_say_what_the_functions_do() -> None:
    for name, row in choices.ACTIVATIONS.items():
        assert row.gated == (sublayers.ACTIVATIONS[name].rows == 2)


def test_options_say_with_which_names_they_have_an_effect() -> None:
    """A setting that has an effect only with some names says so in its description, too."""
    for key, names in Recipe.named().items():
        section, _, by = key.rpartition(".")
        for setting in {option for row in names.values() for option in (*row.options, *row.needs)}:
            field = way_to(Recipe, f"{section}.{setting}")[-1]
            with_it = names.with_option(setting)
            others = set(names) - set(with_it)
            said = " ".join((field.description or "").split())
            assert all(name in said for name in with_it) or all(name in said for name in others), (key, setting, by)


def test_a_setting_says_what_it_is() -> None:
    assert Recipe.marked(Fact.MOMENTS) == ["optimizer.name", "optimizer.momentum", "train.ema"]
    assert Recipe.is_marked("data.train.corpora.news.v1.src", Fact.PATH)  # names of corpora may have dots
    assert Recipe.is_marked("plugins.folder/my.py", Fact.PATH)
    assert Recipe.is_marked("model.encoder.layers", Fact.FIXED)  # as all of the section
    assert not Recipe.is_marked("data.train.columns", Fact.PATH)
    assert not Recipe.is_marked("data.train.gone", Fact.PATH)
    assert Recipe.marked("average") == ["run", "model", "average_last"]


def test_a_name_that_may_be_a_plug_ins_is_looked_for_there_alone() -> None:
    named: dict[str, Choices[choices.Choice]] = {key: names for key, names in Recipe.named().items() if names.plugins}
    assert {"task", "model.encoder.block", "model.decoder.block", "schedule.name"} <= named.keys()
    with pytest.raises(UserError, match=r"model\.norm: is 'mine', must be one of layer_norm, rms_norm"):
        load_recipe("recipes/demo/admin_18l-18l.yaml", ["model.norm=mine"])


def test_stopping_rules_are_settings() -> None:
    assert Recipe.marked(Fact.ENDS) == [f"train.{rule}" for rule in trainer.STOP_CONDITIONS]
