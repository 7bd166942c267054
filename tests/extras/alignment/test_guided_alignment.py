"""Guided alignment in training: it aligns, every layout trains the same, and a run resumes to the bit."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from refusals import Refused
from tiny_engines import VOCAB, batches, parallel, recipe_with, step
from warm import Warm

from deepnmt.batch import Batch
from deepnmt.checkpoint.checkpoint import WEIGHTS
from deepnmt.cli import main
from deepnmt.files import read_log
from deepnmt.parallel.build import start_engine
from deepnmt.parallel.ds_config import layout_of
from deepnmt.processes.process_group import processes
from deepnmt.training.state import Interval

UPDATES = 60


@pytest.fixture(scope="module")
def toy(prepared: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The recipe of a text whose alignment is known: the demo's short sentences, and their words spelt backwards, the
    last one first."""
    folder = tmp_path_factory.mktemp("toy")
    for name in ("train", "valid"):
        lines = [line.split() for line in (prepared / "text" / f"{name}.en").read_text(encoding="utf-8").splitlines()]
        lines = [words for words in lines if len(words) < 9]
        for suffix, texts in {
                "en": (" ".join(words) for words in lines),
                "back": (" ".join(word[::-1] for word in reversed(words)) for words in lines),
                "links": (" ".join(f"{len(words) - 1 - t}-{t}" for t in range(len(words))) for words in lines)}.items():
            (folder / f"{name}.{suffix}").write_text("".join(f"{text}\n" for text in texts), encoding="utf-8")
    tree = yaml.safe_load((prepared / "recipe.yaml").read_text(encoding="utf-8"))
    tree["run"] = str(folder / "run")
    tree["data"] |= {"folder": str(folder / "data"), "test": {}, **{
        name: {"src": str(folder / f"{name}.en"), "trg": str(folder / f"{name}.back"),
               "alignments": str(folder / f"{name}.links")} for name in ("train", "valid")}}
    tree["model"] |= {"width": 32, "encoder": {"block": "pre_ln", "layers": 1},
                      "decoder": {"block": "pre_ln", "layers": 2}}
    tree["train"] = {"updates": UPDATES, "log_every": UPDATES // 3, "validate_every": UPDATES,
                     "save_every": UPDATES // 2, "valid_bleu": False}
    (folder / "recipe.yaml").write_text(yaml.safe_dump(tree), encoding="utf-8")
    assert main("prepare", [str(folder / "recipe.yaml")]) == 0
    return folder


def train(toy: Path, run: str, *settings: str) -> list[dict[str, Any]]:
    assert main("train", [str(toy / "recipe.yaml"), f"run={toy / run}", *settings]) == 0
    return read_log(toy / run / "log.jsonl")


def test_alignment_error_falls_and_a_run_resumes_to_the_bit(toy: Path, threads: None) -> None:
    plain, guided = train(toy, "plain"), train(toy, "guided", "train.guided_alignment=1")
    errors = [next(line["alignment_error"] for line in log if line["type"] == "valid") for log in (plain, guided)]
    assert errors[0] > 0.6 and errors[1] < errors[0] - 0.15, errors
    losses = [[line.get("alignment_loss") for line in log if line["type"] == "train"] for log in (plain, guided)]
    assert losses[0] == [None] * 3 and losses[1][2] < losses[1][0] - 0.1
    # a kill after the checkpoint in the middle, which is also in the middle of an epoch
    middle = toy / "guided" / "checkpoints" / f"update-{UPDATES // 2:08d}"
    state = json.loads((middle / "state.json").read_text())
    assert state["micro_batch"] > 0 and state["extra"]["interval"]["alignment_loss"] > 0
    shutil.copytree(middle, toy / "resumed" / "checkpoints" / middle.name)
    resumed = train(toy, "resumed", "train.guided_alignment=1")
    whole, again = (toy / run / "checkpoints" / f"update-{UPDATES:08d}" / WEIGHTS for run in ("guided", "resumed"))
    assert whole.read_bytes() == again.read_bytes()
    figures = [next(line for line in log if (line["type"], line["update"]) == ("valid", UPDATES))
               for log in (guided, resumed)]
    assert figures[0]["alignment_error"] == figures[1]["alignment_error"]


def test_sums_of_an_older_run_are_read() -> None:
    read = Interval.from_saved({"loss": 3.0, "tokens": 5, "alignment": 0.5})
    assert read.figures == {"alignment_loss": 0.5}
    assert Interval.from_saved(read.to_saved()) == read and "alignment" not in read.to_saved()
    assert Interval.from_saved({"loss": 3.0, "alignment": 0.0}).figures == {}


def test_a_run_without_the_alignments_is_refused(prepared: Path, toy: Path, refused: Refused) -> None:
    said = refused("train", prepared / "recipe.yaml", f"run={toy / 'none'}", "train.guided_alignment=0.05",
                   f"data.train.alignments={toy / 'train.links'}")
    assert "was made from other texts than the recipe's data.train names" in said


# -- layouts -----------------------------------------------------------------------------------------------------------


def with_links(batch: Batch) -> Batch:
    """Each target position but the last is linked with one position of the source, and every third with two."""
    src, trg = batch["src"], batch["trg_in"]
    rows = [(b, t, (t + k) % 3, 1 + (t % 3 == 0)) for b in range(len(src)) for t in range(min(2, trg.size(1) - 1))
            for k in range(1 + (t % 3 == 0))]
    return batch.with_tensors(links=torch.tensor(rows).T.contiguous())


def trial(folder: str, layout: str) -> None:
    """Runs on each rank: losses, gradient norms and the loss of alignment of two updates."""
    with processes(threads=1, group=True) as ranks:
        recipe = recipe_with(
            batch={"accumulation": 4 // ranks.world},
            data={"folder": "x", "src_lang": "a", "trg_lang": "b", "valid": {"tsv": "x"},
                  "train": {"tsv": "x", "alignments": "links"}},
            model={"width": 16, "heads": 2, "ffn": 25, "dropout": 0.2, "encoder": {"block": "post_ln", "layers": 2},
                   "decoder": {"block": "pre_ln", "layers": 3}},
            train={"updates": 10, "guided_alignment": 0.5, "guided_layer": 1},
            parallel={**parallel(layout), "recompute_layers": 2 if "zero3" in layout else 0})
        engine, found = start_engine(recipe, layout_of(recipe, ranks.world), (VOCAB, VOCAB), ranks), []
        for update in range(2):
            plan = [with_links(batch) for batch in batches(update, 4)]
            found.append([*step(engine, plan, ranks)[:2]])
            engine.evaluate(batches(update, 1))  # ZeRO-3 has another course of modules then
        stats = engine.train_step(plan[engine.data_rank :: engine.data_world], 100, 0.0)
        found.append([stats.figures["alignment_loss"], stats.nll])
        if ranks.first:
            Path(folder, f"{layout}.json").write_text(json.dumps(found), encoding="utf-8")
        engine.close()


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory, warm: Warm) -> torch.Tensor:
    folder = tmp_path_factory.mktemp("local")
    warm.run(1, "test_guided_alignment:trial", folder, "local")
    return torch.tensor(json.loads((folder / "local.json").read_text()))


@pytest.mark.parametrize(("layout", "tolerance"), [
    ("zero1_fp32", 1e-5), ("zero3_fp32", 1e-5), ("zero0_bf16", 3e-2)])
def test_a_layout_equals_the_local_engine(
    layout: str, tolerance: float, local: torch.Tensor, tmp_path: Path, warm: Warm
) -> None:
    warm.run(2, "test_guided_alignment:trial", tmp_path, layout)
    ours = torch.tensor(json.loads((tmp_path / f"{layout}.json").read_text()))
    assert float(ours[2, 0]) > 0
    torch.testing.assert_close(ours, local, rtol=tolerance, atol=0)
