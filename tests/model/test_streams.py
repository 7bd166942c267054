"""The residual stream that a block owns: packing, LayerDrop, optimizer rules, the clock of ProRes; and the blocks of
2021 to 2026 against published code and against what their papers claim of their start."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from published_blocks import FFN, FIXTURE, HEADS, LAYERS, STREAMS, branch, fill, wave
from published_blocks import D as WIDTH
from small_models import BLOCKS, VOCAB, batch, batch_of, model_of, shapes
from test_blocks import branches_of, new, position_of, stream_of
from tiny_engines import batches, build, export_state, recipe_with, step
from torch import nn

from deepnmt import config
from deepnmt.model import blocks
from deepnmt.model.blocks import SIDES, LayerPosition, Side, pack, set_clock, tensors, unpack
from deepnmt.model.init import new_model
from deepnmt.model.transformer import run_layers
from deepnmt.optim.groups import group_key
from deepnmt.processes.ranks import Ranks

D = 16
PRE_LN_AT_FIRST = ["hyper", "mhc"]


def fresh(block: str, layers: int = 3, **stack: Any) -> Any:
    model = shapes(block, (layers, layers))
    stacks = {side: model.stack(side).model_copy(update=stack) for side in SIDES}
    return new_model(model.model_copy(update=stacks), VOCAB, VOCAB, seed=1)


def data() -> Any:
    return batch_of(*batch([7, 3, 5], [6, 2, 4]))


# ---- the stream


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("block", BLOCKS)
def test_every_layer_gets_what_its_block_says(block: str, side: Side) -> None:
    """So many tensors enter it, and they survive packing; so a pipeline may split there."""
    model, seen = model_of(block), []
    stack = model.get_submodule(side)
    for part in (*stack.get_submodule("layers").children(), stack.get_submodule("norm")):
        part.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    model(data())
    assert [len(tensors(x)) for x in seen] == [
        blocks.BLOCKS[block].carried(LayerPosition.of(shapes(block), side, index)) for index in range(3)]
    for x in seen:
        assert pack(x).shape[-1] == D * len(tensors(x))
        assert all(map(torch.equal, tensors(unpack(pack(x), D)), tensors(x)))


@pytest.mark.parametrize("block", BLOCKS)
def test_a_dropped_layer_is_a_layer_less(block: str) -> None:
    """The stream passes it by as a whole; of blocks that keep each output there are zeros (Attention Residuals) or the
    output below once more (DLCL). Every parameter has a gradient all the same."""
    model = model_of(block)
    layer, x = model.encoder.layers[1].train(), stream_of(block, "encoder")
    if block == "attn_res":
        assert isinstance(x, tuple) and len(x) == 3  # the stack's input and both sub-layers of layer 0
    layer.layer_drop = 1.0
    y = layer(x)
    kept = tensors(x)
    added = tensors(y)[len(kept) :]
    if block.startswith("dlcl"):
        assert torch.equal(tensors(y)[-1], kept[-1])
    else:
        assert all(map(torch.equal, tensors(y), kept)) and not any(bool(each.any()) for each in added)
    sum(each.sum() for each in tensors(y)).backward()
    assert all(p.grad is not None for p in layer.rule.parameters())


@pytest.mark.parametrize("block", ["siamese", "attn_res", "block_attn_res", "mhc"])
def test_recomputing_layers_changes_no_gradient(block: str) -> None:
    model, found = model_of(block), []
    for group in (0, 1, 2):
        model.recompute = group
        model.zero_grad()
        model(data()).loss.backward()
        found.append([p.grad.clone() for p in model.parameters()])
    for recomputed in found[1:]:
        torch.testing.assert_close(recomputed, found[0], rtol=1e-6, atol=1e-7)


def test_parameters_of_streams_have_rules_of_their_own() -> None:
    """Muon takes no map of a gate, and what is static in it is not decayed."""
    keys = {}
    for block in ("hyper", "mhc", "attn_res", "pre_ln"):
        recipe = recipe_with(model={**shapes(block).model_dump(), "max_length": 512}, optimizer={
            "name": "muon", "momentum": 0.95, "weight_decay": 0.1, "decay_norms_and_biases": True})
        for name, p in new_model(recipe.model, VOCAB, VOCAB, 1).named_parameters():
            keys[f"{block} {name.split('layers.1.')[-1]}"] = group_key(name, p.shape, recipe)
    for block in PRE_LN_AT_FIRST:
        assert keys[f"{block} rule.gates.0.maps"][:3] == (0.1, 1.0, False)
        assert [keys[f"{block} rule.gates.0.{name}"].weight_decay for name in ("static", "scales")] == [0, 0]
        assert keys[f"{block} ffn.fc1.weight"][:3] == (0.1, 1.0, True)
    assert keys["attn_res rule.mixes.1.gate.query"].weight_decay == 0
    assert keys["attn_res encoder.norm.mix.gate.query"].weight_decay == 0
    assert keys["pre_ln rule.norms.0.weight"].weight_decay == 0.1


# ---- ProRes


def test_prores_gives_each_layer_its_share_and_then_all() -> None:
    """min(t / (T·l), 1) with T = 4; after T·L updates the model is that of its block, to the bit."""
    ramped, plain = fresh("pre_ln", ramp=4), fresh("pre_ln")
    for update, shares in ((2, [0.5, 0.25, 1 / 6]), (6, [1.0, 0.75, 0.5]), (12, [1.0, 1.0, 1.0])):
        set_clock(ramped, update)
        assert [layer.rule.share for layer in ramped.encoder.layers] == pytest.approx(shares)
    assert torch.equal(ramped(data()).loss, plain(data()).loss)
    set_clock(ramped, 0)  # before the first update nothing is added
    src, lengths, *_ = batch([5, 5], [4, 4])
    x = ramped.encoder.input(ramped.table("src")(src))
    assert torch.equal(ramped.encode(src, lengths), ramped.encoder.norm(x))


def test_a_resumed_run_goes_on_with_the_shares_of_its_update() -> None:
    """They are a function of the update's number, which no checkpoint needs to hold."""
    stack = config.Stack(block="keel", layers=2, ramp=4)
    model = shapes("keel").model_copy(update={"max_length": 512, "encoder": stack})
    recipe, ranks = recipe_with(model=model.model_dump()), Ranks.alone()
    first = build(recipe, ranks)
    for update in range(3):
        step(first, batches(update, 1), ranks)
    saved = {state.name: state for state in export_state(first)}
    moments = {name: tensor for state in saved.values() for name, tensor in state.moments.items()}
    second = build(recipe, ranks)
    second.fill(lambda name: saved[name].weight, moments.__getitem__, 3)
    for engine in (first, second):
        shares = [layer.rule.share for layer in engine.module.get_submodule("encoder.layers").children()]
        assert shares == [0.75, 0.375]
    assert step(first, batches(3, 1), ranks) == step(second, batches(3, 1), ranks)


