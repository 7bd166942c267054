"""Initialisation, tying, names, dropout and types of the model."""

from __future__ import annotations

import hashlib
import math

import pytest
import torch
from small_models import batch_of, layer_of
from torch import Tensor, nn

from deepnmt import config
from deepnmt.model.blocks import BLOCKS, DeepNorm, LayerPosition, Side
from deepnmt.model.dropout import Dropout, stable_hash
from deepnmt.model.init import Initialiser, fill, new_model
from deepnmt.model.layers import InputLayer
from deepnmt.model.positions import sinusoids
from deepnmt.model.transformer import Transformer
from deepnmt.tokens import PAD

NAMES: list[str] = list(config.choices.BLOCKS)
SIDES: list[Side] = ["encoder", "decoder"]
D, V = 16, 21


def shapes(
    block: str = "admin", *, tied: str = "all", dropout: float = 0.0, layers: int = 2, init: str = "auto"
) -> config.Model:
    stack = {"block": block, "layers": layers, "init": init}
    rates = {"dropout": dropout, "attention_dropout": dropout, "activation_dropout": dropout}
    return config.Model.model_validate(
        {"width": D, "heads": 4, "ffn": 24, "tied": tied, "max_length": 12, "encoder": stack, "decoder": stack, **rates}
    )


def batch() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    src, trg_in, trg_out = (torch.randint(4, V, (3, 6), generator=generator) for _ in range(3))
    src[1, 4:] = PAD
    trg_out[2, 2:] = PAD
    return src, torch.tensor([6, 4, 6]), trg_in, trg_out


# ---- initialisation


@pytest.mark.parametrize("block", NAMES)
@pytest.mark.parametrize("side", SIDES)
def test_a_layer_built_alone_equals_the_models(side: Side, block: str) -> None:
    torch.manual_seed(0)
    model = new_model(shapes(block), V, V, seed=5)
    torch.manual_seed(99)
    alone = layer_of(shapes(block), side, 1, seed=5)
    whole = model.get_submodule(f"{side}.layers.1").state_dict()
    assert whole.keys() == alone.state_dict().keys()
    assert all(torch.equal(whole[name], value) for name, value in alone.state_dict().items())


@pytest.mark.parametrize(("kind", "message"), [
    ("nan", "decoder.layers.0.ffn.fc1.bias was not filled: it contains NaN"),
    ("short", r"decoder.layers.0.ffn.fc1.bias has shape \[3\], but must have \[24\]"),
])
def test_a_source_must_fill_every_parameter(kind: str, message: str) -> None:
    model, first = shapes(), Initialiser(shapes(), V, V, 1)
    built = Transformer(model, V, V, 1)
    assert all(bool(parameter.isnan().all()) for parameter in built.parameters())
    wrong = torch.full((24,), math.nan) if kind == "nan" else torch.zeros(3)
    with pytest.raises(ValueError, match=message):
        fill(built, lambda name: wrong if name == "decoder.layers.0.ffn.fc1.bias" else first(name))


def test_weights_follow_the_seed() -> None:
    one, same, other = (new_model(shapes(), V, V, seed).state_dict() for seed in (5, 5, 6))
    assert all(torch.equal(one[name], same[name]) for name in one)
    for name, value in one.items():
        assert torch.equal(value, other[name]) == (value.ndim < 2)


def test_no_two_matrices_share_their_random_numbers() -> None:
    matrices = [p.flatten() for p in new_model(shapes(tied="none"), V, V, 1).parameters() if p.ndim == 2]
    assert len({round(m[0].item() / m.abs().max().item(), 6) for m in matrices}) == len(matrices)


def test_depth_does_not_change_a_layers_initial_weights() -> None:
    shallow, deep = (layer_of(shapes(layers=n), "encoder", 1, 1).state_dict() for n in (2, 7))
    assert all(torch.equal(shallow[name], deep[name]) for name in shallow)


