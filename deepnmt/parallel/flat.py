"""DeepSpeed's bf16 optimizer (ZeRO-1) on its flat buffers: few launches where it visits one tensor after the other.

DeepSpeed keeps the fp32 gradients of a parameter group in one buffer, but adds to it, takes norms of it and clips it
tensor by tensor, some 2,900 launches an update of a model with 961 tensors. Here that are some 60, with the same
results to the bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from deepnmt.device import on_gpu


def update_flat(optimizer: Any, to_host: Callable[[Tensor], Tensor]) -> None:
    """Replaces methods of a `BF16_Optimizer`.

    Args:
        to_host: copies the gradient norm to the host.
    """
    one_by_one = optimizer.update_hp_grads

    @torch.no_grad()
    def add_gradients(clear_lp_grads: bool = False) -> None:
        """Adds a micro-batch's gradients to those in fp32, and frees them: so the next ones need no addition."""
        groups = optimizer.bf16_groups
        if not on_gpu(optimizer.bf16_groups_flat[0]) or any(p.grad is None for group in groups for p in group):
            one_by_one(clear_lp_grads)  # a CPU would copy the whole buffer to add numbers of two types
            return
        for group, total, sums, has in zip(
                groups, optimizer.fp32_groups_actual_gradients_flat, optimizer.fp32_groups_gradients,
                optimizer.fp32_groups_has_gradients, strict=True):
            total.add_(torch.cat([p.grad.reshape(-1) for p in group]))
            has[:] = [True] * len(group)
            for p, own in zip(group, sums, strict=True):
                p._hp_grad, p.grad = own, None

    @torch.no_grad()
    def step(closure: None = None) -> None:
        """Clips by the norm and updates, or drops an update whose gradients are not finite."""
        gradients, _ = optimizer.get_grads_for_norm()
        squares = torch.stack(torch._foreach_norm(gradients)).pow(2).sum()
        if optimizer.mpu is not None:  # a pipeline
            dist.all_reduce(squares, group=optimizer.mpu.get_model_parallel_group())
        norm = to_host(squares.sqrt())
        optimizer._global_grad_norm, optimizer.overflow = norm, not math.isfinite(norm)
        if optimizer.overflow:
            return
        factor = optimizer.clip_grad / (norm + 1e-6)
        for weights, kept in zip(
                optimizer.fp32_groups_flat_partition, optimizer.fp32_groups_gradient_flat_partition, strict=True):
            if optimizer.clip_grad and factor < 1:
                kept.mul_(factor)
            weights.grad = kept
        optimizer.optimizer.step()
        optimizer._lazy_init_hp_params_optimizer_state()
        optimizer.update_lp_params()

    optimizer.update_hp_grads, optimizer.step = add_gradients, step
