"""Whole models of every block: DLCL's stacks, initial state, first updates, and pairs of blocks."""

from __future__ import annotations

import itertools

import pytest
import torch
from small_models import BLOCKS, VOCAB, batch, batch_of, layer_of, model_of, shapes
from torch import Tensor, nn
from torch.nn import functional as F

from deepnmt import config
from deepnmt.model.init import new_model
from deepnmt.model.transformer import Stack, Transformer

D, H = 16, 4
NAMES = list(config.choices.BLOCKS)
PAIRS = list(zip(NAMES, [*NAMES[1:], NAMES[0]]))  # every block on both sides, beside another one


def pair(encoder: str, decoder: str, layers: int = 2, init: str = "auto") -> config.Model:
    stacks = [{"block": block, "layers": layers, "init": init} for block in (encoder, decoder)]
    return config.Model.model_validate(shapes("post_ln").model_dump() | dict(zip(("encoder", "decoder"), stacks)))


def fresh(block: str, layers: int = 2) -> Transformer:
    return new_model(pair(block, block, layers), VOCAB, VOCAB, seed=1).eval()


def inputs(model: Transformer) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Ids and lengths of unpadded sentences, and what enters the stacks."""
    src, _, trg, _ = batch([5, 5], [4, 4])
    return src, trg, model.encoder.input(model.table("src")(src)), model.decoder.input(model.table("trg")(trg))


# ---- DLCL's stacks


def by_the_matrix(stack: Stack, x: Tensor, pre_norm: bool) -> Tensor:
    """An encoder of DLCL layers as its paper writes it: a lower-triangular W, an LN for each y."""
    mixes, ys = [*(layer.rule.mix for layer in stack.layers), stack.norm.mix], [x]

    def mixed() -> Tensor:
        row = mixes[len(ys) - 1]
        if not pre_norm:
            return row.norm(sum(w * y for w, y in zip(row.weights, ys, strict=True)))
        return sum(w * mixes[k].norm(y) for k, (w, y) in enumerate(zip(row.weights, ys, strict=True)))

    for layer in stack.layers:
        x = mixed()
        for i in range(2):
            h = layer.rule.norms[i](x) if pre_norm else x
            x = x + (layer.ffn(h) if i else layer.self_attn(h, None, causal=False))
            x = x if pre_norm else layer.rule.norms[i](x)
        ys.append(x)
    return stack.norm.norm(mixed())


@torch.no_grad()
@pytest.mark.parametrize("block", ["dlcl", "dlcl_post"])
def test_dlcl_is_the_papers_matrix(block: str) -> None:
    model = model_of(block)
    src, _, x, _ = inputs(model)
    expected = by_the_matrix(model.encoder, x, block == "dlcl")
    torch.testing.assert_close(model.encode(src, torch.tensor([5, 5])), expected, rtol=1e-5, atol=1e-5)


def gradients(model: Transformer) -> dict[str, Tensor]:
    model.zero_grad()
    model(batch_of(*batch([7, 3, 5], [6, 2, 4]))).loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("block", ["dlcl", "dlcl_post"])
def test_recomputing_layers_changes_no_gradient_of_dlcl(block: str) -> None:
    model = model_of(block)
    kept = gradients(model)
    for group in (1, 2):
        model.recompute = group
        for name, gradient in gradients(model).items():
            torch.testing.assert_close(gradient, kept[name], rtol=1e-6, atol=1e-7)


# ---- initial state


@torch.no_grad()
@pytest.mark.parametrize("block", ["rezero", "fixup"])
def test_a_new_stack_is_the_identity(block: str) -> None:
    model = fresh(block, layers=5)
    src, trg, x, y = inputs(model)
    memory = model.encode(src, torch.tensor([5, 5]))
    assert torch.equal(memory, x)
    assert torch.equal(model.decode(trg, memory, torch.tensor([5, 5])), y)


@torch.no_grad()
def test_a_new_rezero_post_ln_stack_is_its_norms_alone() -> None:
    model = fresh("rezero_post_ln")
    src, _, x, _ = inputs(model)
    for _ in range(4):
        x = F.layer_norm(x, (D,))
    torch.testing.assert_close(model.encode(src, torch.tensor([5, 5])), x, rtol=1e-5, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("init", ["xavier", "depth_scaled"])
@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_looks_linear_ffn_is_linear_at_first(activation: str, init: str) -> None:
    """Because fc2 is mirrored and both are orthogonal; after a change of weights it is no longer linear."""
    model = pair("looks_linear", "looks_linear", 4, init).model_copy(update={"activation": activation, "ffn": 48})
    ffn, scale = layer_of(model, "encoder", 1, 1).ffn, 0.5 if init == "depth_scaled" else 1.0
    x, y = torch.randn(2, 7, D).unbind()
    torch.testing.assert_close(ffn(2 * x - 3 * y), 2 * ffn(x) - 3 * ffn(y), rtol=1e-5, atol=1e-5)
    first, second = ffn.fc1.weight, ffn.fc2.weight
    assert first.shape == (24, D) and second.shape == (D, 48)
    assert torch.equal(second[:, :24], -second[:, 24:])
    torch.testing.assert_close(first.T @ first, scale**2 * torch.eye(D), rtol=0, atol=1e-6)
    torch.testing.assert_close(second[:, :24] @ second[:, :24].T, scale**2 * torch.eye(D), rtol=0, atol=1e-6)
    torch.testing.assert_close(ffn(x), x @ (second[:, :24] @ first).T, rtol=1e-5, atol=1e-5)
    second.add_(torch.randn_like(second))
    assert not torch.allclose(ffn(x + y), ffn(x) + ffn(y), atol=1e-2)


@torch.no_grad()
def test_looks_linear_ffn_is_a_concatenated_rectifier() -> None:
    ffn = model_of("looks_linear").encoder.layers[0].ffn
    x = torch.randn(3, D)
    h = x @ ffn.fc1.weight.T + ffn.fc1.bias
    expected = torch.cat([h.clamp(min=0), (-h).clamp(min=0)], dim=1) @ ffn.fc2.weight.T + ffn.fc2.bias
    torch.testing.assert_close(ffn(x), expected, rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_fixup_has_a_scalar_before_each_linear_map_and_activation() -> None:
    """A whole decoder layer with random parameters, in plain products."""
    model = model_of("fixup")
    layer = model.decoder.layers[1]
    p = dict(layer.named_parameters())
    x, memory = torch.randn(2, 3, D), torch.randn(2, 5, D)

    def linear(name: str, h: Tensor) -> Tensor:
        return (h - p[f"{name}.shift"]) @ p[f"{name}.weight"].T + p[f"{name}.bias"]

    def attention(name: str, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
        heads = [part.unflatten(-1, (H, -1)).transpose(1, 2) for part in (q, k, v)]
        mixed = F.scaled_dot_product_attention(*heads, is_causal=causal).transpose(1, 2).flatten(2)
        return linear(f"{name}.out", mixed)

    h = x + p["rule.scales.0"] * attention("self_attn", *linear("self_attn.qkv", x).chunk(3, -1), True)
    crossed = attention("cross_attn", linear("cross_attn.q", h), *linear("cross_attn.kv", memory).chunk(2, -1), False)
    h = h + p["rule.scales.1"] * crossed
    inner = (linear("ffn.fc1", h) - p["ffn.shift"]).relu()
    expected = h + p["rule.scales.2"] * linear("ffn.fc2", inner)
    torch.testing.assert_close(layer(x, memory), expected, rtol=1e-5, atol=1e-5)
    assert sum(name.endswith("shift") for name in p) == 8


# ---- first updates


def three_steps(shape: config.Model) -> Transformer:
    """Trains on one batch with Adam; every parameter gets a gradient, and the loss falls."""
    model = new_model(shape, VOCAB, VOCAB, seed=1, label_smoothing=0.1).train()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(4):
        optimizer.zero_grad()
        loss = model(batch_of(*batch([7, 3, 5], [6, 2, 4]), key=1)).loss
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
    assert losses[-1] < losses[0]
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.isfinite().all() and parameter.grad.any(), name
    return model


@pytest.mark.parametrize("block", BLOCKS)
def test_every_block_trains(block: str) -> None:
    """If a gate or a matrix is 0 at first, the encoder's matrices get gradients from the third update on."""
    three_steps(shapes(block, dropout=0.1))


