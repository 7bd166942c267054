"""Which operations of the model the Triton kernels replace, and when: on a GPU from Ampere on, if nobody looks inside.

A layer's branch, dropout included, cannot be told apart into the two. So a layer passes its block `Sublayer`s, and each
formula of a block that ends with x + F(x) or LN(x + F(x)) has a twin here that takes the dropout into its last kernel.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from deepnmt import device as device_
from deepnmt.errors import UserError
from deepnmt.extras.kernels import fused, packed
from deepnmt.model import dropout as dropout_
from deepnmt.model import loss, sublayers
from deepnmt.model.blocks import (
    B2T,
    DLCL,
    Admin,
    B2TNoLN,
    Block,
    Branch,
    DeepNorm,
    DLCLPost,
    LayerNorm,
    PostLN,
    PreLN,
    ReZeroPostLN,
    RMSNorm,
    TFixup,
)
from deepnmt.model.dropout import Dropout
from deepnmt.model.layers import DecoderLayer, EncoderLayer
from deepnmt.model.positions import Rotate
from deepnmt.model.published import PublishedAdminClosedForm
from deepnmt.model.sublayers import FeedForward

Function = Callable[..., Any]


def check(device: torch.device) -> None:
    """Raises `UserError` if this machine has a GPU but no Triton, or no C compiler for what starts its kernels. A CPU
    computes by the plain operations."""
    installed = importlib.util.find_spec("triton") is not None
    compilers = os.environ.get("CC", "cc"), "gcc", "clang"
    if device.type == "cuda" and not (installed and any(map(shutil.which, compilers))):
        raise UserError("parallel.overrides lists triton, which needs Triton and a C compiler, but this machine has no "
                        f"{'C compiler; install gcc' if installed else 'Triton; pip install triton'}, or set "
                        "parallel.overrides=[]")


def has_kernels(x: Tensor) -> bool:
    """Whether the kernels compute with this tensor: on a GPU, or for a test that makes a CPU one."""
    return device_.on_gpu(x) and x.dtype != torch.float64 and (
        not x.is_cuda or torch.cuda.get_device_capability(x.device) >= (8, 0))


def attends_packed(qkv: Tensor, heads: int) -> bool:
    """Whether queries, keys and values [..., 3D] can have one gradient: on a GPU of NVIDIA, whose kernel reads heads
    that begin at multiples of 16 bytes."""
    head_bytes = qkv.size(-1) // (3 * heads) * qkv.element_size()
    return qkv.is_cuda and torch.version.hip is None and head_bytes % 16 == 0


def usable(x: Tensor, *modules: nn.Module) -> bool:
    """Whether a kernel may compute with x in the place of these modules: nobody is to be told what goes through them
    (probes, or DeepSpeed, which gathers their weights)."""
    return has_kernels(x) and not any(
        module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
        for module in modules)


# -- dropout, attention, the first linear map of an FFN, and the loss --------------------------------------------------


def dropout(plain: Function) -> Function:
    def run(x: Tensor, p: float) -> Tensor:
        return fused.drop(x, p) if p and has_kernels(x) else plain(x, p)

    return run


def self_attention(plain: Function) -> Function:
    def run(
        qkv: Tensor, heads: int, mask: Tensor | None, dropout: float, causal: bool, rotate: Rotate | None
    ) -> Tensor:
        known = rotate is None and torch.is_grad_enabled() and attends_packed(qkv, heads)
        if known and mask is not None and mask.dtype != torch.bool:
            return packed.attend(qkv, mask, heads, dropout)
        return plain(qkv, heads, mask, dropout, causal, rotate)

    return run


def attend_step(plain: Function) -> Function:
    def run(
        qkv: Tensor, heads: int, past: Tensor, visible: Tensor | None, slots: slice, rotate: Rotate | None
    ) -> Tensor:
        if rotate is None and not torch.is_grad_enabled() and has_kernels(qkv):
            return fused.attend_step(qkv, past, visible, heads, slots)
        return plain(qkv, heads, past, visible, slots, rotate)

    return run


def feed_forward(plain: Function) -> Function:
    """With ReLU at the end of the first matrix product."""
    def forward(ffn: FeedForward, x: Tensor) -> Tensor:
        known = type(ffn) is FeedForward and ffn.activation is F.relu and type(ffn.fc1) is nn.Linear
        if known and usable(x, ffn.fc1):
            return ffn.fc2(ffn.dropout(fused.linear_relu(x, ffn.fc1)))
        return plain(ffn, x)

    return forward


def cross_entropy(plain: Function) -> Function:
    def run(hidden: Tensor, weight: Tensor, targets: Tensor, smoothing: float) -> tuple[Tensor, Tensor]:
        if not has_kernels(hidden):
            return plain(hidden, weight, targets, smoothing)
        return _OnePass.apply(hidden, weight, targets, smoothing, loss.needs_gradient(hidden, weight))

    return run


class _OnePass(torch.autograd.Function):
    """The loss with one operation for what is between the matrix products."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, smoothing: float, differentiable: bool
    ) -> tuple[Tensor, Tensor]:
        counts, weight_mean = hidden.new_ones(len(hidden), dtype=torch.float32), weight.float().mean(0)
        summed = hidden.sum(0, dtype=torch.float32)
        sums = hidden.new_empty(len(hidden), 2, dtype=torch.float32)
        hidden_grad = torch.empty_like(hidden) if differentiable else hidden
        weight_grad = weight.new_zeros(weight.shape if differentiable else 0, dtype=torch.float32)
        size = loss.chunk_rows(hidden, len(weight))
        # rows begin at multiples of 128 bytes, for the kernel and the matrix products
        logits = hidden.new_empty(min(size, len(hidden)), -(-len(weight) // 64) * 64)[:, : len(weight)]
        for start in range(0, len(hidden), size):
            part = slice(start, start + size)
            product = torch.mm(hidden[part], weight.t(), out=logits[: len(hidden[part])])
            sums[part] = fused.cross_entropy_(product, targets[part], counts[part], smoothing, differentiable)
            if differentiable:
                torch.mm(product, weight, out=hidden_grad[part])
                loss.add_product(weight_grad, product.t(), hidden[part], product)
        total, nll = sums.sum(0).unbind()
        total = total - smoothing * torch.dot(summed, weight_mean)  # the mean of a row's logits
        if differentiable:
            hidden_grad -= smoothing * weight_mean
            weight_grad -= smoothing / len(weight) * summed
            ctx.save_for_backward(hidden_grad, weight_grad)
        ctx.weight_dtype = weight.dtype
        ctx.mark_non_differentiable(nll)
        return total, nll

    @staticmethod
    def backward(ctx: Any, loss_grad: Tensor, nll_grad: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        hidden_grad, weight_grad = ctx.saved_tensors
        return hidden_grad * loss_grad, (weight_grad * loss_grad).to(ctx.weight_dtype), None, None, None


# -- layers and blocks -------------------------------------------------------------------------------------------------


class Sublayer(NamedTuple):
    """F_i: `run`, then dropout."""

    run: Branch
    dropout: Dropout

    def __call__(self, x: Tensor) -> Tensor:
        return self.dropout(self.run(x))


def encoder_layer(plain: Function) -> Function:
    def compute(layer: EncoderLayer, x: Any, mask: Tensor | None) -> Any:
        return layer.rule(x, (
            Sublayer(lambda h: layer.self_attn(h, mask, causal=False), layer.dropout),
            Sublayer(lambda h: layer.ffn(h), layer.dropout)))

    return compute


def decoder_layer(plain: Function) -> Function:
    def compute(layer: DecoderLayer, x: Any, memory: Tensor | None, mask: Tensor | None) -> Any:
        if memory is None:  # a language model
            return plain(layer, x, memory, mask)
        keys, values = layer.cross_attn.keys_values(memory)
        return layer.rule(x, (
            Sublayer(lambda h: layer.self_attn(h, None, causal=True), layer.dropout),
            Sublayer(lambda h: layer.cross_attn(h, keys, values, mask), layer.dropout),
            Sublayer(lambda h: layer.ffn(h), layer.dropout)))

    return compute


def added(plain: Function) -> Function:
    """Leaves out the adds that nobody looks at, which change nothing."""
    def run(block: Block, branches: Sequence[Branch]) -> list[Branch]:
        summands: list[Branch] = plain(block, branches)
        for i, (add, branch) in enumerate(zip(block.adds, branches, strict=True)):
            unseen = isinstance(branch, Sublayer) and not (add._forward_hooks or add._forward_pre_hooks)
            if unseen and block.share == 1.0:
                summands[i] = branch
        return summands

    return run


def plus(x: Tensor, f: Branch, given: Tensor) -> Tensor:
    """x + f(given)."""
    if isinstance(f, Sublayer) and f.dropout.rate and has_kernels(x):
        return fused.drop(f.run(given), f.dropout.rate, x)
    return x + f(given)


def normed(norm: nn.Module, x: Tensor, f: Branch, omega: Tensor | float = 1.0, other: Tensor | None = None) -> Tensor:
    """norm(other + ω ⊙ x + f(x))."""
    if isinstance(norm, LayerNorm | RMSNorm) and usable(x, norm):
        run, p = (f.run, f.dropout.rate) if isinstance(f, Sublayer) else (f, 0.0)
        return fused.add_norm(run(x), p, x, norm, omega, other)
    return norm((omega * x if other is None else other + omega * x) + f(x))


def _join(formula: Callable[[Any, int, Tensor, Branch], Tensor]) -> Callable[[Function], Function]:
    """A row for a block's `join`."""
    return lambda plain: formula


def b2t(plain: Function) -> Function:
    def forward(block: B2T, x: Tensor, branches: Sequence[Branch]) -> Tensor:
        *others, last = block.added(branches)
        h = x
        for norm, f in zip(block.norms, others, strict=False):
            h = normed(norm, h, f)
        return normed(block.norms[-1], h, last, other=x)

    return forward


def b2t_no_ln(plain: Function) -> Function:
    def forward(block: B2TNoLN, x: Tensor, branches: Sequence[Branch]) -> Tensor:
        h = x
        for f in block.added(branches):
            h = plus(h, f, h)
        return block.alpha * x + block.beta * h

    return forward


REPLACEMENTS: list[tuple[Any, str, Callable[[Function], Function]]] = [
    (dropout_, "dropout", dropout),
    (sublayers, "self_attention", self_attention),
    (sublayers, "attend_step", attend_step),
    (loss, "linear_cross_entropy", cross_entropy),
    (FeedForward, "forward", feed_forward),
    (EncoderLayer, "compute", encoder_layer),
    (DecoderLayer, "compute", decoder_layer),
    (Block, "added", added),
    (B2T, "forward", b2t),
    (B2TNoLN, "forward", b2t_no_ln),
    (PostLN, "join", _join(lambda block, i, x, f: normed(block.norms[i], x, f))),
    (DLCLPost, "join", _join(lambda block, i, x, f: normed(block.norms[i], x, f))),
    (Admin, "join", _join(lambda block, i, x, f: normed(block.norms[i], x, f, block.omegas[i]))),
    (DeepNorm, "join", _join(lambda block, i, x, f: normed(block.norms[i], x, f, block.alpha))),
    (PublishedAdminClosedForm, "join", _join(lambda block, i, x, f: normed(block.norms[i], x, f, block.omega))),
    (ReZeroPostLN, "join", _join(lambda block, i, x, f: normed(block.norms[i], x, lambda h: block.a * f(h)))),
    (PreLN, "join", _join(lambda block, i, x, f: plus(x, f, block.norms[i](x)))),
    (DLCL, "join", _join(lambda block, i, x, f: plus(x, f, block.norms[i](x)))),
    (TFixup, "join", _join(lambda block, i, x, f: plus(x, f, x))),
]