@pytest.mark.parametrize("block", BLOCKS)
def test_prores_goes_with_every_block(block: str) -> None:
    """A share of 1/2 is what branches of half the size would give."""
    rule, f, x = new(block, position_of("encoder")), branches_of("encoder"), stream_of(block, "encoder")
    with torch.no_grad():
        halved = rule(x, [lambda h, g=g: 0.5 * g(h) for g in f])  # type: ignore[misc]
        rule.share = 0.5
        for ours, theirs in zip(tensors(rule(x, f)), tensors(halved), strict=True):
            torch.testing.assert_close(ours, theirs)


# ---- how blocks begin


@torch.no_grad()
@pytest.mark.parametrize("block", PRE_LN_AT_FIRST)
def test_hyper_connections_begin_as_pre_ln(block: str) -> None:
    ours, theirs = fresh(block)(data()).loss, fresh("pre_ln")(data()).loss
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=0)


@pytest.mark.parametrize("block", PRE_LN_AT_FIRST)
@pytest.mark.parametrize("mix", ["sinkhorn", "identity"])
def test_streams_do_not_stay_alike(block: str, mix: str) -> None:
    """One update separates them; a start in which all are treated alike would have one gradient for all."""
    model = fresh(block, **({"mix": mix} if block == "mhc" else {}))
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    for _ in range(2):
        optimizer.zero_grad()
        model(data()).loss.backward()
        optimizer.step()
    streams = run_layers(model.encoder.present, 0, model.encoder.start(torch.randn(2, 5, D)), None, 0)
    parts = torch.stack(tensors(streams)).detach()
    assert float((parts - parts.mean(0)).abs().max()) > 1e-4 * float(parts.abs().max())