def xavier_bound(rows: int, columns: int) -> float:
    return math.sqrt(6 / (rows + columns))


def gain_of(block: str, side: Side, matrix: str) -> float:
    """The factor on the Xavier bound that the paper of the block names, for 2 + 2 layers and the default init."""
    fused, query = (2**-0.5 if matrix in ("q", "k", "v") else 1.0), matrix in ("q", "k")
    if block == "deepnorm":
        return 1.0 if query else DeepNorm.constants(LayerPosition(side, 1, 2, 2, D))[1]
    if block == "fixup":  # 2·2 + 3·2 branches
        return {"fc1": 10**-0.5, "fc2": 0.0, "out": 0.0}.get(matrix, fused * 10 ** (-1 / 6))
    if block == "sub_ln":
        return fused * (1.0 if query else (math.log(6) * (math.log(4) / 3 if side == "encoder" else 1.0)) ** 0.5)
    if block == "t_fixup":
        return fused if query else (0.67 * 2**-0.25 if side == "encoder" else 18**-0.25)
    return fused * (2**-0.5 if block in ("b2t", "b2t_no_ln") else 1.0)


def matrices(state: dict[str, Tensor]) -> dict[tuple[str, str], Tensor]:
    """A layer's matrices by sub-layer and name; fused ones are split."""
    split = {}
    for name, value in state.items():
        if value.ndim == 2 and not name.startswith("rule."):
            sublayer, linear, _ = name.split(".")
            parts = linear if linear in ("qkv", "kv") else [linear]
            split |= {(sublayer, part): piece for part, piece in zip(parts, value.chunk(len(parts)), strict=True)}
    return split


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("block", NAMES)
def test_matrices_are_xavier_times_the_blocks_gain(block: str, side: Side) -> None:
    """Each weight is a fixed uniform number times the bound, so the ratio to Post-LN's is exactly the gain."""
    state = layer_of(shapes(block), side, 1, 1).state_dict()
    ours, plain = matrices(state), matrices(layer_of(shapes("post_ln"), side, 1, 1).state_dict())
    assert ours.keys() == plain.keys() and len(ours) == (6 if side == "encoder" else 10)
    for (sublayer, matrix), value in plain.items():
        base = gain_of("post_ln", side, matrix)
        bound = base * xavier_bound(*((24, D) if matrix in ("fc1", "fc2") else (D, D)))
        assert 0.9 * bound < value.abs().max() <= bound
        if block != "looks_linear" or sublayer != "ffn":  # orthogonal, see tests/model/test_block_models.py
            gain = 1.0 if block == "sub_ln" and sublayer == "cross_attn" else gain_of(block, side, matrix) / base
            torch.testing.assert_close(ours[sublayer, matrix], value * gain)
    for name, value in state.items():
        if value.ndim == 1 and not name.startswith(("rule.omegas", "rule.mix", "rule.gates")):
            zero = name.endswith(("bias", "shift", "rule.a"))
            assert value.eq(0.0 if zero else 1.0).all(), name


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("block", NAMES)
def test_every_block_can_be_depth_scaled(block: str, side: Side) -> None:
    """Each matrix of a stack of 4 layers is halved, with every block; nothing else changes."""
    scaled, plain = (layer_of(shapes(block, init=init, layers=4), side, 1, 1).state_dict()
                     for init in ("depth_scaled", "xavier"))
    for name, value in plain.items():
        torch.testing.assert_close(scaled[name], value * (0.5 if value.ndim == 2 else 1.0))


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("block", NAMES)
def test_xavier_separate_does_not_divide_query_key_and_value_by_sqrt_2(block: str, side: Side) -> None:
    """Matrices with a gain of 1/√2 become √2 times as large, nothing else changes; deepnorm has no such gain."""
    whole, plain = (layer_of(shapes(block, init=init), side, 1, 1).state_dict()
                    for init in ("xavier_separate", "xavier"))
    separate, fused = matrices(whole), matrices(plain)
    enlarged = {"deepnorm": (), "t_fixup": ("q", "k")}.get(block, ("q", "k", "v"))
    for (sublayer, matrix), value in fused.items():
        torch.testing.assert_close(separate[sublayer, matrix], value * (2**0.5 if matrix in enlarged else 1.0))
    assert all(torch.equal(whole[name], value) for name, value in plain.items() if value.ndim != 2)
    if block == "post_ln":
        assert 0.9 * xavier_bound(D, D) < separate["self_attn", "q"].abs().max() <= xavier_bound(D, D)


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("block", NAMES)
def test_fairseqs_draw_is_that_of_pytorchs_linear_in_the_ffn(block: str, side: Side) -> None:
    """FFN matrices and the biases of q, k, v, fc1, fc2; the bounds are ±1/√columns, times the block's factors."""
    ours, plain = (layer_of(shapes(block, init=init), side, 1, 1).state_dict() for init in ("fairseq", "xavier"))
    for name, value in plain.items():
        linear, _, last = name.rpartition(".")
        columns = 24 if "fc2" in linear else D
        if last == "bias" and linear.rpartition(".")[2] in ("qkv", "q", "kv", "fc1", "fc2"):
            assert value.abs().max() == 0 and 0.7 * columns**-0.5 < ours[name].abs().max() <= columns**-0.5
        elif value.ndim == 2 and ".fc" in name and block != "looks_linear":
            factor = value.abs().max() / xavier_bound(D, 24)  # of the block: 0 for fc2 with fixup
            assert ours[name].abs().max() == pytest.approx(float(factor) * columns**-0.5, rel=0.1)
        else:
            assert torch.equal(ours[name], value)


