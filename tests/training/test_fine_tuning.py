"""A run that begins with a trained model (`train.init_from`, `train.grow`) on other text with its vocabulary
(`vocab.model`), and the running average of the weights (`train.ema`) wherever a model is used."""

from __future__ import annotations

import math
import shutil
from pathlib import Path

import pytest
import torch
from kills import kill_before
from refusals import Refused, user_error
from run_files import losses, records, tensors
from tiny_engines import options as layout_options
from warm import Warm, train

from deepnmt import api
from deepnmt.checkpoint.checkpoint import load_model, model_in, moments_in, weights_in
from deepnmt.cli import main
from deepnmt.config import Recipe, load_recipe, with_settings
from deepnmt.config.choices import BLOCKS
from deepnmt.data.mixing import training_stream
from deepnmt.data.prepare import prepare
from deepnmt.data.prepared import open_prepared
from deepnmt.model.init import fill, new_model
from deepnmt.parallel.build import start_engine
from deepnmt.parallel.ds_config import layout_of
from deepnmt.processes.ranks import Ranks
from deepnmt.tasks.translation.validate import validate
from deepnmt.training.fine_tuning import find_trained, origins, trained_weights

OTHER_TEXT = Path(__file__).resolve().parents[1] / "fixtures" / "other_text"  # 150 pairs, 10 and 5

pytestmark = pytest.mark.usefixtures("threads")