@torch.no_grad()
def test_keels_first_layer() -> None:
    """Its first sub-layer is Pre-LN, and its second has α = 1; above it is α = 2 · 3 everywhere."""
    rules = [layer.rule for layer in fresh("keel").encoder.layers]
    assert [rule.alphas for rule in rules] == [[1.0, 1.0], [6.0, 6.0], [6.0, 6.0]]
    assert fresh("keel").decoder.layers[0].rule.alphas == [1.0, 1.0, 9.0]
    f, x = branches_of("encoder"), torch.randn(2, 5, D)
    first, second = f
    h = x + first(nn.functional.layer_norm(x, (D,)))
    expected = nn.functional.layer_norm(h + second(nn.functional.layer_norm(h, (D,))), (D,))
    torch.testing.assert_close(rules[0](x, f), expected)


@torch.no_grad()
def test_mix_ln_is_post_ln_in_its_lowest_quarter() -> None:
    assert [layer.rule.post for layer in fresh("mix_ln", 9).encoder.layers] == [True] * 2 + [False] * 7
    f, x = branches_of("encoder"), torch.randn(2, 5, D)
    position = LayerPosition("encoder", 1, 9, 9, D)
    assert torch.equal(new("mix_ln", position)(x, f), new("post_ln", position)(x, f))


@torch.no_grad()
def test_layer_norm_scaling_folds_into_pre_ln() -> None:
    """With γ and β of layer l divided by √l the models are equal but for rounding."""
    ours, theirs = model_of("lns"), model_of("pre_ln")
    weights = dict(ours.state_dict())
    for side in SIDES:
        for name in [name for name in weights if name.startswith(f"{side}.layers.1.rule.norms")]:
            weights[name] = weights[name] * 2**-0.5
    theirs.load_state_dict(weights)
    torch.testing.assert_close(ours(data()).loss, theirs(data()).loss, rtol=1e-6, atol=0)


@torch.no_grad()
def test_sub_ln_norms_before_the_last_matrix() -> None:
    layer = model_of("sub_ln").encoder.layers[1]
    x, seen = torch.randn(2, 5, D), {}
    for name in ("self_attn.out", "ffn.fc2"):
        layer.get_submodule(name).register_forward_hook(lambda _m, given, _o, name=name: seen.update({name: given[0]}))
    layer.self_attn.norm.reset_parameters()
    layer.ffn.norm.reset_parameters()
    layer(x)
    for given in seen.values():
        torch.testing.assert_close(given.mean(-1), torch.zeros(2, 5), rtol=0, atol=1e-5)
        torch.testing.assert_close(given.var(-1, correction=0), torch.ones(2, 5), rtol=1e-2, atol=0)
    assert not hasattr(model_of("sub_ln").decoder.layers[1].cross_attn, "norm")


def test_block_attention_residuals_carry_no_more_than_their_blocks() -> None:
    """At 100 layers: N + 1 tensors, where the full form has one for each sub-layer."""
    for block, most in (("block_attn_res", 9), ("attn_res", 301)):
        stack = config.Stack(block=block, layers=100)
        carried = [LayerPosition("decoder", index, 100, 100, D, stack) for index in range(101)]
        assert max(position.block.carried(position) for position in carried) == most


# ---- published code


def random(module: nn.Module) -> None:
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(std=0.3)