@pytest.mark.parametrize("block", NAMES)
def test_init_auto_is_depth_scaled_for_b2t_only(block: str) -> None:
    auto, chosen = (layer_of(shapes(block, init=init, layers=4), "decoder", 1, 1).state_dict() for init in
                    ("auto", "depth_scaled" if block in ("b2t", "b2t_no_ln") else "xavier"))
    assert all(torch.equal(auto[name], value) for name, value in chosen.items())


SOURCE, TARGET = 18**-0.25, 27**-0.25  # (9·2)^-1/4 and (9·3)^-1/4


@pytest.mark.parametrize(("encoder", "decoder", "tied", "factors"), [
    ("t_fixup", "t_fixup", "all", {"shared": SOURCE}),
    ("t_fixup", "t_fixup", "decoder", {"src": SOURCE, "trg": TARGET}),
    ("t_fixup", "t_fixup", "none", {"src": SOURCE, "trg": TARGET, "out": 1.0}),
    ("t_fixup", "pre_ln", "all", {"shared": SOURCE}),
    ("pre_ln", "t_fixup", "all", {"shared": TARGET}),
    ("pre_ln", "t_fixup", "decoder", {"src": 1.0, "trg": TARGET}),
])
def test_t_fixup_scales_the_tables_that_its_stacks_read(
    encoder: str, decoder: str, tied: str, factors: dict[str, float]
) -> None:
    def tables(first: str, second: str) -> dict[str, Tensor]:
        stacks = {"encoder": config.Stack(block=first, layers=2), "decoder": config.Stack(block=second, layers=3)}
        model = shapes(tied=tied).model_copy(update=stacks)
        for side in SIDES:  # the initialiser alone gives the same
            use = "src" if side == "encoder" else "trg"
            alone = Initialiser(model, V, V, 1)(f"embeddings.{config.choices.TYINGS[tied].tables[use]}.weight")
            assert torch.equal(alone, new_model(model, V, V, 1).table(use).weight)
        return dict(new_model(model, V, V, 1).embeddings.state_dict())

    plain, scaled = tables("pre_ln", "pre_ln"), tables(encoder, decoder)
    assert scaled.keys() == {f"{name}.weight" for name in factors}
    for name, factor in factors.items():
        torch.testing.assert_close(scaled[f"{name}.weight"], factor * plain[f"{name}.weight"])


