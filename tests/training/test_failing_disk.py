"""The n-th change of a file fails, once with an input/output error and once on a full disk, for every n.

As SQLite is tested. A preloaded library (tests/support/faults.c) makes the n-th making, writing, syncing, renaming or
deleting of a file in the run folder fail; the package knows nothing of it. Whatever n: the user reads one sentence and
no traceback, nothing that was saved is lost, and the same command goes on to the same bits. Some are tried every day,
all if DEEPNMT_LONG is set, or with `DEEPNMT_WRITES=1-100` those. And a disk that is really full: a run makes room for
its checkpoints.
"""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
from run_files import losses
from warm import Warm, kill, train, without_pictures

from deepnmt.checkpoint.checkpoint import find_checkpoint, list_checkpoints, read_scores, update_of, verify
from deepnmt.checkpoint.saving import Saver
from deepnmt.cli import main
from deepnmt.config import load_recipe
from deepnmt.files import read_log
from deepnmt.folders import FolderWriteError
from deepnmt.processes.ranks import Ranks
from deepnmt.training.trainer import Trainer
from deepnmt.training.updates import UpdateHook

LONG = bool(os.environ.get("DEEPNMT_LONG"))
EVERY_DAY = 6  # numbers of each error tried
OPTIONS = ("train.updates=3", "train.save_every=1", "train.validate_every=2", "train.valid_bleu=false",
           "train.keep_last=2", "train.keep_best=0", "train.max_failed_saves=9")


@pytest.fixture(scope="module")
def failing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Warm]:
    """Starts processes with the library preloaded."""
    compiler = next(filter(None, map(shutil.which, ("gcc", "cc", "clang"))), None)
    if compiler is None:
        pytest.skip("there is no C compiler for the library that makes writes fail")
    library = tmp_path_factory.mktemp("library") / "faults.so"
    source = Path(__file__).resolve().parents[1] / "support" / "faults.c"
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", library, source, "-ldl"], check=True)
    server = Warm(library, *(("matplotlib.backends.backend_agg", "matplotlib.ticker") if LONG else ()))
    yield server
    server.close()


def command(name: str, under: str, at: str, error: str, count: str, *words: str) -> int:
    """Runs in a process of `failing`: a command of deepnmt, the `at`-th change of whose files fails."""
    os.environ.update(FAULT_UNDER=under, FAULT_AT=at, FAULT_ERRNO=error, FAULT_COUNT=count)
    if not LONG:
        without_pictures()
    return train(*words) if name == "train" else main(name, words)


def attempt(warm: Warm, name: str, run: Path, at: int, error: int, *words: object) -> tuple[int, int]:
    """The exit code of a command and the number of changes that it made."""
    count = run.parent / "count"
    count.unlink(missing_ok=True)
    warm.start(1, "test_failing_disk:command", name, f"{run}/", at, error, count, *words)
    (code,) = warm.wait(120)
    assert "Traceback" not in warm.said(), f"{name}, change {at}, error {error}\n{warm.said()}"
    return code, count.stat().st_size if count.exists() else 0


def numbers(changes: int) -> Iterator[tuple[int, int]]:
    """Which change fails, and with which error."""
    for error in (errno.EIO, errno.ENOSPC):
        every = range(1, changes + 1)
        some = sorted(random.Random(error).sample(every, min(EVERY_DAY, changes)))
        first, _, last = os.environ.get("DEEPNMT_WRITES", f"1-{changes}").partition("-")
        for at in every[int(first) - 1 : int(last)] if LONG else some:
            yield at, error


def files(checkpoint: Path) -> list[bytes]:
    return [(checkpoint / name).read_bytes() for name in ("weights.safetensors", "moments.safetensors")]


@pytest.mark.timeout(24 * 3600 if LONG else 1800)
def test_training_goes_on_to_the_bit(failing: Warm, prepared: Path, tmp_path: Path) -> None:
    recipe, whole = prepared / "recipe.yaml", tmp_path / "whole" / "run"
    whole.parent.mkdir()
    code, changes = attempt(failing, "train", whole, 0, 0, recipe, f"run={whole}", *OPTIONS)
    assert code == 0 and changes > 80, failing.said()
    expected, told = files(whole / "checkpoints" / "update-00000003"), 0
    for at, error in numbers(changes):
        case, run = f"change {at} of {changes}, {os.strerror(error)}", tmp_path / "broken" / "run"
        run.parent.mkdir()
        code, _ = attempt(failing, "train", run, at, error, recipe, f"run={run}", *OPTIONS)
        said = failing.said()
        assert code in (0, 2), f"{case}\n{said}"
        assert said.count("deepnmt: ") == (code == 2), f"{case}\n{said}"
        told += os.strerror(error) in said or "the disk is full" in said
        assert code == 0 or os.strerror(error) in said, f"{case}\n{said}"
        found = list_checkpoints(run / "checkpoints")
        for checkpoint in found:
            verify(checkpoint)
        if code == 0:
            assert files(run / "checkpoints" / "update-00000003") == expected, case
        code, _ = attempt(failing, "train", run, 0, 0, recipe, f"run={run}", *OPTIONS)
        assert code == 0, f"{case}\n{failing.said()}"
        assert not found or "resuming from" in said + failing.said() or "finished" in failing.said(), case
        assert losses(run) == losses(whole), case
        assert files(run / "checkpoints" / "update-00000003") == expected, case
        assert json.loads((run / "STATUS.json").read_text())["status"] == "finished"
        shutil.rmtree(run.parent)
    print(f"{changes} changes in a run, {told} faults told")