@torch.no_grad()
@pytest.mark.parametrize("std", [0.1, 1.0])
def test_mhc_is_that_of_deepseek_v4(std: float) -> None:
    """As Hugging Face's transformers has it, which uses the transpose of its matrix: H_res' logits are transposed, too.
    It adds 1e-6 in its Sinkhorn rounds."""
    theirs_of = pytest.importorskip("transformers.models.deepseek_v4.modeling_deepseek_v4").DeepseekV4HyperConnection
    torch.manual_seed(0)
    settings = SimpleNamespace(hc_mult=4, hc_sinkhorn_iters=20, hc_eps=1e-6, rms_norm_eps=1e-6, hidden_size=D)
    theirs, gate = theirs_of(settings), new("mhc", position_of("encoder")).get_submodule("gates.0")
    theirs.fn.normal_(std=std / 8)
    theirs.base.normal_(std=std)
    theirs.scale.fill_(0.5)
    order = torch.cat([torch.arange(8), 8 + torch.arange(16).view(4, 4).T.flatten()])
    gate.get_parameter("maps").copy_(theirs.fn[order])
    gate.get_parameter("static").copy_(theirs.base[order])
    gate.get_parameter("scales").copy_(theirs.scale)
    h = torch.randn(2, 5, 4, D)
    post, comb, collapsed = theirs(h)
    ours = gate(h)
    torch.testing.assert_close((ours[..., 0].unsqueeze(-1) * h).sum(-2), collapsed, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(ours[..., -1], post, rtol=1e-4, atol=1e-5)
    mixed = ours[..., 1:-1].transpose(-1, -2) @ h
    torch.testing.assert_close(mixed, comb.transpose(-1, -2) @ h, rtol=1e-4, atol=2e-5)


@torch.no_grad()
def test_peri_ln_with_cross_attention_is_t5gemmas_decoder_layer() -> None:
    code = pytest.importorskip("transformers.models.t5gemma.modeling_t5gemma")
    settings = pytest.importorskip("transformers.models.t5gemma.configuration_t5gemma").T5GemmaModuleConfig(
        hidden_size=D, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2,
        head_dim=8, vocab_size=32, attn_implementation="eager")
    settings.is_decoder, settings.cross_attention_hidden_size, settings.dropout_rate = True, D, 0.0
    layer, ours = code.T5GemmaDecoderLayer(settings, 0).eval(), new("peri_ln", position_of("decoder"))
    random(layer)
    for i, name in enumerate(("self_attn", "cross_attn", "feedforward")):
        ours.norms[i] = layer.get_submodule(f"pre_{name}_layernorm")
        ours.get_submodule("out_norms")[i] = layer.get_submodule(f"post_{name}_layernorm")  # type: ignore[index, operator]
    x, memory = torch.randn(2, 5, D), torch.randn(2, 7, D)
    turns = code.T5GemmaRotaryEmbedding(settings)(x, torch.arange(5)[None].expand(2, -1))
    theirs = layer(x, position_embeddings=turns, encoder_hidden_states=memory)
    nothing: dict[str, Any] = {"attention_mask": None, "past_key_values": None}
    found = ours(x, [
        lambda h: layer.self_attn(hidden_states=h, position_embeddings=turns, **nothing)[0],
        lambda h: layer.cross_attn(hidden_states=h, encoder_hidden_states=memory, **nothing)[0], layer.mlp])
    torch.testing.assert_close(found, theirs[0] if isinstance(theirs, tuple) else theirs, rtol=0, atol=0)


@torch.no_grad()
def test_the_weights_of_attention_residuals_are_those_of_inkling2() -> None:
    """As Hugging Face's transformers has it, which also norms the values; in the paper (figure 2) they are as they
    are."""
    code = pytest.importorskip("transformers.models.inkling2.modeling_inkling2")
    theirs = code.Inkling2BlockAttentionResidual(SimpleNamespace(hidden_size=D))
    ours = new("attn_res", position_of("encoder")).get_submodule("mixes.0")
    theirs.query.normal_()
    ours.get_parameter("gate.query").copy_(theirs.query * D**-0.5)
    sources = torch.randn(6, 2, 5, D).unbind()
    normed = [nn.functional.rms_norm(v, (D,), eps=1e-6) for v in sources]
    weights = ours.get_submodule("gate")(sources)
    expected = theirs(torch.stack(sources[:-1], -2), sources[-1])[0]
    a = weights.unsqueeze(-1)
    torch.testing.assert_close((a * torch.stack(normed, -2)).sum(-2), expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(ours(sources), (a * torch.stack(sources, -2)).sum(-2), rtol=1e-5, atol=1e-6)


def published(name: str, *shape: int) -> torch.Tensor:
    """What published code puts out, as `tests/support/published_blocks.py` has computed it."""
    return torch.tensor(json.loads(FIXTURE.read_text(encoding="utf-8"))[name], dtype=torch.float64).view(shape)


@torch.no_grad()
def test_siamese_norm_is_that_of_its_authors() -> None:
    """Both streams of SiameseNorm 70efa00c after three layers."""
    streams: Any = (wave(1, 2, 3, WIDTH),) * 2
    for index in range(LAYERS):
        rule: Any = new("siamese", LayerPosition("encoder", index, LAYERS, LAYERS, WIDTH)).double()
        for i in range(2):
            for number, norms in enumerate((rule.post_norms, rule.pre_norms, rule.norms)):
                fill(norms[i], 10 * index + 3 * i + number)
        streams = rule(streams, [branch(2 * index), branch(2 * index + 1)])
    torch.testing.assert_close(torch.stack(streams), published("siamese", 2, 2, 3, WIDTH), rtol=0, atol=1e-11)


@torch.no_grad()
@pytest.mark.parametrize(("block", "layers"), [("lns", LAYERS), ("mix_ln", 4)])
def test_layers_of_one_stream_are_those_of_their_authors(block: str, layers: int) -> None:
    """LayerNorm-Scaling 3ac54dde, and MixLN ff45826 with one Post-LN layer of four, without the norm on top."""
    x = wave(1, 2, 3, WIDTH)
    for index in range(layers):
        position = LayerPosition("encoder", index, layers, layers, WIDTH, norm_kind="rms_norm")
        rule: Any = new(block, position).double()
        for i in range(2):
            fill(rule.norms[i], 2 * index + i)
        x = rule(x, [branch(2 * index), branch(2 * index + 1)])
    torch.testing.assert_close(x, published(block, 2, 3, WIDTH), rtol=0, atol=1e-11)


@torch.no_grad()
def test_hyper_connections_are_those_that_are_published() -> None:
    """hyper-connections 47751035, with its RMSNorm and a branch that has no norm."""
    rule: Any = new("hyper", LayerPosition("encoder", 2, 6, 6, WIDTH, norm_kind="rms_norm")).double()
    gate = rule.gates[1]  # of the sixth sub-layer
    gate.norm.eps = 0.0
    gate.maps.copy_(torch.cat([wave(1, WIDTH, STREAMS + 1), wave(4, WIDTH)[:, None]], 1))
    gate.static.copy_(torch.cat([wave(0, STREAMS, STREAMS + 1), wave(3, STREAMS)[:, None]], 1).flatten())
    gate.scales.copy_(torch.stack([wave(2), wave(5)]))
    rule.norms[1] = nn.Identity()
    found = rule.join(1, wave(9, 2, 3, STREAMS, WIDTH).unbind(-2), branch(1))
    expected = published("hyper", 2, 3, STREAMS, WIDTH)
    torch.testing.assert_close(torch.stack(found, -2), expected, rtol=0, atol=1e-11)


@torch.no_grad()
def test_the_sub_layers_of_sub_ln_are_those_of_torchscale() -> None:
    """torchscale 4d1e0e82: its self-attention and FFN have an inner norm, and its cross-attention has none.
    Its constants are in `test_model.py`."""
    model = config.Model.model_validate({
        "width": WIDTH, "heads": HEADS, "ffn": FFN, "activation": "gelu", "max_length": 32,
        **{side: {"block": "sub_ln", "layers": 1} for side in SIDES}})
    layer: Any = new_model(model, VOCAB, VOCAB, 1).eval().double().decoder.layers[0]
    x, memory = wave(1, 2, 3, WIDTH), wave(2, 2, 4, WIDTH)

    def parameters(number: int, names: list[str], shapes: dict[str, tuple[int, ...]]) -> dict[str, torch.Tensor]:
        """Those of their module, in the order of its names."""
        return {name: 0.5 * wave(100 * number + index, *shapes[name]) for index, name in enumerate(names)}

    names = [f"{part}_proj.{kind}" for part in ("k", "out", "q", "v") for kind in ("bias", "weight")]
    square = {name: (WIDTH,) if name.endswith("bias") else (WIDTH, WIDTH) for name in names}
    inner = [f"inner_attn_ln.{kind}" for kind in ("bias", "weight")]
    own = parameters(0, [*inner, *names], {**square, **dict.fromkeys(inner, (WIDTH,))})
    other = parameters(1, names, square)
    for kind in ("bias", "weight"):
        layer.self_attn.get_parameter(f"qkv.{kind}").copy_(torch.cat([own[f"{p}_proj.{kind}"] for p in "qkv"]))
        layer.self_attn.get_parameter(f"out.{kind}").copy_(own[f"out_proj.{kind}"])
        layer.self_attn.get_parameter(f"norm.{kind}").copy_(own[f"inner_attn_ln.{kind}"])
        layer.cross_attn.get_parameter(f"q.{kind}").copy_(other[f"q_proj.{kind}"])
        layer.cross_attn.get_parameter(f"kv.{kind}").copy_(torch.cat([other[f"{p}_proj.{kind}"] for p in "kv"]))
        layer.cross_attn.get_parameter(f"out.{kind}").copy_(other[f"out_proj.{kind}"])
    order = ["fc1.bias", "fc1.weight", "fc2.bias", "fc2.weight", "norm.bias", "norm.weight"]  # theirs: ffn_layernorm
    for index, name in enumerate(order):
        parameter = layer.ffn.get_parameter(name)
        parameter.copy_(0.5 * wave(200 + index, *parameter.shape))
    found = {"self_attn": layer.self_attn(x, None, causal=False), "ffn": layer.ffn(x),
             "cross_attn": layer.cross_attn(x, *layer.cross_attn.keys_values(memory), None)}
    for name, output in found.items():  # torchscale's softmax and activation are in fp32
        assert float((output - published(name, 2, 3, WIDTH)).abs().max()) < 1e-6, name
