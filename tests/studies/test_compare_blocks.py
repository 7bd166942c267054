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
from dataclasses import asdict
from multiprocessing import active_children
from pathlib import Path
from typing import Any

import pytest
import torch
from refusals import Refused
from run_files import records
from small_models import batch_of

from deepnmt.checkpoint.checkpoint import load_model
from deepnmt.cli import main as train_command
from deepnmt.config import Recipe, load_recipe
from deepnmt.data.batching import START, Stream
from deepnmt.data.prepared import PreparedData, open_prepared
from deepnmt.errors import UserError
from deepnmt.files import read_numbered_log
from deepnmt.model.init import new_model
from deepnmt.parallel.engine import LocalEngine
from deepnmt.processes.ranks import Ranks
from deepnmt.tokens import EOS
from studies.__main__ import main
from studies.blocks import Sourceless, frequencies_loss, further_rates, results_of, run_variant, validation_loss
from studies.outcomes import outcome, panels, worth_of
from studies.plots import spread
from studies.scores import bleu, unpack, with_totals
from studies.variants import Variant, list_variants, read_study

ONE = "parallel.threads=1"
Compare = Callable[..., list[dict[str, Any]]]


def recipe_of(prepared: Path, *overrides: str) -> Recipe:
    return load_recipe(prepared / "recipe.yaml", [ONE, *overrides])


def lines(folder: Path) -> list[dict[str, Any]]:
    return [record for _, record in read_numbered_log(folder / "runs.jsonl")]


def tables(text: str) -> list[list[dict[str, str]]]:
    """The Markdown tables of a text, each a list of rows, which are cells by column."""
    found = []
    for part in text.split("\n\n"):
        head, *rows = [[cell.strip() for cell in line.strip("| ").split(" | ")] for line in part.splitlines()]
        if part.startswith("| "):
            found.append([dict(zip(head, row, strict=True)) for row in rows[1:]])
    return found


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
    text = (tmp_path / "blocks.md").read_text()
    assert text.count("**1L-1L**") == text.count("**2L-2L**") == 1
    *outcomes, shallow, deep = tables(text)
    for rows in outcomes:
        assert {row["initialisation"] for row in rows} == {"xavier"}
        assert {row["block"] for row in rows} == {"post_ln", "pre_ln/post_ln", "pre_ln, no source"}
        assert [row["validation"] for row in rows] == sorted(row["validation"] for row in rows)  # the best first
        assert all(float(row["target tokens"].replace(",", "")) > 22 for row in rows)
    assert [(row["model"], row["side"]) for row in (*shallow, *deep)] == [
        (f"{block} {depth}", side) for depth in ("1L-1L", "2L-2L") for block in ("post_ln", "pre_ln/post_ln")
        for side in ("encoder", "decoder")]
    assert all((tmp_path / f"{name}.png").stat().st_size > 20_000 for name in ("blocks", "layers"))
    assert compare(*words) == runs and capsys.readouterr().out == output  # nothing is left to do


