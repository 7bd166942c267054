"""The study of residual blocks at a toy size: its runs, baselines, table and picture, and resuming it."""

from __future__ import annotations

import itertools
import json
import math
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable
from multiprocessing import active_children
from pathlib import Path
from typing import Any

import pytest
import torch
from refusals import Refused
from run_files import records

from deepnmt.cli import main as train_command
from deepnmt.config import Recipe, load_recipe
from deepnmt.data.prepared import PreparedData
from deepnmt.errors import UserError
from deepnmt.files import read_log
from deepnmt.model.init import new_model
from deepnmt.parallel.local import LocalEngine
from deepnmt.ranks import Ranks
from studies.__main__ import main
from studies.blocks import (
    Variant,
    _results,
    frequencies_loss,
    list_variants,
    outcome,
    panels,
    read_study,
    run_variant,
    validation_loss,
)
from studies.plots import spread

ONE = "parallel.threads=1"
Compare = Callable[..., list[dict[str, Any]]]


def recipe_of(prepared: Path, *overrides: str) -> Recipe:
    return load_recipe(prepared / "recipe.yaml", [ONE, *overrides])


def lines(folder: Path) -> list[dict[str, Any]]:
    return read_log(folder / "runs.jsonl")


@pytest.fixture
def compare(prepared: Path, tmp_path: Path) -> Compare:
    """Runs the command with output in `tmp_path`; returns the runs in its file."""

    def run(*words: str) -> list[dict[str, Any]]:
        assert main("compare-blocks", [str(prepared / "recipe.yaml"), ONE, "--output", str(tmp_path), *words]) == 0
        return lines(tmp_path)

    return run


