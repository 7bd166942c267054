"""How much a model uses its source: the figures by hand, a planted collapse, and what a run says of it."""

from __future__ import annotations

import json
import math
from dataclasses import astuple, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from run_files import losses, records, scalars
from small_models import BLOCKS, batch_of, shapes
from torch import Tensor, nn

from deepnmt import config
from deepnmt.checkpoint.checkpoint import list_checkpoints
from deepnmt.config import Recipe, load_recipe, with_settings
from deepnmt.data.prepared import PreparedData, open_prepared
from deepnmt.decode.models import load_model
from deepnmt.model.init import new_model
from deepnmt.model.sublayers import split_heads
from deepnmt.model.transformer import Transformer
from deepnmt.parallel.engine import Engine, LocalEngine
from deepnmt.processes.ranks import Ranks
from deepnmt.tasks.translation import source_use
from deepnmt.tasks.translation.collapse import collapse_note, has_collapsed
from deepnmt.tasks.translation.source_use import SourceUse, measure_source_use, measure_validation_text
from deepnmt.tasks.translation.task import TASK as TRANSLATION
from deepnmt.tokens import PAD
from deepnmt.training.divergence import diverged
from deepnmt.training.status import run_status
from deepnmt.training.trainer import train

ALONE = Ranks.alone()


@pytest.fixture(scope="module")
def recipe(prepared: Path) -> Recipe:
    return load_recipe(prepared / "recipe.yaml")


@pytest.fixture(scope="module")
def data(recipe: Recipe) -> PreparedData:
    return open_prepared(recipe)


def engine_of(recipe: Recipe, data: PreparedData, block: config.Block = "post_ln") -> tuple[LocalEngine, Recipe]:
    """An engine with a small model whose weights are all random, and its recipe."""
    made = recipe.model_copy(update={"model": shapes(block).model_copy(update={"max_length": 64})})
    model = new_model(made.model, *(vocab.size for vocab in data.vocabs()), 1)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.empty_like(parameter).normal_(std=0.1, generator=generator))
    return LocalEngine(model, made, ALONE.device), made


class Constant(nn.Module):
    """Puts out one vector at every position."""

    def forward(self, x: Any) -> Tensor:
        last = x[-1] if isinstance(x, tuple) else x
        return torch.ones_like(last)


# -- the figures -------------------------------------------------------------------------------------------------------


@torch.no_grad()
def by_hand(model: Transformer, pairs: list[tuple[Tensor, ...]], others: list[Tensor]) -> SourceUse:
    """The figures of sentences one by one, so without any padding. `pairs`: source, target in, target out."""
    memories, outputs, entropies, own, shuffled = [], [], [], 0.0, 0.0
    for (src, trg_in, trg_out), other in zip(pairs, others, strict=True):
        length, seen = torch.tensor([src.size(1)]), list[tuple[Any, ...]]()
        handles = [layer.cross_attn.register_forward_pre_hook(
            lambda part, given, seen=seen: seen.append((part, *given))) for layer in model.decoder_layers]
        memories.append(model.encode(src, length)[0])
        outputs.append(model.decode(trg_in, memories[-1][None], length)[0])
        for handle in handles:
            handle.remove()
        for part, x, keys, *_ in seen:
            weights = (split_heads(part.q(x), part.heads) @ keys.transpose(2, 3) / math.sqrt(keys.size(3))).softmax(3)
            entropies.append(-(weights * weights.log()).sum(3).mean(1)[0] / math.log(src.size(1)))
        own += float(model(batch_of(src, length, trg_in, trg_out)).nll)
        shuffled += float(model(batch_of(other, torch.tensor([other.size(1)]), trg_in, trg_out)).nll)
    memory, output = torch.cat(memories), torch.cat(outputs)
    common = [float(x.mean(0).square().sum() / x.square().sum(1).mean()) for x in (memory, output)]
    return SourceUse((shuffled - own) / len(output), *common, float(torch.cat(entropies).mean()))