def test_other_settings_are_other_runs(compare: Compare, tmp_path: Path) -> None:
    words = ["--depths", "1", "--blocks", "post_ln"]
    # two runs for each number of updates, whatever the run folder
    for updates, run, count in ((2, "one", 2), (3, "one", 4), (3, "other", 4)):
        assert len(compare(f"train.updates={updates}", f"run={tmp_path}/{run}", *words)) == count
    runs = compare("train.updates=3", *words, "--warmups", "2", "0")
    assert [run["system"]["warmup"] for run in runs[4:]] == [2, 2, 0, 0]
    text = (tmp_path / "blocks.md").read_text()
    assert "**1L-1L, no warm-up**" in text
    assert all(f"| post_ln 1L-1L, warm-up {warmup} | encoder |" in text for warmup in (0, 2))


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
    whole = list_variants(recipe_of(prepared), ["post_ln", "deepnorm"], [4], inits=["auto", "published"])
    assert [s.name for s in whole[1:]] == ["post_ln", "deepnorm", "deepnorm, published"]  # the same for post_ln
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
        system, settings = record["system"], record["settings"]
        assert system.pop("init") == "auto"
        settings["train"]["updates"], settings["optimizer"]["lr"] = system.pop("updates"), system.pop("rate")
        settings["seed"] = system.pop("seed")
        for key in ("tokens", "cpu_seconds", "tests", "layers"):
            del record[key]
        del settings["translate"]
        record["settings"]["optimizer"]["decay_norms_and_biases"] = True
        del record["settings"]["model"]["activation"]  # as if the setting were newer
    (tmp_path / "runs.jsonl").write_text("".join(json.dumps(record) + "\n" for record in old))
    runs = compare(*words, "--inits", "auto", "xavier", "depth_scaled")
    assert runs[:2] == old and [r["system"]["init"] for r in runs[2:]] == ["depth_scaled"]
    table = (tmp_path / "blocks.md").read_text()
    assert "| post_ln | xavier | " in table and "| post_ln | depth_scaled | " in table
    assert [row["target tokens"] != "–" for row in tables(table)[0]].count(True) == 1  # the new run
    plotted = panels(read_study(tmp_path / "runs.jsonl"))
    assert [(panel.title, list(panel.curves)) for panel in plotted] == [
        ("1L-1L", ["pre_ln, no source", "post_ln"]), ("1L-1L, init: depth_scaled", ["post_ln"])]


def test_two_processes(prepared: Path, tmp_path: Path, threads: None) -> None:
    words = [str(prepared / "recipe.yaml"), ONE, "train.updates=3", "--depths", "1", "--blocks", "admin"]
    for count in ("1", "2"):
        assert main("compare-blocks", [*words, "--output", str(tmp_path / count), "--processes", count]) == 0
    alone, both = ({json.dumps(r["system"]): {**r, "seconds": 0, "cpu_seconds": 0} for r in lines(tmp_path / str(n))}
                   for n in (1, 2))
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

    threading.Thread(target=interrupt, daemon=True).start()
    with pytest.raises(KeyboardInterrupt):
        list(results_of([{signal.SIGUSR2}, {signal.SIGUSR2}], 60, 2, math.inf))  # type: ignore[list-item, arg-type]
    assert set(active_children()) <= others and time.monotonic() - started < 100
    assert len(blocked) == 2 and all(mask & 1 << signal.SIGINT - 1 for mask in blocked)
    assert capfd.readouterr().err == ""


def test_a_run_equals_a_training_run(prepared: Path, tmp_path: Path) -> None:
    """The training and validation losses of `deepnmt train`, for Admin with its profile and two micro-batches."""
    overrides = [ONE, f"run={tmp_path}", "batch.accumulation=2", "train.updates=10", "train.valid_bleu=false"]
    assert train_command("train", [str(prepared / "recipe.yaml"), *overrides]) == 0
    plain = [math.log(r["perplexity"]) for r in records(tmp_path, "train")]
    recipe = recipe_of(prepared, *overrides)
    variant = Variant("admin", "admin", 2, 4, 10, recipe.optimizer.lr, recipe.seed)
    found = run_variant(variant, recipe, Ranks.alone())
    assert found["losses"] == pytest.approx([sum(plain) / 10], abs=2e-4) and found["dropped"] == 0
    valid = records(tmp_path, "valid")[-1]
    assert found["valid"] == pytest.approx(math.log(valid["perplexity"]), abs=2e-4)


