"""A trained run, with Admin in one stack and DeepNorm in the other, is folded into plain Post-LN."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from deepnmt.checkpoint.checkpoint import list_checkpoints, load_model, load_weights
from deepnmt.cli import main
from deepnmt.config import load_recipe
from deepnmt.model.admin_profile import AdminProfile


@pytest.mark.parametrize("decoder", ["admin", "deepnorm"])
def test_a_trained_run_folds_into_the_same_translations(decoder: str, prepared: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert main("train", [str(prepared / "recipe.yaml"), f"run={run}", f"model.decoder.block={decoder}",
                          "model.width=32", "train.updates=60", "train.save_every=30", "train.validate_every=60",
                          "train.valid_bleu=false", "parallel.threads=1"]) == 0
    source = list_checkpoints(run / "checkpoints")[-1]
    profile = AdminProfile.load(run / "admin_profile.json", load_recipe(run).model)
    trained = load_weights(source)
    moved = (trained["encoder.layers.1.rule.omegas.1"] - profile.encoder[3]).abs()
    assert moved.max() > 1e-2 and moved.std() > 1e-3  # training has changed ω
    assert main("fold", [str(run), "--checkpoint", str(source), "--output", str(tmp_path / "folded")]) == 0
    before, after = load_model(source), load_model(tmp_path / "folded")
    blocks = after.recipe.model
    assert (blocks.encoder.block, blocks.decoder.block) == ("post_ln", "post_ln")

    texts = ((prepared / "text" / f"test.{side}").read_text(encoding="utf-8").splitlines() for side in ("en", "de"))
    for sentence, reference in zip(*texts, strict=True):
        src = torch.tensor([[*before.src_vocab.encode(sentence), 2]])
        trg = torch.tensor([[1, *before.trg_vocab.encode(reference)]])
        lengths = torch.tensor([src.size(1)])
        with torch.no_grad():
            ours, theirs = (m.logits(m.decode(trg, m.encode(src, lengths), lengths)) for m in (before.model,
                                                                                              after.model))
        torch.testing.assert_close(theirs, ours, rtol=0, atol=1e-5)

    outputs = []
    for checkpoint in (source, tmp_path / "folded"):
        out = tmp_path / f"{checkpoint.name}.de"
        assert main("translate", [str(run), "--checkpoint", str(checkpoint), "--output", str(out), "--input",
                                  str(prepared / "text" / "test.en"), "translate.beam=4"]) == 0
        outputs.append(out.read_text(encoding="utf-8"))
    assert outputs[0] == outputs[1] and len(set(outputs[0].splitlines())) > 1
