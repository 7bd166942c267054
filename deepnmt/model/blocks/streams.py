"""Blocks with several residual streams. The notation is that of `blocks/base.py`; n streams are H [..., n, D] as one
tensor. The papers have decoders alone; for an encoder-decoder we read them so: each stack has its own streams, the
cross-attention is one more sub-layer, and the memory is the encoder's output, in which the streams are one again.
"""

from __future__ import annotations

import math
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from deepnmt import config
from deepnmt.model.blocks.base import Block, Branch, Gate, LayerPosition, Rule, Stream, tensors


class SiameseTop(nn.Module):
    """LN(LN_x(x) + LN_y(y))."""

    def __init__(self, position: LayerPosition) -> None:
        super().__init__()
        self.stream_norms = nn.ModuleList(position.norm() for _ in range(2))
        self.norm = position.norm()

    def forward(self, streams: tuple[Tensor, Tensor]) -> Tensor:
        """From both streams [..., D] to the stack's output [..., D]."""
        x, y = (norm(stream) for norm, stream in zip(self.stream_norms, streams, strict=True))
        return self.norm(x + y)


class Siamese(Block):
    """A Post-LN stream x and a Pre-LN stream y with shared sub-layers: x ← LN_x(x); z = F_i(LN_i(x + LN_y(y)));
    x ← x + z/c; y ← y + z; x = y at first. SiameseNorm, arXiv 2602.08064, algorithm 1.

    c = √(K(l+1)) in layer l from 0: the paper's √(2(l+1)), with K = 3 in a decoder (our reading).
    """

    def __init__(self, position: LayerPosition) -> None:
        super().__init__(position)
        self.post_norms = nn.ModuleList(position.norm() for _ in range(position.branches))
        self.pre_norms = nn.ModuleList(position.norm() for _ in range(position.branches))
        self.scale = (position.branches * (position.index + 1)) ** -0.5

    @classmethod
    def start(cls, position: LayerPosition, x: Tensor) -> Stream:
        return x, x

    @classmethod
    def carried(cls, position: LayerPosition) -> int:
        return 2

    def join(self, i: int, streams: tuple[Tensor, Tensor], f: Branch) -> Stream:
        x, y = streams
        x = self.post_norms[i](x)
        z = f(self.norms[i](x + self.pre_norms[i](y)))
        return x + self.scale * z, y + z

    @classmethod
    def top(cls, position: LayerPosition) -> nn.Module:
        return SiameseTop(position)


class SumTop(nn.Module):
    """LN of the sum of all streams."""

    def __init__(self, position: LayerPosition) -> None:
        super().__init__()
        self.norm = position.norm()

    def forward(self, streams: Stream) -> Tensor:
        """From n streams [..., D] to the stack's output [..., D]."""
        return self.norm(torch.stack(tensors(streams)).sum(0))


class HyperGate(Gate):
    """The coefficients [A_m, A_r, B] = s ⊙ tanh(LN(H) W) + static of a sub-layer. Zhu et al. 2024, eq. 10 to 13."""

    def __init__(self, position: LayerPosition) -> None:
        super().__init__()
        n = position.settings.streams
        self.norm = position.norm()
        self.maps = nn.Parameter(torch.empty(position.width, n + 2))
        self.static = nn.Parameter(torch.empty(n * (n + 2)))
        self.scales = nn.Parameter(torch.empty(2))  # of A_m and A_r, and of B

    def forward(self, h: Tensor) -> Tensor:
        """H [..., n, D] to A [..., n, n + 2]: how much of each stream goes into the sub-layer and into each of the n
        streams above it, and how much of the sub-layer's output it gets."""
        n = h.size(-2)
        scales = torch.cat([self.scales[:1].expand(n + 1), self.scales[1:]])
        return torch.tanh(self.norm(h) @ self.maps) * scales + self.static.view(n, n + 2)