def test_rates_are_searched_for_each_block(compare: Compare, capsys: pytest.CaptureFixture[str]) -> None:
    """Runs take the best rate of shorter runs; a seed that is added later is trained alone."""
    words = ["train.updates=9", "--depths", "1", "--blocks", "post_ln", "pre_ln", "--rates", "1e-4", "1e-3"]
    runs = compare(*words, "--seeds", "1")
    search, own = ([run for run in runs if run["system"]["updates"] == updates] for updates in (3, 9))
    assert len(search) + len(own) == len(runs)
    for block in ("post_ln", "pre_ln"):
        found = {run["system"]["rate"]: run["exchanged"] - run["valid"] for run in search
                 if run["system"]["encoder"] == block}
        assert {1e-4, 1e-3} < found.keys() and not further_rates([1e-4, 1e-3], found)
        best = [run["system"]["rate"] for run in own if run["system"]["encoder"] == block and run["system"]["source"]]
        assert best == [max(found, key=lambda rate: found[rate])]
    more = compare(*words, "--seeds", "1", "2")
    assert more[: len(runs)] == runs and [run["system"]["seed"] for run in more[len(runs) :]] == [2, 2]
    capsys.readouterr()
    assert compare(*words, "--seeds", "1", "2") == more
    own_rows, _, search_rows = tables(capsys.readouterr().out)
    assert [row["runs"] for row in own_rows if row["block"] in ("post_ln", "pre_ln")] == ["2", "2"]
    assert all(sum("**" in cell for cell in row.values()) == 1 for row in search_rows)


def test_which_rates_a_search_still_needs() -> None:
    assert further_rates([1e-3, 2e-3], {1e-3: 0.1}) == [2e-3]
    assert further_rates([1e-3, 2e-3], {1e-3: 0.1, 2e-3: 0.3}) == [4e-3]
    assert further_rates([1e-3, 2e-3], {1e-3: 0.3, 2e-3: 0.1}) == [5e-4]
    assert further_rates([1e-3, 2e-3], {1e-3: 0.1, 2e-3: 0.3, 4e-3: -math.inf}) == []
    assert further_rates([1e-3], {1e-3: 0.1}) == []  # one rate is no search
    endless = {1e-3 * 2.0**n: float(n) for n in range(5)}
    assert further_rates([1e-3, 2e-3], endless) == []


def test_a_search_prefers_a_source_that_is_used_to_a_lower_loss() -> None:
    """Admin at 18L-18L after 300 updates: at the rate of the lower loss the encoder had collapsed."""
    reads = {"ended": True, "valid": 4.505, "exchanged": 4.629}
    collapsed = {"ended": True, "valid": 4.401, "exchanged": 4.401}
    diverged = {"ended": False, "valid": 4.3, "exchanged": None}
    assert sorted([collapsed, diverged, reads], key=worth_of) == [diverged, collapsed, reads]


