"""Chains of element-wise operations as one operation on a GPU: what is read and written once need not wait for memory
twice. Each operation is a Triton kernel (`kernels.py`).

    torch.ops.deepnmt.drop            dropout, and the sum with the residual
    torch.ops.deepnmt.add_norm        dropout of a branch, its sum with the residual, and the norm
    torch.ops.deepnmt.relu_backward   the gradient of a ReLU's input, and the sums of its columns: those of a bias
    torch.ops.deepnmt.attend_step     a decoding step's attention, which also keeps the new keys and values
    torch.ops.deepnmt.cross_entropy_  softmax, loss, and the gradient in place of the logits

`B` sentences, `D` width, `H` heads, `d` = D / H, `K` hypotheses, `R` rows (tokens), `V` vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from deepnmt import device
from deepnmt.model.dropout import dropped_of

_PARTS = 512  # rows of sums over columns, before they are summed themselves

_library = torch.library.Library("deepnmt", "FRAGMENT")
for _schema in (
    "drop(Tensor x, Tensor? residual, float p, Tensor? key) -> (Tensor, Tensor)",
    "add_norm(Tensor branch, Tensor x, Tensor? other, Tensor? omega, float alpha, Tensor weight, Tensor? bias, "
    "float eps, float p) -> (Tensor, Tensor, Tensor)",
    "add_norm_backward(Tensor grad, Tensor total, Tensor? x, Tensor? omega, float alpha, Tensor weight, bool centred, "
    "float eps, float p, Tensor key) -> (Tensor, Tensor, Tensor)",
    "addmm_relu(Tensor x, Tensor weight, Tensor bias) -> Tensor",
    "relu_backward(Tensor grad, Tensor out) -> (Tensor, Tensor)",
    "column_sums(Tensor parts, ScalarType dtype) -> Tensor",
    "attend_step(Tensor packed, Tensor(a!) past, Tensor? visible, int heads, int start, int stop) -> Tensor",
    "cross_entropy_(Tensor(a!) logits, Tensor targets, Tensor counts, float smoothing, bool gradient) -> Tensor",
):
    draws = _schema.startswith(("drop(", "add_norm("))
    _library.define(_schema, tags=(torch.Tag.nondeterministic_seeded,) if draws else ())
_ops = torch.ops.deepnmt


# -- dropout -----------------------------------------------------------------------------------------------------------


def drop(x: Tensor, p: float, residual: Tensor | None = None) -> Tensor:
    """residual + dropout(x), both [..., D]. Masks are those of `add_norm`."""
    return _ops.drop(x.contiguous(), None if residual is None else residual.contiguous(), p, None)[0]


def _keep_for_drop(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    _, residual, p, _ = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(output[1])
    ctx.settings = residual is not None, p


def _drop_gradients(ctx: Any, grad: Tensor, _key: None) -> tuple[Tensor | None, ...]:
    added, p = ctx.settings
    return _ops.drop(grad.contiguous(), None, p, *ctx.saved_tensors)[0], grad if added else None, None, None


def _drop_gpu(x: Tensor, residual: Tensor | None, p: float, key: Tensor | None) -> tuple[Tensor, Tensor]:
    from deepnmt.extras.kernels import kernels  # needs Triton

    drawn, out = _draw(x, p) if key is None else key, torch.empty_like(x)
    kernels.launch_drop(x, residual, _numbers(drawn, p), out)
    return out, drawn if key is None else key.new_empty(0)


def _drop_shapes(x: Tensor, residual: Tensor | None, p: float, key: Tensor | None) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), torch.empty(0 if key is not None else 2, dtype=torch.int64, device="cpu")


# -- dropout, residual, norm -------------------------------------------------------------------------------------------


def add_norm(branch: Tensor, p: float, x: Tensor, norm: Any, omega: Tensor | float = 1.0, other: Tensor | None = None
             ) -> Tensor:
    """norm(other + ω ⊙ x + dropout(branch)), all [..., D]; `norm` is a LayerNorm or an RMSNorm.

    The sum is rounded to the model's type before the norm. Masks are a function of the device's generator, as those of
    PyTorch are, and are not stored: the backward pass computes them anew.
    """
    vector, alpha = (omega, 1.0) if isinstance(omega, Tensor) else (None, omega)
    return _ops.add_norm(
        branch.contiguous(), x.contiguous(), None if other is None else other.contiguous(), vector, alpha, norm.weight,
        getattr(norm, "bias", None), norm.eps, p)[1]


def _keep_for_add_norm(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, x, other, omega, alpha, weight, bias, eps, p = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(output[0], None if omega is None else x, omega, weight, output[2])
    ctx.settings = other is not None, bias is not None, alpha, eps, p


def _add_norm_gradients(ctx: Any, _total: None, grad: Tensor, _key: None) -> tuple[Tensor | None, ...]:
    total, x, omega, weight, key = ctx.saved_tensors
    summed, centred, alpha, eps, p = ctx.settings
    of_x, of_branch, parts = _ops.add_norm_backward(
        grad.contiguous(), total, x, omega, alpha, weight, centred, eps, p, key)
    sums = _ops.column_sums(parts, weight.dtype)
    return (of_branch if _apart(omega, alpha, p) else of_x, of_x, of_x if summed else None,
            None if omega is None else sums[-1], None, sums[0], sums[1] if centred else None, None, None)


def _draw(x: Tensor, p: float) -> Tensor:
    """Key and counter of the masks of one call, [2] on the CPU, from the generator of the device; it moves on."""
    key = torch.zeros(2, dtype=torch.int64)
    if p == 0:
        return key
    if x.device.type == "cpu":
        return key.random_()
    generator = device.default_generator(x.device)
    key[0], key[1] = generator.initial_seed(), generator.get_offset()
    generator.set_offset(int(key[1]) + 4)  # it counts in fours
    return key


def _numbers(key: Tensor, p: float) -> tuple[int, int, int, float]:
    """What a kernel is told about a mask: key, counter, values of 16 bits that drop, and the scale of what is kept."""
    dropped = dropped_of(p)
    return *key.tolist(), dropped, 2**16 / (2**16 - dropped)


def _apart(omega: Tensor | None, alpha: float, p: float) -> bool:
    """Whether the gradient of the branch is another than that of x."""
    return omega is not None or alpha != 1 or p > 0


def _norm_parts(total: Tensor, centred: bool, omega: Tensor | None) -> tuple[int, int, int]:
    """The shape of the sums for the gradients of weight, bias and ω, in this order."""
    width = total.size(-1)
    return min(_PARTS, total.numel() // width), 1 + centred + (omega is not None), width


def _add_norm_gpu(
    branch: Tensor, x: Tensor, other: Tensor | None, omega: Tensor | None, alpha: float, weight: Tensor,
    bias: Tensor | None, eps: float, p: float,
) -> tuple[Tensor, Tensor, Tensor]:
    from deepnmt.extras.kernels import kernels  # needs Triton

    key, total, out = _draw(x, p), torch.empty_like(x), torch.empty_like(x)
    kernels.launch_add_norm(branch, x, other, omega, alpha, weight, bias, eps, _numbers(key, p), total, out)
    return total, out, key


def _add_norm_backward_gpu(
    grad: Tensor, total: Tensor, x: Tensor | None, omega: Tensor | None, alpha: float, weight: Tensor, centred: bool,
    eps: float, p: float, key: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    from deepnmt.extras.kernels import kernels  # needs Triton

    of_x, of_branch, parts = _add_norm_backward_shapes(
        grad, total, x, omega, alpha, weight, centred, eps, p, key)
    kernels.launch_add_norm_backward(grad, total, x, omega, alpha, weight, centred, eps, _numbers(key, p), of_x,
                                     of_branch if of_branch.numel() else None, parts)
    return of_x, of_branch, parts


def _add_norm_backward_shapes(
    grad: Tensor, total: Tensor, x: Tensor | None, omega: Tensor | None, alpha: float, weight: Tensor, centred: bool,
    eps: float, p: float, key: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    of_branch = torch.empty_like(total) if _apart(omega, alpha, p) else total.new_empty(0)
    return torch.empty_like(total), of_branch, total.new_empty(_norm_parts(total, centred, omega), dtype=torch.float32)


# -- linear map and ReLU -----------------------------------------------------------------------------------------------


def linear_relu(x: Tensor, linear: nn.Linear) -> Tensor:
    """relu(linear(x)): the matrix product ends with bias and ReLU."""
    return _ops.addmm_relu(x.contiguous(), linear.weight, linear.bias)


def _addmm_relu(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return torch.ops.aten._addmm_activation(bias, x.flatten(0, -2), weight.t()).view(*x.shape[:-1], -1)


def _addmm_relu_shapes(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return x.new_empty(*x.shape[:-1], len(weight))


def _keep_for_addmm_relu(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:2], output)


def _addmm_relu_gradients(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    x, weight, out = ctx.saved_tensors
    of_sum, parts = _ops.relu_backward(grad.contiguous(), out)
    rows = of_sum.flatten(0, -2)
    return (rows @ weight).view(x.shape), rows.t() @ x.flatten(0, -2), _ops.column_sums(parts, weight.dtype)


def _relu_backward_shapes(grad: Tensor, out: Tensor) -> tuple[Tensor, Tensor]:
    width = grad.size(-1)
    return torch.empty_like(grad), grad.new_empty(min(_PARTS, grad.numel() // width), width, dtype=torch.float32)


def _relu_backward_gpu(grad: Tensor, out: Tensor) -> tuple[Tensor, Tensor]:
    from deepnmt.extras.kernels import kernels  # needs Triton

    of_sum, parts = _relu_backward_shapes(grad, out)
    kernels.launch_relu_backward(grad, out, of_sum, parts)
    return of_sum, parts


def _column_sums_gpu(parts: Tensor, dtype: torch.dtype) -> Tensor:
    from deepnmt.extras.kernels import kernels  # needs Triton

    sums = _column_sums_shapes(parts, dtype)
    kernels.launch_column_sums(parts, sums)
    return sums


def _column_sums_shapes(parts: Tensor, dtype: torch.dtype) -> Tensor:
    return parts.new_empty(parts.shape[1:], dtype=dtype)


# -- attention in decoding ---------------------------------------------------------------------------------------------


def attend_step(packed: Tensor, past: Tensor, visible: Tensor | None, heads: int, slots: slice) -> Tensor:
    """Attention of hypotheses at one position; their keys and values are put into the past.

    Args:
        packed: queries, keys and values [B, K, 3D]; or [B, 1, 3D], if all hypotheses of a sentence are the same.
        past: see `SelfAttention.step`; so are `visible` and `slots`. In the slots of its own position a hypothesis sees
            itself, whatever `visible` says.

    Returns:
        [B, K, D], or [B, 1, D].
    """
    return _ops.attend_step(packed.contiguous(), past, visible, heads, slots.start, slots.stop)


def _attend_step_gpu(packed: Tensor, past: Tensor, visible: Tensor | None, heads: int, start: int, stop: int) -> Tensor:
    from deepnmt.extras.kernels import kernels  # needs Triton

    out = _attend_step_shapes(packed, past, visible, heads, start, stop)
    kernels.launch_attend_step(packed, past, visible, heads, start, stop, out)
    return out


def _attend_step_shapes(packed: Tensor, past: Tensor, visible: Tensor | None, heads: int, start: int, stop: int
                        ) -> Tensor:
    return packed.new_empty(*packed.shape[:2], packed.size(2) // 3)


# -- cross-entropy -----------------------------------------------------------------------------------------------------


def cross_entropy_(logits: Tensor, targets: Tensor, counts: Tensor, smoothing: float, gradient: bool) -> Tensor:
    """Sums of a loss for logits z [R, V], target tokens y [R] and counts n [R] in fp32.

    With `gradient`, n (softmax(z) - (1 - ε) onehot(y)) takes the place of the logits, ε = `smoothing`.

    Returns:
        [R, 2] in fp32: n (lse(z) - (1 - ε) z_y) and n (lse(z) - z_y).
    """
    return _ops.cross_entropy_(logits, targets, counts, smoothing, gradient)


def _cross_entropy_gpu(logits: Tensor, targets: Tensor, counts: Tensor, smoothing: float, gradient: bool) -> Tensor:
    from deepnmt.extras.kernels import kernels  # needs Triton

    sums = _cross_entropy_shapes(logits, targets, counts, smoothing, gradient)
    kernels.launch_cross_entropy_(logits, targets, counts, smoothing, gradient, sums)
    return sums


def _cross_entropy_shapes(logits: Tensor, targets: Tensor, counts: Tensor, smoothing: float, gradient: bool) -> Tensor:
    return logits.new_empty(len(logits), 2, dtype=torch.float32)


def _add_norm_shapes(branch: Tensor, x: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(x), torch.empty(2, dtype=torch.int64, device="cpu")


for _name, _compute, _shapes in (
    ("drop", _drop_gpu, _drop_shapes),
    ("add_norm", _add_norm_gpu, _add_norm_shapes),
    ("add_norm_backward", _add_norm_backward_gpu, _add_norm_backward_shapes),
    ("addmm_relu", _addmm_relu, _addmm_relu_shapes),
    ("relu_backward", _relu_backward_gpu, _relu_backward_shapes),
    ("column_sums", _column_sums_gpu, _column_sums_shapes),
    ("attend_step", _attend_step_gpu, _attend_step_shapes),
    ("cross_entropy_", _cross_entropy_gpu, _cross_entropy_shapes),
):
    _library.impl(_name, _compute, "CUDA")
    torch.library.register_fake(f"deepnmt::{_name}", _shapes, lib=_library)

for _name, _gradients, _keep in (
    ("drop", _drop_gradients, _keep_for_drop), ("add_norm", _add_norm_gradients, _keep_for_add_norm),
    ("addmm_relu", _addmm_relu_gradients, _keep_for_addmm_relu),
):
    torch.library.register_autograd(f"deepnmt::{_name}", _gradients, setup_context=_keep, lib=_library)