@pytest.mark.parametrize("block", BLOCKS)
def test_the_figures_by_hand(
        block: config.Block, recipe: Recipe, data: PreparedData, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, made = engine_of(recipe, data, block)
    split = data.split("valid")
    monkeypatch.setattr(source_use, "BATCH", 60)
    own, shuffled = source_use.paired_batches(split, range(3, 12), 6, 60, ALONE.device)
    assert len(own) > 1 and any(bool((batch["trg_out"] == PAD).any()) for batch in own)
    pairs = [(src[None, :length], trg_in[None, trg_out != PAD], trg_out[None, trg_out != PAD])
             for batch in own for src, length, trg_in, trg_out in zip(*batch.tensors.values(), strict=True)]
    others = [src[None, :length] for batch in shuffled
              for src, length in zip(batch["src"], batch["src_lengths"], strict=True)]
    engine.module.eval()
    found = measure_source_use(engine, made, split, range(3, 12), ALONE, 6)
    assert astuple(found) == pytest.approx(astuple(by_hand(engine.module, pairs, others)), abs=1e-5)
    assert 0 < found.encoder_common < 0.9 and 0 < found.cross_attention_entropy < 1 and found.source_gain != 0


def test_a_measurement_leaves_no_trace(recipe: Recipe, data: PreparedData) -> None:
    engine, made = engine_of(recipe, data)
    before, state = str(engine.module), torch.get_rng_state()
    first, second = (measure_validation_text(made, data, engine, ALONE)[""] for _ in range(2))
    assert first == second and torch.equal(state, torch.get_rng_state()) and str(engine.module) == before
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in engine.module.modules())


def test_a_planted_collapse_and_what_is_said_of_it(recipe: Recipe, data: PreparedData) -> None:
    engine, made = engine_of(recipe, data)
    [healthy] = measure_validation_text(made, data, engine, ALONE).values()
    assert healthy.encoder_common < 0.9 and collapse_note(made, 100, healthy) is None
    engine.module.encoder.norm = Constant()
    [found] = measure_validation_text(made, data, engine, ALONE).values()
    assert (found.encoder_common, found.cross_attention_entropy) == pytest.approx((1, 1), abs=1e-6)
    assert abs(found.source_gain) < 1e-6 and 0 < found.decoder_common < 1
    note = collapse_note(made, 100, found)
    assert note is not None and note.startswith(
        "the encoder has collapsed: 100 % of the encoder's output is one vector, and another sentence's source costs "
        "0.00 nats a target token;")
    assert f": 'optimizer.lr_factors={{encoder: 0.1}}' optimizer.lr_factors_until={made.train.updates // 4} (" in note
    assert collapse_note(made, 3, found) is None, "the warm-up has 4 updates"
    long = with_settings(made, {"schedule.warmup": 8000})
    assert collapse_note(long, 999, found) is None and collapse_note(long, 1000, found) == note
    for factors, words in (({"decoder": 0.5, "encoder": 0.2}, "decoder: 0.5, encoder: 0.02"),
                           ({"encoder.layers": 0.5, "*.ffn": 2.0}, 'encoder: 0.1, encoder.layers: 0.05, "*.ffn": 2')):
        slow = with_settings(made, {"optimizer.lr_factors": factors})  # where several match, the last counts
        assert f"'optimizer.lr_factors={{{words}}}'" in str(collapse_note(slow, 100, found))
    risen = with_settings(made, {"optimizer.lr_factors": {"encoder": 0.2}, "optimizer.lr_factors_until": 50})
    for update, words in ((50, ": 'optimizer.lr_factors={encoder: 0.02}' ("),
                          (51, ", and for longer: 'optimizer.lr_factors={encoder: 0.02}' "
                               "optimizer.lr_factors_until=100 (")):
        assert f"lower its learning rate alone{words}docs/guide" in str(collapse_note(risen, update, found))


@pytest.mark.parametrize(("gain", "common", "collapsed"), [
    (0.0, 0.98, True), (0.12, 0.98, False), (0.0, 0.88, False), (math.nan, 0.98, False), (0.0, math.nan, False)])
def test_when_an_encoder_has_collapsed(gain: float, common: float, collapsed: bool) -> None:
    assert has_collapsed(SourceUse(gain, common, 0.5, 1.0)) == collapsed