@pytest.mark.parametrize(("encoder", "decoder"), PAIRS)
def test_every_pair_trains(encoder: str, decoder: str) -> None:
    three_steps(pair(encoder, decoder))


@torch.no_grad()
@pytest.mark.parametrize(("encoder", "decoder"), PAIRS)
def test_a_pair_decodes_step_by_step_as_in_one_pass(encoder: str, decoder: str) -> None:
    model = new_model(pair(encoder, decoder), VOCAB, VOCAB, seed=1).eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.2)
    src, lengths, trg, _ = batch([7, 3, 5], [6, 6, 6])
    memory = model.encode(src, lengths)
    cache = model.start_cache(memory, lengths, 1, 6)
    steps = torch.stack([model.step(trg[:, t], cache) for t in range(6)], dim=1)
    torch.testing.assert_close(steps, model.decode(trg, memory, lengths), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_every_pair_of_blocks_has_finite_gradients() -> None:
    """All pairs: loss and gradients are finite, and the target embeddings get a gradient."""
    shape = shapes("post_ln").model_dump() | {"width": 8, "heads": 2, "ffn": 8}
    data = batch_of(*batch([5, 3], [4, 6]))
    for encoder, decoder in itertools.product(BLOCKS, BLOCKS):
        stacks = {"encoder": {"block": encoder, "layers": 1}, "decoder": {"block": decoder, "layers": 1}}
        model = new_model(config.Model.model_validate(shape | stacks), VOCAB, VOCAB, seed=1)
        loss = model(data).loss
        loss.backward()
        grads = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        assert loss.isfinite() and all(grad.isfinite().all() for grad in grads), (encoder, decoder)
        table = model.table("trg").weight.grad
        assert table is not None and table.any(), (encoder, decoder)
