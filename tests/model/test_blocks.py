"""Each block against its formula in plain tensor operations, and reductions that must be exact."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from deepnmt.model.blocks import (
    BLOCKS,
    AdminClosedForm,
    B2TNoLN,
    Block,
    DeepNorm,
    LayerPosition,
    ReZeroPostLN,
    Side,
    Stream,
    TFixup,
    tensors,
)
from deepnmt.model.init import fill

D = 16
SIDES: list[Side] = ["encoder", "decoder"]


def position_of(side: Side, layers: tuple[int, int] = (6, 4)) -> LayerPosition:
    return LayerPosition(side, 1, *layers, D)


def new(block: str, position: LayerPosition) -> Block:
    """The block of a layer with its initial parameters."""
    built = BLOCKS[block](position)
    fill(built, lambda name: torch.tensor(built.initial_value(position, name)))
    return built


def block_of(block: str, side: Side) -> Block:
    """The block of layer 1, counted from 0, with random gains, biases, ω and other parameters."""
    torch.manual_seed(3)
    rule = new(block, position_of(side))
    with torch.no_grad():
        for parameter in rule.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return rule


def branches_of(side: Side) -> list[nn.Linear]:
    torch.manual_seed(4)
    return [nn.Linear(D, D) for _ in range(2 if side == "encoder" else 3)]


def stream_of(block: str, side: Side) -> Stream:
    """The input of layer 1: the output of layer 0, and what else the block carries."""
    torch.manual_seed(5)
    found = [n * torch.randn(2, 5, D) for n in range(1, 1 + BLOCKS[block].carried(position_of(side)))]
    return found[0] if len(found) == 1 else tuple(found)


def normalised(x: Tensor, rule: Block, i: int | str) -> Tensor:
    """LayerNorm i of the block, or the one of this name, from its definition."""
    centred = x - x.mean(-1, keepdim=True)
    name = i if isinstance(i, str) else f"norms.{i}"
    gain, bias = rule.get_parameter(f"{name}.weight"), rule.get_parameter(f"{name}.bias")
    return centred / (centred.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * gain + bias


def streams_by_formula(block: str, streams: tuple[Tensor, ...], f: list[nn.Linear], rule: Block) -> list[Tensor]:
    """All streams after layer 1 of a block that has several, by the formula in its paper."""
    parameter, n = rule.get_parameter, len(streams)
    xs = list(streams)
    for i, branch in enumerate(f):
        match block:
            case "siamese":
                c = (len(f) * 2) ** 0.5
                x = normalised(xs[0], rule, f"post_norms.{i}")
                z = branch(normalised(x + normalised(xs[1], rule, f"pre_norms.{i}"), rule, i))
                xs = [x + z / c, xs[1] + z]
            case "hyper":
                maps, static = parameter(f"gates.{i}.maps"), parameter(f"gates.{i}.static").view(n, n + 2)
                scales = parameter(f"gates.{i}.scales")
                dynamic = [torch.tanh(normalised(x, rule, f"gates.{i}.norm") @ maps) for x in xs]

                def a(k: int, column: int, i: int = i) -> Tensor:  # of stream k
                    return dynamic[k][..., column : column + 1] * scales[column // (n + 1)] + static[k, column]  # noqa: B023

                z = branch(normalised(sum((a(k, 0) * xs[k] for k in range(n)), torch.zeros(())), rule, i))
                xs = [sum((a(k, 1 + j) * xs[k] for k in range(n)), a(j, n + 1) * z) for j in range(n)]
            case "mhc":
                u = torch.cat(xs, -1)
                u = (u / (u.square().mean(-1, keepdim=True) + 1e-6).sqrt()) @ parameter(f"gates.{i}.maps").T
                static, scales = parameter(f"gates.{i}.static"), parameter(f"gates.{i}.scales")
                pre = 1 / (1 + torch.exp(-(scales[0] * u[..., :n] + static[:n])))
                post = 2 / (1 + torch.exp(-(scales[1] * u[..., n : 2 * n] + static[n : 2 * n])))
                res = torch.exp(scales[2] * u[..., 2 * n :] + static[2 * n :]).unflatten(-1, (n, n))
                for _ in range(20):
                    res = res / res.sum(-2, keepdim=True)
                    res = res / res.sum(-1, keepdim=True)
                z = branch(normalised((pre.unsqueeze(-1) * torch.stack(xs, -2)).sum(-2), rule, i))
                mixed = res @ torch.stack(xs, -2)
                xs = [mixed[..., j, :] + post[..., j : j + 1] * z for j in range(n)]
            case "attn_res" | "block_attn_res":
                size, number = (1, 0) if block == "attn_res" else (2, len(f) + i)  # 12 sub-layers, 8 blocks: of 2 each
                gate = f"mixes.{i}.gate"
                key = [x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * parameter(f"{gate}.weight") for x in xs]
                weights = torch.stack([(k * parameter(f"{gate}.query")).sum(-1) for k in key]).softmax(0)
                z = branch(normalised((weights.unsqueeze(-1) * torch.stack(xs)).sum(0), rule, i))
                xs = [*xs, z] if number % size == 0 else [*xs[:-1], xs[-1] + z]
            case _:
                raise AssertionError(f"{block} has no formula here")
    return xs


def formula(block: str, x: Stream, f: list[nn.Linear], rule: Block, side: Side) -> Tensor:
    """The output of layer 1 (of 6 in the encoder, of 4 in the decoder) by the formula in the block's paper."""
    parameter, branches, in_encoder = rule.get_parameter, list(enumerate(f)), side == "encoder"
    if isinstance(x, tuple):
        w = parameter("mix.weights")
        if block == "dlcl":  # the layer below has normed x[0] already
            return formula("pre_ln", w[0] * x[0] + w[1] * normalised(x[1], rule, "mix.norm"), f, rule, side)
        return formula("post_ln", normalised(w[0] * x[0] + w[1] * x[1], rule, "mix.norm"), f, rule, side)
    match block:
        case "post_ln" | "looks_linear":
            for i, branch in branches:
                x = normalised(x + branch(x), rule, i)
        case "pre_ln" | "sub_ln" | "mix_ln":
            for i, branch in branches:
                x = x + branch(normalised(x, rule, i))
        case "admin" | "admin_closed_form":
            for i, branch in branches:
                x = normalised(x * parameter(f"omegas.{i}") + branch(x), rule, i)
        case "b2t":
            h1 = normalised(x + f[0](x), rule, 0)
            h = h1 if in_encoder else normalised(h1 + f[1](h1), rule, 1)
            x = normalised(x + h + f[-1](h), rule, len(f) - 1)
        case "b2t_no_ln":
            h1 = x + f[0](x)
            h = h1 if in_encoder else h1 + f[1](h1)
            x = (0.5 if in_encoder else 4 / 12) * x + 16**-0.2 * (h + f[-1](h))  # L = 6 and 4, both under 9
        case "deepnorm":
            alpha = 0.81 * (6**4 * 4) ** 0.0625 if in_encoder else (3 * 4) ** 0.25
            for i, branch in branches:
                x = normalised(alpha * x + branch(x), rule, i)
        case "rezero":
            for branch in f:
                x = x + parameter("a") * branch(x)
        case "rezero_post_ln":
            for i, branch in branches:
                x = normalised(x + parameter("a") * branch(x), rule, i)
        case "fixup":
            for i, branch in branches:
                x = x + parameter(f"scales.{i}") * branch(x)
        case "t_fixup":
            for branch in f:
                x = x + branch(x)
        case "peri_ln":
            for i, branch in branches:
                x = x + normalised(branch(normalised(x, rule, i)), rule, f"out_norms.{i}")
        case "lns":
            for i, branch in branches:
                x = x + branch(normalised(x, rule, i) / 2**0.5)
        case "keel":  # 2 · 6 = 3 · 4 sub-layers
            for i, branch in branches:
                x = normalised(12 * x + branch(normalised(x, rule, i)), rule, f"out_norms.{i}")
        case _:
            raise AssertionError(f"{block} has no formula here")
    return x


