"""Mistakes in resuming, averaging, translating with and scoring a run give one sentence, exit code 2 and no traceback;
nothing is written or lost."""

from __future__ import annotations

import errno
import gzip
import os
import shutil
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import tiny_run
import torch
from refusals import Refused, contents, truncate, user_error
from warm import Warm

from deepnmt.checkpoint.checkpoint import Contents, load_model
from deepnmt.cli import main
from deepnmt.config import dump_recipe, load_recipe
from deepnmt.errors import UserError
from deepnmt.processes.ranks import Ranks, Result
from deepnmt.training import resume
from deepnmt.training.resume import run_lock

FIRST, NEWEST = "update-00000003", "update-00000006"


@pytest.fixture(scope="module")
def trained(prepared: Path, warm: Warm, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with checkpoints of updates 3 and 6."""
    run = tmp_path_factory.mktemp("trained") / "run"
    warm.train(1, prepared / "recipe.yaml", f"run={run}", "train.updates=6", "train.valid_bleu=false",
               "train.validate_every=6")
    assert warm.wait() == [0], warm.said()
    return run


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    """A copy of that run, for a test to damage."""
    return Path(shutil.copytree(trained, tmp_path / "run"))


# -- checkpoints -------------------------------------------------------------------------------------------------------


def test_missing_checkpoints(prepared: Path, trained: Path, refused: Refused, tmp_path: Path) -> None:
    recipe, source, output = prepared / "recipe.yaml", tmp_path / "in", tmp_path / "out"
    source.write_text("a dog\n")
    files = ("--input", source, "--output", output)
    assert f"there is no folder {tmp_path}/none" in refused("translate", recipe, f"run={tmp_path}/none", *files)
    found = refused("translate", recipe, f"run={tmp_path}", *files)
    assert f"{tmp_path} is not a checkpoint and holds no whole one" in found
    found = refused("evaluate", trained, "--checkpoint", tmp_path / "none")
    assert f"--checkpoint is {tmp_path}/none, but there is no such folder; give best, newest, averaged or" in found
    assert "give the folder of the run" in refused("translate", trained / "checkpoints" / NEWEST)
    found = refused("average", recipe, f"run={tmp_path}")
    assert f"there is no checkpoint in {tmp_path}/checkpoints; train first" in found
    assert "9 checkpoints in" in refused("average", trained, "--last", 9)
    assert "there are 2; choose from 1 to 2" in refused("average", trained, "--last", 0)
    assert "there is no checkpoint of update 4" in refused("average", trained, "--updates", "3,4")
    found = refused("average", trained, "model.heads=4")
    assert f"{FIRST} holds another model than requested:\n  model.heads: 2 -> 4" in found
    assert "--range is '3', must be FROM:TO" in refused("average", trained, "--range", "3")
    assert sorted(file.name for file in tmp_path.iterdir()) == ["in"]
    assert not (trained / "averaged").exists()


@pytest.mark.parametrize("file", ["weights.safetensors", "src.spm", "recipe.yaml", "state.json", "manifest.json"])
def test_truncated_checkpoints(run: Path, refused: Refused, tmp_path: Path, file: str) -> None:
    checkpoint, source = run / "checkpoints" / NEWEST, tmp_path / "in"
    source.write_text("a dog\n")
    truncate(checkpoint / file)
    before = contents(run)
    output = tmp_path / "out"
    for found in (refused("translate", run, "--checkpoint", checkpoint, "--input", source, "--output", output),
                  refused("evaluate", run, "--checkpoint", checkpoint), refused("average", run, "--last", 2)):
        assert f"checkpoint {checkpoint} is damaged: {file}" in found and "restore it from a copy" in found
    assert contents(run) == before and not output.exists()


def test_foreign_checkpoints(run: Path, refused: Refused, tmp_path: Path) -> None:
    foreign = Path(shutil.copytree(run / "checkpoints" / NEWEST, tmp_path / "foreign"))
    (foreign / "manifest.json").write_text('{"format": 9}')
    assert "its format is 9" in refused("translate", run, "--checkpoint", foreign, "--input", foreign / "state.json")
    assert "its format is 9" in refused("average", run, "--checkpoints", foreign)
    (foreign / "manifest.json").unlink()
    found = refused("translate", run, "--checkpoint", foreign, "--input", run / "log.jsonl")
    assert f"{foreign} is not a checkpoint" in found
    data = load_recipe(run).data.folder
    found = refused("translate", run, "--checkpoint", data, "--input", run / "log.jsonl")
    assert f"{data} is not a checkpoint" in found
    assert f"{foreign} is damaged: manifest.json is missing" in refused("average", run, "--checkpoints", foreign)
    before = contents(foreign)
    assert "exists and is not a checkpoint" in refused("average", run, "--output", foreign)
    assert contents(foreign) == before


def test_weights_of_another_model(run: Path, refused: Refused, tmp_path: Path) -> None:
    ours = load_model(run / "checkpoints" / NEWEST)
    weights = {name: tensor.detach() for name, tensor in ours.model.named_parameters()}
    weights["encoder.layers.0.ffn.fc1.weight"] = torch.zeros(64, 16)
    other = tiny_run.save(tmp_path, Contents(weights, {}, ours.state, dump_recipe(ours.recipe), ours.files))
    clause = "encoder.layers.0.ffn.fc1.weight is [64, 16] where [32, 16] is expected"
    found = refused("average", run, "--checkpoints", ours.folder, other)
    assert f"{other} is another model than {ours.folder}" in found and clause in found
    found = refused("translate", run, "--checkpoint", other, "--input", run / "log.jsonl", "--output", tmp_path / "out")
    assert f"{other} does not hold the model of its recipe.yaml" in found and clause in found
    assert not (run / "averaged").exists() and not (tmp_path / "out").exists()


# -- resuming a run ----------------------------------------------------------------------------------------------------


def put_average(run: Path) -> str:
    assert main("average", [str(run), f"--output={run}/mean"]) == 0
    shutil.rmtree(run / "checkpoints" / NEWEST)
    (run / "mean").rename(run / "checkpoints" / NEWEST)
    return f"{NEWEST} is an average, and training cannot resume from one"


def put_unknown(run: Path) -> str:
    for name in (FIRST, NEWEST):
        shutil.rmtree(run / "checkpoints" / name)
        (run / "checkpoints" / name).mkdir()
        (run / "checkpoints" / name / "mine.txt").write_text("mine")
    return "is damaged, so the run cannot resume"


def cut_all(run: Path) -> str:
    for name in (FIRST, NEWEST):
        truncate(run / "checkpoints" / name / "moments.safetensors")
    return "is damaged, so the run cannot resume"


@pytest.mark.parametrize("spoil", [put_average, put_unknown, cut_all])
def test_runs_that_cannot_resume(prepared: Path, run: Path, refused: Refused, spoil: Callable[[Path], str]) -> None:
    said, before = spoil(run), contents(run)
    assert said in refused("train", prepared / "recipe.yaml", f"run={run}", "train.updates=9")
    assert contents(run) == before


@pytest.mark.parametrize(("change", "said"), [
    (("model.width=32",), "model.width: 16 -> 32"),
    (("model.encoder.block=b2t", "seed=8"), "model.encoder.block: admin -> b2t\n  seed: 7 -> 8"),
    (("admin.tokens=256", "train.best_by=bleu"), "admin.tokens: 512 -> 256\n  train.best_by: loss -> bleu"),
])
def test_another_run_in_its_place(prepared: Path, run: Path, refused: Refused, change: tuple[str], said: str) -> None:
    with (run / "log.jsonl").open("a") as log:  # of an attempt that went further and was killed
        log.write('{"type": "train", "update": 8, "loss": 1.0}\n')
    before = contents(run)
    found = refused("train", prepared / "recipe.yaml", f"run={run}", *change)
    assert said in found and "train into another folder with run=FOLDER" in found
    assert contents(run) == before


def test_run_of_other_text(prepared: Path, run: Path, refused: Refused, tmp_path: Path) -> None:
    other = f"data.train={{src: {prepared}/text/train.en, trg: {prepared}/text/train.de}}"
    folder, valid = f"data.folder={tmp_path}/data", f"data.valid={{src: {prepared}/text/test.en, trg: " \
        f"{prepared}/text/test.de}}"
    assert main("prepare", [str(prepared / "recipe.yaml"), folder, other, valid]) == 0
    before = contents(run)
    found = refused("train", prepared / "recipe.yaml", f"run={run}", folder, valid)
    assert f"was trained on other data than {tmp_path}/data holds now" in found
    assert contents(run) == before


def test_folders_that_are_no_run(prepared: Path, run: Path, refused: Refused) -> None:
    assert "is a checkpoint, not a recipe or a run" in refused("train", run / "checkpoints" / NEWEST)
    assert "holds no recipe.yaml" in refused("train", prepared / "data")
    assert "train.updatse: unknown setting" in refused("status", run, "train.updatse=3")


def test_a_run_folder_that_is_a_checkpoint(prepared: Path, run: Path, refused: Refused) -> None:
    checkpoint = run / "checkpoints" / NEWEST
    before = contents(checkpoint)
    found = refused("train", prepared / "recipe.yaml", f"run={checkpoint}")
    assert f"run is {checkpoint}, which is a checkpoint" in found
    assert contents(checkpoint) == before


def holder_of(run: Path) -> int:
    """Another process, which holds the lock of the run until it is killed."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            with run_lock(run, Ranks.alone()):
                os.write(writer, b"!")
                time.sleep(600)
        finally:
            os._exit(0)
    os.close(writer)
    assert os.read(reader, 1), "it has the lock"
    os.close(reader)
    return pid


def test_a_run_that_another_process_trains(
    prepared: Path, run: Path, refused: Refused, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resume, "LOCK_WAIT", 0.2)
    here, pid = Ranks.alone(), holder_of(run)
    writing = run / "checkpoints" / ".tmp-update-00000009-0badc0de"
    writing.mkdir()
    (writing / "weights.safetensors").write_text("half")
    before = contents(run)
    other = f"another process (process {pid} on {socket.gethostname()}) is training in {run}; "
    try:
        found = refused("train", prepared / "recipe.yaml", f"run={run}", "train.updates=9")
        assert f"{other}waiting up to 0.2 s for it to end" in found and f"{other}wait until it has ended" in found
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    assert contents(run) == before
    # with that process its lock is gone, and what it was writing is of no use
    with run_lock(run, here), user_error("another process"), run_lock(run, here):
        pass
    with run_lock(run, here):
        assert not writing.exists()
    with user_error("error of the first rank"), run_lock(run, SecondRank(1, 2, 1, 2, here.device)):
        pass


def test_a_run_that_another_process_is_ending(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that is being stopped saves first; a new start says so and waits until it has ended."""
    pid, told = holder_of(tmp_path), list[str]()
    monkeypatch.setattr(resume, "print_status", lambda line: (told.append(line), os.kill(pid, signal.SIGKILL)))
    with run_lock(tmp_path, Ranks.alone()):
        assert (tmp_path / ".lock").read_text() == f"process {os.getpid()} on {socket.gethostname()}\n"
    os.waitpid(pid, 0)
    assert len(told) == 1 and f"process {pid} on" in told[0]


def test_a_lock_of_another_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lock is open to all who may write to the folder. If it cannot be opened, training is rejected; if the file
    system has no locks, it is not."""
    here = Ranks.alone()
    tmp_path.chmod(0o2775)
    with run_lock(tmp_path, here):
        assert (tmp_path / ".lock").stat().st_mode & 0o777 == 0o664

    def fails(number: int) -> Callable[..., None]:
        def flock(*_: object) -> None:
            raise OSError(number, os.strerror(number))
        return flock

    for number in (errno.EACCES, errno.EIO):
        monkeypatch.setattr(resume.fcntl, "flock", fails(number))
        said = rf"\.lock cannot be locked: {os.strerror(number)}; if no other run uses it, delete it"
        with user_error(said), run_lock(tmp_path, here):
            pass
    for number in (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP):
        monkeypatch.setattr(resume.fcntl, "flock", fails(number))
        with run_lock(tmp_path, here):
            pass


def test_a_run_whose_checkpoint_cannot_be_restored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If its only checkpoint cannot be renamed back, the run does not start from scratch."""
    (tmp_path / "checkpoints" / ".before-update-00000009-0badc0de").mkdir(parents=True)

    def refused(path: Path, target: Path) -> Path:
        raise OSError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Path, "rename", refused)
    with user_error("is update-00000009, displaced by a killed process"), \
            run_lock(tmp_path, Ranks.alone()):
        pass


class SecondRank(Ranks):
    """A rank whose first rank raises an error."""

    def raise_everywhere(self, check: Callable[[], Result]) -> Result:
        check()  # makes no folder on this rank
        raise UserError("error of the first rank")


def test_run_folder_that_is_a_file(prepared: Path, refused: Refused, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    for command in ("train", "profile"):
        for path in (tmp_path / "file", tmp_path / "file" / "run"):
            assert f"run folder {path} cannot be written" in refused(command, prepared / "recipe.yaml", f"run={path}")
    assert (tmp_path / "file").read_text() == "mine"


def test_a_run_that_was_moved_is_still_a_run(run: Path, tmp_path: Path, threads: None) -> None:
    (tmp_path / "in").write_text("a dog\n\n")
    text = (run / "recipe.yaml").read_text().splitlines()
    (run / "recipe.yaml").write_text("\n".join(["run: runs/where-it-was-trained", *text[1:]]))
    assert main("translate", [str(run), "--input", f"{tmp_path}/in", "--output", f"{tmp_path}/out"]) == 0
    assert len((tmp_path / "out").read_text().splitlines()) == 2


# -- translating, scoring and the rest ---------------------------------------------------------------------------------


def test_translation_files(trained: Path, refused: Refused, tmp_path: Path) -> None:
    found = refused("translate", trained, "--input", tmp_path / "none", "--output", tmp_path / "out")
    assert f"there is no input file {tmp_path}/none" in found
    source = tmp_path / "in"
    source.write_bytes(b"a dog\n\xff\n")
    found = refused("translate", trained, "--input", source, "--output", tmp_path / "out")
    assert f"{source}, line 2: not valid UTF-8" in found
    (tmp_path / "in.gz").write_bytes(gzip.compress(b"a dog\n" * 9)[:-9])
    found = refused("translate", trained, "--input", tmp_path / "in.gz", "--output", tmp_path / "out")
    assert f"{tmp_path}/in.gz" in found
    assert "is the input file itself" in refused("translate", trained, "--input", source, "--output", source)
    assert f"output {tmp_path} is a folder" in refused("translate", trained, "--input", source, "--output", tmp_path)
    assert "cannot be written" in refused("translate", trained, "--input", source, "--output", tmp_path / "no" / "out")
    found = refused("translate", trained, "--input", source, "translate.nbest=9")
    assert "nbest (9) must not be above beam (2)" in found
    for named in ((), ("--checkpoint", trained / "checkpoints" / NEWEST)):
        found = refused("translate", trained, "--input", source, "model.encoder.block=b2t", *named)
        assert f"{NEWEST} holds another model than requested:\n  model.encoder.block: admin -> b2t" in found
    assert sorted(file.name for file in tmp_path.iterdir()) == ["in", "in.gz"]
    assert source.read_bytes() == b"a dog\n\xff\n"


def test_scoring(prepared: Path, trained: Path, refused: Refused, tmp_path: Path) -> None:
    short, whole = tmp_path / "short", prepared / "text" / "test.de"
    short.write_text("ein Hund\n" * 19)
    scores = ("--output", tmp_path / "scores.json")
    found = refused("evaluate", trained, "--hypotheses", f"ours={short}", *scores)
    assert "ours on held_out has 19 lines, but the reference has 20; put the translation of each" in found
    found = refused("evaluate", trained, "--test", f"mine={short},{whole}", "--hypotheses", f"a={whole}", *scores)
    assert "mine has 19 source lines and 20 reference lines" in found
    assert "did you mean held_out?" in refused("evaluate", trained, "--test", "held-out", *scores)
    assert "none cannot be read" in refused("evaluate", trained, "--hypotheses", f"a={tmp_path}/none", *scores)
    assert "not of the form SYSTEM=FILE" in refused("evaluate", trained, "--hypotheses", short, *scores)
    assert "model.encoder.layers: 2 -> 3" in refused("evaluate", trained, "model.encoder.layers=3", *scores)
    found = refused("evaluate", trained, "--hypotheses", f"a={whole}", "--checkpoint", trained, *scores)
    assert f"so the checkpoint {trained} would have no effect" in found
    found = refused("evaluate", trained, "--hypotheses", f"a={whole}", "--output", short / "x.json")
    assert f"file {short}/x.json cannot be written" in found
    assert [file.name for file in tmp_path.iterdir()] == ["short"] and not (trained / "scores.json").exists()


def test_settings_without_effect(trained: Path, refused: Refused, tmp_path: Path) -> None:
    """Settings that change nothing are rejected."""
    source = ("--input", trained / "log.jsonl", "--output", tmp_path / "out")
    ready = ("--hypotheses", f"a={trained}/log.jsonl", "--output", tmp_path / "out")
    for command, words, setting in (
            ("average", (), "train.updates=7"), ("average", ("--last", 1), "average_last=2"),
            ("translate", source, "batch.tokens=99"), ("translate", source, "parallel.ds_config=null"),
            ("evaluate", (), "data.folder=x"), ("evaluate", ready, "translate.beam=1"), ("evaluate", ready, "seed=3")):
        assert f"{setting} has no effect here because " in refused(command, trained, *words, setting)
    assert list(tmp_path.iterdir()) == [] and not (trained / "averaged").exists()


def test_profile_of_another_model(prepared: Path, trained: Path, refused: Refused, tmp_path: Path) -> None:
    recipe, here = prepared / "recipe.yaml", f"run={tmp_path}/run"
    found = refused("train", recipe, here, "model.encoder.layers=3", f"admin.profile={trained}/admin_profile.json")
    assert f"{trained}/admin_profile.json" in found
    assert "admin.profile: " in refused("train", recipe, here, f"admin.profile={tmp_path}/none.json")
    blocks = ("model.encoder.block=post_ln", "model.decoder.block=pre_ln")
    assert "only admin is profiled" in refused("profile", recipe, here, *blocks)
    found = refused("profile", recipe, here, f"admin.profile={trained}/admin_profile.json")
    assert f"admin.profile is {trained}/admin_profile.json, which training reads instead of measuring" in found
    before = contents(trained)
    assert f"{trained} has begun with the ω of its admin_profile.json" in refused("profile", trained, "seed=8")
    assert contents(trained) == before


def test_comparing_and_timing(prepared: Path, trained: Path, refused: Refused, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    picture = tmp_path / "file" / "x.png"
    assert f"picture {picture} cannot be written" in refused("compare", trained, "--output", picture)
    recipe = prepared / "recipe.yaml"
    assert "--rounds is 0, must be 1 or more" in refused("benchmark", recipe, "--rounds", 0)
    assert "there is no prepared data" in refused("benchmark", recipe, f"data.folder={tmp_path}/none")
    assert "there is no folder" in refused("benchmark", recipe, "--translate", tmp_path / "none")
    assert contents(tmp_path) == {"file": b"mine"}
