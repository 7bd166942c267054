"""A further loss is one file: focal loss as a plug-in trains in every layout, with its own figure in the log."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from refusals import user_error
from small_models import VOCAB as WORDS
from small_models import batch, batch_of, shapes
from tiny_engines import VOCAB, batches, parallel, recipe_with
from warm import Warm

from deepnmt import visitors
from deepnmt.config import load_recipe, plugins
from deepnmt.errors import UserError
from deepnmt.files import read_log
from deepnmt.model.init import Initialiser, fill
from deepnmt.model.objective import CrossEntropy, RDrop, objective_of
from deepnmt.model.transformer import Transformer
from deepnmt.parallel.build import start_engine
from deepnmt.parallel.ds_config import layout_of
from deepnmt.processes.process_group import processes
from deepnmt.processes.ranks import Ranks
from deepnmt.training.status import FINISHED
from deepnmt.training.trainer import train

FOCAL = '''
from torch.nn import functional as F

from deepnmt.model.loss import LossSums, token_rows
from deepnmt.model.objective import Objective
from deepnmt.tokens import PAD


class Focal(Objective):
    """-(1 - p)² log p, p the probability of the target token. Lin et al. 2017, Focal Loss, eq. 4."""

    figures = ("focal_loss",)

    def loss(self, hidden, weight, batch):
        (rows,), targets = token_rows([hidden], batch["trg_out"], PAD, batch.tokens)
        nll = F.cross_entropy(F.linear(rows, weight).float(), targets, reduction="none")
        focal = ((1 - (-nll).exp()) ** 2 * nll).sum()
        return LossSums(focal, nll.detach().sum(), {"focal_loss": focal.detach()})


OBJECTIVES = {"focal": Focal}
'''


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a new process: no plug-in was named, none has run."""
    monkeypatch.setattr(plugins, "_plugins", {})


