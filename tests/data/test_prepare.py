"""prepare: the whole job on generated text, its bytes, its error messages, and what a kill leaves behind."""

from __future__ import annotations

import fcntl
import json
import multiprocessing
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from refusals import user_error

from deepnmt.config import Recipe, Vocab, check_recipe
from deepnmt.data import build, encoding
from deepnmt.data.prepare import prepare
from deepnmt.data.prepared import PreparedData, check_settings, open_prepared
from deepnmt.training.dry_run import describe

SYLLABLES = ("ba", "ko", "ten", "lis", "mur", "a", "ei", "st")


def _line(number: int, words: int) -> str:
    generator = random.Random(number)
    return " ".join("".join(generator.choices(SYLLABLES, k=3)) for _ in range(words))


def _write(folder: Path, name: str, pairs: list[tuple[str, str]]) -> dict[str, str]:
    for side, lines in zip(("src", "trg"), zip(*pairs)):
        (folder / f"{name}.{side}").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return {side: str(folder / f"{name}.{side}") for side in ("src", "trg")}


def _tree(folder: Path, train: int = 600) -> dict[str, Any]:
    """A recipe with three texts; for every filter there is a training pair that it leaves out."""
    good = [(_line(n, 3 + n % 5), _line(n + 7, 3 + n % 4).upper().lower()) for n in range(train)]
    bad = [("", "a"), ("a", ""), ("ba ko", "ba ko"), good[0], (_line(1, 60), _line(2, 50)), ("ba", _line(3, 10))]
    held_out = [(_line(n, 4), _line(n, 5)) for n in range(900, 930)]
    return {
        "run": str(folder / "run"), "train": {"updates": 10}, "schedule": {"warmup": 1},
        "vocab": {"size": 80}, "batch": {"tokens": 200},
        "data": {"folder": str(folder / "data"), "src_lang": "x", "trg_lang": "y", "workers": 1,
                 "train": _write(folder, "train", good + bad), "valid": _write(folder, "valid", [("", "a"), *held_out]),
                 "test": {"one": _write(folder, "one", held_out)},
                 "filters": {"max_tokens": 60, "max_ratio": 6.0}, "subword_variants": 2, "subword_alpha": 0.2},
    }


def _recipe(tree: dict[str, Any]) -> Recipe:
    return check_recipe(tree, "recipe")