@pytest.mark.slow
@pytest.mark.timeout(24 * 3600 if LONG else 1800)
def test_an_average_is_the_old_or_the_new(failing: Warm, prepared: Path, tmp_path: Path) -> None:
    recipe, run = prepared / "recipe.yaml", tmp_path / "run"
    assert attempt(failing, "train", run, 0, 0, recipe, f"run={run}", *OPTIONS)[0] == 0
    assert attempt(failing, "average", run, 0, 0, run, "--last", 1)[0] == 0
    old = (find_checkpoint(run, "averaged") / "weights.safetensors").read_bytes()
    shutil.copytree(run, tmp_path / "kept" / "run")
    code, changes = attempt(failing, "average", run, 0, 0, run, "--last", 2)
    new = (find_checkpoint(run, "averaged") / "weights.safetensors").read_bytes()
    assert code == 0 and changes > 20 and new != old
    for at, error in numbers(changes):
        shutil.rmtree(run)
        shutil.copytree(tmp_path / "kept" / "run", run)
        code, _ = attempt(failing, "average", run, at, error, run, "--last", 2)
        said = failing.said()
        assert code in (0, 2) and (code == 0 or os.strerror(error) in said), f"change {at}\n{said}"
        held = find_checkpoint(run, "averaged")
        verify(held)
        assert (held / "weights.safetensors").read_bytes() in ((old, new) if code else (new,)), at
        assert attempt(failing, "average", run, 0, 0, run, "--last", 2)[0] == 0
        assert (find_checkpoint(run, "averaged") / "weights.safetensors").read_bytes() == new
        assert not list(run.glob(".*averaged*")), "what was in the way is swept away"


@pytest.mark.timeout(24 * 3600 if LONG else 1800)
def test_a_profile_is_whole_or_its_fault_is_told(failing: Warm, prepared: Path, tmp_path: Path) -> None:
    recipe, whole = prepared / "recipe.yaml", tmp_path / "whole" / "run"
    whole.parent.mkdir()
    code, changes = attempt(failing, "profile", whole, 0, 0, recipe, f"run={whole}")
    assert code == 0 and changes >= 4, failing.said()
    expected = (whole / "admin_profile.json").read_bytes()
    for at, error in numbers(changes):
        case, run = f"change {at} of {changes}, {os.strerror(error)}", tmp_path / "broken" / "run"
        run.parent.mkdir()
        code, _ = attempt(failing, "profile", run, at, error, recipe, f"run={run}")
        said = failing.said()
        assert code == 2 and said.count("deepnmt: ") == 1 and os.strerror(error) in said, f"{case}\n{said}"
        assert attempt(failing, "profile", run, 0, 0, recipe, f"run={run}")[0] == 0, f"{case}\n{failing.said()}"
        assert (run / "admin_profile.json").read_bytes() == expected, case
        shutil.rmtree(run.parent)


# -- a disk that stays full --------------------------------------------------------------------------------------------


def run_with(
    prepared: Path, run: Path, full: Callable[[], bool], monkeypatch: pytest.MonkeyPatch, *overrides: str,
    hook: UpdateHook = lambda number: nullcontext(),
) -> tuple[Trainer, int]:
    """A run whose checkpoints cannot be written while the disk is `full`."""
    def publish(saver: Saver, *arguments: Any) -> int:
        if full():
            raise FolderWriteError("checkpoint folder x cannot be written: it is full; free", errno.ENOSPC)
        return real(saver, *arguments)

    real = Saver._publish
    monkeypatch.setattr(Saver, "_publish", publish)
    recipe = load_recipe(prepared / "recipe.yaml", [f"run={run}", "train.valid_bleu=false", *overrides])
    made = Trainer(recipe, Ranks.alone(), watch=lambda *_: hook)
    try:
        return made, made.run_to_end()
    finally:
        made.close()


