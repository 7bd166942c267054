"""Stages of mixtures (`data.stages`): shares, their ends by epochs, updates and patience, and runs that are killed."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from corpus_recipes import recipe_of, text
from run_files import losses, records, tensors
from warm import Warm

from deepnmt.checkpoint.checkpoint import load_state
from deepnmt.config import Recipe, dump_recipe, load_recipe, with_settings
from deepnmt.data.batching import Position
from deepnmt.data.mixing import Mixture, training_stream
from deepnmt.data.prepare import prepare
from deepnmt.data.prepared import open_prepared
from deepnmt.processes.process_group import processes
from deepnmt.tasks.translation.task import TASK as TRANSLATION
from deepnmt.training.status import FINISHED
from deepnmt.training.task import Validation
from deepnmt.training.trainer import train

STAGES = [{"mix": {"large": 1, "small": 1}, "until": {"epochs": 1}},
          {"mix": {"small": 2.0}, "until": {"updates": 3, "patience": 5}},
          {"mix": {"large": 3, "small": 1}, "until": {"patience": 2, "epochs": 9}},
          {"mix": {"large": 1}}]
UPDATES = 16


@pytest.fixture(scope="module")
def staged(prepared: Path, tmp_path_factory: pytest.TempPathFactory) -> Recipe:
    """Four stages of two corpora; each update is saved."""
    recipe = recipe_of(prepared, tmp_path_factory.mktemp("staged"), stages=STAGES,
                       train={"large": text(prepared, "train"), "small": text(prepared, "test")})
    prepare(recipe)
    return with_settings(recipe, {
        "batch.tokens": 2048, "batch.accumulation": 2, "train.updates": UPDATES, "train.validate_every": 2,
        "train.save_every": 1, "train.keep_last": 99, "model.encoder.block": "pre_ln",
        "model.decoder.block": "pre_ln"})


class KilledError(Exception):
    """As a kill is, between two updates."""


def run(recipe: Recipe, folder: Path, killed: int | None = None) -> Path:
    """Trains, up to the beginning of update `killed`; a validation's value falls up to update 10, then rises."""
    @contextmanager
    def hook(number: int) -> Iterator[None]:
        if number == killed:
            raise KilledError
        yield

    def validate(recipe: Recipe, data: Any, engine: Any, ranks: Any) -> Validation:
        update = engine.optimizer_step
        loss = 5.0 + abs(update - 10) / 10
        return Validation(loss, math.exp(loss), loss)

    recipe = with_settings(recipe, {"run": str(folder)})
    with processes(1) as ranks:
        assert train(recipe, ranks, replace(TRANSLATION, validate=validate), lambda *_: hook) == FINISHED
    return folder


def state_at(folder: Path, update: int) -> tuple[Any, ...]:
    state = load_state(folder / "checkpoints" / f"update-{update:08d}")
    return state.epoch, state.micro_batch, state.best, state.extra.get("stages"), state.extra["validations"]


