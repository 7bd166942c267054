"""The study of residual systems at toy size: its runs, its marks, its table and picture, and going on with it."""

from __future__ import annotations

import itertools
import json
import math
import os
import signal
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable
from multiprocessing import active_children
from pathlib import Path
from typing import Any

import pytest
import torch

from deepnmt.cli import main as train_command
from deepnmt.config import Recipe, load_recipe
from deepnmt.data.prepared import PreparedData, Split
from deepnmt.errors import UserError
from deepnmt.model.init import new_model
from deepnmt.parallel.local import LocalEngine
from deepnmt.ranks import Ranks
from studies.__main__ import main
from studies.blocks import (
    System,
    _results,
    frequencies_loss,
    list_systems,
    outcome,
    panels,
    read_study,
    run_system,
    validation_loss,
)
from studies.plots import spread

Tool = Callable[..., "subprocess.CompletedProcess[str]"]
ALONE = Ranks(0, 1, 0, 1, torch.device("cpu"))
ONE = "parallel.threads=1"


def recipe_of(prepared: Path, *overrides: str) -> Recipe:
    return load_recipe(prepared / "recipe.yaml", [ONE, *overrides])


def valid_of(prepared: Path) -> Split:
    return PreparedData.open(prepared / "data").split("valid")


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "runs.jsonl").read_text().splitlines()]


