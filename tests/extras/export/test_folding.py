"""Folding: the folded model has the same logits for all weights, tyings and blocks; and it can be loaded."""

from __future__ import annotations

import copy
import itertools
from pathlib import Path
from typing import Any

import pytest
import tiny_run
import torch
from refusals import user_error
from torch import Tensor

from deepnmt import config
from deepnmt.checkpoint.average import average_run
from deepnmt.checkpoint.checkpoint import (
    Contents,
    load_model,
    moments_in,
    verify,
)
from deepnmt.cli import main
from deepnmt.config.choices import TYINGS
from deepnmt.extras.export.post_ln import compute_in_float64, fold_run, fold_weights, save_folded
from deepnmt.model.init import new_model
from deepnmt.model.transformer import Transformer

VOCAB = 40  # tiny_run's
KNOWN = ["admin", "admin_closed_form", "deepnorm"]


def shapes(encoder: str, decoder: str, tied: str = "all", **settings: Any) -> config.Model:
    return config.Model.model_validate({
        "width": 16, "heads": 2, "ffn": 24, "max_length": 300, "tied": tied,
        "encoder": {"block": encoder, "layers": 3}, "decoder": {"block": decoder, "layers": 2}, **settings,
    })


def as_trained(model: config.Model) -> Transformer:
    """A model whose every parameter is random: matrices, biases, norms, and ω between 1/3 and 3, some negative."""
    module = new_model(model, VOCAB, VOCAB, 1).eval()
    draw = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            noise = torch.empty_like(parameter).normal_(generator=draw)
            if "omegas" in name or name.endswith("input.gain"):
                parameter.copy_(3 ** torch.empty_like(parameter).uniform_(-1, 1, generator=draw))
                parameter[::5] *= -1
            else:
                parameter.add_(0.3 * noise)
    return module


def folded(module: Transformer, model: config.Model) -> tuple[Transformer, config.Model]:
    weights, plain = fold_weights({name: p.detach() for name, p in module.named_parameters()}, model)
    other = new_model(plain, VOCAB, VOCAB, 1).eval()
    assert {name for name, _ in other.named_parameters()} == weights.keys()
    other.load_state_dict(weights)
    return other, plain


def test_an_outdated_average_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    recipe = tiny_run.recipe_of(tmp_path / "run")
    tiny_run.write(recipe, 10)
    folder, newest = average_run(recipe), tiny_run.write(recipe, 20)
    with user_error("b2t"):  # which cannot be folded
        fold_run(recipe)
    [message] = caplog.messages
    assert message.startswith(f"{folder} was averaged") and str(newest) in message


@torch.no_grad()
def test_other_norms_gates_positions_and_sizes_fold_too() -> None:
    model = config.with_settings(shapes("admin", "deepnorm", "decoder"), {
        "norm": "rms_norm", "activation": "swiglu", "positions": "rotary", "decoder.width": 12, "decoder.heads": 3,
        "decoder.layer_drop": 0.1})
    module = as_trained(model).double()
    other, plain = folded(module, model)
    assert plain.decoder.block == "post_ln" and plain.shape("decoder") == (12, 3, 24)
    torch.testing.assert_close(logits(other.double()), logits(module), rtol=0, atol=2e-5)