def test_an_old_checkpoint_makes_room(prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk holds three; the newest and the best stay."""
    made, code = run_with(
        prepared, tmp_path, lambda: len(list_checkpoints(tmp_path / "checkpoints")) == 3, monkeypatch,
        "train.updates=8", "train.save_every=1", "train.keep_last=9", "train.validate_every=2", "optimizer.lr=1.0")
    assert code == 0
    left = [update_of(path) for path in list_checkpoints(tmp_path / "checkpoints")]
    assert len(left) == 3 and left[-1] == 8 and made.state.best["update"] in left
    told = [r["message"] for r in read_log(tmp_path / "log.jsonl") if "the disk is full" in r.get("message", "")]
    assert len(told) > 1
    assert told[0] == "the disk is full; update-00000001 was deleted to make room for a newer checkpoint"


def done_when_asked(saver: Saver) -> bool:
    """In place of `Saver.done`, which also says that it is still writing."""
    return saver._writing is not None and (saver._writing.exception() is not None or True)


def test_the_last_validation_is_saved_where_room_was_made_before_it(
    prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The save of update 12 fails while 13, the last, is computed: so 13 is saved at once, with its validation."""
    monkeypatch.setattr(Saver, "done", done_when_asked)
    writes = iter([False, False, True])
    _, code = run_with(prepared, tmp_path, lambda: next(writes, False), monkeypatch, "train.updates=13",
                       "train.save_every=4", "train.keep_last=9", "train.validate_every=13", "train.max_failed_saves=2")
    assert code == 0
    assert list(read_scores(tmp_path / "checkpoints")) == [13]


def test_a_checkpoint_for_which_room_was_made_has_what_was_reported(
    prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The save of update 6 fails while 7 is computed, so 7 is saved; killed in 8, the run does not log 7 twice."""
    @contextmanager
    def killed(number: int) -> Iterator[None]:
        if number == 8:
            raise RuntimeError("killed")
        yield

    monkeypatch.setattr(Saver, "done", done_when_asked)
    writes = iter([False, False, False, True])  # of 1, which is the best, 2 and 4; then of 6
    words = ("train.updates=8", "train.save_every=2", "train.keep_last=9", "train.validate_every=1",
             "optimizer.lr=1.0e-12")
    with pytest.raises(RuntimeError, match="killed"):
        run_with(prepared, tmp_path, lambda: next(writes, False), monkeypatch, *words, hook=killed)
    assert [update_of(path) for path in list_checkpoints(tmp_path / "checkpoints")] == [1, 4, 7]
    assert run_with(prepared, tmp_path, lambda: False, monkeypatch, *words)[1] == 0
    for kind in ("train", "valid"):
        assert [r["update"] for r in read_log(tmp_path / "log.jsonl") if r["type"] == kind] == [*range(1, 9)], kind


@pytest.mark.parametrize("most", [1, 3])
def test_a_run_ends_after_so_many_failed_saves(
    most: int, prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first and the third are written, then none; one that succeeds in between counts anew. The newest stays."""
    full = iter([False, True, False])
    words = ("train.updates=99", "train.save_every=1", "train.validate_every=50", f"train.max_failed_saves={most}")
    said = (rf"it is full; free; train\.max_failed_saves is {most}, and so many in a row failed; the same command then "
            "resumes")
    with pytest.raises(FolderWriteError, match=said):
        run_with(prepared, tmp_path, lambda: next(full, True), monkeypatch, *words)
    last = max(r["update"] for r in read_log(tmp_path / "log.jsonl") if r["type"] == "train")
    assert most < last <= 3 * most
    assert len(list_checkpoints(tmp_path / "checkpoints")) == 1


def test_a_run_without_a_checkpoint_is_not_said_to_resume(
    prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(FolderWriteError, match="the same command then begins anew"):
        run_with(prepared, tmp_path, lambda: True, monkeypatch, "train.updates=1")
    assert not list_checkpoints(tmp_path / "checkpoints")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root mounts a small disk")
def test_a_small_disk(prepared: Path, tmp_path: Path, warm: Warm) -> None:
    """A real file system that holds three checkpoints: every save makes room, the run ends well, and resumes."""
    mount = ["mount", "-t", "tmpfs", "-o", "size=1100k", "none", str(tmp_path)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("no file system can be mounted here")
    try:
        words = (f"run={tmp_path / 'run'}", "train.updates=12", "train.save_every=1", "train.keep_last=9",
                 "train.valid_bleu=false")
        warm.train(1, prepared / "recipe.yaml", *words)
        assert warm.wait(300) == [0], warm.said()
        said = warm.said()
        assert "was deleted to make room for a newer checkpoint" in said and "Traceback" not in said, said
        assert "but " in said and "has room for" in said, "the start warns"
        assert update_of(list_checkpoints(tmp_path / "run" / "checkpoints")[-1]) == 12
    finally:
        for pid in warm.pids:
            kill(pid)
        subprocess.run(["umount", tmp_path], check=True)
