"""The Triton kernels of `fused.py`, which says what each computes; tests/extras/kernels/twins.py does it in PyTorch.

A kernel reads and writes every element once, only the logits it reads twice. Sums are in fp32. No two programs write to
one place, so a result does not depend on the order in which they run.
"""

# mypy: disallow-untyped-defs=False
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _kept(seed, offset, row, dropped, block: tl.constexpr):
    """Which elements of a row are kept: those whose 16 random bits are not below `dropped`, as `kept` of the twins."""
    eights = (row * (block // 8) + tl.arange(0, block // 8)).to(tl.uint32)
    zeros = eights * 0
    a, b, c, d = tl.philox(seed, eights, zeros + offset.to(tl.uint32), zeros, zeros + 0x80000000)
    words = tl.join(tl.join(a, b), tl.join(c, d))
    return tl.reshape(tl.join(words & 0xFFFF, words >> 16), (block,)) >= dropped


@triton.jit(do_not_specialize=["seed", "offset"])
def drop(x, residual, out, seed, offset, dropped, scale, width, block: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, block)
    inside = columns < width
    at = row * width + columns
    h = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    h = tl.where(_kept(seed, offset, row, dropped, block), h * scale, 0.0)
    if residual is not None:
        h += tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + at, h.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["seed", "offset"])
def add_norm(branch, x, other, omega, weight, bias, total, out, seed, offset, dropped, scale, alpha, eps, width,
             block: tl.constexpr, dropping: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, block)
    inside = columns < width
    at = row * width + columns
    h = tl.load(branch + at, mask=inside, other=0.0).to(tl.float32)
    if dropping:
        h = tl.where(_kept(seed, offset, row, dropped, block), h * scale, 0.0)
    residual = tl.load(x + at, mask=inside, other=0.0).to(tl.float32) * alpha
    if omega is not None:
        residual *= tl.load(omega + columns, mask=inside, other=0.0).to(tl.float32)
    if other is not None:
        residual += tl.load(other + at, mask=inside, other=0.0).to(tl.float32)
    rounded = (h + residual).to(out.dtype.element_ty)  # what the backward pass reads
    tl.store(total + at, rounded, mask=inside)
    h = rounded.to(tl.float32)
    if bias is not None:
        h = tl.where(inside, h - tl.sum(h, 0) / width, 0.0)
    h *= 1.0 / tl.sqrt(tl.sum(h * h, 0) / width + eps)
    h *= tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    if bias is not None:
        h += tl.load(bias + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + at, h.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["seed", "offset", "rows"])
def add_norm_backward(grad, total, x, omega, weight, grad_x, grad_branch, parts, seed, offset, dropped, scale, alpha,
                      eps, rows, width, block: tl.constexpr, dropping: tl.constexpr, centred: tl.constexpr,
                      lines: tl.constexpr):
    first = tl.program_id(0)
    columns = tl.arange(0, block)
    inside = columns < width
    w = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    o = w
    if omega is not None:
        o = tl.load(omega + columns, mask=inside, other=0.0).to(tl.float32)
    of_weight, of_bias, of_omega = w * 0, w * 0, w * 0
    for row in range(first, rows, tl.num_programs(0)):
        at = row * width.to(tl.int64) + columns
        h = tl.load(total + at, mask=inside, other=0.0).to(tl.float32)
        g = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32)
        if centred:
            h = tl.where(inside, h - tl.sum(h, 0) / width, 0.0)
        factor = 1.0 / tl.sqrt(tl.sum(h * h, 0) / width + eps)
        h *= factor  # the norm without weight and bias
        of_weight += g * h
        of_bias += g
        g *= w
        change = g - h * (tl.sum(g * h, 0) / width)
        if centred:
            change -= tl.sum(g, 0) / width
        change *= factor  # the gradient of the sum
        of_x = change * alpha
        if omega is not None:
            of_omega += change * tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
            of_x *= o
        tl.store(grad_x + at, of_x.to(grad_x.dtype.element_ty), mask=inside)
        if grad_branch is not None:
            if dropping:
                change = tl.where(_kept(seed, offset, row, dropped, block), change * scale, 0.0)
            tl.store(grad_branch + at, change.to(grad_branch.dtype.element_ty), mask=inside)
    line = parts + first * lines * width + columns
    tl.store(line, of_weight, mask=inside)
    if centred:
        tl.store(line + width, of_bias, mask=inside)
    if omega is not None:
        tl.store(line + (lines - 1) * width, of_omega, mask=inside)


