"""Two processes that differ in recipe, data, code or run folder, as two machines may: both end with exit code 2 and one
sentence, in seconds. They are forked, each works in a folder of its own; tests/nodes has machines."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from run_files import losses
from warm import Warm, without_pictures

from deepnmt.cli import main
from deepnmt.config import Fact, flatten, load_recipe
from deepnmt.data.prepare import prepare
from deepnmt.processes import agreement
from deepnmt.processes.ranks import Ranks

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 200.0  # far below the hours of a collective; most of it is waiting for a core
HOST = os.uname().nodename
BOTH = ("run=run", "data.folder=data", f"parallel.ds_config={ROOT}/ds_configs/zero1.json", "model.encoder.block=pre_ln",
        "model.decoder.block=pre_ln", "train.valid_bleu=false", "train.validate_every=100",
        "data.train={src: absent, trg: absent}")


def differ(recipe: str, folders: str, *overrides: str) -> int:
    """Runs on each rank, in its folder; `only:` marks an override, or a function here, of the second one."""
    without_pictures()
    rank = os.environ["RANK"]
    os.chdir(Path(folders) / rank)
    words = [word.removeprefix("only:") for word in overrides if rank == "1" or not word.startswith("only:")]
    for name in words:
        if "=" not in name:
            globals()[name]()
    return main("train", [recipe, *BOTH, *(word for word in words if "=" in word)])


def other_code() -> None:
    from deepnmt.processes import handshake

    handshake.code_hash = lambda: "f" * 64


def no_state() -> None:
    from deepnmt.folders import DamagedFolder
    from deepnmt.training import resume

    def gone(folder: Path) -> None:
        raise DamagedFolder(folder, "state.json is missing")

    resume.load_state = gone


def no_look_at_the_folder() -> None:
    from deepnmt.training import resume

    resume.agree_on_folder = lambda *_: None


@pytest.fixture
def train(prepared: Path, tmp_path: Path, warm: Warm) -> Callable[..., str]:
    """Trains in the folders 0 and 1, wants exit codes of `code` in time, no traceback, and at 2 one sentence, which it
    returns."""
    for rank in "01":
        (tmp_path / rank).mkdir(exist_ok=True)
        (tmp_path / rank / "data").symlink_to(prepared / "data")

    def run(*overrides: str, code: int = 2) -> str:
        warm.start(2, "test_nodes_that_differ:differ", prepared / "recipe.yaml", tmp_path, *overrides)
        codes, text = warm.wait(SECONDS), warm.said()
        assert codes == [code, code] and "Traceback" not in text, (codes, text)
        sentences = [line for line in text.splitlines() if line.startswith("deepnmt: ")]
        assert len(sentences) == (code != 0), text
        return sentences[0] if sentences else text

    return run


def test_every_setting_is_compared(prepared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All but paths, where these may differ."""
    found: list[Mapping[str, str]] = []
    monkeypatch.setattr(agreement, "agree", lambda _ranks, _subject, items, _remedy: found.append(items))
    for same in ("true", "false"):
        recipe = load_recipe(prepared / "recipe.yaml", [f"parallel.same_paths={same}"])
        agreement.agree_on_recipe(recipe, Ranks.alone())
    settings = flatten(recipe.model_dump())
    paths = {key for key in settings if recipe.is_marked(key, Fact.PATH)}
    assert found[0].keys() == settings.keys() and found[0]["seed"] == "7"
    assert found[1].keys() - settings.keys() == {"the SHA-256 of plugins"}
    assert found[0].keys() - found[1].keys() == paths > {"run", "data.folder"}


@pytest.mark.parametrize(("change", "phrase"), [
    ("optimizer.lr=0.02", f"optimizer.lr is 0.005 on rank 0 of {HOST}, but 0.02 on rank 1 of {HOST}; start all"),
    ("parallel.ds_config=null", f"ds_configs/zero1.json on rank 0 of {HOST}, but None on rank 1 of {HOST}; start all"),
    ("run=other", f"run is run on rank 0 of {HOST}, but other on rank 1 of {HOST}; start all machines with the same "
     "recipe and overrides; if only paths of files and folders differ, set parallel.same_paths=false on all"),
    ("other_code", "deepnmt's version and code is "),
])
def test_another_setting(change: str, phrase: str, train: Callable[..., str], tmp_path: Path) -> None:
    assert phrase in train(f"only:{change}")
    assert not list(tmp_path.glob("*/run"))


