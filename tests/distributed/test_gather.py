"""Under ZeRO-3 decoding happens on a whole copy: same weights, same translations, same BLEU as in other layouts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from warm import Warm

from deepnmt.checkpoint import load_moments, load_weights
from deepnmt.config import Translate, load_recipe
from deepnmt.data.settings import open_prepared
from deepnmt.model.transformer import Transformer
from deepnmt.parallel.build import build_engine
from deepnmt.parallel.launch import processes
from deepnmt.translate import translate_lines
from deepnmt.validate import validate


def trial(recipe: str, checkpoint: str, layout: str, output: str) -> None:
    """Runs on each rank: the gathered weights against the exported ones, and what a validation makes of them."""
    with processes(threads=1, group=True) as ranks:
        settings = load_recipe(recipe, [f"parallel.ds_config={layout}", "train.valid_sentences=0"])
        data = open_prepared(settings)
        vocabs = data.vocabs()
        model = Transformer(settings.model, vocabs[0].size, vocabs[1].size, settings.seed)
        engine = build_engine(model, settings, ranks)
        engine.import_state(load_weights(Path(checkpoint)), load_moments(Path(checkpoint)), 12)
        whole = engine.gather_model()
        for (name, weight), state in zip(whole.named_parameters(), engine.export_state(), strict=True):
            assert name == state.name and torch.equal(weight.cpu(), state.weight.to(weight.dtype)), name
        if ranks.first:  # decodes while no other process takes part
            assert len(translate_lines(whole, vocabs, data.split("valid").src_text(), Translate(method="greedy"))) == 20
        ranks.barrier()
        found = validate(settings, data, engine, ranks)
        if ranks.first:
            Path(output).write_text(json.dumps([found.loss, found.bleu, next(whole.parameters()).dtype.itemsize]))
        engine.close()


@pytest.fixture(scope="module")
def checkpoint(prepared: Path, tmp_path_factory: pytest.TempPathFactory, warm: Warm) -> Path:
    """Of a run long enough for a BLEU above 0."""
    run = tmp_path_factory.mktemp("gather") / "run"
    warm.train(1, prepared / "recipe.yaml", f"run={run}", "train.updates=80", "train.validate_every=1000",
               "train.save_every=80", "train.valid_bleu=false", "batch.tokens=512")
    assert warm.wait() == [0], warm.said()
    return run / "checkpoints" / "update-00000080"


# In bf16 the weights are the same bits, but the products' kernels differ by where a weight lies in memory.
@pytest.mark.parametrize(("layout", "control", "of_loss", "of_bleu"), [
    ("zero3_fp32", (1, "null"), 1e-6, 0.0), ("zero3_bf16", (2, "zero1_bf16"), 1e-3, 1.0),
])
def test_validation_is_that_of_other_layouts(
    layout: str, control: tuple[int, str], of_loss: float, of_bleu: float, checkpoint: Path, prepared: Path,
    tmp_path: Path, warm: Warm
) -> None:
    results = []
    for world, name in ((2, layout), control):
        output = tmp_path / f"{name}.json"
        path = name if name == "null" else f"ds_configs/{name}.json"
        warm.run(world, "test_gather:trial", prepared / "recipe.yaml", checkpoint, path, output)
        results.append(json.loads(output.read_text()))
    (loss, bleu, size), (other_loss, other_bleu, other_size) = results
    assert loss == pytest.approx(other_loss, rel=of_loss)
    assert bleu == pytest.approx(other_bleu, abs=of_bleu) and other_bleu > 0 and size == other_size