def trial(folder: str, layout: str) -> None:
    """Runs on each rank: loss, nll, figure and gradient norm of three updates with focal loss, alone and in R-Drop."""
    with processes(threads=1, group=layout != "local") as ranks:
        found: list[Any] = []
        for alpha in (0.0, 2.0):
            recipe = recipe_with(
                plugins=[f"{folder}/focal.py"],
                batch={"accumulation": 4 if layout.startswith("pipe") else 4 // ranks.world},
                model={"width": 16, "heads": 2, "ffn": 24, "dropout": 0.2, "encoder": {"layers": 2},
                       "decoder": {"layers": 2}},
                train={"updates": 10, "objective": "focal", "r_drop": alpha},
                parallel=parallel(layout.removeprefix("pipe_"), 2 if layout.startswith("pipe") else 0))
            engine = start_engine(recipe, layout_of(recipe, ranks.world), (VOCAB, VOCAB), ranks)
            for update in range(3):
                plan = batches(update, 4)
                tokens = sum(each.tokens for each in plan)
                stats = engine.train_step(plan[engine.data_rank :: engine.data_world], tokens, 1e-2)
                found.append([stats.loss, stats.nll, stats.figures["focal_loss"], stats.grad_norm])
            engine.close()
        if ranks.first:
            Path(folder, f"{layout}.json").write_text(json.dumps(found), encoding="utf-8")


def test_focal_loss_is_one_file_and_the_same_in_every_layout(tmp_path: Path, warm: Warm) -> None:
    """In the plain engine, ZeRO-2 on two processes and a pipeline of two stages."""
    (tmp_path / "focal.py").write_text(FOCAL, encoding="utf-8")
    found = {}
    for world, layout in ((1, "local"), (2, "zero2_fp32"), (2, "pipe_zero1_fp32")):
        warm.run(world, "test_objective:trial", tmp_path, layout)
        found[layout] = torch.tensor(json.loads((tmp_path / f"{layout}.json").read_text()))
    local = found.pop("local")
    assert local.shape == (6, 4) and bool(local.isfinite().all())
    torch.testing.assert_close(local[:3, 2], local[:3, 0])  # the figure is the loss, but for R-Drop's divergence
    assert bool((local[3:, 0] > local[3:, 2]).all()) and bool((local[:, 2] < local[:, 1]).all())
    for layout, figures in found.items():
        torch.testing.assert_close(figures, local, rtol=2e-5, atol=1e-5, msg=lambda text, layout=layout: layout + text)


def test_a_run_trains_with_it_and_logs_its_figure(prepared: Path, tmp_path: Path, threads: None) -> None:
    plugin = tmp_path / "focal.py"
    plugin.write_text(FOCAL, encoding="utf-8")
    recipe = load_recipe(prepared / "recipe.yaml", [
        f"run={tmp_path / 'run'}", f"plugins=[{plugin}]", "train.objective=focal", "train.updates=4",
        "train.log_every=2", "train.validate_every=4", "train.valid_bleu=false"])
    assert train(recipe, Ranks.alone()) == FINISHED
    lines = [line for line in read_log(tmp_path / "run" / "log.jsonl") if line["type"] == "train"]
    assert len(lines) == 2 and all(line["focal_loss"] == pytest.approx(line["loss"]) for line in lines)


def test_an_objective_that_is_none_is_refused(tmp_path: Path) -> None:
    plugin = tmp_path / "wrong.py"
    plugin.write_text("OBJECTIVES = {'wrong': 3}\n", encoding="utf-8")
    recipe = recipe_with(plugins=[str(plugin)], train={"updates": 10, "objective": "wrong"})
    with pytest.raises(UserError, match=r"objective wrong of .* is 3, must be a subclass of .*objective\.Obj"):
        objective_of(recipe)


def test_a_loss_whose_folder_is_gone_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(visitors, "PACKAGE", tmp_path)
    data = {"folder": "x", "src_lang": "a", "trg_lang": "b", "valid": {"tsv": "x"},
            "train": {"tsv": "x", "alignments": "links"}}
    with user_error("train.guided_alignment needs deepnmt/extras/alignment, which is not installed"):
        objective_of(recipe_with(data=data, train={"updates": 10, "guided_alignment": 0.1}))


def test_a_recipe_without_a_plug_in_minimises_cross_entropy() -> None:
    objective = objective_of(recipe_with(train={"updates": 10, "label_smoothing": 0.2, "r_drop": 3.0}))
    assert isinstance(objective, RDrop) and type(objective.inner) is CrossEntropy
    assert (objective.alpha, objective.inner.smoothing, objective.figures) == (3.0, 0.2, ())


# -- one stage ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bounds", [(2, 5), (1, 3, 4), (4, 6)], ids=str)
def test_stages_are_the_model_in_parts(bounds: tuple[int, ...]) -> None:
    """Names of parameters are those of the whole, in its order, and the units put one after the other compute the
    same, with dropout, to the bit."""
    shape = shapes("admin", (2, 2), 0.2)
    whole = Transformer(shape, WORDS, WORDS, 1, CrossEntropy(0.1))
    cuts = (0, *bounds, 7)
    stages = [Transformer(shape, WORDS, WORDS, 1, CrossEntropy(0.1), units=range(start, stop))
              for start, stop in pairwise(cuts)]
    names = [name for name, _ in whole.named_parameters()]
    for model in (whole, *stages):
        fill(model, Initialiser(shape, WORDS, WORDS, 1))
        own = [name for name, _ in model.named_parameters()]
        assert own == [name for name in names if name in own]
    assert {name for stage in stages for name, _ in stage.named_parameters()} == set(names)
    given = batch_of(*batch([5, 9, 3], [4, 6, 7]), key=3)
    memory = hidden = None
    for stage in stages:
        memory, hidden = stage.run(given, memory, hidden)
    assert hidden is not None
    ours, theirs = stages[-1].objective.loss(hidden, stages[-1].output_weight, given), whole(given)
    assert torch.equal(ours.loss, theirs.loss) and torch.equal(ours.nll, theirs.nll)