@pytest.mark.parametrize(("kept", "named"), [
    (slice(None, None, -1), ["the data's fingerprint"]),
    (slice(None, None, 2), ["the data's fingerprint", "the vocabulary src.spm", "the vocabulary trg.spm"]),
])
def test_other_data_under_the_same_path(
        kept: slice, named: list[str], prepared: Path, train: Callable[..., str], tmp_path: Path) -> None:
    texts = {}
    for side, language in (("src", "en"), ("trg", "de")):
        lines = (prepared / "text" / f"train.{language}").read_text().splitlines(keepends=True)
        texts[side] = tmp_path / f"train.{language}"
        texts[side].write_text("".join(lines[kept]))
    (tmp_path / "1" / "data").unlink()
    prepare(load_recipe(prepared / "recipe.yaml", [
        f"data.folder={tmp_path}/1/data", f"data.train={{src: {texts['src']}, trg: {texts['trg']}}}"]))
    sentence = train()
    assert all(f"{name} is " in sentence for name in named) and sentence.count(" is ") == len(named), sentence
    assert f"on rank 1 of {HOST}; give all machines the same files" in sentence


def test_another_deepspeed_json_under_the_same_path(train: Callable[..., str], tmp_path: Path) -> None:
    for rank, stage in enumerate("12"):
        text = (ROOT / "ds_configs" / f"zero{stage}.json").read_text()
        (tmp_path / str(rank) / "zero.json").write_text(text)
    assert (f"zero_optimization.stage in parallel.ds_config is 1 on rank 0 of {HOST}, but 2 on rank 1 of {HOST}"
            in train("parallel.ds_config=zero.json"))


def test_paths_may_differ_if_the_recipe_says_so(train: Callable[..., str], prepared: Path, tmp_path: Path) -> None:
    """The second machine has a copy of the data, and sees the run folder elsewhere; it resumes there too. Plug-ins must
    be the same code."""
    shutil.copytree(prepared / "data", tmp_path / "1" / "copy")
    (tmp_path / "1" / "mounted").symlink_to(tmp_path / "0")
    (tmp_path / "0" / "my.py").write_text("BLOCKS = {'mine': None}\n")
    shutil.copy(tmp_path / "0" / "my.py", tmp_path / "1" / "copy" / "my.py")
    other = ("parallel.same_paths=false", "only:run=mounted/run", "only:data.folder=copy",
             "data.train.alignments=links", "only:data.train.alignments=copy/links",
             "data.train.translated_by=teacher", "only:data.train.translated_by=copy/teacher",
             "plugins=my.py", "only:plugins=copy/my.py")
    train("train.updates=6", *other, code=0)
    train("train.updates=9", *other, code=0)
    shutil.copy(tmp_path / "0" / "my.py", tmp_path / "1" / "my.py")
    train("train.updates=9", "only:run=../0/run", "run=../0/run", "plugins=my.py", code=0)
    assert len(losses(tmp_path / "0" / "run")) == 9
    (tmp_path / "1" / "copy" / "my.py").write_text("BLOCKS = {'other': None}\n")
    assert "the SHA-256 of plugins is " in train("train.updates=9", *other)


@pytest.mark.slow
def test_a_run_folder_that_is_not_shared_is_refused_at_the_first_start(
        train: Callable[..., str], tmp_path: Path) -> None:
    refused = f"the run folder run is missing on {HOST}; every machine reads the checkpoints in it"
    assert refused in train()
    (tmp_path / "1" / "run").mkdir()
    assert f"the run folder run is not the first machine's folder on {HOST}" in train()
    assert [file.name for file in (tmp_path / "0" / "run").iterdir()] == [".lock"]


@pytest.mark.slow
def test_half_of_one_checkpoint_and_half_of_another(train: Callable[..., str], tmp_path: Path) -> None:
    """The second machine holds another run of that name."""
    train("run=../0/run", code=0)
    train("run=../1/run", "optimizer.lr=0.02", code=0)
    assert f"the run folder run is not the first machine's folder on {HOST}" in train("train.updates=15")
    newest = "run/checkpoints/update-00000012"
    assert (f"{newest}/manifest.json is not the one that process 0 sees on {HOST}"
            in train("train.updates=15", "no_look_at_the_folder"))
    shutil.rmtree(tmp_path / "1" / newest)
    assert f"{newest}/manifest.json cannot be read (No such" in train("train.updates=15", "no_look_at_the_folder")


def test_a_file_that_one_machine_cannot_read_on_resuming(train: Callable[..., str]) -> None:
    both = "run=../0/run"
    train(both, "train.updates=3", code=0)
    assert "state.json is missing" in train(both, "only:no_state")