def test_embeddings_have_the_stated_standard_deviation() -> None:
    weight = new_model(shapes(), 4000, 4000, 1).output_weight
    assert weight[PAD].eq(0).all()
    assert weight.std().item() == pytest.approx(D**-0.5, rel=0.02)


# ---- tying and names


@pytest.mark.parametrize(
    ("tied", "tables"), [("all", {"shared"}), ("decoder", {"src", "trg"}), ("none", {"src", "trg", "out"})]
)
def test_tying(tied: str, tables: set[str]) -> None:
    model = new_model(shapes(tied=tied), V, V, 1)
    assert set(model.embeddings) == tables
    model(batch_of(*batch())).loss.backward()
    for table in model.embeddings.values():
        assert isinstance(table, nn.Embedding)
        assert table.weight.grad is not None and table.weight.grad.any()
    expected = {"all": "shared", "decoder": "trg", "none": "out"}[tied]
    assert model.output_weight is model.get_parameter(f"embeddings.{expected}.weight")


def test_tying_all_needs_one_vocabulary() -> None:
    with pytest.raises(ValueError, match="21 and 22"):
        new_model(shapes(), V, V + 1, 1)


@pytest.mark.parametrize("block", NAMES)
def test_each_parameter_is_in_the_state_once(block: str) -> None:
    model = new_model(shapes(block), V, V, 1)
    assert list(model.state_dict()) == [name for name, _ in model.named_parameters()]
    names = set(model.state_dict())
    assert {"embeddings.shared.weight", "encoder.layers.1.ffn.fc1.weight"} < names
    assert "decoder.layers.0.cross_attn.kv.bias" in names
    without = not BLOCKS[block].layer_norms
    assert ("decoder.layers.1.rule.norms.2.weight" in names) != without
    assert any(".norms." in name for name in names) != without
    assert ("encoder.norm.weight" in names) == ("decoder.norm.bias" in names) == BLOCKS[block].final_norm
    mixed = {"encoder.layers.1.rule.mix.weights", "decoder.layers.0.rule.mix.norm.bias", "decoder.norm.mix.weights"}
    assert mixed & names == (mixed if block.startswith("dlcl") else set())
    assert ("encoder.norm.norm.weight" in names) == (block in (
        "dlcl", "siamese", "attn_res", "block_attn_res", "hyper", "mhc"))


def test_blocks_of_the_two_sides_are_independent() -> None:
    hybrid = shapes().model_copy(update={"encoder": config.Stack(block="post_ln", layers=1),
                                         "decoder": config.Stack(block="pre_ln", layers=1)})
    names = set(new_model(hybrid, V, V, 1).state_dict())
    assert "decoder.norm.weight" in names and "encoder.norm.weight" not in names


# ---- positions


def test_sinusoids_are_marians() -> None:
    table = sinusoids(9, 6)
    for position in range(9):
        for i in range(3):
            angle = position / 10000 ** (2 * i / 6)
            assert table[position, i].item() == pytest.approx(math.sin(angle), abs=1e-6)
            assert table[position, 3 + i].item() == pytest.approx(math.cos(angle), abs=1e-6)


def test_a_sentence_longer_than_max_length_is_an_error() -> None:
    model = new_model(shapes(), V, V, 1)
    with pytest.raises(ValueError, match=r"13 tokens exceeds model.max_length \(12\)"):
        model.encode(torch.full((1, 13), 5), torch.tensor([13]))


# ---- dropout


def test_masks_depend_on_the_key_only() -> None:
    model = new_model(shapes(dropout=0.3), V, V, 1).train()
    torch.manual_seed(1)
    first = model(batch_of(*batch(), key=4)).loss
    torch.manual_seed(2)
    torch.rand(17)
    assert torch.equal(first, model(batch_of(*batch(), key=4)).loss)
    assert not torch.equal(first, model(batch_of(*batch(), key=5)).loss)