class Hyper(Block):
    """n streams, h = A_mᵀH, H ← A_rᵀH + Bᵀ F_i(LN_i(h)), and at the end their sum. Zhu et al. 2024, Hyper-Connections,
    eq. 1 to 5 and algorithm 2.

    W = 0, s = 0.01, A_m = e_{k mod n} in the k-th sub-layer of the stack, A_r = I and B = 1 at first, and every stream
    is the stack's input: so it begins as Pre-LN. Only W is decayed.
    """

    initial_values: ClassVar[dict[str, float]] = {"scales": 0.01, "maps": 0.0}
    gate: ClassVar[type[Gate]] = HyperGate

    def __init__(self, position: LayerPosition) -> None:
        super().__init__(position)
        self.gates = nn.ModuleList(self.gate(position) for _ in range(position.branches))

    @classmethod
    def start(cls, position: LayerPosition, x: Tensor) -> Stream:
        return (x,) * position.settings.streams

    @classmethod
    def carried(cls, position: LayerPosition) -> int:
        return position.settings.streams

    @classmethod
    def value(cls, x: Stream) -> Tensor:
        """The mean of the streams."""
        return torch.stack(tensors(x)).mean(0)

    @classmethod
    def parameter_rule(cls, name: str) -> Rule:
        last = name.rpartition(".")[2]
        return Rule(decayed=False if last in ("static", "scales") else None, muon=last != "maps")

    @classmethod
    def initial_value(cls, position: LayerPosition, name: str) -> float | list[float]:
        if not name.endswith(".static"):
            return super().initial_value(position, name)
        number = position.index * position.branches + int(name.split(".")[1])  # of the sub-layer in its stack
        return cls.static(position.settings, number % position.settings.streams)

    @staticmethod
    def static(settings: config.Stack, read: int) -> list[float]:
        """The static coefficients [n, n + 2] of a sub-layer that begins with the stream `read` as its input."""
        n = settings.streams
        rows = [[float(k == read), *(float(k == j) for j in range(n)), 1.0] for k in range(n)]
        return [value for row in rows for value in row]

    def join(self, i: int, streams: Stream, f: Branch) -> Stream:
        h = torch.stack(tensors(streams), dim=-2)
        a = self.gates[i](h).to(h.dtype)
        mixed = a[..., :-1].transpose(-1, -2) @ h  # [..., 1 + n, D]: the input of the sub-layer, and the streams
        z = f(self.norms[i](mixed[..., 0, :]))
        return (mixed[..., 1:, :] + a[..., -1:] * z.unsqueeze(-2)).unbind(-2)

    @classmethod
    def top(cls, position: LayerPosition) -> nn.Module:
        return SumTop(position)


def sinkhorn(logits: Tensor, rounds: int = 20) -> Tensor:
    """A doubly stochastic matrix of exp(logits) [..., n, n]: columns, then rows, in turn. Sinkhorn and Knopp 1967."""
    m = logits.exp()
    for _ in range(rounds):
        m = m / m.sum(-2, keepdim=True)
        m = m / m.sum(-1, keepdim=True)
    return m


class ManifoldGate(Gate):
    """H_pre = σ(a_1·uφ_1 + b_1), H_post = 2σ(a_2·uφ_2 + b_2) and H_res = Sinkhorn(a_3·uφ_3 + b_3), u all streams in one
    RMSNorm. Xie et al. 2025, eq. 7 to 9. In fp32; with `mix: identity` H_res is I."""

    def __init__(self, position: LayerPosition) -> None:
        super().__init__()
        n = position.settings.streams
        self.parts = [n, n, n * n if position.settings.mix == "sinkhorn" else 0]
        self.maps = nn.Parameter(torch.empty(sum(self.parts), n * position.width))
        self.static = nn.Parameter(torch.empty(sum(self.parts)))
        self.scales = nn.Parameter(torch.empty(3))

    def forward(self, h: Tensor) -> Tensor:
        """H [..., n, D] to the coefficients [..., n, n + 2] of `HyperGate`."""
        n, flat = h.size(-2), h.flatten(-2).float()
        u = flat * (flat.square().mean(-1, keepdim=True) + 1e-6).rsqrt()
        dynamic, static, scales = F.linear(u, self.maps.float()), self.static.float(), self.scales.float()
        pre, post, res = (scale * d + s for scale, d, s in zip(
            scales, dynamic.split(self.parts, -1), static.split(self.parts), strict=True))
        if self.parts[2]:
            mix = sinkhorn(res.unflatten(-1, (n, n))).transpose(-1, -2)
        else:
            mix = torch.eye(n, device=h.device).expand(*pre.shape, n)
        return torch.cat([torch.sigmoid(pre).unsqueeze(-1), mix, 2 * torch.sigmoid(post).unsqueeze(-1)], dim=-1)


class ManifoldHyper(Hyper):
    """H ← H_res H + H_postᵀ F_i(LN_i(H_pre H)), the streams mixed by a doubly stochastic matrix. Xie et al. 2025, mHC,
    eq. 3 and 7 to 9.

    The paper does not publish φ and b. Ours: φ = 0; H_pre 1/2 for the stream k mod n and 1/(2(n-1)) for the others,
    H_post = 1, and H_res with 0 and -3 in its logits: it begins as Pre-LN. A start that treats all streams alike would
    get the same gradient for all of them and never separate them.
    """

    gate: ClassVar[type[Gate]] = ManifoldGate

    @staticmethod
    def static(settings: config.Stack, read: int) -> list[float]:
        n = settings.streams
        pre = [0.0 if k == read else -math.log(2 * n - 3) for k in range(n)]
        res = [0.0 if k == j else -3.0 for k in range(n) for j in range(n)]
        return [*pre, *[0.0] * n, *(res if settings.mix == "sinkhorn" else [])]
