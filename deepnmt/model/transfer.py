"""Settings that carry over depth and width: CompleteP (Dey et al. 2025, arXiv 2505.01618, table 1, α = 1) for encoder
and decoder, with `model.tuned_at`.

A rate that was tuned on a small model suits a large one if activations and their changes keep their size. The rule,
with w = D / D', f = I / I' the widths of model and FFN over those of the tuned model, h that of a head, and l = L / L'
the depth of the parameter's own stack over the tuned one's:

| parameter                    | initial variance | rate | multiplier of what it puts out   | Adam's eps |
|------------------------------|------------------|------|----------------------------------|------------|
| matrix of fan-in k times as  | σ²/k             | η/k  | 1/l at the end of a branch; in   | ε/(r·l)    |
|   large, fan-out r times     |                  |      | attention 1/√h on the scores     |            |
| bias of such a matrix        | 0                | η    | as the matrix                    | ε/(r·l)    |
| norm in a layer              | 1, 0             | η    | peri_ln's second 1/l             | ε/(w·l)    |
| embedding table              | σ²               | η    | 1                                | ε/w        |
| output table, tied or not    | σ²               | η    | 1/w on the logits                | ε/w        |
| norm on top of a stack, gain | 1, 0             | η    | 1                                | ε/w        |

Weight decay is divided by what the rate is multiplied with, so that a step shrinks every weight alike. A
cross-attention is a branch of the decoder. Where the paper leaves ε as it is, it follows the gradient here, too.
Muon's step on a matrix has the norm η·√max(rows, columns), so with fan-in k and fan-out r times as large its rate is
η·√(r / (k·m)), m the growth of the larger one: a step changes outputs as much at any width (Yang et al. 2023, A
Spectral Condition for Feature Learning).

**The multipliers are in the weights.** Adam's and Muon's steps do not depend on the size of the gradient, so a layer
c·W x with initial weights W, rate η and eps ε trains exactly as V x with V = c·W, rate c·η and eps ε/c. So the model
computes what it always computes, and can be exported, averaged and decoded like any other. In these terms: the last
matrix of a branch and its bias have c = 1/l; query, key and value have c = h^-1/4, and the matrix that takes the values
has h^1/4; a table, whose initial weights and scale √D amount to c = w^-1/2 already, has that, and the norm below the
logits has the other w^-1/2. At the tuned shape every factor is exactly 1.
"""

from __future__ import annotations

from typing import NamedTuple

from deepnmt import config


class Factors(NamedTuple):
    """Of a parameter: the factors on its initial weights, learning rate and Adam's eps."""

    init: float = 1.0
    rate: float = 1.0
    eps: float = 1.0

    @property
    def decay(self) -> float:
        """The factor on a weight decay that is multiplied by the rate."""
        return 1 / self.rate

    def holding(self, multiplier: float) -> Factors:
        """The same for a parameter that holds a multiplier of the forward pass."""
        return Factors(self.init * multiplier, self.rate * multiplier, self.eps / multiplier)


def factors_of(name: str, model: config.Model, muon: bool = False) -> Factors:
    """The factors of a parameter, by its canonical name; `muon`: of a matrix that Muon updates."""
    tuned = model.tuned_at
    if tuned == config.TunedAt():
        return Factors()
    wider = model.width / (tuned.width or model.width)
    if name.startswith("embeddings."):
        return Factors(eps=1 / wider).holding(wider**-0.5)._replace(init=1.0)
    side, kind, *rest = name.split(".")
    if kind == "norm":  # the top of a stack
        return _of_norm(name, 1 / wider, wider**-0.5 if side == model.last else 1.0)
    if kind != "layers":  # its input
        return Factors(eps=1 / wider)
    _, part, linear, *_, last = rest  # as in 3.self_attn.qkv.weight, 3.rule.norms.0.bias
    stack, layers = model.encoder, tuned.encoder_layers
    if side == "decoder":
        stack, layers = model.decoder, tuned.decoder_layers
    deeper = stack.layers / (layers or stack.layers)
    held = 1 / deeper if linear in stack.facts.branch_ends else 1.0
    if part == "rule":
        return _of_norm(name, 1 / (wider * deeper), held)
    shape = model.shape("decoder" if side == "decoder" else "encoder")
    wider_ffn = model.ffn / (tuned.ffn or model.ffn)
    (rows, fan_out), (columns, fan_in) = (shape.width, wider), (shape.width, wider)
    if linear == "fc1":
        rows, fan_out = shape.ffn, wider_ffn
    elif linear == "fc2":
        columns, fan_in = shape.ffn, wider_ffn
    else:
        wider_head = wider / (model.heads / (tuned.heads or model.heads))
        in_head = wider_head**-0.25
        if linear != "out":
            held *= in_head
        elif last == "weight":
            held /= in_head
    eps = 1 / (fan_out * deeper)
    if last == "bias":
        return Factors(eps=eps).holding(held)
    there = rows / fan_out, columns / fan_in
    xavier = ((rows + columns) / sum(there) / fan_in) ** 0.5  # 1 if the FFN is as many times as wide there
    rate = (fan_out / fan_in * max(there) / max(rows, columns)) ** 0.5 if muon else 1 / fan_in
    return Factors(xavier, rate, eps).holding(held)


def _of_norm(name: str, eps: float, multiplier: float) -> Factors:
    """The factors of a gain or bias, either of which holds the multiplier of what its norm puts out."""
    if name.rpartition(".")[2] not in ("weight", "bias"):
        raise ValueError(f"nothing says whether model.tuned_at scales {name}; say it in model/transfer.py")
    return Factors(eps=eps).holding(multiplier)