@triton.jit(do_not_specialize=["rows"])
def relu_backward(grad, out, grad_in, parts, rows, width, block: tl.constexpr):
    first = tl.program_id(0)
    columns = tl.program_id(1) * block + tl.arange(0, block)
    inside = columns < width
    summed = tl.zeros((block,), tl.float32)
    for row in range(first, rows, tl.num_programs(0)):
        at = row * width.to(tl.int64) + columns
        g = tl.load(grad + at, mask=inside, other=0.0)
        g = tl.where(tl.load(out + at, mask=inside, other=0.0) > 0, g, 0.0)
        tl.store(grad_in + at, g, mask=inside)
        summed += g.to(tl.float32)
    tl.store(parts + first * width + columns, summed, mask=inside)


@triton.jit
def column_sums(parts, sums, rows, width, block: tl.constexpr, lines: tl.constexpr):
    columns = tl.program_id(0) * block + tl.arange(0, block)
    inside = (columns < width)[None, :]
    summed = tl.zeros((lines, block), tl.float32)
    for start in range(0, rows, lines):
        read = start + tl.arange(0, lines)[:, None]
        summed += tl.load(parts + read * width + columns[None, :], mask=inside & (read < rows), other=0.0)
    tl.store(sums + columns, tl.sum(summed, 0).to(sums.dtype.element_ty), mask=columns < width)


@triton.jit
def cross_entropy_(logits, targets, counts, sums, smoothing, vocab, stride, block: tl.constexpr,
                   gradient: tl.constexpr):
    """What follows a row's logits, up to `stride`, is overwritten: so rows can be read 16 bytes at a time."""
    row = tl.program_id(0).to(tl.int64)
    line = logits + row * stride
    target, count = tl.load(targets + row), tl.load(counts + row)
    of_target = tl.load(line + target).to(tl.float32)  # before any of the gradient is written
    top = tl.full((), float("-inf"), tl.float32)
    mass = tl.zeros((), tl.float32)
    for start in range(0, stride, block):
        columns = start + tl.arange(0, block)
        z = tl.load(line + columns, mask=columns < stride, other=0.0).to(tl.float32)
        z = tl.where(columns < vocab, z, float("-inf"))
        higher = tl.maximum(top, tl.max(z, 0))
        mass = mass * tl.exp(top - higher) + tl.sum(tl.exp(z - higher), 0)
        top = higher
    lse = top + tl.log(mass)
    tl.store(sums + 2 * row, (lse - (1 - smoothing) * of_target) * count)
    tl.store(sums + 2 * row + 1, (lse - of_target) * count)
    if gradient:
        for start in range(0, stride, block):
            columns = start + tl.arange(0, block)
            z = tl.load(line + columns, mask=columns < stride, other=0.0).to(tl.float32)
            z = tl.where(columns < vocab, z, float("-inf"))
            g = tl.exp(z - lse) - tl.where(columns == target, 1 - smoothing, 0.0)
            tl.store(line + columns, (g * count).to(logits.dtype.element_ty), mask=columns < stride)


@triton.jit(do_not_specialize=["filled"])
def attend_step(packed, past, visible, out, scale, filled, given, beams, heads, width, past_part, past_sentence,
                past_head, visible_sentence, visible_row, block: tl.constexpr, rows: tl.constexpr, slots: tl.constexpr):
    """One head of one sentence. `given` rows of `packed`, one or as many as `beams`; `filled` slots are read, and those
    after them written."""
    sentence, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row, column, slot = tl.arange(0, rows), tl.arange(0, block), tl.arange(0, slots)
    narrow = column < width
    inside = (row < beams)[:, None] & narrow[None, :]
    line = (sentence * given + tl.minimum(row, given - 1))[:, None] * 3 * heads + head
    at = packed + line * width + column[None, :]
    q = tl.load(at, mask=inside, other=0.0)
    key = tl.load(at + heads * width, mask=inside, other=0.0)
    value = tl.load(at + 2 * heads * width, mask=inside, other=0.0)
    old = past + sentence * past_sentence + head * past_head
    new = old + (filled + row)[:, None] * width + column[None, :]
    tl.store(new, key, mask=inside)
    tl.store(new + past_part, value, mask=inside)
    top = tl.sum(q.to(tl.float32) * key.to(tl.float32), 1) * scale  # itself
    mass = tl.full((rows,), 1.0, tl.float32)
    total = value.to(tl.float32)
    for begin in range(0, filled, slots):
        at_slot = begin + slot
        there = at_slot < filled
        keys = tl.load(old + at_slot[None, :] * width + column[:, None], mask=there[None, :] & narrow[:, None],
                       other=0.0)
        scores = tl.dot(q, keys, input_precision="ieee") * scale
        if visible is not None:
            seen = visible + sentence * visible_sentence + row[:, None] * visible_row + at_slot[None, :]
            scores += tl.load(seen, mask=(row < given)[:, None] & there[None, :], other=float("-inf")).to(tl.float32)
        scores = tl.where(there[None, :], scores, float("-inf"))
        higher = tl.maximum(top, tl.max(scores, 1))
        weights = tl.exp(scores - higher[:, None])
        shrunk = tl.exp(top - higher)
        values = tl.load(old + past_part + at_slot[:, None] * width + column[None, :],
                         mask=there[:, None] & narrow[None, :], other=0.0)
        mass = mass * shrunk + tl.sum(weights, 1)
        total = total * shrunk[:, None] + tl.dot(weights.to(values.dtype), values, input_precision="ieee")
        top = higher
    done = out + ((sentence * given + row)[:, None] * heads + head) * width + column[None, :]
    tl.store(done, (total / mass[:, None]).to(out.dtype.element_ty), mask=inside & (row < given)[:, None])