@pytest.mark.parametrize("part", ["encoder.input", "encoder.layers.1", "decoder.layers.0"])
def test_masks_depend_on_the_runs_seed(part: str) -> None:
    one, other = (new_model(shapes(dropout=0.3), V, V, seed).train() for seed in (1, 2))
    other.load_state_dict(one.state_dict())
    x, memory = torch.randn(2, 5, D), torch.randn(2, 4, D)
    inputs = (x, memory) if part.startswith("decoder") else (x,)
    results = [model.get_submodule(part)(*inputs, dropout_key=4) for model in (one, one, other)]
    assert torch.equal(results[0], results[1])
    assert not torch.equal(results[0], results[2])


def test_masks_differ_between_layers() -> None:
    model = new_model(shapes(dropout=0.5), V, V, 1).train()
    masks: list[Tensor] = []
    for i in range(2):
        add = model.get_submodule(f"encoder.layers.{i}.rule.adds.0")
        add.register_forward_hook(lambda module, inputs, output: masks.append(output == 0))
    model(batch_of(*batch()))
    assert not torch.equal(masks[0], masks[1])


def test_the_output_of_every_sublayer_is_dropped() -> None:
    model = new_model(shapes(dropout=0.5, layers=1), V, V, 1).train()
    shares: list[float] = []
    for side, count in (("encoder", 2), ("decoder", 3)):
        for i in range(count):
            add = model.get_submodule(f"{side}.layers.0.rule.adds.{i}")
            add.register_forward_hook(lambda module, inputs, output: shares.append(float((output == 0).float().mean())))
    model(batch_of(*batch()))
    assert len(shares) == 5 and all(0.3 < share < 0.7 for share in shares)


def test_a_recomputed_layer_has_the_same_masks() -> None:
    model = new_model(shapes(dropout=0.3), V, V, 1).train()
    layer, x = model.encoder.layers[1], torch.randn(2, 5, D)
    first = layer(x, None, 9)
    model(batch_of(*batch()))
    assert torch.equal(layer(x, None, 9), first)


@pytest.mark.parametrize("block", ["post_ln", "sub_ln"])
@pytest.mark.parametrize("rate", ["dropout", "attention_dropout", "activation_dropout"])
def test_each_rate_has_an_effect_by_itself(rate: str, block: str) -> None:
    model = new_model(shapes(block).model_copy(update={rate: 0.5}), V, V, 1).train()
    keyed = [model(batch_of(*batch(), key=key)).loss for key in (4, 4, 5)]
    assert torch.equal(keyed[0], keyed[1]) and not torch.equal(keyed[0], keyed[2])
    layer, x = model.decoder.layers[0], torch.randn(2, 5, D)
    crossing = layer.cross_attn
    keys, values = crossing.keys_values(torch.randn(2, 4, D))
    for compute, wanted in ((lambda: layer.self_attn(x, None, True), "attention_dropout"),
                            (lambda: crossing(x, keys, values, None), "attention_dropout"),
                            (lambda: layer.ffn(x), "activation_dropout")):
        one, two = compute(), compute()
        assert torch.equal(one, two) is not (rate == wanted)


def test_evaluation_uses_no_random_numbers() -> None:
    model = new_model(shapes(dropout=0.3), V, V, 1).eval()
    before = torch.get_rng_state()
    assert torch.equal(model(batch_of(*batch(), key=4)).loss, model(batch_of(*batch(), key=5)).loss)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("p", [0.1, 0.5])
