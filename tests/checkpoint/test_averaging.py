"""Averages: which checkpoints, their exact mean, and what is rejected."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import tiny_run
import torch
from refusals import user_error

from deepnmt import config
from deepnmt.checkpoint import average as averaging
from deepnmt.checkpoint import tensors as stored
from deepnmt.checkpoint.average import (
    average_run,
    average_weights,
    choose_checkpoints,
    save_average,
    warn_if_outdated,
)
from deepnmt.checkpoint.checkpoint import (
    Contents,
    load_model,
    load_state,
    load_weights,
    moments_in,
    require_model,
    update_of,
    verify,
    write_checkpoint,
)
from deepnmt.checkpoint.retention import check_average_last, last_consecutive
from deepnmt.training.dry_run import describe

VALIDATIONS = [{"update": 10, "value": 3.0}, {"update": 20, "value": 1.0}, {"update": 30, "value": 2.0}]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with checkpoints of updates 10, 20, 30 and 40, written once; 40 was not validated."""
    folder = tmp_path_factory.mktemp("saved")
    for update in (10, 20, 30, 40):
        tiny_run.write(tiny_run.recipe_of(folder), update, validations=VALIDATIONS)
    return folder


@pytest.fixture
def recipe(saved: Path, tmp_path: Path) -> config.Recipe:
    """Of a copy of that run."""
    shutil.copytree(saved, tmp_path / "run")
    return tiny_run.recipe_of(tmp_path / "run")


def _checkpoints(recipe: config.Recipe) -> Path:
    return Path(recipe.run) / "checkpoints"


def _updates(folder: Path) -> list[int]:
    return load_state(folder).extra["averaged_updates"]


def test_the_average_is_the_mean_rounded_once(recipe: config.Recipe) -> None:
    folders = choose_checkpoints(_checkpoints(recipe), last=3)
    averaged = average_weights(folders)
    weights = [tiny_run.weights_of(recipe, update) for update in (20, 30, 40)]
    assert averaged.keys() == weights[0].keys()
    for name, tensor in averaged.items():
        exact = torch.stack([group[name].detach().double() for group in weights]).sum(0) / 3
        assert tensor.dtype == torch.float32 and torch.equal(tensor, exact.to(torch.float32))