# -- launches ----------------------------------------------------------------------------------------------------------


def launch_drop(x: Tensor, residual: Tensor | None, mask: tuple[int, int, int, float], out: Tensor) -> None:
    width = x.size(-1)
    block, warps = _block(width)
    drop[(x.numel() // width,)](x, residual, out, *mask, width, block, num_warps=warps)


def launch_add_norm(branch: Tensor, x: Tensor, other: Tensor | None, omega: Tensor | None, alpha: float, weight: Tensor,
                    bias: Tensor | None, eps: float, mask: tuple[int, int, int, float], total: Tensor,
                    out: Tensor) -> None:
    width = x.size(-1)
    block, warps = _block(width)
    add_norm[(x.numel() // width,)](branch, x, other, omega, weight, bias, total, out, *mask, alpha, eps, width, block,
                                    mask[2] > 0, num_warps=warps)


def launch_add_norm_backward(grad: Tensor, total: Tensor, x: Tensor | None, omega: Tensor | None, alpha: float,
                             weight: Tensor, centred: bool, eps: float, mask: tuple[int, int, int, float],
                             grad_x: Tensor, grad_branch: Tensor | None, parts: Tensor) -> None:
    width = total.size(-1)
    block, warps = _block(width)
    add_norm_backward[(len(parts),)](
        grad, total, x, omega, weight, grad_x, grad_branch, parts, *mask, alpha, eps, total.numel() // width, width,
        block, mask[2] > 0, centred, parts.size(1), num_warps=warps)


def launch_relu_backward(grad: Tensor, out: Tensor, grad_in: Tensor, parts: Tensor) -> None:
    width = grad.size(-1)
    block, warps = _block(min(width, 1024))
    relu_backward[(len(parts), -(-width // block))](grad, out, grad_in, parts, grad.numel() // width, width, block,
                                                    num_warps=warps)


def launch_column_sums(parts: Tensor, sums: Tensor) -> None:
    column_sums[(-(-sums.numel() // 32),)](parts, sums, len(parts), sums.numel(), 32, 32)


def launch_cross_entropy_(logits: Tensor, targets: Tensor, counts: Tensor, smoothing: float, gradient: bool,
                          sums: Tensor) -> None:
    cross_entropy_[(len(logits),)](logits, targets, counts, sums, smoothing, logits.size(1), logits.stride(0), 4096,
                                   gradient, num_warps=8)


def launch_attend_step(packed: Tensor, past: Tensor, visible: Tensor | None, heads: int, start: int, stop: int,
                       out: Tensor) -> None:
    sentences, given, width = len(packed), packed.size(1), past.size(-1)
    seen = (0, 0) if visible is None else (visible.stride(0), visible.stride(2))
    attend_step[(sentences, heads)](
        packed, past, visible, out, width**-0.5, start, given, stop - start, heads, width, *past.stride()[:3], *seen,
        max(16, triton.next_power_of_2(width)), max(16, triton.next_power_of_2(stop - start)), 64)


def _block(width: int) -> tuple[int, int]:
    """Columns of a program and its warps: eight columns a thread, so that 16-bit numbers travel 16 bytes at a time."""
    block = max(16, triton.next_power_of_2(width))
    return block, min(16, max(1, block // 256))