def _contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def test_progress_in_a_log_is_plain_lines(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare(_recipe(_tree(tmp_path)))
    log = capsys.readouterr().err
    assert "\r" not in log and "encoding" not in log
    monkeypatch.setattr("deepnmt.progress.PLAIN_SECONDS", 0.0)
    (tmp_path / "again").mkdir()
    prepare(_recipe(_tree(tmp_path / "again")))
    log = capsys.readouterr().err
    assert "\r" not in log and "\ntrain: encoding: 602 of 602 pairs in " in log
    assert "\ntrain: reading: 606 of 606 pairs in " in log and "\nvocabulary: reading: 606 of 606 pairs in " in log
    assert re.search(r"train: reading: 10 of 606 pairs in \d+ s, ETA \d+ s\n", log)


def test_an_eta_begins_with_the_first_pair(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deepnmt.progress.PLAIN_SECONDS", 0.0)
    with build.show_pairs("train: duplicates", 10) as progress:
        progress(0)  # as of the first range of hashes, if there are none in it
        progress(5)
    assert re.fullmatch(r"train: duplicates: 0 of 10 pairs in 0 s\ntrain: duplicates: 5 of 10 pairs in 0 s, ETA 0 s\n",
                        capsys.readouterr().err)


def test_how_long_a_vocabulary_takes_is_said_before(capsys: pytest.CaptureFixture[str]) -> None:
    build.say_what_is_learned(Vocab(), 1_000_000, 9_000_000)
    build.say_what_is_learned(Vocab(kind="unigram", shared=False), 2_000_000, 2_000_000)
    build.say_what_is_learned(Vocab(), 800, 800)
    build.say_what_is_learned(Vocab(kind="word"), 9_000_000, 9_000_000)  # they are only counted
    assert capsys.readouterr().err == (
        "training the vocabulary of 8000 bpe pieces on 1,000,000 of 9,000,000 pairs (vocab.max_sentences), some 1 min\n"
        "training the vocabulary of 8000 unigram pieces a side, some 6 min\n"
        "training the vocabulary of 8000 bpe pieces\n"
        "training the vocabulary of 8000 word pieces\n")


def test_every_part_of_a_folder(tmp_path: Path) -> None:
    recipe = _recipe(_tree(tmp_path))
    data = PreparedData.open(prepare(recipe))
    data.verify()
    counts = data.manifest["splits"]["train"]
    assert counts["read"] == 606 and counts["pairs"] == 600
    assert counts["left_out"] == {"empty": 2, "identical": 1, "duplicate": 1, "too_long": 1, "ratio": 1}
    assert sorted(data.splits) == ["test.one", "train", "valid"]
    src, trg = data.vocabs()
    assert src.bytes == trg.bytes and src.size == 80

    train, texts = data.split("train"), (tmp_path / "train.src").read_text(encoding="utf-8").split("\n")
    assert len(train) == 600 and [src.decode(train.sources[i].tolist()) for i in range(600)] == texts[:600]
    assert int(train.src_lengths.sum()) == counts["src_tokens"] + 600
    for k in range(2):
        variant = train.variant(k)
        assert [src.decode(variant.sources[i].tolist()) for i in range(600)] == texts[:600]
        assert variant.src_lengths.sum() > 1.05 * train.src_lengths.sum() and variant.src_lengths.max() <= 61
    assert not np.array_equal(train.variant(0).src_lengths, train.variant(1).src_lengths)

    valid = data.split("valid")  # nothing is left out of it, and its lines stay aligned
    assert len(valid) == 31 and valid.src_lengths[0] == 1
    assert valid.src_text() == (tmp_path / "valid.src").read_text(encoding="utf-8").split("\n")[:-1]
    assert [trg.decode(valid.targets[i].tolist()) for i in range(31)] == valid.trg_text()
    assert not list(tmp_path.glob(".*"))


def test_bytes_do_not_depend_on_processes_seed_and_folder(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("first", "second")]
    for folder in folders:
        folder.mkdir()
    trees = [_tree(folder, train=2 * encoding.CHUNK + 50) for folder in folders]
    trees[1]["seed"] = 77
    trees[1]["data"]["workers"] = 2
    first, second = (_contents(prepare(_recipe(tree))) for tree in trees)
    assert first == second
    assert json.loads(first["manifest.json"])["splits"]["train"]["pairs"] > 2 * encoding.CHUNK
    assert not multiprocessing.active_children()


def test_separate_vocabularies_and_unigram(tmp_path: Path) -> None:
    tree = _tree(tmp_path)
    tree["vocab"] = {"size": 60, "kind": "unigram", "shared": False, "max_sentences": 100}
    tree["model"] = {"tied": "decoder"}
    data = PreparedData.open(prepare(_recipe(tree)))
    src, trg = data.vocabs()
    assert src.fingerprint != trg.fingerprint and src.size == trg.size == 60
    assert data.manifest["vocab"]["trg"] == {"size": 60, "sha256": trg.fingerprint}


def test_up_to_date_folder_is_not_changed_even_without_its_texts(
        tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = _recipe(_tree(tmp_path))
    folder = prepare(recipe)
    assert "left out: empty 2, identical 1, duplicate 1, too_long 1, ratio 1" in capsys.readouterr().err
    before = {file: file.stat().st_mtime_ns for file in folder.iterdir()}
    assert prepare(recipe) == folder
    assert "is up to date" in capsys.readouterr().err
    new_test = _tree(tmp_path)
    new_test["data"]["test"]["two"] = new_test["data"]["valid"]
    new_test["data"]["test"]["table"] = {"tsv": new_test["data"]["valid"]["src"], "columns": [1, 1], "tag": "<2y>"}
    prepare(_recipe(new_test))
    assert "test.two: not in the prepared data, so it is not known" in capsys.readouterr().err
    open_prepared(_recipe(new_test))  # a running run may get more test sets, with tags and tables, too
    (tmp_path / "train.src").unlink()
    prepare(recipe)
    assert "train: the texts are not on this machine" in capsys.readouterr().err
    assert before == {file: file.stat().st_mtime_ns for file in folder.iterdir()}


@pytest.mark.parametrize(("change", "words"), [
    (lambda tree: tree["vocab"].update(size=70), "was made with vocab.size 80, but the recipe has 70"),
    (lambda tree: tree["data"]["filters"].update(max_ratio=3.0), "data.filters.max_ratio 6.0, but the recipe has 3.0"),
    (lambda tree: tree["data"].update(subword_variants=0), "data.subword_variants 2, but the recipe has 0"),
    (lambda tree: tree["data"]["filters"].update(drop_overlap=True) or tree["data"]["test"].update(
        two=tree["data"]["valid"]), "has no test.two, so that its sentences were not left out"),
    (lambda tree: Path(tree["data"]["valid"]["trg"]).write_text("x\n" * 31), "texts than the recipe's data.valid"),
])
def test_folder_of_another_recipe_is_rejected_and_kept(tmp_path: Path, change: Any, words: str) -> None:
    tree = _tree(tmp_path)
    before = _contents(prepare(_recipe(tree)))
    change(tree)
    with user_error(words):
        prepare(_recipe(tree))
    assert _contents(tmp_path / "data") == before


def test_a_folder_older_than_a_filter_counts_as_prepared_with_its_default(tmp_path: Path) -> None:
    tree = _tree(tmp_path)
    data = PreparedData.open(prepare(_recipe(tree)))
    del data.manifest["settings"]["data.filters.drop_identical"]
    check_settings(_recipe(tree), data)
    tree["data"]["filters"]["drop_identical"] = False
    with user_error("was made with data.filters.drop_identical True, but the recipe has False"):
        check_settings(_recipe(tree), data)


def test_a_text_that_is_also_trained_on_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The training text as validation text, and a copy of its sources in a test; before preparation by the paths."""
    tree = _tree(tmp_path)
    shutil.copy(tree["data"]["train"]["src"], tmp_path / "copy.src")
    tree["data"]["valid"] = {"src": str(tmp_path / "." / "train.src"), "trg": tree["data"]["train"]["trg"]}
    tree["data"]["test"]["one"] = {"src": str(tmp_path / "copy.src"), "trg": tree["data"]["train"]["trg"]}
    tree["data"]["test"]["other"] = _write(tmp_path, "other", [(_line(n, 4), _line(n, 5)) for n in range(900, 930)])
    said = "of the training text, so that its scores tell nothing about other text; give sentences that are held out"
    described = describe(_recipe(tree))
    assert re.search(rf"# warning .*valid has .*train.src and .*train.trg {said}.*; test.one has .*train.t", described)
    for _ in range(2):  # the second time the data are up to date
        prepare(_recipe(tree))
        told = [line for line in capsys.readouterr().err.splitlines() if said in line]
        assert [line.partition(" of the training")[0] for line in told] == [
            "warning: valid has train.src and train.trg", "warning: test.one has copy.src and train.trg"]
    assert "test.one has copy.src and train.trg" in describe(_recipe(tree))
    sound = tmp_path / "sound"
    sound.mkdir()
    prepare(_recipe(_tree(sound)))
    assert said not in capsys.readouterr().err and "# warning" not in describe(_recipe(_tree(sound)))


def test_other_peoples_folders_are_never_changed(tmp_path: Path) -> None:
    recipe = _recipe(_tree(tmp_path))
    note = tmp_path / "other" / "note.txt"
    note.parent.mkdir()
    note.write_text("mine")
    (tmp_path / "data").symlink_to(note.parent)
    with user_error("holds no manifest.json"):
        prepare(recipe)
    assert note.read_text() == "mine"
    note.unlink()
    prepare(recipe)  # an empty folder may be filled
    assert (tmp_path / "data").is_symlink() and (tmp_path / "other" / "manifest.json").is_file()


def test_errors_leave_no_folder(tmp_path: Path) -> None:
    for change, words in (({"vocab": {"size": 9000}}, "vocab.size is 9000, but the training text gives at most"),
                          ({"data": {"filters": {"max_tokens": 1}}}, "data.filters leave out all 606 training pairs"),
                          ({"data": {"test": {"a/b": None}}}, "data.test.a/b: a test's name"),
                          ({"data": {"valid": {"src": str(tmp_path / "none")}}}, "there is no text file")):
        tree = _tree(tmp_path)
        for section, values in change.items():
            for key, value in values.items():
                tree[section][key] = value if not isinstance(value, dict) else {**tree[section][key], **value}
        if "a/b" in tree["data"]["test"]:
            tree["data"]["test"] = {"a/b": tree["data"]["valid"]}
        with user_error(words):
            prepare(_recipe(tree))
        assert not (tmp_path / "data").exists() and not list(tmp_path.glob(".*"))


@pytest.mark.parametrize(("step", "file"), [
    ("train_vocabulary", "train.src"), ("encode_pairs", "train.trg"), ("encode_pairs", "valid.trg")])
@pytest.mark.parametrize("change", [lambda lines: lines[::-1], lambda lines: [*lines, "one more"],
                                    lambda lines: lines[:-1]], ids=["other order", "longer", "shorter"])
def test_a_text_that_changes_meanwhile_is_refused(
    step: str, file: str, change: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree = _tree(tmp_path)
    working: Any = getattr(build, step)

    def changing(*arguments: Any) -> Any:
        if not done:
            text = tmp_path / file
            text.write_text("".join(f"{line}\n" for line in change(text.read_text().splitlines())))
            done.append(True)
        return working(*arguments)

    done: list[bool] = []
    monkeypatch.setattr(build, step, changing)
    with user_error(f"^{tmp_path / file} changed while it was prepared, so nothing was kept; wait until"):
        prepare(_recipe(tree))
    assert not (tmp_path / "data").exists() and not list(tmp_path.glob(".*"))


def test_a_file_that_comes_meanwhile_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tree = _tree(tmp_path)
    tree["data"]["train"] = {side: [f"{tmp_path}/train*.{side}"] for side in ("src", "trg")}
    working = build.train_vocabulary

    def coming(*arguments: Any) -> Any:
        for side in ("src", "trg"):
            (tmp_path / f"train2.{side}").write_text("a\n")
        return working(*arguments)

    monkeypatch.setattr(build, "train_vocabulary", coming)
    with user_error("^data.train names 4 files, and 2 when its preparation began, so nothing was kept; wait until all"):
        prepare(_recipe(tree))


def test_progress_costs_the_same_for_every_chunk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Counted(np.ndarray[Any, Any]):
        def __len__(self) -> int:
            asked.append(1)
            return self.shape[0]

    asked: list[int] = []
    encode = encoding.encode_pairs
    monkeypatch.setattr(encoding, "CHUNK", 10)
    monkeypatch.setattr(build, "encode_pairs", lambda *arguments: (
        chunk._replace(codes=chunk.codes.view(Counted)) for chunk in encode(*arguments)))
    prepare(_recipe(_tree(tmp_path)))
    assert 60 < len(asked) < 200  # of some 67 chunks, which would be asked 2,000 times


def test_the_fingerprint_is_of_what_training_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tree = _tree(tmp_path)
    data = PreparedData.open(prepare(_recipe(tree)))
    monkeypatch.setattr("deepnmt.folders.__version__", "99.0")
    for number, (section, changes, same) in enumerate([
        ("data", {"test": {}}, True), ("data", {"workers": 2}, True), ("vocab", {"max_sentences": 5000}, True),
        ("data", {"subword_variants": 1}, False), ("data", {"valid": tree["data"]["test"]["one"]}, False),
        ("vocab", {"size": 81}, False)]):
        other = {**tree, section: {**tree[section], **changes}}
        other["data"] = {**other["data"], "folder": str(tmp_path / str(number))}
        prepared = PreparedData.open(prepare(_recipe(other)))
        assert (prepared.fingerprint == data.fingerprint) == same, changes
    assert prepared.manifest["deepnmt"] == "99.0"


def test_a_second_process_is_rejected(tmp_path: Path) -> None:
    recipe = _recipe(_tree(tmp_path))
    with open(tmp_path / ".data.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with user_error("another process is preparing"):
            prepare(recipe)
    prepare(recipe)


KILLED = """
import json, os, signal, sys
from pathlib import Path
import psutil
from deepnmt.config import check_recipe
from deepnmt.data.arrays import SideWriter
from deepnmt.data.prepare import prepare

def add_and_die(self, *pieces):
    add(self, *pieces)
    if self._tokens.name == "train.v09.trg.tokens":
        Path(sys.argv[2]).write_text(str(len(psutil.Process().children())))
        os.kill(os.getpid(), signal.SIGKILL)

if __name__ == "__main__":
    add, SideWriter.add = SideWriter.add, add_and_die
    prepare(check_recipe(json.load(open(sys.argv[1])), "recipe"))
"""


@pytest.mark.slow
def test_killed_run_leaves_no_folder_and_no_process(tmp_path: Path) -> None:
    """Killed when it has written the first of seven chunks, while its workers encode the others."""
    tree = _tree(tmp_path, train=7 * encoding.CHUNK)
    tree["data"]["workers"] = 2
    tree["data"]["subword_variants"] = 10
    recipe, script, workers = (tmp_path / name for name in ("recipe.json", "job.py", "workers"))
    recipe.write_text(json.dumps(tree))
    script.write_text(KILLED)
    job = subprocess.Popen([sys.executable, script, recipe, workers], start_new_session=True,
                           env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)})
    assert job.wait(300) == -signal.SIGKILL and int(workers.read_text()) >= 2
    name = "train.v09.trg.tokens"
    assert not (tmp_path / "data").exists() and list(tmp_path.glob(f".tmp-data-*/{name}"))
    _wait(lambda: not _alive(job.pid))  # its workers end by themselves
    tree["data"]["subword_variants"] = 0
    prepare(_recipe(tree))
    assert not list(tmp_path.glob(".*")) and not (tmp_path / "data" / name).exists()


def _wait(condition: Any) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


def _alive(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True
