"""RMSNorm, gated activations, rotary positions, sizes by side, LayerDrop and R-Drop: each against a short reference,
and all together in one model."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from small_models import VOCAB, batch, batch_of
from torch import Tensor, nn
from torch.nn import functional as F

from deepnmt import config
from deepnmt.model.blocks import NORMS, RMSNorm
from deepnmt.model.init import Initialiser, fill, new_model
from deepnmt.model.objective import CrossEntropy, RDrop
from deepnmt.model.positions import POSITIONS, rotated
from deepnmt.model.sublayers import ACTIVATIONS, FeedForward, SelfAttention
from deepnmt.model.transformer import Transformer

ALL: dict[str, Any] = {
    "width": 16, "heads": 4, "ffn": 24, "tied": "decoder", "max_length": 32, "norm": "rms_norm",
    "activation": "swiglu", "positions": "rotary", "encoder": {"block": "pre_ln", "layers": 3},
    "decoder": {"block": "admin", "layers": 2, "width": 12, "heads": 2, "ffn": 10},
}


def modern(**changes: Any) -> config.Model:
    return config.Model.model_validate({**ALL, **changes})


def model_of(settings: config.Model) -> Transformer:
    """A model whose parameters are all random."""
    model = new_model(settings, VOCAB, VOCAB, 1, label_smoothing=0.1).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.empty_like(parameter).normal_(std=0.1, generator=generator))
    return model


# ---- norms


@pytest.mark.parametrize(("dtype", "error"), [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 1e-2)])
def test_rms_norm_by_its_formula(dtype: torch.dtype, error: float) -> None:
    torch.manual_seed(0)
    norm, x = NORMS["rms_norm"](16), 3 + 2 * torch.randn(4, 5, 16, dtype=dtype)
    assert isinstance(norm, RMSNorm) and [name for name, _ in norm.named_parameters()] == ["weight"]
    norm = norm.to(dtype)
    nn.init.normal_(norm.weight)
    wide = x.double()
    expected = wide / (wide.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * norm.weight.double()
    assert norm(x).dtype == dtype
    torch.testing.assert_close(norm(x).double(), expected, rtol=error, atol=error)


@pytest.mark.parametrize("kind", NORMS)
def test_a_frozen_norm_is_affine_and_the_norm_at_its_own_input(kind: str) -> None:
    torch.manual_seed(0)
    norm, x, c = NORMS[kind](16).double(), torch.randn(3, 16).double(), torch.randn(3, 16).double()
    nn.init.normal_(norm.weight)
    frozen, zero = norm.frozen(x), torch.zeros(3, 16).double()
    torch.testing.assert_close(frozen(x), norm(x))
    torch.testing.assert_close(frozen(x + 2 * c) - frozen(zero), frozen(x) + 2 * frozen(c) - 3 * frozen(zero))


# ---- the feed-forward sub-layer


FORMULAS = {
    "relu": lambda h: h.clamp(min=0), "gelu": lambda h: h * (1 + torch.erf(h / math.sqrt(2))) / 2,
    "silu": lambda h: h / (1 + (-h).exp()), "reglu": lambda h: h.clamp(min=0), "swiglu": lambda h: h / (1 + (-h).exp()),
    "geglu": lambda h: h * (1 + torch.erf(h / math.sqrt(2))) / 2,
}


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_feed_forward_by_its_formula(activation: str) -> None:
    torch.manual_seed(0)
    ffn, x = FeedForward(16, 24, activation, 0.0), torch.randn(5, 16)
    for parameter in ffn.parameters():
        nn.init.normal_(parameter)
    h = x @ ffn.fc1.weight[:24].T + ffn.fc1.bias[:24]
    inner = FORMULAS[activation](h)
    if activation in config.choices.ACTIVATIONS.where(lambda row: row.gated):
        inner = inner * (x @ ffn.fc1.weight[24:].T + ffn.fc1.bias[24:])
    torch.testing.assert_close(ffn(x), inner @ ffn.fc2.weight.T + ffn.fc2.bias, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("init", ["xavier", "fairseq"])
def test_a_gate_is_drawn_as_a_matrix_of_its_own(init: str) -> None:
    stack = {"block": "post_ln", "init": init}
    settings = modern(width=128, ffn=256, encoder=stack, decoder=stack)
    weight = Initialiser(settings, VOCAB, VOCAB, 1)("encoder.layers.0.ffn.fc1.weight")
    bound = math.sqrt(6 / (128 + 256)) if init == "xavier" else 128**-0.5
    for half in weight.chunk(2):
        assert 0.99 * bound < half.abs().max() <= bound
    assert not torch.equal(*weight.chunk(2))


# ---- positions


def test_rotation_is_a_product_of_complex_numbers() -> None:
    x = torch.randn(2, 3, 7, 8, dtype=torch.float64)
    angles = torch.arange(4, 11)[:, None] * 10000.0 ** (-torch.arange(4, dtype=torch.float64) / 4)
    turned = torch.complex(x[..., :4], x[..., 4:]) * torch.polar(torch.ones_like(angles), angles)
    torch.testing.assert_close(rotated(x, 4, 11), torch.cat([turned.real, turned.imag], dim=-1))
    assert rotated(x.bfloat16(), 4, 11).dtype == torch.bfloat16


def test_rotated_scores_depend_on_distances_alone() -> None:
    """Attention is the same for the same tokens further on; unrotated it does not know their order."""
    torch.manual_seed(0)
    x, order = torch.randn(2, 6, 16), [1, 0, 2, 3, 4, 5]
    q, k = torch.randn(2, 1, 5, 8).double()
    near, far = (rotated(q, p, p + 5) @ rotated(k, p, p + 5).mT for p in (0, 17))
    torch.testing.assert_close(near, far)
    for kind, known in (("sinusoidal", False), ("rotary", True)):
        attention = SelfAttention(16, 4, 0.0, rotate=POSITIONS[kind].rotate)
        for parameter in attention.parameters():
            nn.init.normal_(parameter, std=0.5)
        moved = attention(x[:, order], None, causal=False)[:, order]
        assert torch.allclose(moved, attention(x, None, causal=False), atol=1e-5) != known


def test_a_table_that_decoding_made_serves_training() -> None:
    with torch.inference_mode():
        rotated(torch.randn(1, 1, 3, 30), 0, 3)
    x = torch.randn(1, 1, 3, 30, requires_grad=True)
    rotated(x, 0, 3).sum().backward()
    assert x.grad is not None


# ---- all together


@torch.no_grad()
@pytest.mark.parametrize("changes", [{}, {"tied": "none", "positions": "sinusoidal"}], ids=["rotary", "sinusoidal"])
def test_decoding_step_by_step_equals_decoding_at_once(changes: dict[str, Any]) -> None:
    model, beams, length = model_of(modern(**changes)), 2, 6
    src, lengths, _, _ = batch([7, 3, 5], [length] * 3)
    tokens = torch.randint(4, VOCAB, (6, length), generator=torch.Generator().manual_seed(2))
    tokens[:, 0] = 5
    memory = model.encode(src, lengths)
    cache = model.start_cache(memory, lengths, beams, length)
    first = model.step(tokens[::2, 0], cache).repeat_interleave(beams, 0)
    steps = torch.stack([first, *(model.step(tokens[:, t], cache) for t in range(1, length))], dim=1)
    whole = model.decode(tokens, memory.repeat_interleave(beams, 0), lengths.repeat_interleave(beams))
    torch.testing.assert_close(steps, whole, rtol=1e-5, atol=1e-5)


def test_a_whole_model_by_its_formula() -> None:
    """One Pre-LN layer with all pieces, written from the papers; one token, so that attention is its value."""
    model = model_of(modern(encoder={"block": "pre_ln", "layers": 1}))
    weights = {name.removeprefix("encoder."): p.detach() for name, p in model.named_parameters()}

    def linear(x: Tensor, name: str) -> Tensor:
        return F.linear(x, weights[f"layers.0.{name}.weight"], weights[f"layers.0.{name}.bias"])

    def norm(x: Tensor, name: str) -> Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weights[f"{name}.weight"]

    x = 4 * weights["embeddings.src.weight"][[9]]
    value = linear(norm(x, "layers.0.rule.norms.0"), "self_attn.qkv")[:, 32:]
    x = x + linear(value, "self_attn.out")
    a, b = linear(norm(x, "layers.0.rule.norms.1"), "ffn.fc1").chunk(2, dim=-1)
    x = x + linear(a / (1 + (-a).exp()) * b, "ffn.fc2")
    memory = model.encode(torch.tensor([[9]]), torch.tensor([1]))
    torch.testing.assert_close(memory[0], norm(x, "norm"), rtol=1e-5, atol=1e-5)
    assert model.decode(torch.tensor([[9]]), memory, torch.tensor([1])).shape == (1, 1, 12)


# ---- LayerDrop


@pytest.mark.parametrize("block", ["post_ln", "dlcl"])
def test_a_dropped_layer_is_its_input(block: str) -> None:
    """With p = 0.5 in 24 micro-batches half of the layers are dropped; the output is that of the others, and the
    gradients of the dropped ones are zeros."""
    stack = {"block": block, "layers": 3}
    plain = model_of(modern(dropout=0.0, encoder=stack)).train()
    drops = model_of(modern(dropout=0.0, encoder={**stack, "layer_drop": 0.5})).train()
    src, lengths, _, _ = batch([7, 3, 5], [2] * 3)
    counted = []
    for key in range(24):
        drops.zero_grad(set_to_none=True)
        memory = drops.encode(src, lengths, key)
        memory.square().sum().backward()
        dropped = [index for index, layer in enumerate(drops.encoder.layers)
                   if not layer.self_attn.qkv.weight.grad.any()]
        assert all(p.grad is not None for p in drops.encoder.layers.parameters())
        counted += dropped
        for index, layer in enumerate(plain.encoder.layers):
            layer.layer_drop = float(index in dropped)
        torch.testing.assert_close(plain.encode(src, lengths, key), memory)
    assert 19 < len(counted) < 53 and set(counted) == {0, 1, 2}  # 36 expected, within 4 standard deviations
    assert torch.equal(drops.eval().encode(src, lengths), plain.eval().encode(src, lengths))


def test_what_is_dropped_depends_on_seed_micro_batch_and_layer() -> None:
    def drawn(seed: int) -> list[bool]:
        model = new_model(modern(encoder={"block": "post_ln", "layers": 2, "layer_drop": 0.5}), VOCAB, VOCAB, seed)
        x, y = torch.zeros(1), torch.ones(1)
        model.train()
        return [bool(layer.survivor(x, y, key)) for key in range(40) for layer in model.encoder.layers]

    assert drawn(1) == drawn(1) != drawn(2) and drawn(1)[::2] != drawn(1)[1::2]


# ---- R-Drop


def test_r_drop_compares_two_masks_in_training_alone() -> None:
    """The loss is that of the two halves of a doubled batch; in evaluation, and at α = 0, that of one pass."""
    settings = modern(dropout=0.3)
    plain, doubled = (Transformer(settings, VOCAB, VOCAB, 1, objective)
                      for objective in (CrossEntropy(0.1), RDrop(CrossEntropy(0.1), 4.0)))
    for model in (plain, doubled):
        fill(model, Initialiser(settings, VOCAB, VOCAB, 1))
    given = batch([7, 3], [6, 4])
    one = batch_of(*given, key=5)
    both = plain.train()(batch_of(*(torch.cat([each, each]) for each in given), key=5))
    ours = doubled.train()(one)
    torch.testing.assert_close(ours.nll, both.nll / 2)
    assert ours.loss.item() > both.loss.item() / 2 + 0.1
    assert doubled.eval()(one) == plain.eval()(one)