def test_bleu_and_weights_of_a_run(prepared: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The line has the test set's BLEU, and counts that give it again; the kept weights translate."""
    words = [str(prepared / "recipe.yaml"), ONE, "train.updates=3", "--depths", "1", "--blocks", "post_ln", "pre_ln",
             "--seeds", "1", "2", "--output", str(tmp_path), "--runs", str(tmp_path / "file.jsonl"), "--keep-weights"]
    assert main("compare-blocks", words) == 0
    runs = [record for _, record in read_numbered_log(tmp_path / "file.jsonl")]
    names = list(recipe_of(prepared).data.test)
    for run in runs[1:]:
        assert list(run["tests"]) == names
        for scores in run["tests"].values():
            assert bleu(with_totals(unpack(scores["counts"])).sum(axis=0)) == pytest.approx(scores["bleu"], abs=0.01)
        assert all(math.isfinite(value) for side in ("encoder", "decoder") for name in ("variance", "gradient", "worth")
                   for [value] in [run["layers"][side][name]])
    row = tables(capsys.readouterr().out)[0]
    assert all(name in row[0] for name in names)
    kept = sorted((tmp_path / "weights").iterdir())
    assert len(kept) == len(runs) == 5 and load_model(kept[0]).recipe.train.updates == 3


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
    model = Variant("post_ln", "post_ln", 1, 0, 2, 1e-3, 1).recipe(recipe).model
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
                batch = batch_of(torch.tensor([src]), torch.tensor([len(src)]), torch.tensor([[1, *trg]]),
                                 torch.tensor([[*trg, 2]]))
                total += module.eval()(batch).nll.item()
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


def test_a_curve_ends_with_its_run() -> None:
    system = asdict(Variant("pre_ln", "pre_ln", 2, warmup=1, updates=25, rate=1.0, seed=1))
    run = {"system": system, "losses": [3.0, 2.0, 1.0], "dropped": 0, "ended": True, "valid": 1.0, "exchanged": 2.0,
           "even": 4.0, "frequencies": 3.0}
    assert panels([run])[0].curves == {"pre_ln": [(10, 3.0), (20, 2.0), (25, 1.0)]}
    longer = {**run, "dropped": 20, "losses": [3.0, None, None, 2.0, 1.0]}  # updates that were dropped count
    assert panels([longer])[0].curves == {"pre_ln": [(10, 3.0), (40, 2.0), (45, 1.0)]}


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


# How training may read a text that the studies read as it is prepared.
CORPORA = 'data.train={"a":{"src":"a.en","trg":"a.de"%s},"b":{"src":"b.en","trg":"b.de"}}'
READ_OTHERWISE = [
    ("batch.update_tokens=4000", "batch.update_tokens is 4000, but each run of a study reads the whole text as it is "
     "prepared, in micro-batches of batch.tokens; set batch.update_tokens=null\n"),
    ("data.modify.typos=0.1", "data.modify.typos is 0.1, but each run of a study"),
    (f"{CORPORA % ''} data.train.temperature=2", "data.train.temperature is 2.0, but each run of a study"),
    (f"{CORPORA % ''} data.stages=" '[{"mix":{"a":1},"until":{"updates":3}},{"mix":{"b":1}}]',
     "data.stages is set, but each run of a study"),
    (CORPORA % ',"weight":3', "data.train.a.weight is 3, but each run of a study reads the whole text; set it to 1\n"),
]


@pytest.mark.parametrize(("words", "output"), [
    ("--blocks post_nl", "unknown block 'post_nl'; known: post_ln, "),
    ("--depths 0", "layers"),
    ("--processes 0", "--processes is 0"),
    ("--rates 1e-3", "--rates has one value, so there is nothing to search"),
    ("--search-updates 5", "--search-updates has no effect here because no rates are searched"),
    ('optimizer.lr_factors={"encoder":0.2} optimizer.lr_factors_until=4 --rates 1e-3 2e-3 --search-updates 7',
     "--search-updates is 7, but because of optimizer.lr_factors_until (4) parts of the model learn at lower rates "
     "until update 8; give 8 or more"),
    ("--rates 1e-3 0", "rate 0, seed"),
    ("--seeds 1 -1", "seed -1"),
    ("schedule.name=linear train.updates=30 --rates 1e-3 2e-3 --search-updates 4",
     "schedule.warmup (4) must be below train.updates (4)"),
    *((words, f"{name} has no effect here because the study sets it for every run; remove it and use {option}\n")
      for words, name, option in (("model.encoder.block=b2t", "model.encoder.block", "--blocks"),
                                  ('model={"decoder":{"layers":3}}', "model.decoder.layers", "--depths"),
                                  ("schedule.warmup=3 --warmups 0", "schedule.warmup", "--warmups"))),
    *((f"train.{name}={value}", f"train.{name} is {value}, but every run of a study trains for all "
       f"train.updates; set train.{name}={none}\n")
      for name, value, none in (("epochs", 3, "null"), ("max_seconds", 9.0, "null"), ("patience", 1, 0))),
    *READ_OTHERWISE,
])
def test_mistakes(words: str, output: str, prepared: Path, tmp_path: Path, refused: Refused) -> None:
    assert output in refused("compare-blocks", prepared / "recipe.yaml", ONE, "--output", tmp_path, *words.split())
    assert not (tmp_path / "runs.jsonl").exists()


def test_the_baseline_trains_without_sources(prepared: Path) -> None:
    """It has the targets of the other runs."""
    split = open_prepared(recipe_of(prepared)).split("train")
    [[hidden], [shown]] = (stream(split, 256, 7).update(START, 1, 0, 1, torch.device("cpu")).batches
                           for stream in (Sourceless, Stream))
    assert (hidden["src"] == EOS).all() and hidden["src"].shape == (len(shown["src"]), 1)
    assert torch.equal(hidden["trg_out"], shown["trg_out"]) and shown["src"].shape[1] > 1
