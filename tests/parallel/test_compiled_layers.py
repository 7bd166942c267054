"""Layers under torch.compile, by the branches of a CPU and of a GPU: graphs, and the same losses."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from refusals import user_error
from small_models import VOCAB, batch, batch_of
from tiny_engines import ROOT, build, recipe_of, recipe_with
from torch._dynamo.utils import counters

from deepnmt import device
from deepnmt.config import load_recipe
from deepnmt.model.init import Initialiser, fill
from deepnmt.model.objective import CrossEntropy
from deepnmt.model.transformer import Transformer
from deepnmt.parallel import compiled
from deepnmt.parallel.compiled import compile_layers
from deepnmt.parallel.ds_config import layout_of
from deepnmt.processes.ranks import Ranks

LONG = bool(os.environ.get("DEEPNMT_LONG"))
CPU = torch.device("cpu")
GOLDEN = {"graphs": 4, "breaks": 0}  # they may only fall
SHAPES = [([9, 3, 4], [7, 2, 5]), ([5, 9], [8, 6]), ([11, 4, 6, 2], [3, 7, 6, 5]), ([8, 8], [8, 8]), ([13, 2], [4, 9])]


def losses(model: Transformer) -> list[Any]:
    """Of five micro-batches of five shapes, and the sum of all gradients."""
    found = []
    for key, lengths in enumerate(SHAPES):
        loss = model(batch_of(*batch(*lengths), key=key)).loss
        loss.backward()
        found.append(loss.item())
    return [*found, sum(float(p.grad.double().sum()) for p in model.parameters() if p.grad is not None)]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gpu", *(["cpu"] if LONG else [])])
def test_two_graphs_for_all_layers_of_a_stack_and_all_shapes(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One for all shapes but those of 8 source tokens, or a multiple, whose mask is laid out otherwise; on a CPU it is
    where no sentence is padded, and there is no mask. Traced, but not translated for a processor: so the losses are the
    same to the bit, dropout included."""
    monkeypatch.setattr(device, "on_gpu", lambda tensor: kind == "gpu")
    small = ["model.width=16", "model.ffn=24", "model.heads=2", "model.encoder.layers=10", "model.decoder.layers=10",
             "model.dropout=0.1", "admin.profile=null"]
    recipe = load_recipe(ROOT / "recipes/demo/admin_18l-18l.yaml", small)
    plain, made = (Transformer(recipe.model, VOCAB, VOCAB, 1, CrossEntropy(0.1)).train() for _ in range(2))
    for model in (plain, made):
        fill(model, Initialiser(recipe.model, VOCAB, VOCAB, 1, None))
    torch._dynamo.reset()
    counters.clear()
    compile_layers(made, CPU, "eager")
    assert losses(made) == losses(plain)
    found = {"graphs": counters["stats"]["unique_graphs"], "breaks": sum(counters["graph_break"].values())}
    assert all(found[name] <= most for name, most in GOLDEN.items()), found
    seen: list[object] = []
    made.encoder.layers[3].get_submodule("ffn").register_forward_hook(lambda *_: seen.append(1))
    made(batch_of(*batch(*SHAPES[0])))
    made.eval()(batch_of(*batch(*SHAPES[0])))
    assert len(seen) == 2, "hooks are called in a layer that was compiled before"
    assert counters["stats"]["unique_graphs"] == found["graphs"], "evaluation is not compiled"


@pytest.mark.skipif(not LONG, reason="a C++ compiler takes a minute: DEEPNMT_LONG=1")
def test_compiled_training_has_the_same_losses() -> None:
    """By Inductor, to 1e-5 of a loss; dropout draws the same masks on a CPU."""
    found = []
    for wanted in (False, True):
        recipe = recipe_of("local")
        parallel = recipe.parallel.model_copy(update={"compile": wanted})
        engine = build(recipe.model_copy(update={"parallel": parallel}), Ranks.alone())
        plan = [batch_of(*batch(*lengths), key=key) for key, lengths in enumerate(SHAPES)]
        found.append([engine.train_step([each], 10, 1e-2).loss for each in plan])
    assert found[1] == pytest.approx(found[0], rel=1e-5) and found[1][-1] < found[1][0]


def test_what_cannot_be_compiled_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for section, words in (
            ({"parallel": {"ds_config": "ds_configs/zero3.json", "compile": True}}, ["ZeRO stage 3", "zero1.json"]),
            ({"parallel": {"compile": True}, "model": {"decoder": {"block": "dlcl"}}}, ["dlcl", "another block"])):
        with user_error(".*".join(["parallel.compile is true", *words])):
            layout_of(recipe_with(**section), 1)
    monkeypatch.setattr(compiled.shutil, "which", lambda name: None)
    for kind, words in (("cpu", ["a C.. compiler"]), ("cuda", ["Triton and a C compiler"])):
        with user_error(".*".join(["parallel.compile is true", *words, "parallel.compile=false"])):
            compile_layers(torch.nn.Module(), torch.device(kind))