def test_a_study_and_going_on_with_it(prepared: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [str(prepared / "recipe.yaml"), ONE, "train.updates=22", "--output", str(tmp_path), "--depths", "1", "2",
             "--blocks", "post_ln", "pre_ln/post_ln"]
    assert main("compare-blocks", [*words, "--seconds", "0"]) == 0
    assert len(lines(tmp_path)) <= 1 and "runs are missing; the same command goes on." in capsys.readouterr().out
    assert main("compare-blocks", words) == 0
    said, runs = capsys.readouterr().out, lines(tmp_path)
    assert [(r["system"]["encoder"], r["system"]["layers"], r["system"]["source"]) for r in runs] == [
        ("pre_ln", 1, False), ("post_ln", 1, True), ("pre_ln", 1, True),
        ("pre_ln", 2, False), ("post_ln", 2, True), ("pre_ln", 2, True)]
    assert all(len(r["losses"]) == 3 and r["ended"] and r["losses"][0] > r["losses"][-1] for r in runs)
    rows = [line.split(" | ") for line in (tmp_path / "blocks.md").read_text().splitlines() if line.startswith("| ")]
    assert rows[0][:3] == ["| system", "initialisation", "1L-1L: parameters"] and rows[0][6] == "2L-2L: parameters"
    assert len(rows) == 5 and {row[1] for row in rows[2:]} == {"xavier"}
    assert {row[0] for row in rows[2:]} == {"| post_ln", "| pre_ln/post_ln", "| pre_ln, no source"}
    assert [float(row[3]) for row in rows[2:]] == sorted(float(row[3]) for row in rows[2:])  # the best first
    assert (tmp_path / "blocks.png").stat().st_size > 20_000
    assert main("compare-blocks", words) == 0  # nothing is left to do
    assert lines(tmp_path) == runs and capsys.readouterr().out == said


def test_other_settings_are_other_runs(prepared: Path, tmp_path: Path) -> None:
    words = [str(prepared / "recipe.yaml"), ONE, "--output", str(tmp_path), "--depths", "1", "--blocks", "post_ln"]
    for overrides in (["train.updates=2"], ["train.updates=3"], ["train.updates=3", f"run={tmp_path}/other"]):
        assert main("compare-blocks", [words[0], *overrides, *words[1:]]) == 0
    assert len(lines(tmp_path)) == 4  # two each of the first two; where the run folder is plays no part
    assert main("compare-blocks", [words[0], "train.updates=3", *words[1:], "--warmups", "2", "0"]) == 0
    assert [r["system"]["warmup"] for r in lines(tmp_path)[4:]] == [2, 2, 0, 0]
    assert "1L-1L, no warm-up: parameters" in (tmp_path / "blocks.md").read_text()


def test_initialisations(prepared: Path) -> None:
    """What comes to the same is one run, an older line's included; an initialisation of the recipe's is refused."""
    blocks = ["post_ln", "b2t", "b2t/post_ln"]
    listed = list_systems(recipe_of(prepared), blocks, [4], inits=["auto", "xavier", "depth_scaled"])
    assert [(system.name, system.initialisation) for system in listed] == [
        ("pre_ln, no source", "xavier"), ("post_ln", "xavier"), ("b2t", "depth_scaled"),
        ("b2t/post_ln", "depth_scaled/xavier"), ("b2t, xavier", "xavier"), ("b2t/post_ln, xavier", "xavier"),
        ("post_ln, depth_scaled", "depth_scaled"), ("b2t/post_ln, depth_scaled", "depth_scaled")]
    whole = list_systems(recipe_of(prepared), ["post_ln", "deepnorm"], [4], inits=["xavier", "xavier_separate"])
    assert [s.name for s in whole[1:]] == ["post_ln", "deepnorm", "post_ln, xavier_separate"]  # deepnorm has no other
    assert [s.name for s in list_systems(recipe_of(prepared), blocks, [4], inits=["xavier"])] == [
        "pre_ln, no source", "post_ln", "b2t, xavier", "b2t/post_ln, xavier"]
    model = listed[-1].recipe(recipe_of(prepared)).model
    scaled, plain = (next(p.std().item() for n, p in new_model(model.model_copy(update={
        "decoder": model.decoder.model_copy(update={"init": init})}), 60, 60, 1).named_parameters()
        if n == "decoder.layers.0.ffn.fc1.weight") for init in (model.decoder.init, "xavier"))
    assert scaled == pytest.approx(plain / 2, rel=1e-5)  # 4^-1/2
    with pytest.raises(UserError, match=r"^model.decoder.init is xavier, but a study sets it for every run; leave it"):
        list_systems(recipe_of(prepared, "model.decoder.init=xavier"), blocks, [4])


def test_an_older_study_goes_on(prepared: Path, tmp_path: Path) -> None:
    """Lines of before there was an initialisation count as auto, and stand beside new ones."""
    words = [str(prepared / "recipe.yaml"), ONE, "train.updates=2", "--output", str(tmp_path), "--depths", "1",
             "--blocks", "post_ln"]
    assert main("compare-blocks", words) == 0
    old = lines(tmp_path)
    for record in old:
        assert record["system"].pop("init") == "auto"
        record["settings"]["optimizer"]["decay_norms_and_biases"] = True
    (tmp_path / "runs.jsonl").write_text("".join(json.dumps(record) + "\n" for record in old))
    assert main("compare-blocks", [*words, "--inits", "auto", "xavier", "depth_scaled"]) == 0
    assert lines(tmp_path)[:2] == old and [r["system"]["init"] for r in lines(tmp_path)[2:]] == ["depth_scaled"]
    table = (tmp_path / "blocks.md").read_text()
    assert "| post_ln | xavier | " in table and "| post_ln | depth_scaled | " in table
    panels_drawn = panels(read_study(tmp_path / "runs.jsonl"))
    assert [(panel.title, list(panel.curves)) for panel in panels_drawn] == [
        ("1L-1L", ["pre_ln, no source", "post_ln"]), ("1L-1L, init: depth_scaled", ["post_ln"])]


def test_two_processes(prepared: Path, tmp_path: Path, study: Tool) -> None:
    words = [prepared / "recipe.yaml", ONE, "train.updates=3", "--depths", 1, "--blocks", "admin"]
    for count in (1, 2):
        done = study("compare-blocks", *words, "--output", tmp_path / str(count), "--processes", count)
        assert done.returncode == 0, done.stderr
    alone, both = ({json.dumps(r["system"]): {**r, "seconds": 0} for r in lines(tmp_path / str(n))} for n in (1, 2))
    assert alone == both and len(both) == 2


def test_ctrl_c_ends_all_processes_without_a_word(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A terminal sends it to all of them, in the midst of their start, too."""
    monkeypatch.setattr("studies.blocks._run", signal.sigtimedwait)  # waits, for as long as no such signal comes
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


def test_a_run_is_the_training_jobs(prepared: Path, tmp_path: Path) -> None:
    """The same losses as `deepnmt train`, the same validation, for Admin with its profile and two micro-batches."""
    overrides = [ONE, f"run={tmp_path}", "batch.accumulation=2", "train.updates=10", "train.valid_bleu=false"]
    assert train_command("train", [str(prepared / "recipe.yaml"), *overrides]) == 0
    log = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    plain = [math.log(r["perplexity"]) for r in log if r["type"] == "train"]
    found = run_system(System("admin", "admin", 2, 4), recipe_of(prepared, *overrides), ALONE)
    assert found["losses"] == pytest.approx([sum(plain) / 10], abs=2e-4) and found["dropped"] == 0
    valid = [r for r in log if r["type"] == "valid"][-1]
    assert found["valid"] == pytest.approx(math.log(valid["perplexity"]), abs=2e-4)


def test_the_mark_of_frequencies(prepared: Path) -> None:
    data = PreparedData.open(prepared / "data")
    train, valid = data.split("train"), data.split("valid")
    size = data.vocabs()[1].size
    counts = Counter(t for i in range(len(train)) for t in [*train.targets[i].tolist(), 2])
    tokens = [t for i in range(len(valid)) for t in [*valid.targets[i].tolist(), 2]]
    expected = -sum(math.log((counts[t] + 1) / (counts.total() + size)) for t in tokens) / len(tokens)
    assert frequencies_loss(train, valid, size) == pytest.approx(expected, abs=1e-9)


def test_sources_are_exchanged_or_left_out(prepared: Path) -> None:
    """Against the model called sentence by sentence."""
    recipe, valid = recipe_of(prepared), valid_of(prepared)
    model = System("post_ln", "post_ln", 1, 0).recipe(recipe).model
    vocab = PreparedData.open(prepared / "data").vocabs()[1].size
    module = new_model(model, vocab, vocab, 3, 0.1)
    engine = LocalEngine(module, recipe, ALONE.device)
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

    def close(source_of: Callable[[int], list[int]]) -> Any:
        return pytest.approx(loss(source_of), abs=1e-5)

    assert validation_loss(engine, valid, 64, ALONE, "own") == close(own)
    assert validation_loss(engine, valid, 64, ALONE, "exchanged") == close(lambda place: own((place - 1) % count))
    assert validation_loss(engine, valid, 64, ALONE, "none") == close(lambda _: [2])


def test_what_a_run_came_to() -> None:
    run = {"ended": True, "valid": 3.0, "exchanged": 3.2, "even": 6.0, "frequencies": 5.0, "system": {"source": True}}
    assert outcome(run, 3.1) == "learned"
    assert outcome(run, 3.0) == "target only"
    assert outcome({**run, "exchanged": 3.09}, 3.1) == outcome({**run, "exchanged": None}, 3.1) == "target only"
    assert outcome(run, None) == outcome({**run, "system": {"source": False}}, 3.0) == "not stuck"
    assert outcome({**run, "valid": 4.95}, 5.5) == "stuck"
    assert outcome({**run, "valid": 6.1}, 3.0) == outcome({**run, "valid": None}, 3.0) == "diverged"
    assert outcome({**run, "ended": False}, 3.1) == "diverged"


def test_a_run_that_is_not_finite(prepared: Path, tmp_path: Path) -> None:
    words = [str(prepared / "recipe.yaml"), ONE, "optimizer.lr=1e+30", "train.updates=40", "--output", str(tmp_path),
             "--depths", "1", "--blocks", "t_fixup", "--warmups", "0"]
    assert main("compare-blocks", words) == 0
    run = lines(tmp_path)[-1]
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


def test_mistakes(prepared: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [str(prepared / "recipe.yaml"), ONE, "--output", str(tmp_path)]
    assert main("compare-blocks", [*words, "--blocks", "post_nl"]) == 2
    assert main("compare-blocks", [*words, "--depths", "0"]) == 2
    assert main("compare-blocks", [*words, "--processes", "0"]) == 2
    for mistake in (["model.encoder.block=b2t"], ["model={decoder: {layers: 3}}"], ["schedule.warmup=3", "--warmups",
                    "0"], ["train.epochs=3"], ["train.max_seconds=9.0"], ["train.patience=1"]):
        assert main("compare-blocks", [*words, *mistake]) == 2
    said = capsys.readouterr().err
    for name, option in (("model.encoder.block", "--blocks"), ("model.decoder.layers", "--depths"),
                         ("schedule.warmup", "--warmups")):
        assert f"{name} has no say here, since a study sets it for every run; leave it out and say {option}\n" in said
    for name, value, none in (("epochs", 3, "null"), ("max_seconds", 9.0, "null"), ("patience", 1, 0)):
        assert (f"train.{name} is {value}, but every run of a study goes to its last update, train.updates; set "
                f"train.{name}={none}\n") in said
    assert "there is no block 'post_nl'; known: post_ln, " in said and "layers" in said and "--processes is 0" in said
    assert not (tmp_path / "runs.jsonl").exists()
    with pytest.raises(UserError, match=r"^parallel.ds_config is ds_configs/zero1.json, but runs of a study"):
        run_system(System("post_ln", "post_ln", 1, 0),
                   recipe_of(prepared, "parallel.ds_config=ds_configs/zero1.json"), ALONE)