def test_the_tables_of_the_page_have_a_row_for_each_block() -> None:
    """Two that are written from the facts."""
    page = (Path(__file__).parents[2] / "docs" / "reference" / "blocks.md").read_text(encoding="utf-8")
    names = re.findall(r"^\| `(\w+)` \|", page, flags=re.MULTILINE)
    assert all(names.count(block) >= 2 for block in BLOCKS)


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("block", list(BLOCKS))
def test_block_follows_its_formula(block: str, side: Side) -> None:
    rule, f, x = block_of(block, side), branches_of(side), stream_of(block, side)
    found = tensors(rule(x, f))
    if isinstance(x, Tensor) or block.startswith("dlcl"):
        torch.testing.assert_close(found[-1], formula(block, x, f, rule, side), rtol=1e-5, atol=1e-5)
    else:
        torch.testing.assert_close(list(found), streams_by_formula(block, x, f, rule), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("block", ["dlcl", "dlcl_post"])
def test_a_layer_passes_its_history_on(block: str, side: Side) -> None:
    """dlcl norms the last output; a stream with a tensor too many is an error."""
    rule, y = block_of(block, side), stream_of(block, side)
    kept = rule(y, branches_of(side))
    assert len(kept) == 3 and torch.equal(kept[0], y[0])
    expected = normalised(y[1], rule, "mix.norm") if block == "dlcl" else y[1]
    torch.testing.assert_close(kept[1], expected, rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match="longer"):
        rule((*y, y[0]), branches_of(side))


@pytest.mark.parametrize("block", ["admin", "deepnorm", "rezero_post_ln"])
@pytest.mark.parametrize("side", SIDES)
def test_reduction_to_post_ln_is_exact(side: Side, block: str) -> None:
    post, reduced = block_of("post_ln", side), new(block, position_of(side))
    reduced.load_state_dict(post.state_dict(), strict=False)  # Admin's ω stays at its initial 1
    if isinstance(reduced, DeepNorm):
        reduced.alpha = 1.0
    if isinstance(reduced, ReZeroPostLN):
        nn.init.ones_(reduced.a)
    f, x = branches_of(side), torch.randn(2, 5, D)
    assert torch.equal(reduced(x, f), post(x, f))


@pytest.mark.parametrize(
    ("layers", "encoder", "decoder"),
    [
        ((6, 6), (1.4179, 0.4970), (2.0598, 0.3433)),
        ((18, 18), (1.9987, 0.3526), (2.7108, 0.2608)),
        ((60, 12), (2.6331, 0.2676), (2.4495, 0.2887)),
        ((50, 50), (2.7505, 0.2562), (3.4996, 0.2021)),
        ((100, 100), (3.4157, 0.2063), (4.1618, 0.1699)),
    ],
)
def test_deepnorm_constants(
    layers: tuple[int, int], encoder: tuple[float, float], decoder: tuple[float, float]
) -> None:
    assert DeepNorm.constants(position_of("encoder", layers)) == pytest.approx(encoder, abs=5.1e-5)
    assert DeepNorm.constants(position_of("decoder", layers)) == pytest.approx(decoder, abs=5.1e-5)


@pytest.mark.parametrize("pre_norm", [True, False])
def test_a_new_dlcl_layer_takes_the_mean(pre_norm: bool) -> None:
    """Layer 3 of a new stack, with y_0 … y_3."""
    rule = new("dlcl" if pre_norm else "dlcl_post", LayerPosition("encoder", 3, 6, 4, D))
    ys = tuple(torch.randn(4, 2, 5, D).unbind())
    mixed, _ = rule.get_submodule("mix")(ys)
    if pre_norm:
        expected = (ys[0] + ys[1] + ys[2] + nn.functional.layer_norm(ys[3], (D,))) / 4
    else:
        expected = nn.functional.layer_norm((ys[0] + ys[1] + ys[2] + ys[3]) / 4, (D,))
    torch.testing.assert_close(mixed, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("layers", "width", "alpha", "beta"), [
    (6, 512, 0.5, 0.28717), (9, 512, 0.71922, 0.28717), (10, 512, 0.70795, 0.28717), (18, 128, 0.64820, 0.37893),
    (60, 512, 0.54109, 0.28717),
])
def test_b2t_no_ln_constants(layers: int, width: int, alpha: float, beta: float) -> None:
    for at in (LayerPosition("encoder", 0, layers, 3, width), LayerPosition("decoder", 0, 3, layers, width)):
        assert B2TNoLN.constants(at) == pytest.approx((alpha, beta), abs=1e-5)


@pytest.mark.parametrize(("layers", "encoder", "decoder"), [
    ((6, 6), 0.4281, 0.3689), ((18, 18), 0.3253, 0.2803), ((60, 12), 0.2407, 0.3102), ((50, 50), 0.2520, 0.2171),
    ((100, 100), 0.2119, 0.1826),
])
def test_t_fixup_constants(layers: tuple[int, int], encoder: float, decoder: float) -> None:
    for matrix in ("v", "out", "fc1", "fc2"):
        assert TFixup.matrix_gain(position_of("encoder", layers), matrix) == pytest.approx(encoder, abs=5.1e-5)
        assert TFixup.matrix_gain(position_of("decoder", layers), matrix) == pytest.approx(decoder, abs=5.1e-5)


@pytest.mark.parametrize(("layers", "encoder", "decoder"), [((6, 6), 2.01701, 2.33513), ((18, 18), 3.04084, 3.56719)])
def test_admin_closed_form_is_its_constant(layers: tuple[int, int], encoder: float, decoder: float) -> None:
    """sqrt(13 / ln 13 - 1) and so on; the same in every sub-layer."""
    for side, omega in zip(SIDES, (encoder, decoder), strict=True):
        rule = new("admin_closed_form", position_of(side, layers))
        assert isinstance(rule, AdminClosedForm) and len(rule.omegas) == (2 if side == "encoder" else 3)
        for parameter in rule.omegas:
            assert parameter.tolist() == pytest.approx([omega] * D, abs=1e-5)


@pytest.mark.parametrize("block", list(BLOCKS))
@pytest.mark.parametrize("side", SIDES)
def test_adds_get_each_branch_output_in_order(side: Side, block: str) -> None:
    rule, f = block_of(block, side), branches_of(side)
    branch_outputs: list[Tensor] = []
    add_outputs: list[Tensor] = []
    for branch in f:
        branch.register_forward_hook(lambda module, inputs, output: branch_outputs.append(output))
    for add in rule.adds:
        add.register_forward_hook(lambda module, inputs, output: add_outputs.append(output))
    rule(stream_of(block, side), f)
    assert len(add_outputs) == len(f)
    assert all(a is b for a, b in zip(branch_outputs, add_outputs, strict=True))