def batch() -> tuple[Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(9)
    src, trg = (torch.randint(4, VOCAB, (3, 11), generator=draw) for _ in range(2))
    return src, torch.tensor([11, 7, 2]), trg


def logits(module: Transformer) -> Tensor:
    src, lengths, trg = batch()
    with torch.no_grad():
        found = module.logits(module.decode(trg, module.encode(src, lengths), lengths))
    return found[..., torch.arange(VOCAB) != 3]


def assert_close(ours: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)


@pytest.mark.parametrize("tied", TYINGS)
@pytest.mark.parametrize("block", KNOWN)
def test_the_logits_do_not_change(block: str, tied: str) -> None:
    model = shapes(block, block, tied)
    module = as_trained(model)
    other, plain = folded(module, model)
    assert (plain.encoder.block, plain.decoder.block, plain.tied) == ("post_ln", "post_ln", tied)
    assert not any("omegas" in name for name, _ in other.named_parameters())
    assert [p.shape for p in other.embeddings.parameters()] == [p.shape for p in module.embeddings.parameters()]
    assert_close(logits(other), logits(module))


@pytest.mark.parametrize(("encoder", "decoder"), [
    pair for pair in itertools.product([*KNOWN, "post_ln", "pre_ln", "b2t"], repeat=2) if set(pair) & set(KNOWN)
])
def test_each_stack_folds_alone(encoder: str, decoder: str) -> None:
    model = shapes(encoder, decoder)
    module = as_trained(model)
    other, plain = folded(module, model)
    for stack, block in ((plain.encoder, encoder), (plain.decoder, decoder)):
        assert stack.block == ("post_ln" if block in KNOWN else block)
        assert stack.input_gain == (block in KNOWN)
    assert_close(logits(other), logits(module))


def test_a_constant_omega_and_the_published_draw_fold_too() -> None:
    """The setting of the closed form goes with its block."""
    model = config.with_settings(shapes("admin_closed_form", "deepnorm"), {
        "encoder.init": "published", "encoder.output_change": "constant", "decoder.init": "published"})
    module = as_trained(model)
    other, plain = folded(module, model)
    assert (plain.encoder.block, plain.encoder.output_change, plain.decoder.block) == ("post_ln", "log", "post_ln")
    assert_close(other.encoder.input.gain, torch.full((16,), 6**0.5))  # n = 2 · 3
    assert_close(logits(other), logits(module))


def test_an_existing_gain_is_kept() -> None:
    stack = config.Stack(block="admin", layers=2, input_gain=True)
    model = shapes("admin", "admin").model_copy(update={"encoder": stack, "decoder": stack})
    module = as_trained(model)
    assert_close(logits(folded(module, model)[0]), logits(module))


def test_the_first_omega_is_left_out_where_it_is_1() -> None:
    model = shapes("admin", "admin")
    module = as_trained(model)
    with torch.no_grad():
        for side in (module.encoder, module.decoder):
            side.get_parameter("layers.0.rule.omegas.0").fill_(1.0)
    other, plain = folded(module, model)
    assert not plain.encoder.input_gain and not plain.decoder.input_gain
    assert not any("gain" in name for name, _ in other.named_parameters())
    assert_close(logits(other), logits(module))


def test_the_fold_is_that_of_appendix_c() -> None:
    """Two sub-layers of an encoder, written out."""
    model = shapes("admin", "post_ln")
    module = as_trained(model)
    other, _ = folded(module, model)
    ours, theirs = (m.encoder.get_submodule("layers.0") for m in (module, other))
    first, second = (ours.get_parameter(f"rule.omegas.{i}") for i in (0, 1))
    torch.testing.assert_close(other.encoder.input.gain, first)
    torch.testing.assert_close(theirs.get_parameter("self_attn.qkv.weight"),
                               ours.get_parameter("self_attn.qkv.weight") / first)
    torch.testing.assert_close(theirs.get_parameter("ffn.fc1.weight"), ours.get_parameter("ffn.fc1.weight") / second)
    for part in ("weight", "bias"):
        torch.testing.assert_close(theirs.get_parameter(f"rule.norms.0.{part}"),
                                   ours.get_parameter(f"rule.norms.0.{part}") * second)
    assert torch.equal(theirs.get_parameter("self_attn.out.weight"), ours.get_parameter("self_attn.out.weight"))
    last = "layers.2.rule.norms.1.weight"
    assert torch.equal(other.encoder.get_parameter(last), module.encoder.get_parameter(last))


@pytest.mark.parametrize("beams", [1, 3])
def test_step_by_step_decoding_does_not_change(beams: int) -> None:
    model = shapes("admin", KNOWN[-1])
    module = as_trained(model)
    src, lengths, trg = batch()
    found = []
    for each in (module, folded(module, model)[0]):
        with torch.no_grad():
            cache = each.start_cache(each.encode(src, lengths), lengths, beams, 11)
            steps = [each.step(trg[:, [t]].expand(-1, beams).flatten(), cache) for t in range(11)]
        found.append(torch.stack(steps, dim=1))
    assert_close(found[1], found[0])
    with torch.no_grad():
        whole = module.decode(trg, module.encode(src, lengths), lengths)
    assert_close(found[1].view(3, beams, 11, 16)[:, 0], whole)


def test_training_mode_does_not_change_either() -> None:
    """The dropout masks depend on seed, key and layer alone, so the folded model has the same."""
    model = shapes("admin", "deepnorm", dropout=0.3)
    module = as_trained(model).train()
    other = folded(module, model)[0].train()
    assert_close(logits(other), logits(module))
    assert not torch.allclose(logits(module), logits(module.eval()), atol=0.1)


def test_what_cannot_be_folded_is_rejected() -> None:
    model = shapes("b2t", "pre_ln")
    with user_error(r"^model.encoder.block is b2t and model.decoder.block is pre_ln, but only"):
        fold_weights(dict(as_trained(model).named_parameters()), model)
    model = shapes("b2t", "admin")
    module = as_trained(model)
    with torch.no_grad():
        module.decoder.get_parameter("layers.1.rule.omegas.2")[4] = 0.0
    with user_error(r"^ω of sub-layer 3 of decoder.layers.1 has a zero"):
        fold_weights({name: p.detach() for name, p in module.named_parameters()}, model)


def test_one_layer_at_a_time_is_in_float64() -> None:
    """Gives bit for bit what a whole model in float64 gives, which fp32 does not."""
    module = as_trained(shapes("admin", "deepnorm"))
    whole, single = logits(copy.deepcopy(module).double()), logits(module)
    layers = [*module.encoder.layers, *module.decoder.layers]
    tensors = [parameter.data_ptr() for layer in layers for parameter in layer.parameters()]
    wide: list[int] = []

    def count(*_: object) -> None:
        wide.append(sum(next(layer.parameters()).dtype == torch.float64 for layer in layers))

    compute_in_float64(module)
    for layer in layers:
        layer.register_forward_pre_hook(count)
    assert torch.equal(logits(module), whole) and not torch.equal(single.double(), whole)
    assert wide == [1] * len(layers)
    assert tensors == [parameter.data_ptr() for layer in layers for parameter in layer.parameters()]


def trained_run(folder: Path, encoder: str = "admin", decoder: str = "admin") -> tuple[config.Recipe, Path]:
    """A run with one checkpoint whose every parameter is random."""
    recipe = tiny_run.recipe_of(folder, model=shapes(encoder, decoder).model_dump())
    recipe = config.with_settings(recipe, {"admin.profile": "omega.json"})
    return recipe, saved(recipe, folder / "checkpoints", as_trained(recipe.model))


def saved(recipe: config.Recipe, folder: Path, module: Transformer) -> Path:
    return tiny_run.save(folder, Contents(dict(module.named_parameters()), {}, tiny_run.state_of(10),
                                            config.dump_recipe(recipe), tiny_run.VOCABS))


def test_the_folder_is_a_checkpoint_like_the_others(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe, source = trained_run(tmp_path / "run", decoder="deepnorm")
    (tmp_path / "run" / "recipe.yaml").write_text(config.dump_recipe(recipe), encoding="utf-8")
    assert main("fold", [str(tmp_path / "run"), "model.width=16"]) == 2
    assert "model.width=16 has no effect here because a trained model is folded as it is" in capsys.readouterr().err
    assert main("fold", [str(tmp_path / "run")]) == 0
    output = capsys.readouterr().out
    assert "encoder (admin) and decoder (deepnorm) as post_ln; logits of random sentences differ by at most" in output
    target = tmp_path / "run" / "folded"
    verify(target)
    before, after = load_model(source), load_model(target)
    assert_close(logits(after.model), logits(before.model))
    assert after.recipe.model.encoder == config.Stack(block="post_ln", layers=3, input_gain=True)
    assert after.recipe.optimizer == recipe.optimizer and after.state.update == 10
    assert after.recipe.admin.profile is None  # which a recipe without Admin must not have
    assert after.state.extra["folded"] == str(source) and after.src_vocab.bytes == tiny_run.VOCAB
    with user_error("holds no optimizer moments"):
        moments_in(target)
    text = tmp_path / "in"
    text.write_text("\n".join(tiny_run.SENTENCES) + "\n", encoding="utf-8")
    outputs = []
    for checkpoint in (source, target):
        out = tmp_path / f"out-{checkpoint.name}"
        assert main("translate", [str(tmp_path / "run"), "--checkpoint", str(checkpoint), "--input", str(text),
                                  "--output", str(out), "translate.beam=3", "translate.max_ratio=1.0"]) == 0
        outputs.append(out.read_text(encoding="utf-8"))
    assert outputs[0] == outputs[1] and outputs[0].count("\n") == 3


def test_a_folder_of_something_else_is_not_replaced(tmp_path: Path) -> None:
    _, source = trained_run(tmp_path / "run")
    (tmp_path / "thesis").mkdir()
    with user_error("thesis exists and is not a checkpoint"):
        save_folded(tmp_path / "run", tmp_path / "thesis")
    (tmp_path / "file").write_text("")
    with user_error("file cannot be written: File exists; set --output to a folder"):
        save_folded(tmp_path / "run", tmp_path / "file" / "folded")
    with user_error("is a checkpoint from which training can resume, and the folded model would replace it"):
        save_folded(tmp_path / "run", source)
    save_folded(tmp_path / "run", tmp_path / "folded")
    with user_error("is the checkpoint to fold"):
        save_folded(tmp_path / "folded", tmp_path / "folded")


def test_a_difference_too_large_is_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained_run(tmp_path / "run")
    monkeypatch.setattr("deepnmt.extras.export.post_ln.LARGEST_DIFFERENCE", 1e-12)
    with user_error("an ω close to 0; use the checkpoint as it is"):
        save_folded(tmp_path / "run", tmp_path / "folded")
    assert not (tmp_path / "folded").exists()


def test_the_limit_on_the_difference_is_absolute(tmp_path: Path) -> None:
    """Logits a thousand times as large are rejected, although the relative difference is the same."""
    recipe, source = trained_run(tmp_path / "run")
    before, found = load_model(source).model, save_folded(source, tmp_path / "folded")
    after = load_model(tmp_path / "folded").model
    assert 0 < found.difference < 0.5 * float((logits(after) - logits(before)).abs().max())
    torch.testing.assert_close(logits(after.double()), logits(before.double()), rtol=0, atol=2 * found.difference)
    for parameter in before.decoder.get_submodule("layers.1.rule.norms.2").parameters():
        parameter.data *= 1000
    with user_error(r"the largest is \d+\.\d\), but at most 1e-05 is allowed: rounding the"):
        save_folded(saved(recipe, tmp_path / "large", before.float()), tmp_path / "other")