def test_dropout_has_its_rate_and_keeps_the_mean(p: float, dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    x = torch.ones(401, 503, dtype=dtype, requires_grad=True)
    y = Dropout(p).train()(x)
    kept = y != 0
    error = 4 * math.sqrt(p * (1 - p) / x.numel())
    assert kept.float().mean().item() == pytest.approx(1 - p, abs=error)
    assert (kept[:, 1:] == kept[:, :-1]).float().mean().item() == pytest.approx(p**2 + (1 - p) ** 2, abs=2 * error)
    rounding = 1e-4 if dtype == torch.float32 else 1e-2
    assert y[kept].float().unique().tolist() == pytest.approx([1 / (1 - p)], rel=rounding)
    (gradient,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(gradient, y.detach())


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_word_dropout_leaves_the_position_of_a_dropped_word(dtype: torch.dtype, side: Side) -> None:
    """Takase and Kiyono 2021: embedding · Bernoulli(1 - p), not scaled, then sqrt(D) and the position; bos is kept."""
    p, shape = 0.3, (61, 12, D)
    settings = shapes().model_copy(update={side: config.Stack(word_dropout=p)})
    layer, plain = (InputLayer(of, side, 1) for of in (settings, shapes()))
    embedded = torch.randn(shape, generator=torch.Generator().manual_seed(2)).to(dtype)
    found, whole, empty = layer(embedded, 4), plain(embedded, 4), plain(torch.zeros_like(embedded), 4)
    dropped = (found != whole).any(2)
    assert torch.equal(found, torch.where(dropped[:, :, None], empty, whole))
    drawn = dropped[:, 1:] if side == "decoder" else dropped
    assert bool(dropped[:, 0].any()) == (side == "encoder")
    assert drawn.float().mean().item() == pytest.approx(p, abs=4 * math.sqrt(p * (1 - p) / drawn.numel()))
    assert torch.equal(found, layer(embedded, 4))
    for other in (layer(embedded, 5), InputLayer(settings, side, 2)(embedded, 4)):
        assert not torch.equal((other != whole).any(2), dropped)
    assert torch.equal(layer.eval()(embedded, 4), whole)


def test_word_dropout_draws_anew_on_each_side_and_leaves_the_other_dropout_as_it_is() -> None:
    embedded = torch.ones(61, 12, D)
    words = config.Stack(word_dropout=0.5)
    both = shapes(dropout=0.2).model_copy(update={"encoder": words, "decoder": words})
    masks = [InputLayer(both, side, 1)(embedded, 4) for side in SIDES]
    plain = [InputLayer(shapes(dropout=0.2), side, 1)(embedded, 4) for side in SIDES]
    dropped = [(mask != other).any(2)[:, 1:] for mask, other in zip(masks, plain, strict=True)]
    assert not torch.equal(*dropped)
    for mask, other in zip(masks, plain, strict=True):  # the sines of position 0 are 0 themselves
        assert torch.equal(mask[:, 1:] == 0, other[:, 1:] == 0)


def test_hash_is_stable() -> None:
    digest = hashlib.blake2b(b"1\x002\x00encoder.layers.0", digest_size=8).digest()
    assert stable_hash(1, 2, "encoder.layers.0") == int.from_bytes(digest, "little") >> 1
    assert stable_hash(1, 23) != stable_hash(12, 3)


# ---- types


@pytest.mark.parametrize("block", NAMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_are_finite(dtype: torch.dtype, block: str) -> None:
    model = new_model(shapes(block, dropout=0.1), V, V, 1, label_smoothing=0.1).to(dtype).train()
    with torch.no_grad():
        for parameter in model.parameters():  # gates and matrices that are 0 at first stop gradients
            parameter.add_(0.05 * torch.randn_like(parameter))
    sums = model(batch_of(*batch()))
    assert sums.loss.dtype == torch.float32
    sums.loss.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all() and parameter.grad.any(), name


def test_activations_have_the_parameters_type() -> None:
    """Even if only the parameters are cast and the table of positions is not, as some engines do."""
    model = new_model(shapes(), V, V, 1)
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16()
    assert model.encode(*batch()[:2]).dtype == torch.bfloat16