def test_a_study_is_resumed(compare: Compare, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["train.updates=22", "--depths", "1", "2", "--blocks", "post_ln", "pre_ln/post_ln"]
    assert len(compare(*words, "--seconds", "0")) <= 1
    assert "runs are missing; run the same command again to train them." in capsys.readouterr().out
    runs = compare(*words)
    output = capsys.readouterr().out
    assert [(r["system"]["encoder"], r["system"]["layers"], r["system"]["source"]) for r in runs] == [
        ("pre_ln", 1, False), ("post_ln", 1, True), ("pre_ln", 1, True),
        ("pre_ln", 2, False), ("post_ln", 2, True), ("pre_ln", 2, True)]
    assert all(len(r["losses"]) == 3 and r["ended"] and r["losses"][0] > r["losses"][-1] for r in runs)
    rows = [line.split(" | ") for line in (tmp_path / "blocks.md").read_text().splitlines() if line.startswith("| ")]
    assert rows[0][:3] == ["| block", "initialisation", "1L-1L: parameters"] and rows[0][6] == "2L-2L: parameters"
    assert len(rows) == 5 and {row[1] for row in rows[2:]} == {"xavier"}
    assert {row[0] for row in rows[2:]} == {"| post_ln", "| pre_ln/post_ln", "| pre_ln, no source"}
    assert [float(row[3]) for row in rows[2:]] == sorted(float(row[3]) for row in rows[2:])  # the best first
    assert (tmp_path / "blocks.png").stat().st_size > 20_000
    assert compare(*words) == runs and capsys.readouterr().out == output  # nothing is left to do


def test_other_settings_are_other_runs(compare: Compare, tmp_path: Path) -> None:
    words = ["--depths", "1", "--blocks", "post_ln"]
    # two runs for each number of updates, whatever the run folder
    for updates, run, count in ((2, "one", 2), (3, "one", 4), (3, "other", 4)):
        assert len(compare(f"train.updates={updates}", f"run={tmp_path}/{run}", *words)) == count
    runs = compare("train.updates=3", *words, "--warmups", "2", "0")
    assert [run["system"]["warmup"] for run in runs[4:]] == [2, 2, 0, 0]
    assert "1L-1L, no warm-up: parameters" in (tmp_path / "blocks.md").read_text()


def test_initialisations(prepared: Path) -> None:
    """Initialisations with the same meaning are one run, also with an older line; one in the recipe is rejected."""
    blocks = ["post_ln", "b2t", "b2t/post_ln"]
    listed = list_variants(recipe_of(prepared), blocks, [4], inits=["auto", "xavier", "depth_scaled"])
    assert [(variant.name, variant.initialisation) for variant in listed] == [
        ("pre_ln, no source", "xavier"), ("post_ln", "xavier"), ("b2t", "depth_scaled"),
        ("b2t/post_ln", "depth_scaled/xavier"), ("b2t, xavier", "xavier"), ("b2t/post_ln, xavier", "xavier"),
        ("post_ln, depth_scaled", "depth_scaled"), ("b2t/post_ln, depth_scaled", "depth_scaled")]
    whole = list_variants(recipe_of(prepared), ["post_ln", "deepnorm"], [4], inits=["xavier", "xavier_separate"])
    assert [s.name for s in whole[1:]] == ["post_ln", "deepnorm", "post_ln, xavier_separate"]  # the same for deepnorm
    assert [s.name for s in list_variants(recipe_of(prepared), blocks, [4], inits=["xavier"])] == [
        "pre_ln, no source", "post_ln", "b2t, xavier", "b2t/post_ln, xavier"]
    model = listed[-1].recipe(recipe_of(prepared)).model
    scaled, plain = (next(p.std().item() for n, p in new_model(model.model_copy(update={
        "decoder": model.decoder.model_copy(update={"init": init})}), 60, 60, 1).named_parameters()
        if n == "decoder.layers.0.ffn.fc1.weight") for init in (model.decoder.init, "xavier"))
    assert scaled == pytest.approx(plain / 2, rel=1e-5)  # 4^-1/2
    with pytest.raises(UserError, match=r"^model.decoder.init is xavier, but the study sets it for every run; set it"):
        list_variants(recipe_of(prepared, "model.decoder.init=xavier"), blocks, [4])


def test_an_older_study_is_resumed(compare: Compare, tmp_path: Path) -> None:
    """Older lines without an initialisation count as auto, next to new ones."""
    words = ["train.updates=2", "--depths", "1", "--blocks", "post_ln"]
    old = compare(*words)
    for record in old:
        assert record["system"].pop("init") == "auto"
        record["settings"]["optimizer"]["decay_norms_and_biases"] = True
        del record["settings"]["model"]["activation"]  # as if the setting were newer
    (tmp_path / "runs.jsonl").write_text("".join(json.dumps(record) + "\n" for record in old))
    runs = compare(*words, "--inits", "auto", "xavier", "depth_scaled")
    assert runs[:2] == old and [r["system"]["init"] for r in runs[2:]] == ["depth_scaled"]
    table = (tmp_path / "blocks.md").read_text()
    assert "| post_ln | xavier | " in table and "| post_ln | depth_scaled | " in table
    plotted = panels(read_study(tmp_path / "runs.jsonl"))
    assert [(panel.title, list(panel.curves)) for panel in plotted] == [
        ("1L-1L", ["pre_ln, no source", "post_ln"]), ("1L-1L, init: depth_scaled", ["post_ln"])]


def test_two_processes(prepared: Path, tmp_path: Path, threads: None) -> None:
    words = [str(prepared / "recipe.yaml"), ONE, "train.updates=3", "--depths", "1", "--blocks", "admin"]
    for count in ("1", "2"):
        assert main("compare-blocks", [*words, "--output", str(tmp_path / count), "--processes", count]) == 0
    alone, both = ({json.dumps(r["system"]): {**r, "seconds": 0} for r in lines(tmp_path / str(n))} for n in (1, 2))
    assert alone == both and len(both) == 2


def test_ctrl_c_ends_all_processes_silently(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A terminal sends the signal to all of them, even while they start."""
    monkeypatch.setattr("studies.blocks._run", signal.sigtimedwait)  # waits for a signal that is never sent
    started, others = time.monotonic(), set(active_children())
    blocked: list[int] = []

    def interrupt() -> None:
        while len(ours := set(active_children()) - others) < 2:
            time.sleep(0.01)
        for child in ours:
            status = Path(f"/proc/{child.pid}/status").read_text(encoding="utf-8")
            blocked.append(int(status.partition("SigBlk:")[2].split()[0], 16))
        for pid in (*(child.pid for child in ours), os.getpid()):
            os.kill(pid, signal.SIGINT)

    usual = signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in a shell's background
    threading.Thread(target=interrupt).start()
    try:
        with pytest.raises(KeyboardInterrupt):
            list(_results([{signal.SIGUSR2}, {signal.SIGUSR2}], 60, 2, math.inf))  # type: ignore[list-item, arg-type]
    finally:
        signal.signal(signal.SIGINT, usual)
    assert set(active_children()) <= others and time.monotonic() - started < 30
    assert len(blocked) == 2 and all(mask & 1 << signal.SIGINT - 1 for mask in blocked)
    assert capfd.readouterr().err == ""


def test_a_run_equals_a_training_run(prepared: Path, tmp_path: Path) -> None:
    """The training and validation losses of `deepnmt train`, for Admin with its profile and two micro-batches."""
    overrides = [ONE, f"run={tmp_path}", "batch.accumulation=2", "train.updates=10", "train.valid_bleu=false"]
    assert train_command("train", [str(prepared / "recipe.yaml"), *overrides]) == 0
    plain = [math.log(r["perplexity"]) for r in records(tmp_path, "train")]
    found = run_variant(Variant("admin", "admin", 2, 4), recipe_of(prepared, *overrides), Ranks.alone())
    assert found["losses"] == pytest.approx([sum(plain) / 10], abs=2e-4) and found["dropped"] == 0
    valid = records(tmp_path, "valid")[-1]
    assert found["valid"] == pytest.approx(math.log(valid["perplexity"]), abs=2e-4)


def test_the_baseline_of_frequencies(prepared: Path) -> None:
    data = PreparedData.open(prepared / "data")
    train, valid = data.split("train"), data.split("valid")
    size = data.vocabs()[1].size
    counts = Counter(t for i in range(len(train)) for t in [*train.targets[i].tolist(), 2])
    tokens = [t for i in range(len(valid)) for t in [*valid.targets[i].tolist(), 2]]
    expected = -sum(math.log((counts[t] + 1) / (counts.total() + size)) for t in tokens) / len(tokens)
    assert frequencies_loss(train, valid, size) == pytest.approx(expected, abs=1e-9)


def test_sources_are_shuffled_or_left_out(prepared: Path) -> None:
    """Against the model on one sentence at a time."""
    recipe, valid = recipe_of(prepared), PreparedData.open(prepared / "data").split("valid")
    model = Variant("post_ln", "post_ln", 1, 0).recipe(recipe).model
    vocab = PreparedData.open(prepared / "data").vocabs()[1].size
    module = new_model(model, vocab, vocab, 3, 0.1)
    engine = LocalEngine(module, recipe, torch.device("cpu"))
    count = len(valid)
    order = sorted(range(count), key=lambda i: (-valid.trg_lengths[i], -valid.src_lengths[i], i))

    def loss(source_of: Callable[[int], list[int]]) -> float:
        total = 0.0
        for place, i in enumerate(order):
            src, trg = source_of(place), valid.targets[i].tolist()
            with torch.no_grad():
                total += module.eval()(torch.tensor([src]), torch.tensor([len(src)]), torch.tensor([[1, *trg]]),
                                       torch.tensor([[*trg, 2]])).nll.item()
        return total / int(valid.trg_lengths.sum())

    def own(place: int) -> list[int]:
        return [*valid.sources[order[place]].tolist(), 2]

    kinds = {"own": own, "exchanged": lambda place: own((place - 1) % count), "none": lambda _: [2]}
    for kind, source_of in kinds.items():
        assert validation_loss(engine, valid, 64, Ranks.alone(), kind) == pytest.approx(loss(source_of), abs=1e-5)


def test_outcome() -> None:
    run = {"ended": True, "valid": 3.0, "exchanged": 3.2, "even": 6.0, "frequencies": 5.0, "system": {"source": True}}
    assert outcome(run, 3.1) == "learned"
    assert outcome(run, 3.0) == "target only"
    assert outcome({**run, "exchanged": 3.09}, 3.1) == outcome({**run, "exchanged": None}, 3.1) == "target only"
    assert outcome(run, None) == outcome({**run, "system": {"source": False}}, 3.0) == "not stuck"
    assert outcome({**run, "valid": 4.95}, 5.5) == "stuck"
    assert outcome({**run, "valid": 6.1}, 3.0) == outcome({**run, "valid": None}, 3.0) == "diverged"
    assert outcome({**run, "ended": False}, 3.1) == "diverged"


def test_a_run_that_is_not_finite(compare: Compare, tmp_path: Path) -> None:
    words = "optimizer.lr=1e+30 train.updates=40 --depths 1 --blocks t_fixup --warmups 0"
    run = compare(*words.split())[-1]
    assert not run["ended"] and run["dropped"] == 25 and len(run["losses"]) < 4 and run["losses"][-1] is None
    assert "not finite" in (tmp_path / "blocks.md").read_text() and (tmp_path / "blocks.png").is_file()


def test_names_are_spread() -> None:
    assert spread([1.0, 3.0], 0.5, 0, 4) == [1.0, 3.0]
    assert spread([2.0, 2.0, 2.0], 0.5, 0, 4) == [1.5, 2.0, 2.5]
    assert spread([4.0, 1.0, 4.0], 0.5, 0, 4) == [3.5, 1.0, 4.0]
    places = spread([1.0, 1.1, 1.2, 1.9, 0.9], 0.5, 0, 4)
    ordered = sorted(places)
    assert all(b - a >= 0.5 - 1e-9 for a, b in itertools.pairwise(ordered))
    assert sorted(range(5), key=lambda i: places[i]) == [4, 0, 1, 2, 3]


@pytest.mark.parametrize(("words", "output"), [
    ("--blocks post_nl", "unknown block 'post_nl'; known: post_ln, "),
    ("--depths 0", "layers"),
    ("--processes 0", "--processes is 0"),
    *((words, f"{name} has no effect here because the study sets it for every run; remove it and use {option}\n")
      for words, name, option in (("model.encoder.block=b2t", "model.encoder.block", "--blocks"),
                                  ('model={"decoder":{"layers":3}}', "model.decoder.layers", "--depths"),
                                  ("schedule.warmup=3 --warmups 0", "schedule.warmup", "--warmups"))),
    *((f"train.{name}={value}", f"train.{name} is {value}, but every run of a study trains for all "
       f"train.updates; set train.{name}={none}\n")
      for name, value, none in (("epochs", 3, "null"), ("max_seconds", 9.0, "null"), ("patience", 1, 0))),
])
def test_mistakes(words: str, output: str, prepared: Path, tmp_path: Path, refused: Refused) -> None:
    assert output in refused("compare-blocks", prepared / "recipe.yaml", ONE, "--output", tmp_path, *words.split())
    assert not (tmp_path / "runs.jsonl").exists()