@pytest.fixture(scope="module")
def whole(staged: Recipe, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run that nothing interrupts."""
    return run(staged, tmp_path_factory.mktemp("whole"))


def test_stages_end_by_epochs_updates_and_patience(staged: Recipe, whole: Path) -> None:
    first, second, third = load_state(whole / "checkpoints" / f"update-{UPDATES:08d}").extra["stages"]
    stream = training_stream(staged, open_prepared(staged))
    assert first == [1, math.ceil(stream.epoch_size(0) / 2)], "an epoch's end, as it comes"
    assert second[1] == first[1] + 3 and third[1] == 14, "three updates, and two validations after the best at 10"
    notes = [event["message"] for event in records(whole, "event") if "stage" in event["message"]]
    assert notes == [f"stage 2 of 4 begins with epoch {first[0] + 1}: small 100.0%",
                     f"stage 3 of 4 begins with epoch {second[0] + 1}: large 75.0%, small 25.0%",
                     f"stage 4 of 4 begins with epoch {third[0] + 1}: large 100.0%"]
    epochs = {record["update"]: record["epoch"] for record in records(whole, "train")}
    assert epochs[second[1] + 1] == second[0] + 1, "progress lines count epochs likewise"


def test_runs_killed_at_the_borders_of_stages_equal_the_whole(staged: Recipe, whole: Path, tmp_path: Path) -> None:
    borders = [update for _, update in load_state(whole / "checkpoints" / f"update-{UPDATES:08d}").extra["stages"]]
    for kill in sorted({border + more for border in borders for more in (0, 1, 2)}):
        with pytest.raises(KilledError):
            run(staged, tmp_path / "broken", kill)
    broken = run(staged, tmp_path / "broken")
    assert losses(broken) == losses(whole)
    for update in (*(border + more for border in borders for more in (0, 1)), UPDATES):
        assert state_at(broken, update) == state_at(whole, update)
    for name in ("weights", "moments"):
        ours, theirs = tensors(broken, UPDATES, name), tensors(whole, UPDATES, name)
        assert all(torch.equal(ours[key], theirs[key]) for key in theirs)


def test_a_stop_before_the_validation_that_ends_a_stage(staged: Recipe, whole: Path, tmp_path: Path,
                                                        monkeypatch: pytest.MonkeyPatch) -> None:
    """The run that resumes validates, ends the stage and then saves the checkpoint again."""
    from deepnmt.training import trainer

    def stopping(*arguments: Any, **options: Any) -> Iterator[Any]:
        for done in updates(*arguments, **options):
            yield replace(done, stop=done.number == 14)

    updates = trainer.updates
    monkeypatch.setattr(trainer, "updates", stopping)
    with pytest.raises(AssertionError):
        run(staged, tmp_path / "stopped")  # preempted
    assert len(state_at(tmp_path / "stopped", 14)[3]) == 2
    monkeypatch.setattr(trainer, "updates", updates)
    run(staged, tmp_path / "stopped")
    assert state_at(tmp_path / "stopped", 14) == state_at(whole, 14)
    assert losses(tmp_path / "stopped") == losses(whole)


def job(recipe: str, folder: str) -> None:
    """Runs on each rank."""
    with processes(threads=1, group=True) as ranks:
        settings = load_recipe(Path(recipe), [
            f"run={folder}", f"batch.accumulation={2 // ranks.world}", "parallel.ds_config=ds_configs/zero1.json",
            "parallel.precision=fp32", "train.valid_bleu=false"])
        assert train(settings, ranks) == FINISHED


def test_two_processes_have_the_stages_of_one(staged: Recipe, tmp_path: Path, warm: Warm) -> None:
    (tmp_path / "recipe.yaml").write_text(dump_recipe(with_settings(staged, {"train.updates": 9})))
    for world, name in ((1, "one"), (2, "two")):
        warm.run(world, "test_stages:job", tmp_path / "recipe.yaml", tmp_path / name)
    one, two = tmp_path / "one", tmp_path / "two"
    assert len(state_at(one, 9)[3]) == 2
    for update in range(1, 10):
        assert [state_at(one, update)[i] for i in (0, 1, 3)] == [state_at(two, update)[i] for i in (0, 1, 3)]
        assert losses(two)[update] == pytest.approx(losses(one)[update], rel=1e-5)


# -- shares ------------------------------------------------------------------------------------------------------------


def mixture(begun: tuple[int, ...] = ()) -> Mixture:
    mixes = [[0.7, 0.3, 0.0], [0.0, 1.0, 0.0], [0.1, 0.1, 0.8]]
    return Mixture([20_000, 3_000, 700], [1.0] * 3, mixes=mixes, epochs=[2, None, None], begun=begun)


def test_an_epoch_has_the_shares_of_its_stage() -> None:
    staged = mixture((2, 5))
    assert [staged.counts(epoch) for epoch in (0, 1, 2, 4, 5)] == [
        [16_100, 6_900, 0]] * 2 + [[0, 3_000, 0]] * 2 + [[2_370, 2_370, 18_960]]
    assert staged.starts(2) == [32_200, 13_800, 0] and staged.starts(6) == [34_570, 25_170, 18_960]
    for epoch in (0, 3, 6):
        corpora = np.searchsorted([20_000, 23_000], staged.rows(1, epoch), side="right")
        assert np.bincount(corpora, minlength=3).tolist() == staged.counts(epoch)
    used = np.bincount(np.concatenate([staged.rows(1, epoch) for epoch in range(7)]), minlength=23_700)
    for part in (used[:20_000], used[20_000:23_000], used[23_000:]):
        assert part.max() - part.min() <= 1, "stages go on with a corpus where the one before ended"


def test_stages_are_a_function_of_the_epoch_and_of_what_ended_early() -> None:
    assert mixture().firsts() == [0, 2] and mixture((2,)).firsts() == [0, 2] and mixture((1, 4)).firsts() == [0, 1, 4]
    assert mixture((1,)).counts(1) == [0, 3_000, 0] and mixture().counts(1) == [16_100, 6_900, 0]


@pytest.mark.parametrize("shard_pairs", [0, 100])
def test_streams_have_stages(staged: Recipe, prepared: Path, tmp_path: Path, shard_pairs: int) -> None:
    """From the first epoch on, and from a stage that was begun early; in shards a stage has windows of its own."""
    recipe = recipe_of(prepared, tmp_path, stages=STAGES, shard_pairs=shard_pairs, window_pairs=160,
                       train={"large": text(prepared, "train"), "small": text(prepared, "test")})
    prepare(recipe)
    data = open_prepared(recipe)
    stream = training_stream(recipe, data)
    vocab = data.vocabs()[0]
    small = set((prepared / "text" / "test.en").read_text(encoding="utf-8").splitlines())

    def shares(position: Position, epoch: int) -> tuple[int, int]:
        """The pairs of an epoch, and how many of them are of the small corpus."""
        of_small = total = 0
        while position.epoch == epoch:
            update = stream.update(position, 1, 0, 1, torch.device("cpu"))
            for line in update.batches[0]["src"].tolist():
                total, of_small = total + 1, of_small + (vocab.decode(line) in small)
            position = update.next
        return total, of_small

    large, few = data.corpora("train").values()
    assert shares(Position(0, 0), 0) == (large + few, (large + few) // 2)
    assert shares(Position(1, 0), 1) == (few, few)
    stream.begin_stages([1, 2])
    assert shares(Position(2, 0), 2) == (large + few, (large + few) // 4)
    stream.begin_stages([1, 2, 3])
    assert shares(Position(3, 0), 3) == (large, 0)