@pytest.fixture(scope="module")
def base(prepared: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a trained run `old`, and other text prepared with its vocabulary, `new/data`; `words` are the
    settings of a run that fine-tunes it."""
    folder = tmp_path_factory.mktemp("fine_tuning")
    assert main("train", [f"{prepared}/recipe.yaml", f"run={folder}/old", "train.updates=6"]) == 0
    shutil.copytree(OTHER_TEXT, folder / "new" / "text")
    prepare(recipe_of(prepared, folder))
    return folder


def words(prepared: Path, base: Path, run: str = "tuned") -> list[str]:
    text = base / "new" / "text"
    return [f"{prepared}/recipe.yaml", f"run={base}/{run}", f"data.folder={base}/new/data", f"vocab.model={base}/old",
            *(f"data.{split}={{src: {text}/{split}.en, trg: {text}/{split}.de}}" for split in ("train", "valid")),
            "data.test={}", f"train.init_from={base}/old"]


def recipe_of(prepared: Path, base: Path, *changes: str) -> Recipe:
    file, *settings = words(prepared, base)
    return load_recipe(file, [*settings, *changes])


def begun(recipe: Recipe) -> torch.nn.Module:
    """The model that the run begins with."""
    data = open_prepared(recipe)
    model = new_model(recipe.model, data.vocabs()[0].size, data.vocabs()[1].size, recipe.seed)
    fill(model, trained_weights(recipe, data.vocabs(), Ranks.alone()))
    return model


def test_a_run_begins_with_the_old_model_and_nothing_else_of_it(prepared: Path, base: Path) -> None:
    options = ["model.dropout=0.0", "train.updates=3", "train.save_every=1", "train.freeze=[encoder]",
               "schedule.warmup=10", "train.keep_last=3"]
    assert main("train", [*words(prepared, base), *options]) == 0
    run, recipe = base / "tuned", recipe_of(prepared, base, *options)
    data = open_prepared(recipe)
    assert data.vocabs()[0].bytes == load_model(base / "old").src_vocab.bytes
    old = load_model(base / "old").model
    old.objective.smoothing = recipe.train.label_smoothing
    batch = training_stream(recipe, data).batch(0, 0, torch.device("cpu"))
    sums = old(batch)
    assert losses(run)[1] == pytest.approx(float(sums.loss) / batch.tokens, abs=1e-6)
    first = records(run, "train")[0]
    assert first["target_tokens"] == batch.tokens
    assert first["perplexity"] == pytest.approx(math.exp(float(sums.nll) / batch.tokens), rel=1e-6)
    assert first["update"] == 1 and first["learning_rate"] == pytest.approx(5e-3 / 10)  # its own schedule
    assert any("beginning with the weights of" in event["message"] for event in records(run, "event"))
    moments, before = tensors(run, 1, "moments"), weights_in(base / "old" / "checkpoints" / "update-00000006")
    for name, weight in tensors(run, 3, "weights").items():
        mean = moments[f"{name}.exp_avg"] / (1 - 0.9)  # of a single gradient
        torch.testing.assert_close(moments[f"{name}.exp_avg_sq"] / (1 - 0.98), mean**2, rtol=1e-3, atol=1e-12)
        frozen = name.startswith("encoder.")
        assert torch.equal(weight, before[name]) == frozen and bool(mean.any()) != frozen, name


def test_a_killed_run_goes_on_as_if_it_had_not_been(prepared: Path, base: Path, warm: Warm) -> None:
    """The old model is not needed for it."""
    moved, options = base / "moved", ["train.updates=6", "train.save_every=3", "train.validate_every=4",
                                      "train.freeze=[embeddings]", "train.ema=0.8", "train.checkpoint_form=shards"]
    shutil.copytree(base / "old", moved)
    given = [word.replace(f"init_from={base}/old", f"init_from={moved}") for word in words(prepared, base, "killed")]
    assert main("train", [*given, *options, f"run={base}/whole"]) == 0
    warm.start(1, "test_fine_tuning:train_until", 2, *given, *options)
    assert warm.wait() == [-9], warm.said()
    shutil.rmtree(moved)
    assert main("train", [*given, *options]) == 0
    whole, killed = (base / run / "checkpoints" / "update-00000006" for run in ("whole", "killed"))
    assert losses(base / "whole") == losses(base / "killed")
    for read in (weights_in, moments_in):
        assert all(torch.equal(tensor, read(killed)[name]) for name, tensor in read(whole).items())


def train_until(number: str, *arguments: str) -> int:
    """Runs on each rank: `deepnmt train`, killed before its `number`-th save gets its name."""
    kill_before(int(number), "/checkpoints/update-", "os.rename")
    return train(*arguments)


@pytest.mark.parametrize(("layout", "stages"), [("zero3_fp32", 0), ("zero1_fp32", 2)], ids=["zero3-2", "pipeline-2"])
def test_other_layouts_begin_with_the_old_model(
    layout: str, stages: int, prepared: Path, base: Path, warm: Warm
) -> None:
    """Two micro-batches an update, in every layout."""
    given = [*words(prepared, base), "train.updates=3", "train.valid_bleu=false"]
    alone, two = base / "alone", base / f"two_{layout}"
    if not alone.exists():
        assert main("train", [*given, f"run={alone}", "batch.accumulation=2"]) == 0
    warm.train(2, *given, f"run={two}", *layout_options(layout, stages), f"batch.accumulation={max(stages, 1)}")
    assert warm.wait() == [0, 0], warm.said()
    assert losses(two) == pytest.approx(losses(alone), rel=1e-5) and len(losses(two)) == 3


def test_any_model_can_be_the_begin(prepared: Path, base: Path) -> None:
    checkpoint = base / "old" / "checkpoints" / "update-00000006"
    assert main("average", [f"{base}/old", f"--output={base}/mean"]) == 0
    assert main("fold", [f"{base}/old", f"--checkpoint={checkpoint}", f"--output={base}/folded"]) == 0
    folded = ["model.encoder.block=post_ln", "model.decoder.block=post_ln", "model.encoder.input_gain=true",
              "model.decoder.input_gain=true"]
    for folder, changes in ((checkpoint, []), (base / "mean", []), (base / "folded", folded)):
        model = begun(recipe_of(prepared, base, f"train.init_from={folder}", *changes))
        held = weights_in(folder)
        assert all(torch.equal(parameter, held[name]) for name, parameter in model.named_parameters())


@pytest.mark.parametrize(("how", "places"), [("stack", [0, 1, 0, 1, 0]), ("interleave", [0, 0, 0, 1, 1])])
@pytest.mark.parametrize("side", ["encoder", "decoder"])
@pytest.mark.parametrize("block", BLOCKS.where(lambda block: block.growable))
def test_a_deeper_stack(block: str, side: str, how: str, places: list[int], prepared: Path, base: Path) -> None:
    old, blocks = base / f"old_{block}", [f"model.{part}.block={block}" for part in ("encoder", "decoder")]
    if not old.exists():  # trained once, by the first test that needs it
        assert main("train", [f"{prepared}/recipe.yaml", f"run={old}", *blocks, "train.updates=1",
                              "train.valid_bleu=false"]) == 0
    model = begun(recipe_of(prepared, base, f"train.init_from={old}", *blocks, f"model.{side}.layers=5",
                            f"train.grow={how}"))
    held, begins = weights_in(old / "checkpoints" / "update-00000001"), 0
    for name, parameter in model.named_parameters():
        words = name.split(".")
        if name.startswith(f"{side}.layers."):
            words[2] = str(places[begins := int(words[2])])
        assert torch.equal(parameter, held[".".join(words)])
    assert begins == 4


def test_what_does_not_fit_is_named(prepared: Path, base: Path, refused: Refused, tmp_path: Path) -> None:
    def said(*changes: str) -> str:
        return refused("train", *words(prepared, base, "none"), *changes)

    assert ("embeddings.shared.weight is [300, 16] where [300, 32] is expected, since model.width is 32 and was 16; "
            "set model.width=16") in said("model.width=32")
    assert ("encoder.norm.weight [16] is missing, since model.encoder.block is pre_ln and was admin; set "
            "model.encoder.block=admin") in said("model.encoder.block=pre_ln")
    assert ("decoder.layers.0.self_attn.qkv.weight would mean something else, since model.decoder.block is "
            "admin_closed_form and was admin") in said("model.decoder.block=admin_closed_form")
    assert ("embeddings.shared.weight would mean something else, since model.heads is 4 and was 2"
            in said("model.heads=4"))
    assert ("encoder.layers.2.self_attn.qkv.weight [48, 16] is missing, since model.encoder.layers is 3 and was 2; set "
            "model.encoder.layers=2, or train.grow=stack") in said("model.encoder.layers=3")
    assert ("decoder.layers.1.cross_attn.kv.bias [32] is not expected, since model.decoder.layers is 1 and was "
            "2; set model.decoder.layers=2") in said("model.decoder.layers=1", "train.grow=stack")
    assert "train.grow (stack) has no effect, since " in said("train.grow=stack")
    recipe = recipe_of(prepared, base, "train.grow=stack")
    alone = recipe.model_copy(update={"model": with_settings(recipe.model, {"encoder.layers": 0})})  # another task's
    with user_error(r"since model\.encoder\.layers is 0 and was 2; set model\.encoder\.layers=2"):
        origins(alone, open_prepared(recipe).vocabs(), find_trained(recipe))
    offered = said("model.encoder.layers=3", "model.encoder.block=b2t", "train.grow=stack")
    assert "train.grow (stack) is offered for pre_ln, admin, deepnorm, " in offered
    assert "but model.encoder.block is b2t; set model.encoder.layers=2" in offered
    assert "train.init_from: there is no folder nowhere" in said("train.init_from=nowhere")
    assert "train.freeze names 'encodre', but no parameter" in (fault := said("train.freeze=[encodre]"))
    assert "did you mean encoder?" in fault
    assert "did you mean decoder.layers.1.ffn?" in said("optimizer.lr_factors={decoder.layers.1.fnn: 2.0}")
    assert "parts are embeddings, encoder, decoder, " in said("train.freeze=[xyz]")
    assert "leaves nothing to train" in said("train.freeze=[embeddings, encoder, decoder]")
    # the recipe's own data have another vocabulary of the same size; then one of another size
    own = [f"vocab.model={prepared}/data", f"train.init_from={tmp_path}/other"]
    other = [f"data.folder={tmp_path}/data", f"run={tmp_path}/other", "vocab.size=310", "data.train.src="
             f"{base}/new/text/train.en", f"data.train.trg={base}/new/text/train.de"]
    prepare(load_recipe(prepared / "recipe.yaml", other))
    assert main("train", [f"{prepared}/recipe.yaml", *other, "train.updates=1", "train.valid_bleu=false"]) == 0
    fault = said(*own)
    assert "whose vocabulary src.spm is not that of" in fault
    assert "embeddings.shared.weight is [310, 16] where [300, 16] is expected; set vocab.model=" in fault


def test_a_model_whose_layers_are_not_whole_yet(prepared: Path, base: Path, refused: Refused) -> None:
    """The new run would count them in full at once."""
    assert main("train", [f"{prepared}/recipe.yaml", f"run={base}/ramped", "model.decoder.ramp=4", "train.updates=1",
                          "train.valid_bleu=false"]) == 0
    fault = refused("train", *words(prepared, base, "none"), f"train.init_from={base}/ramped")
    assert "model.decoder.ramp is 4, so its 2 layers are whole from update 8 on, but " in fault
    assert "is of update 1; take a later checkpoint, or train that run further" in fault


def test_a_begun_run_keeps_its_model(prepared: Path, base: Path, refused: Refused) -> None:
    if not (base / "tuned").exists():
        assert main("train", [*words(prepared, base), "train.updates=1"]) == 0
    assert "train.init_from: " in refused("train", *words(prepared, base), "train.init_from=null", "train.updates=9")
    fault = refused("train", *words(prepared, base), "train.updates=9", "train.ema=0.9")
    assert "train.ema: None -> 0.9" in fault


def test_dry_run_and_other_commands(
    prepared: Path, base: Path, refused: Refused, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main("train", [*words(prepared, base), "--dry-run"]) == 0
    assert f"begins with                        the weights of {base}/old/".replace(" ", "") in (
        capsys.readouterr().out.replace(" ", ""))
    assert "embeddings.shared.weight is" in refused("train", *words(prepared, base), "model.width=32", "--dry-run")
    assert "does not begin with fresh weights" in refused("diagnose", *words(prepared, base))
    assert "which has trained ω" in refused("profile", *words(prepared, base))


def test_the_running_average_is_the_model(prepared: Path, base: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = base / "averaging"
    options = ["train.updates=8", "train.save_every=4", "train.validate_every=4", "train.ema=0.7"]
    assert main("train", [*words(prepared, base, "averaging"), *options]) == 0
    checkpoint, recipe = run / "checkpoints" / "update-00000008", recipe_of(prepared, base, *options)
    average = {name: moments_in(checkpoint)[f"{name}.ema"] for name in weights_in(checkpoint)}
    assert not any(torch.equal(average[name], weight) for name, weight in weights_in(checkpoint).items())
    for used in (load_model(checkpoint), load_model(run, "best"), api.load(run)):
        assert used.checkpoint == checkpoint if isinstance(used, api.Run) else True
    loaded = load_model(checkpoint).model
    assert all(torch.equal(average[name], parameter) for name, parameter in loaded.named_parameters())
    # validations are of it, so the best checkpoint is
    data, ranks = open_prepared(recipe), Ranks.alone()
    engine = start_engine(recipe, layout_of(recipe, 1), (300, 300), ranks, initialise=False)
    engine.fill(model_in(checkpoint))
    valid = records(run, "valid")[-1]
    result = validate(recipe, data, engine, ranks)
    assert (result.loss, result.figures["bleu"]) == (valid["loss"], valid["bleu"])
    engine.fill(weights_in(checkpoint))
    assert validate(recipe, data, engine, ranks).loss != valid["loss"]
    # a run can begin with it; `average` takes the weights themselves
    other = begun(recipe_of(prepared, base, f"train.init_from={run}"))
    assert all(torch.equal(average[name], parameter) for name, parameter in other.named_parameters())
    assert main("average", [str(run), "--last=1"]) == 0
    mean = load_model(run, "averaged").model
    assert all(torch.equal(weights_in(checkpoint)[name], parameter) for name, parameter in mean.named_parameters())


def test_a_damaged_average_is_found(prepared: Path, base: Path, tmp_path: Path) -> None:
    if not (base / "averaging").exists():
        assert main("train", [*words(prepared, base, "averaging"), "train.updates=8", "train.ema=0.7"]) == 0
    checkpoint = shutil.copytree(base / "averaging" / "checkpoints" / "update-00000008", tmp_path / "update-00000008")
    content = bytearray((checkpoint / "moments.safetensors").read_bytes())
    content[-1] ^= 1
    (checkpoint / "moments.safetensors").write_bytes(content)
    with user_error("SHA-256 of moments.safetensors differs"):
        load_model(checkpoint)