def test_each_corpus_has_its_own_figures(recipe: Recipe, data: PreparedData, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, made = engine_of(recipe, data)
    monkeypatch.setattr(data, "corpora", lambda name: {"one": 12, "line": 1, "two": 7})
    uses, split = measure_validation_text(made, data, engine, ALONE), data.split("valid")
    assert list(uses) == ["one", "two"] and uses["two"] == measure_source_use(engine, made, split, range(13, 20), ALONE)
    mean = SourceUse.mean(uses.values())
    gains = [use.source_gain for use in uses.values()]
    assert mean is not None and mean.source_gain == pytest.approx(sum(gains) / 2)


# -- a run -------------------------------------------------------------------------------------------------------------


def collapsing(recipe: Recipe, layout: Any, data: PreparedData, ranks: Ranks, initialise: bool) -> Engine:
    engine = TRANSLATION.start(recipe, layout, data, ranks, initialise)
    engine.module.encoder.norm = Constant()  # type: ignore[union-attr]
    return engine


COLLAPSING = replace(TRANSLATION, start=collapsing)


def test_a_run_says_once_that_it_has_collapsed(
        prepared: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], threads: None) -> None:
    run, settings = tmp_path / "run", ["train.validate_every=3", "train.valid_bleu=false", "schedule.warmup=1"]
    for updates in (6, 9, 9):  # the second resumes, the third finds all done
        made = load_recipe(prepared / "recipe.yaml", [f"run={run}", f"train.updates={updates}", *settings])
        assert train(made, ALONE, COLLAPSING) == 0
    said = [record["message"] for record in records(run, "event") if "collapsed" in record["message"]]
    assert len(said) == 1 and capsys.readouterr().err.count("has collapsed") == 1
    [look], validations = records(run, "look"), records(run, "valid")
    assert look["update"] == 1 and [record["update"] for record in validations] == [3, 6, 9]
    assert all(record["encoder_common"] == pytest.approx(1) for record in (look, *validations))
    assert set(scalars(run)["valid/source_gain"]) == {1, 3, 6, 9}
    warning = json.loads((run / "STATUS.json").read_text())["warning"]
    assert warning == said[0].replace("lr_factors_until=1", "lr_factors_until=2")  # a quarter of 6 updates, and of 9
    assert run_status(run).sentence.endswith(warning)


def test_training_is_the_same_with_and_without_validations(prepared: Path, tmp_path: Path, threads: None) -> None:
    found = []
    for name, every in (("often", 1), ("never", 100)):
        made = load_recipe(prepared / "recipe.yaml", [
            f"run={tmp_path / name}", "train.updates=6", f"train.validate_every={every}", "train.valid_bleu=false"])
        assert train(made, ALONE) == 0
        found.append(losses(tmp_path / name))
    assert found[0] == found[1] and len(found[0]) == 6


@pytest.mark.parametrize("ema", ["null", "0.5"])
def test_a_validation_measures_the_weights_that_a_checkpoint_is_loaded_with(
        ema: str, prepared: Path, tmp_path: Path, data: PreparedData, threads: None) -> None:
    made = load_recipe(prepared / "recipe.yaml", [f"run={tmp_path}", "train.updates=6", "train.validate_every=6",
                                                  f"train.ema={ema}", "train.valid_bleu=false"])
    assert train(made, ALONE) == 0
    model = load_model(list_checkpoints(tmp_path / "checkpoints")[-1]).model
    [found] = measure_validation_text(made, data, LocalEngine(model, made, ALONE.device), ALONE).values()
    [logged] = records(tmp_path, "valid")
    use = SourceUse.of(logged)
    assert use is not None and astuple(use) == pytest.approx(astuple(found), abs=1e-6)


def test_a_diverged_run_says_how_its_source_was_used(recipe: Recipe) -> None:
    engine: Any = SimpleNamespace(scaler_state=lambda: None)
    record = {"update": 40, "source_gain": 0.004, "encoder_common": 0.97, "decoder_common": 0.2,
              "cross_attention_entropy": 1.0}
    made = with_settings(recipe, {"run": "nowhere"})
    said = str(diverged(made, engine, ALONE, [], 1.0, 1.0, None, TRANSLATION.explain(record)))
    assert "At the validation of update 40, 97 % of the encoder's output is one vector, and another" in said
    assert "validation of" not in str(diverged(
        made, engine, ALONE, [], 1.0, 1.0, None, TRANSLATION.explain({"update": 40, "loss": 3.0})))
