"""Checkpoints: round trips, kills at every step of a save, damage of every kind, retention, loading a model."""

from __future__ import annotations

import errno
import hashlib
import itertools
import json
import math
import os
import random
import re
import resource
import shutil
import signal
import stat
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny_run
import torch
from kills import kill_before
from peaks import begin_peak, peak
from refusals import user_error
from safetensors.torch import load_file, save, save_file
from torch import Tensor

from deepnmt import folders
from deepnmt.checkpoint import checkpoint
from deepnmt.checkpoint.checkpoint import (
    MODEL_FILES,
    MOMENTS,
    find_checkpoint,
    list_checkpoints,
    load_model,
    load_state,
    load_weights,
    moments_in,
    newest_checkpoint,
    read_scores,
    update_of,
    verify,
    weights_in,
)
from deepnmt.checkpoint.retention import make_room, most_at_once, prune
from deepnmt.config import Train, dump_recipe, load_recipe
from deepnmt.folders import DamagedFolder, FolderWriteError

FILES = (*MODEL_FILES, MOMENTS)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of updates 10 to 40, written once: syncing is slow on a busy disk."""
    folder = tmp_path_factory.mktemp("saved")
    for update in (10, 20, 30, 40):
        tiny_run.write(tiny_run.recipe_of(folder), update)
    return folder / "checkpoints"


def _copy(saved: Path, run: Path, *updates: int) -> Path:
    for update in updates:
        name = f"update-{update:08d}"
        shutil.copytree(saved / name, run / "checkpoints" / name)
    return run


@pytest.fixture
def run(saved: Path, tmp_path: Path) -> Path:
    """A run folder with checkpoints of updates 10 and 20."""
    return _copy(saved, tmp_path, 10, 20)


def _in_child(work: Callable[[], object], *kill: Any) -> int:
    """Runs `work` in a forked process, which `kill_before(*kill)` may end; returns its exit code."""
    pid = os.fork()
    if pid == 0:
        try:
            torch.set_num_threads(1)  # OpenMP's threads are not forked, and the child would wait for them
            if kill:
                kill_before(*kill)
            work()
            os._exit(0)
        finally:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def _same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def _damages(checkpoint: Path) -> str:
    with pytest.raises(DamagedFolder) as caught:
        verify(checkpoint)
    assert str(checkpoint) in str(caught.value) and "\n" not in str(caught.value)
    return str(caught.value)


# -- round trip --------------------------------------------------------------------------------------------------------


def test_round_trip(run: Path) -> None:
    recipe = tiny_run.recipe_of(run)
    folder = tiny_run.write(recipe, 30, validations=[{"update": 30, "value": 1.5}])
    assert folder == run / "checkpoints" / "update-00000030"
    assert sorted(path.name for path in folder.iterdir()) == sorted([*FILES, "manifest.json"])
    verify(folder)
    umask = os.umask(0o027)
    try:
        again = tiny_run.write(recipe, 31)
    finally:
        os.umask(umask)
    assert {file.stat().st_mode & 0o777 for file in again.iterdir()} == {0o640}
    weights = tiny_run.weights_of(recipe, 30)
    assert _same(load_weights(folder), weights)
    moments = moments_in(folder)
    assert len(load_file(folder / MOMENTS)) == 2 * len(weights)
    assert all(torch.equal(moments(f"{name}.exp_avg_sq"), weight * 0.25) for name, weight in weights.items())
    assert load_state(folder) == tiny_run.state_of(30, validations=[{"update": 30, "value": 1.5}])
    assert load_recipe(folder / "recipe.yaml") == recipe
    assert (folder / "src.spm").read_bytes() == tiny_run.VOCAB == (folder / "trg.spm").read_bytes()
    manifest = json.loads((folder / "manifest.json").read_text())
    data = (folder / "weights.safetensors").read_bytes()
    assert manifest["files"]["weights.safetensors"] == {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    assert manifest["parameters"] == sum(weight.numel() for weight in weights.values())


def test_same_content_gives_the_same_bytes(tmp_path: Path) -> None:
    recipe = tiny_run.recipe_of(tmp_path)
    first = {path.name: path.read_bytes() for path in tiny_run.write(recipe, 10).iterdir()}
    assert {path.name: path.read_bytes() for path in tiny_run.write(recipe, 10).iterdir()} == first


def test_only_fp32_is_stored(tmp_path: Path) -> None:
    contents = checkpoint.Contents({"w": torch.ones(2, dtype=torch.bfloat16)}, None, tiny_run.state_of(1), "", {})
    with pytest.raises(ValueError, match=r"w is torch\.bfloat16"):
        checkpoint.write_checkpoint(tmp_path / "one", contents)
    assert list(tmp_path.iterdir()) == []


def test_views_of_one_buffer_are_stored_separately(tmp_path: Path) -> None:
    flat = torch.arange(12.0)
    weights = {"a": flat[:4], "b": flat[4:].view(2, 4).t()}
    contents = checkpoint.Contents(weights, None, tiny_run.state_of(1), "", {})
    checkpoint.write_checkpoint(tmp_path / "one", contents)
    assert _same(load_weights(tmp_path / "one"), weights)


# -- kills and faults of the file system -------------------------------------------------------------------------------


def _eventful_save(run: Path) -> None:
    """A save of everything: it replaces a checkpoint, sets a newer one aside and prunes older ones."""
    tiny_run.write(tiny_run.recipe_of(run), 30)
    prune(run / "checkpoints", Train(updates=99, keep_last=1, keep_best=0), {})


def _eventful(saved: Path, run: Path) -> Path:
    """10 and 20 are whole; 30 and 40 damaged."""
    checkpoints = _copy(saved, run, 10, 20, 30, 40) / "checkpoints"
    (checkpoints / "update-00000030" / "weights.safetensors").write_bytes(b"{")
    (checkpoints / "update-00000040" / "manifest.json").write_bytes(b"{")
    return checkpoints


def test_a_kill_before_any_change_leaves_an_undamaged_checkpoint(saved: Path, tmp_path: Path) -> None:
    found, codes = [], [-signal.SIGKILL]
    for number in itertools.count(1):
        run = tmp_path / str(number)
        checkpoints = _eventful(saved, run)
        codes.append(_in_child(lambda run=run: _eventful_save(run), number, checkpoints))  # type: ignore[misc]
        skipped: list[DamagedFolder] = []
        newest = newest_checkpoint(checkpoints, skipped.append)
        assert newest is not None
        assert _same(load_weights(newest), tiny_run.weights_of(tiny_run.recipe_of(run), update_of(newest)))
        assert all("update-00000040" in str(why) or "update-00000030" in str(why) for why in skipped)
        found.append(update_of(newest))
        _eventful_save(run)  # the resumed run
        assert [update_of(path) for path in list_checkpoints(checkpoints)] == [30]
        assert not list(checkpoints.glob(".*"))
        if codes[-1] == 0:
            break
    assert set(codes[:-1]) == {-signal.SIGKILL} and len(found) > len(FILES) + 6
    assert found == sorted(found) and set(found) == {20, 30} and found.count(30) > 3


def _only(folder: Path) -> str:
    """The name and the text of the one folder of a parent."""
    (path,) = folder.iterdir()
    folders.check_files(path, folders.read_manifest(path), ["text"], ["text"])
    return f"{path.name}: {(path / 'text').read_text()}"


def _commit(target: Path, text: str) -> None:
    folders.commit_folder(target, {"text": [text.encode()]}, {})


def test_a_kill_before_any_change_leaves_the_old_or_the_new_folder(tmp_path: Path) -> None:
    """After the recovery exactly one of the two is left, and it is undamaged."""
    found, code = [], -signal.SIGKILL
    for number in itertools.count(1):
        _commit(tmp_path / "update-1", "old")
        code = _in_child(lambda: _commit(tmp_path / "update-1", "new"), number, tmp_path)
        folders.recover_after_kill(tmp_path, "update-*")
        found.append(_only(tmp_path))
        if code == 0:
            break
        assert code == -signal.SIGKILL
    assert found == sorted(found, reverse=True) and set(found) == {"update-1: old", "update-1: new"} and len(found) > 5


def test_a_folder_whose_successor_cannot_be_renamed_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _commit(tmp_path / "update-1", "old")
    rename = Path.rename

    def refused(path: Path, target: Path) -> Path:
        if path.name.startswith(".tmp-"):
            raise OSError(5, "Input/output error")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", refused)
    with pytest.raises(FolderWriteError, match="Input/output error"):
        _commit(tmp_path / "update-1", "new")
    assert _only(tmp_path) == "update-1: old"


def test_a_folder_that_a_kill_left_renamed_can_be_read(run: Path) -> None:
    """Both the average and the only checkpoint of a run, by readers, which do not recover."""
    checkpoints = run / "checkpoints"
    shutil.copytree(checkpoints / "update-00000010", run / "averaged")
    shutil.rmtree(checkpoints / "update-00000010")
    for target in (run / "averaged", checkpoints / "update-00000020"):
        _in_child(lambda folder=target: _commit(folder, "new"), 2, target.name, "os.rename")  # type: ignore[misc]
        assert not target.exists()
    (average,), (newest,) = run.glob(".before-averaged-*"), checkpoints.glob(".before-update-00000020-*")
    assert find_checkpoint(run) == find_checkpoint(run / "averaged") == find_checkpoint(run, "averaged") == average
    assert find_checkpoint(run, "newest") == find_checkpoint(checkpoints / "update-00000020") == newest
    assert list_checkpoints(checkpoints) == [newest] and update_of(newest) == 20
    assert _same(load_weights(newest), tiny_run.weights_of(tiny_run.recipe_of(run), 20))
    (checkpoints / "update-00000020").mkdir()
    assert list_checkpoints(checkpoints) == [checkpoints / "update-00000020"], "the successor came"


def test_a_folder_that_cannot_be_recovered_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    left = tmp_path / ".before-update-00000010-0badc0de"
    left.mkdir()

    def refused(path: Path, target: Path) -> Path:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(Path, "rename", refused)
    message = (rf"{left} is update-00000010, displaced by a killed process, and .*: Read-only file system; "
               "give write permission")
    with pytest.raises(FolderWriteError, match=message):
        folders.recover_after_kill(tmp_path, "update-*")
    assert left.is_dir()


def test_a_kill_at_a_random_time_leaves_an_undamaged_checkpoint(run: Path) -> None:
    state, chance = tiny_run.state_of(30), random.Random(5)
    weights = {f"w{i}": torch.full((50_000,), float(i)) for i in range(10)}
    contents = checkpoint.Contents(weights, weights, state, "", {})
    target = run / "checkpoints" / "update-00000030"
    seconds = []
    for _ in range(3):
        started = time.monotonic()
        checkpoint.write_checkpoint(target, contents)
        seconds.append(time.monotonic() - started)
        shutil.rmtree(target)
    finished = 0
    for _ in range(20):
        shutil.rmtree(target, ignore_errors=True)
        pid = os.fork()
        moment = chance.uniform(0, 1.2 * min(seconds))
        if pid == 0:  # killed by its own alarm, which comes in time whoever has the cores
            torch.set_num_threads(1)
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.setitimer(signal.ITIMER_REAL, moment)
            checkpoint.write_checkpoint(target, contents)
            os._exit(0)
        os.waitpid(pid, 0)
        newest = newest_checkpoint(run / "checkpoints")
        assert newest is not None and newest == (target if target.exists() else run / "checkpoints" / "update-00000020")
        finished += target.exists()
    assert finished < 20


def test_a_full_disk_is_an_error_and_leaves_nothing(run: Path) -> None:
    before = sorted(path.name for path in (run / "checkpoints").iterdir())

    def save() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
        try:
            tiny_run.write(tiny_run.recipe_of(run), 30)
        except FolderWriteError as error:
            os._exit(42 if "update-00000030 cannot be written: " in str(error) else 1)

    assert _in_child(save) == 42
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == before


def test_a_folder_that_cannot_be_made_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("a file")
    with pytest.raises(FolderWriteError, match=r"update-00000010 cannot be written: (File exists|Not a directory)"):
        tiny_run.write(tiny_run.recipe_of(tmp_path), 10)


def test_a_save_sets_later_checkpoints_aside(run: Path) -> None:
    tiny_run.write(tiny_run.recipe_of(run), 15)
    assert [update_of(path) for path in list_checkpoints(run / "checkpoints")] == [10, 15]
    (aside,) = (run / "checkpoints").glob("set-aside-update-00000020-*")
    verify(aside)


def test_recovery_touches_no_other_folders(tmp_path: Path) -> None:
    for name in (".tmp-update-00000010-0badc0de", ".trash-update-00000020-0badc0de", ".trash-mine", "update-00000010",
                 ".before-update-00000010-0badc0de", ".before-mean-0badc0de"):
        (tmp_path / name).mkdir()
    folders.recover_after_kill(tmp_path, "update-*")
    kept = [".before-mean-0badc0de", ".trash-mine", "update-00000010"]
    assert sorted(path.name for path in tmp_path.iterdir()) == kept
    for name in (".tmp-mean[1]-0badc0de", ".tmp-mean1-0badc0de"):
        (tmp_path / name).mkdir()
    folders.recover(tmp_path / "mean[1]")  # no pattern
    assert sorted(path.name for path in tmp_path.iterdir()) == [kept[0], ".tmp-mean1-0badc0de", *kept[1:]]


# -- damage ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*FILES, "manifest.json"])
def test_a_missing_truncated_or_linked_file_is_named(
    run: Path, tmp_path_factory: pytest.TempPathFactory, name: str
) -> None:
    folder = run / "checkpoints" / "update-00000020"
    file, elsewhere = folder / name, tmp_path_factory.mktemp("elsewhere") / name
    data = file.read_bytes()
    file.write_bytes(data[:-1])
    assert name in _damages(folder)
    file.rename(elsewhere)
    assert name in _damages(folder)
    elsewhere.write_bytes(data)
    file.symlink_to(elsewhere)
    assert name in _damages(folder)
    assert newest_checkpoint(run / "checkpoints", lambda why: None) == run / "checkpoints" / "update-00000010"


FLIPS = 1430 if os.environ.get("DEEPNMT_LONG") else 60  # in each of the seven files


def test_every_flipped_bit_is_detected(run: Path) -> None:
    """60 flips and 10 cuts of each file, with an older checkpoint to fall back to; 10,010 and 1,673 if DEEPNMT_LONG is
    set."""
    older, folder, draw = *(run / "checkpoints" / f"update-000000{update}" for update in (10, 20)), random.Random(1)
    found = {"flips": 0, "cuts": 0}
    for name in (*FILES, "manifest.json"):
        data = (folder / name).read_bytes()
        damaged = bytearray(data)
        for number in range(FLIPS):
            place, bit = draw.randrange(len(data)), 1 << draw.randrange(8)
            damaged[place] ^= bit
            (folder / name).write_bytes(damaged)
            damaged[place] ^= bit
            assert name in _damages(folder) or "format" in _damages(folder)
            found["flips"] += 1
            if number % 6 == 0:
                (folder / name).write_bytes(data[:draw.randrange(len(data))])
                assert name in _damages(folder)
                assert newest_checkpoint(folder.parent, lambda why: None) == older
                found["cuts"] += 1
        (folder / name).write_bytes(data)
    verify(folder)
    print(f"{found} found")


def _forge(folder: Path, **changes: object) -> None:
    tiny_run.forge(folder / "manifest.json", **changes)


def _replace(folder: Path, name: str, data: bytes) -> None:
    """Another content of a file, with hashes that fit."""
    files = json.loads((folder / "manifest.json").read_text())["files"]
    (folder / name).write_bytes(data)
    _forge(folder, files=files | {name: {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}})


@pytest.mark.parametrize(("old", "new", "words"), [
    ("layers: 1\n", "layers: 100000000\n", "model.encoder.layers: is 100000000, must be less than or equal to 100000"),
    ("layers: 1\n", "layers: 100000\n", "in weights.safetensors, the encoder has other than 100000 layers"),
    ("width: 8\n", "width: 65536\n", r"is \[40, 8\] where \[40, 65536\] is expected"),
    ("max_length: 300\n", "max_length: 1000000000000\n", "model.max_length: is 1000000000000, must be less than"),
    ("seed: 1\n", "seed: &a [1, 1, 1]\n", "seed: is .*, must be a valid integer"),
])
def test_a_foreign_recipe_builds_nothing_that_the_weights_do_not_hold(
    run: Path, old: str, new: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = run / "checkpoints" / "update-00000020"
    text = (folder / "recipe.yaml").read_text()
    assert old in text
    _replace(folder, "recipe.yaml", text.replace(old, new).encode())
    started, before = time.process_time(), begin_peak()
    with user_error(words):
        load_model(folder)
    assert time.process_time() - started < 20, "seconds of this process, whoever else has the cores"
    assert peak() - before < 300 * 2**10


@pytest.mark.parametrize(("changes", "words"), [
    ({"update": "20"}, "update: Input should be a valid integer"), ({"update": 10**15}, "is that of update 1"),
    ({"update": True}, "update: "), ({"epoch": 2**40}, "epoch: "), ({"micro_batch": -1}, "micro_batch: "),
    ({"optimizer_step": None}, "optimizer_step: "), ({"loss_scale": 3}, "loss_scale: "), ({"best": []}, "best: "),
    ({"loss_scale": {"scale": 0, "clean": 1}}, "loss_scale.scale: "), ({"extra": [1]}, "extra: "),
    ({"extra": {"validations": [[]]}}, "extra.validations.0: "), ({"more": 1}, "more: Extra inputs are not permitted"),
    ({"extra": {"validations": [{"update": 1, "value": None}]}}, "extra.validations.0.value: "),
    ({"extra": {"processes": 0}}, "extra.processes: "), ({"extra": {"stages": [[1]]}}, "extra.stages.0: "),
    ({"extra": {"interval": {"loss": "x"}}}, "extra.interval.loss: "),
])
def test_a_state_of_wrong_types(run: Path, changes: dict[str, object], words: str) -> None:
    folder = run / "checkpoints" / "update-00000020"
    _replace(folder, "state.json", json.dumps(json.loads((folder / "state.json").read_text()) | changes).encode())
    verify(folder)
    with user_error(rf"state\.json .*{words}"):
        load_state(folder)
    assert 20 not in read_scores(run / "checkpoints")


@pytest.mark.parametrize(("change", "words"), [
    (lambda x: x.index_fill(0, torch.tensor([0]), math.nan), "contains NaN"),
    (lambda x: x.to(torch.int32), "is of type I32, must be F32"),
    (lambda x: x.to(torch.complex64), "is of type C64, must be F32"),
], ids=["NaN", "int32", "complex64"])
def test_weights_that_are_no_numbers(run: Path, change: Callable[[Tensor], Tensor], words: str) -> None:
    """They are told with their file; nothing is cast without a word."""
    folder = run / "checkpoints" / "update-00000020"
    name = "decoder.layers.0.ffn.fc2.weight"
    for file, tensor in (("weights.safetensors", name), ("moments.safetensors", f"{name}.exp_avg")):
        whole = load_file(folder / file)
        _replace(folder, file, save({**whole, tensor: change(whole[tensor])}))
    with user_error(f"{folder} is damaged: {re.escape(name)} in weights.safetensors {words}"):
        load_model(folder)
    with user_error(f"{folder} is damaged: {re.escape(name)}.exp_avg in moments.safetensors {words}"):
        moments_in(folder)[f"{name}.exp_avg"]


def test_names_of_tensors_do_not_reach_the_terminal_as_they_are(run: Path) -> None:
    folder = run / "checkpoints" / "update-00000020"
    for name in ("\x1b]0;title\x07\x1b[2J", "x" * 9 * 10**7):
        save_file({**load_file(folder / "weights.safetensors"), name: torch.zeros(1)}, run / "new")
        _replace(folder, "weights.safetensors", (run / "new").read_bytes())
        shown = r"(\\x1b\]0;title\\x07|x+ \.\.\. x+).*"
        with user_error(rf"in weights\.safetensors, {shown} \[1\] is not expected") as caught:
            load_model(folder)
        assert str(caught.value).isprintable() and len(str(caught.value)) < 5000


def test_a_manifest_cannot_name_files_elsewhere(run: Path) -> None:
    folder = run / "checkpoints" / "update-00000020"
    files = json.loads((folder / "manifest.json").read_text())["files"]
    for name in ("../update-00000010/weights.safetensors", "/etc/hostname", ".."):
        _forge(folder, files=files | {name: files["state.json"]})
        assert f"names {name!r}" in _damages(folder)
    _forge(folder, files={name: entry for name, entry in files.items() if name != "weights.safetensors"})
    assert "does not name weights.safetensors" in _damages(folder)
    nothing: tuple[object, ...] = ([], {"weights.safetensors": 3})
    for entries in nothing:
        _forge(folder, files=entries)
        assert "lists no files" in _damages(folder)
    _forge(folder, files=files, format=3)
    assert "its format is 3, but this deepnmt reads 1 and 2" in _damages(folder)
    for content in ("[]", "[" * 100_000, "\xff", ""):
        (folder / "manifest.json").write_bytes(content.encode("latin-1"))
        assert "manifest.json" in _damages(folder)


def test_a_copy_under_another_update_is_rejected(run: Path) -> None:
    checkpoints = run / "checkpoints"
    shutil.copytree(checkpoints / "update-00000010", checkpoints / "update-00000050")
    assert "that of update 10" in _damages(checkpoints / "update-00000050")
    assert newest_checkpoint(checkpoints, lambda why: None) == checkpoints / "update-00000020"


def test_no_checkpoint_at_all(tmp_path: Path) -> None:
    assert newest_checkpoint(tmp_path / "none") is None
    assert "manifest.json is missing" in _damages(tmp_path)


def test_readers_detect_damage_too(run: Path) -> None:
    folder = run / "checkpoints" / "update-00000020"
    (folder / "weights.safetensors").write_bytes(b"\x08" + bytes(7) + b"[1, 2]  ")
    with pytest.raises(DamagedFolder, match=r"weights\.safetensors has \d+ bytes"):
        load_weights(folder)
    with pytest.raises(DamagedFolder, match=r"weights\.safetensors cannot be read"):
        weights_in(folder)("embeddings.shared.weight")
    _replace(folder, "state.json", b'{"update": 3}')
    with pytest.raises(DamagedFolder, match=r"state\.json is not a training state"):
        load_state(folder)


# -- retention ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("last", "best", "every", "kept"),
    [(1, 0, 0, [6]), (2, 1, 0, [2, 5, 6]), (1, 2, 0, [2, 3, 6]), (9, 9, 0, [1, 2, 3, 4, 5, 6]), (1, 0, 2, [2, 4, 6]),
     (1, 1, 4, [2, 4, 6])],
)
def test_prune_keeps_the_last_the_best_and_every_kth(
    tmp_path: Path, last: int, best: int, every: int, kept: list[int]
) -> None:
    train = Train(updates=6, save_every=1, keep_last=last, keep_best=best, keep_every=every)
    for update in range(1, 7):
        (tmp_path / f"update-{update:08d}").mkdir()
    scores = {1: float("nan"), 2: 1.0, 3: 1.0, 4: 3.0, 5: 2.0, 99: 0.0}  # 1 diverged, 6 not validated, 99 is gone
    gone = prune(tmp_path, train, scores)
    assert [update_of(path) for path in list_checkpoints(tmp_path)] == kept
    assert {update_of(path) for path in gone} == set(range(1, 7)) - set(kept)
    assert not list(tmp_path.glob(".*")) and len(kept) < most_at_once(train) <= 11


def test_validations_save_their_best_beside_what_is_saved_on_schedule() -> None:
    train = Train(updates=900, save_every=1000, validate_every=50, keep_last=4, keep_best=1)
    assert most_at_once(train) == 6


def test_a_full_disk_takes_those_of_keep_every_last(tmp_path: Path) -> None:
    for update in range(2, 9):
        (tmp_path / f"update-{update:08d}").mkdir()
    train = Train(updates=9, save_every=1, keep_every=2)
    freed = [make_room(tmp_path, train, {3: 1.0, 4: 2.0}, 8) for _ in range(6)]
    assert [path and update_of(path) for path in freed] == [5, 7, 2, 4, 6, None]
    assert [update_of(path) for path in list_checkpoints(tmp_path)] == [3, 8], "the best and the newest"


def test_a_full_disk_takes_first_what_the_run_could_not_resume_from(tmp_path: Path) -> None:
    for update in (10, 12, 15):
        (tmp_path / f"update-{update:08d}").mkdir()
    freed = [make_room(tmp_path, Train(updates=20, save_every=5), {}, 13) for _ in range(3)]
    assert [path and update_of(path) for path in freed] == [15, 10, None]


def test_scores_are_collected_from_all_checkpoints(run: Path) -> None:
    recipe = tiny_run.recipe_of(run)
    tiny_run.write(recipe, 30, validations=[{"update": 10, "value": 3.0}, {"update": 30, "value": 2.0}])
    (tiny_run.write(recipe, 40) / "state.json").unlink()
    altered = tiny_run.write(recipe, 50, validations=[{"update": 50, "value": 9.0}]) / "state.json"
    altered.write_text(altered.read_text().replace("9.0", "1.0"))
    assert read_scores(run / "checkpoints") == {10: 3.0, 30: 2.0}


# -- finding and loading a model ---------------------------------------------------------------------------------------


def test_which_checkpoint_of_a_run(run: Path) -> None:
    with user_error(r"no checkpoint in .* was validated"):
        find_checkpoint(run, "best")
    with user_error("holds no averaged/"):
        find_checkpoint(run, "averaged")
    recipe = tiny_run.recipe_of(run)
    tiny_run.write(recipe, 30, validations=[{"update": 10, "value": 3.0}, {"update": 20, "value": 2.0}])
    checkpoints = run / "checkpoints"
    assert find_checkpoint(run) == find_checkpoint(run, "newest") == checkpoints / "update-00000030"
    assert find_checkpoint(run, "best") == checkpoints / "update-00000020"
    shutil.copytree(checkpoints / "update-00000010", run / "averaged")
    assert find_checkpoint(run) == find_checkpoint(run, "averaged") == run / "averaged"
    assert find_checkpoint(run, "newest") == checkpoints / "update-00000030"
    assert find_checkpoint(checkpoints / "update-00000010", "best") == checkpoints / "update-00000010"


def test_a_model_is_loaded_as_it_was_saved(run: Path) -> None:
    recipe = tiny_run.recipe_of(run)
    loaded = load_model(run)
    assert _same(dict(loaded.model.named_parameters()), tiny_run.weights_of(recipe, 20))
    assert not loaded.model.training
    assert (loaded.recipe.model, loaded.state.update, loaded.folder.name) == (recipe.model, 20, "update-00000020")
    assert loaded.src_vocab.bytes == loaded.trg_vocab.bytes == tiny_run.VOCAB


def test_weights_of_another_model_are_rejected_by_name(run: Path) -> None:
    wide = tiny_run.recipe_of(run, model={"ffn": 20})
    folder = tiny_run.save(
        run / "checkpoints", checkpoint.Contents(tiny_run.weights_of(tiny_run.recipe_of(run)), {},
                                                    tiny_run.state_of(30), dump_recipe(wide), tiny_run.VOCABS))
    with user_error(r"encoder\.layers\.0\.ffn\.fc1\.weight is \[16, 8\] where \[20, 8\] is"):
        load_model(folder)


def test_a_model_is_not_loaded_from_damaged_or_missing_files(run: Path) -> None:
    file = run / "checkpoints" / "update-00000020" / "weights.safetensors"
    tensors = load_file(file)
    next(iter(tensors.values())).view(-1)[0] += 1
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(DamagedFolder, match=r"the SHA-256 of weights\.safetensors differs"):
        load_model(file.parent)
    assert load_model(run).state.update == 10
    with user_error("there is no folder"):
        load_model(run / "nowhere")
    with user_error("is not a checkpoint and holds no whole one"):
        load_model(run / "checkpoints")


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOTSUP, errno.EIO])
def test_a_file_system_that_cannot_sync_folders(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """FUSE and object stores may refuse it; an error of the disk stays one."""
    sync = os.fsync

    def refusing(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(number, os.strerror(number))
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", refusing)
    if number == errno.EIO:
        with pytest.raises(FolderWriteError, match="Input/output error"):
            tiny_run.write(tiny_run.recipe_of(tmp_path), 10)
    else:
        verify(tiny_run.write(tiny_run.recipe_of(tmp_path), 10))
