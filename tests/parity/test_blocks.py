"""Each residual system against its formula in plain tensor operations, and the reductions that must be exact."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from deepnmt.model.residual import RULES, DeepNorm, Place, Rule, Side

D = 16
SIDES: list[Side] = ["encoder", "decoder"]


def place(side: Side, layers: tuple[int, int] = (6, 4)) -> Place:
    return Place(side, 1, *layers, D)


def rule_of(block: str, side: Side) -> Rule:
    """The block's rule with random gains, biases and ω."""
    torch.manual_seed(3)
    rule = RULES[block](place(side))
    with torch.no_grad():
        for parameter in rule.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return rule


def branches_of(side: Side) -> list[nn.Linear]:
    torch.manual_seed(4)
    return [nn.Linear(D, D) for _ in range(2 if side == "encoder" else 3)]


def normalised(x: Tensor, rule: Rule, i: int) -> Tensor:
    """LayerNorm i of the rule, from its definition."""
    centred = x - x.mean(-1, keepdim=True)
    gain, bias = rule.get_parameter(f"norms.{i}.weight"), rule.get_parameter(f"norms.{i}.bias")
    return centred / (centred.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * gain + bias


def post_ln(x: Tensor, f: list[nn.Linear], rule: Rule, side: Side) -> Tensor:
    for i in range(len(f)):
        x = normalised(x + f[i](x), rule, i)
    return x


def pre_ln(x: Tensor, f: list[nn.Linear], rule: Rule, side: Side) -> Tensor:
    for i in range(len(f)):
        x = x + f[i](normalised(x, rule, i))
    return x


def admin(x: Tensor, f: list[nn.Linear], rule: Rule, side: Side) -> Tensor:
    for i in range(len(f)):
        x = normalised(x * rule.get_parameter(f"omegas.{i}") + f[i](x), rule, i)
    return x


def b2t(x: Tensor, f: list[nn.Linear], rule: Rule, side: Side) -> Tensor:
    h1 = normalised(x + f[0](x), rule, 0)
    h = h1 if side == "encoder" else normalised(h1 + f[1](h1), rule, 1)
    return normalised(x + h + f[-1](h), rule, len(f) - 1)


def deepnorm(x: Tensor, f: list[nn.Linear], rule: Rule, side: Side) -> Tensor:
    alpha = 0.81 * (6**4 * 4) ** 0.0625 if side == "encoder" else (3 * 4) ** 0.25
    for i in range(len(f)):
        x = normalised(alpha * x + f[i](x), rule, i)
    return x


REFERENCES: dict[str, Callable[[Tensor, list[nn.Linear], Rule, Side], Tensor]] = {
    "post_ln": post_ln,
    "pre_ln": pre_ln,
    "admin": admin,
    "b2t": b2t,
    "deepnorm": deepnorm,
}


def test_every_block_has_a_reference() -> None:
    assert REFERENCES.keys() == RULES.keys()


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("block", list(RULES))
def test_block_follows_its_formula(block: str, side: Side) -> None:
    rule, f = rule_of(block, side), branches_of(side)
    x = torch.randn(2, 5, D)
    torch.testing.assert_close(rule(x, f), REFERENCES[block](x, f, rule, side), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("block", ["admin", "deepnorm"])
@pytest.mark.parametrize("side", SIDES)
def test_reduction_to_post_ln_is_exact(side: Side, block: str) -> None:
    post, reduced = rule_of("post_ln", side), RULES[block](place(side))
    reduced.load_state_dict(post.state_dict(), strict=False)  # Admin's ω stays at its initial 1
    if isinstance(reduced, DeepNorm):
        reduced.alpha = 1.0
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
    assert DeepNorm.constants(place("encoder", layers)) == pytest.approx(encoder, abs=5.1e-5)
    assert DeepNorm.constants(place("decoder", layers)) == pytest.approx(decoder, abs=5.1e-5)


@pytest.mark.parametrize("block", list(RULES))
@pytest.mark.parametrize("side", SIDES)
def test_adds_see_each_branch_output_in_order(side: Side, block: str) -> None:
    rule, f = rule_of(block, side), branches_of(side)
    made: list[Tensor] = []
    seen: list[Tensor] = []
    for branch in f:
        branch.register_forward_hook(lambda module, inputs, output: made.append(output))
    for add in rule.adds:
        add.register_forward_hook(lambda module, inputs, output: seen.append(output))
    rule(torch.randn(2, 5, D), f)
    assert len(seen) == len(f)
    assert all(a is b for a, b in zip(made, seen, strict=True))