def test_files_are_opened_anew_for_each_group_of_tensors(
    recipe: config.Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = choose_checkpoints(_checkpoints(recipe), last=2)
    whole = average_weights(folders)
    monkeypatch.setattr(stored, "MAPPED_VALUES", 100)
    parts = average_weights(folders)
    assert list(parts) == list(whole) and all(torch.equal(parts[name], whole[name]) for name in whole)


MEMORY = """
import sys
from pathlib import Path
from deepnmt.checkpoint import average as averaging, tensors as stored

def kilobytes(name):  # getrusage would count the process that started this one
    return int(Path("/proc/self/status").read_text().partition(name + ":")[2].split()[0])

stored.MAPPED_VALUES = 100_000
small, *folders = map(Path, sys.argv[1:])
averaging.average_weights([small, small])  # the libraries' own memory does not count
before = kilobytes("VmRSS")
averaging.average_weights(folders)
print(1024 * (kilobytes("VmHWM") - before))
"""


def test_memory_is_that_of_one_model(tmp_path: Path) -> None:
    """Six checkpoints of 64 MB; they share their files, but each is read, and counted, separately."""
    weights = {f"layer{number}": torch.full((100_000,), float(number)) for number in range(160)}
    small, first, *others = [tmp_path / f"update-{number}" for number in range(7)]
    for folder, held in ((small, {"layer0": torch.ones(1000)}), (first, weights)):
        write_checkpoint(folder, Contents(held, None, tiny_run.state_of(1), "", {}))
    for folder in others:
        shutil.copytree(first, folder, copy_function=os.link)
    folders = [first, *others]
    done = subprocess.run([sys.executable, "-c", MEMORY, *map(str, [small, *folders])], capture_output=True,
                          text=True, check=True, cwd=Path(averaging.__file__).parents[2])
    assert 64e6 < int(done.stdout) < 1.5 * 64e6


def test_float32_alone_would_lose_the_mean(tmp_path: Path) -> None:
    for number, value in enumerate((2.0**24, 1.0, 1.0)):
        contents = Contents({"w": torch.tensor([value])}, None, tiny_run.state_of(number), "", {})
        write_checkpoint(tmp_path / str(number), contents)
    mean = average_weights([tmp_path / str(number) for number in range(3)])["w"]
    assert mean.item() == torch.tensor((2**24 + 2) / 3, dtype=torch.float32).item()
    summed = torch.tensor([2.0**24, 1.0, 1.0])
    assert mean.item() != ((summed[0] + summed[1] + summed[2]) / 3).item()


def test_the_average_of_one_checkpoint_has_its_weights(recipe: config.Recipe) -> None:
    folder = _checkpoints(recipe) / "update-00000010"
    averaged, weights = average_weights([folder]), load_weights(folder)
    assert all(torch.equal(averaged[name], weights[name]) for name in weights)


def test_an_average_is_a_checkpoint_without_moments(recipe: config.Recipe) -> None:
    folder = average_run(recipe, updates=[30, 10])
    assert folder == Path(recipe.run) / "averaged"
    verify(folder)
    loaded = load_model(Path(recipe.run))
    assert loaded.folder == folder and loaded.recipe.model == recipe.model and loaded.src_vocab.bytes == tiny_run.VOCAB
    assert loaded.state.update == 30 and _updates(folder) == [30, 10]
    expected = average_weights(choose_checkpoints(_checkpoints(recipe), updates=[10, 30]))
    assert all(torch.equal(p, expected[name]) for name, p in loaded.model.named_parameters())
    with user_error("holds no optimizer moments"):
        moments_in(folder)
    again = average_run(recipe, last=1)
    assert again == folder and _updates(again) == [40]
    assert sorted(path.name for path in Path(recipe.run).iterdir()) == ["averaged", "checkpoints"]


def test_each_way_of_choosing(recipe: config.Recipe, tmp_path: Path) -> None:
    checkpoints = _checkpoints(recipe)
    assert [update_of(path) for path in choose_checkpoints(checkpoints, last=2)] == [30, 40]
    assert [update_of(path) for path in choose_checkpoints(checkpoints, best=2)] == [20, 30]
    assert [update_of(path) for path in choose_checkpoints(checkpoints, updates=[40, 10])] == [40, 10]
    assert [update_of(path) for path in choose_checkpoints(checkpoints, span=(15, 30))] == [20, 30]
    assert _updates(average_run(recipe)) == [10, 20, 30, 40]
    assert _updates(average_run(recipe.model_copy(update={"average_last": 3}))) == [20, 30, 40]
    assert _updates(average_run(recipe, best=2)) == [20, 30]
    assert _updates(average_run(recipe, span=(10, 20))) == [10, 20]
    chosen: list[str | Path] = [checkpoints / "update-00000040", str(checkpoints / "update-00000020")]
    assert _updates(average_run(recipe, folders=chosen, output=str(tmp_path / "mean"))) == [40, 20]
    verify(tmp_path / "mean")


def test_an_old_best_checkpoint_is_not_one_of_the_last(recipe: config.Recipe) -> None:
    """The run kept two, and 10 for its validation; then it resumed and kept more."""
    few, more = (recipe.model_copy(update={
        "train": config.Train(updates=90, save_every=10, keep_last=n), "average_last": n}) for n in (2, 5))
    checkpoints = _checkpoints(recipe)
    shutil.rmtree(checkpoints / "update-00000020")
    tiny_run.write(few, 30)
    tiny_run.write(few, 40)
    tiny_run.write(more, 50)
    assert [update_of(path) for path in choose_checkpoints(checkpoints, last=3)] == [30, 40, 50]
    with user_error(r"^the last 4 checkpoints in .* but one before the last 3 was deleted or not .*; choose 3"):
        choose_checkpoints(checkpoints, last=4)
    assert _updates(average_run(more)) == [30, 40, 50]


@pytest.mark.parametrize(("updates", "chosen"), [
    ([10, 20, 30, 40], [10, 20, 30, 40]),
    ([10, 20, 40], [40]),  # 30 was not written, or deleted on a full disk
    ([10, 20, 23, 30], [10, 20, 23, 30]),  # 23 was the best so far
    ([7, 10, 18, 23], [23]),  # 18 and 23 are kept as the best, and 20, in between, is not
    ([7, 10, 18, 20], [7, 10, 18, 20]),
])
def test_where_a_checkpoint_is_missing_the_last_ones_begin_after_it(
        updates: list[int], chosen: list[int], recipe: config.Recipe) -> None:
    saving = recipe.model_copy(update={"train": config.Train(updates=90, save_every=10, keep_last=9)})
    shutil.rmtree(_checkpoints(recipe))
    for update in updates:
        tiny_run.write(saving, update)
    assert [update_of(path) for path in last_consecutive(_checkpoints(saving), 9)] == chosen


def test_more_to_average_than_is_kept(recipe: config.Recipe) -> None:
    """Rejected before training; but a run that was trained so can be read."""
    asked = recipe.model_copy(update={"train": config.Train(updates=90, keep_last=2), "average_last": 5})
    sentence = r"^average_last \(5\) must not be above train.keep_last \(2\), .* set average_last=2, or keep more"
    with user_error(sentence):
        check_average_last(asked)
    with user_error(sentence):
        describe(asked)
    shutil.rmtree(asked.run)
    tiny_run.write(asked, 40)
    assert load_model(Path(asked.run)).recipe.average_last == 5
    require_model(_checkpoints(asked) / "update-00000040", asked.model)
    assert _updates(average_run(asked)) == [40]


def test_an_outdated_average_causes_a_warning(
    recipe: config.Recipe, caplog: pytest.LogCaptureFixture
) -> None:
    folder = average_run(recipe, best=1)  # of update 20, though there is 40
    for average in (folder, _checkpoints(recipe) / "update-00000010"):
        warn_if_outdated(average)
    assert caplog.messages == []
    newest = tiny_run.write(recipe, 50)
    warn_if_outdated(folder)
    assert caplog.messages == [f"{folder} was averaged before {newest} was saved; average again to include it, or "
                               "choose it with --checkpoint"]
    average_run(recipe, last=1)
    newest = tiny_run.write(recipe, 45)  # as if 50 was damaged: it is set aside
    warn_if_outdated(folder)
    shutil.rmtree(newest)  # 40 is the newest again, which existed at the averaging
    warn_if_outdated(folder)
    assert [message.partition(" was averaged before ")[2].partition(";")[0] for message in caplog.messages[1:]] == [
        f"{newest} was saved"]


def test_an_average_of_a_run_that_was_begun_anew_causes_a_warning(
    recipe: config.Recipe, caplog: pytest.LogCaptureFixture
) -> None:
    """Its checkpoints have the same names, and other weights, of however many updates."""
    folder = average_run(recipe, last=2)
    checkpoints = _checkpoints(recipe)
    checkpoints.rename(checkpoints.with_name("kept"))
    for count, update in enumerate((10, 30, 40), 1):
        path = tiny_run.write(recipe, update, seed=9)
        warn_if_outdated(folder)
        assert len(caplog.messages) == count and f"was averaged before {path} was saved" in caplog.messages[-1]
    shutil.rmtree(checkpoints)
    checkpoints.with_name("kept").rename(checkpoints)
    warn_if_outdated(folder)
    assert len(caplog.messages) == 3


def test_an_average_in_another_run_is_compared_with_that_runs_checkpoints(
    recipe: config.Recipe, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    other = tiny_run.recipe_of(tmp_path / "other")
    tiny_run.write(other, 15)
    average_run(other, folders=[_checkpoints(recipe) / "update-00000040"])
    warn_if_outdated(tmp_path / "other" / "averaged")
    assert caplog.messages == []
    newest = tiny_run.write(other, 35)
    warn_if_outdated(tmp_path / "other" / "averaged")
    assert [f"was averaged before {newest} was saved" in message for message in caplog.messages] == [True]


def test_an_average_of_an_older_version_is_compared_by_its_updates(
    recipe: config.Recipe, caplog: pytest.LogCaptureFixture
) -> None:
    for update, messages in ((20, 1), (40, 1)):
        folder = average_run(recipe, updates=[update])
        state = load_state(folder)
        del state.extra["updates_beside"]
        write_checkpoint(folder, Contents(load_weights(folder), None, state, (folder / "recipe.yaml").read_text(),
                                          tiny_run.VOCABS))
        warn_if_outdated(folder)
        assert len(caplog.messages) == messages
    assert caplog.messages == [f"{folder} does not hold the newest checkpoint, {_checkpoints(recipe)}/update-00000040; "
                               "average again to include it, or choose it with --checkpoint"]


def test_an_average_is_written_where_a_link_leads(recipe: config.Recipe, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "mean")
    for last in (1, 2):  # what the link leads to is made, then replaced
        average_run(recipe, last=last, output=tmp_path / "link")
        assert (tmp_path / "link").is_symlink() and len(load_state(tmp_path / "mean").extra["averaged"]) == last
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "mean", "run"]


def test_impossible_choices_are_rejected(recipe: config.Recipe) -> None:
    checkpoints = _checkpoints(recipe)
    for count in (5, 0, -1):
        with user_error(rf"^{count} checkpoints in .* were requested, but there are \d"):
            choose_checkpoints(checkpoints, last=count)
    with user_error(r"^4 validated checkpoints in .* but there are 3"):
        choose_checkpoints(checkpoints, best=4)
    with user_error(r"no checkpoint of update 25 in .* there are 10, 20, 30, 40"):
        choose_checkpoints(checkpoints, updates=[10, 25])
    with user_error("name one twice"):
        choose_checkpoints(checkpoints, updates=[10, 10])
    with user_error("the list of checkpoints to average is empty"):
        average_run(recipe, updates=[])
    last = checkpoints / "update-00000040"
    (checkpoints.parent / "link").symlink_to(last)
    with user_error(f"^checkpoints {last}, .*link name one twice; give each once$"):
        average_run(recipe, folders=[last, checkpoints.parent / "link"])
    with user_error("from 41 to 90"):
        choose_checkpoints(checkpoints, span=(41, 90))
    with user_error("in one way only"):
        average_run(recipe, last=1, best=1)
    with user_error(r"there is no checkpoint in .*; train first"):
        average_run(recipe.model_copy(update={"run": recipe.run + "-other"}))


@pytest.mark.parametrize(
    ("change", "difference"),
    [
        ({"ffn": 20}, r"decoder\.layers\.0\.ffn\.fc1\.bias is \[20\] where \[16\] is expected"),
        ({"tied": "none"}, r"embeddings\.shared\.weight \[40, 8\] is missing"),
        ({"heads": 4}, r"model\.heads is 4 where 2 is expected"),
        ({"activation": "gelu"}, r"model\.activation is gelu where relu is expected"),
    ],
)
def test_another_model_is_rejected_with_the_difference(
    recipe: config.Recipe, tmp_path: Path, change: dict[str, int | str], difference: str
) -> None:
    other = tiny_run.write(tiny_run.recipe_of(tmp_path / "other", model=change), 50)
    with user_error(rf"{other} is another model than .*update-00000010: {difference}"):
        average_run(recipe, folders=[_checkpoints(recipe) / "update-00000010", other])
    assert not (Path(recipe.run) / "averaged").exists()


def test_another_vocabulary_is_rejected(recipe: config.Recipe, tmp_path: Path) -> None:
    vocabs = {**tiny_run.VOCABS, "src.spm": tiny_run.OTHER_VOCAB}
    other = tiny_run.write(tiny_run.recipe_of(tmp_path / "other"), 50, vocabs=vocabs)
    with user_error(r"the vocabulary src\.spm differs"):
        save_average([_checkpoints(recipe) / "update-00000010", other], tmp_path / "mean")


def test_a_file_of_the_task_is_copied(tmp_path: Path) -> None:
    run, files = tiny_run.recipe_of(tmp_path / "run"), {**tiny_run.VOCABS, "more.txt": b"1"}
    for update in (10, 20):
        tiny_run.write(run, update, vocabs=files)
    assert load_model(average_run(run)).files == files
    tiny_run.write(run, 30, vocabs={**files, "more.txt": b"2"})
    with user_error(r"the file more\.txt differs"):
        average_run(run)


def test_a_damaged_checkpoint_is_not_averaged(recipe: config.Recipe) -> None:
    file = _checkpoints(recipe) / "update-00000040" / "weights.safetensors"
    file.write_bytes(file.read_bytes()[:-4] + b"\0\0\x80\x7f")
    with user_error(r"update-00000040 is damaged: the SHA-256 of weights\.safetensors differs"):
        average_run(recipe, last=2)


def test_a_folder_of_something_else_is_not_replaced(recipe: config.Recipe, tmp_path: Path) -> None:
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter").write_text("1")
    for manifest in ("contents.json", "manifest.json"):  # prepared data have the latter
        (tmp_path / "thesis" / manifest).write_text("{}")
        with user_error("thesis exists and is not a checkpoint"):
            average_run(recipe, last=1, output=tmp_path / "thesis")
    assert (tmp_path / "thesis" / "chapter").read_text() == "1"
    newest = _checkpoints(recipe) / "update-00000040"
    before = sorted(newest.iterdir())
    with user_error("update-00000040 is a checkpoint from which training can resume, and the average would replace it"):
        average_run(recipe, last=2, output=newest)
    assert sorted(newest.iterdir()) == before


