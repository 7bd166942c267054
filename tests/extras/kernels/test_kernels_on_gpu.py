"""The Triton kernels on a GPU, against their twins; without a GPU a few of them, where both are the twins.

    DS_ACCELERATOR=cuda python -m pytest tests/extras/kernels/test_kernels_on_gpu.py
"""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import twins  # noqa: F401  # what a CPU computes

ON_GPU = os.environ.get("DS_ACCELERATOR") == "cuda"
ALL = ON_GPU or bool(os.environ.get("DEEPNMT_LONG"))
DEVICE = torch.device("cuda" if ON_GPU else "cpu")


def kernels() -> dict[str, tuple[Any, ...]]:
    """The arguments of every operation that is a Triton kernel, with 37 rows of width 40."""
    def random(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=draw)

    draw, key = torch.Generator().manual_seed(1), torch.tensor([2**62 + 3, 8])
    branch, x, other, weight, bias, omega = (random(37, 40), random(37, 40), random(37, 40), random(40), random(40),
                                             random(40))
    packed, past, visible = random(4, 3, 120), random(2, 4, 2, 90, 20), torch.zeros(4, 1, 3, 87)
    visible[..., ::5] = visible[..., -3:] = -torch.inf
    visible[:, 0, :, -3:].diagonal(dim1=-2, dim2=-1).zero_()
    return {
        "drop": (x, other, 0.25, key), "add_norm": (branch, x, other, omega, 1.0, weight, bias, 1e-5, 0.0),
        "add_norm_backward": (branch, x, other, omega, 1.0, weight, True, 1e-5, 0.25, key),
        "relu_backward": (x, other.relu()), "column_sums": (random(37, 2, 40), torch.float32),
        "attend_step": (packed, past, visible, 2, 84, 87),
        "cross_entropy_": (random(37, 64)[:, :50], torch.arange(37), torch.ones(37), 0.1, True)}


@pytest.mark.parametrize("name", kernels() if ALL else ["add_norm", "attend_step"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16] if ALL else [torch.float32])
def test_a_kernel_computes_what_its_twin_does(name: str, dtype: torch.dtype) -> None:
    """What is returned and what is changed in place; the twin computes in float64, on the CPU."""
    def placed(number: int, value: Any, device: torch.device | str, to: torch.dtype) -> Any:
        if not isinstance(value, torch.Tensor) or (name != "cross_entropy_" and value.dtype == torch.int64):
            return value  # a number, or a key of masks, which the host reads
        kept = value.dtype == torch.int64 or (name, number) == ("cross_entropy_", 2)  # target tokens and their counts
        return value.to(device) if kept else value.to(device, dtype).to(to)

    def given(device: torch.device | str, to: torch.dtype) -> list[Any]:
        return [placed(number, value, device, to) for number, value in enumerate(kernels()[name])]

    here, there = given("cpu", torch.float64), given(DEVICE, dtype)
    if name == "column_sums":
        here[1], there[1] = torch.float64, dtype
    operation = getattr(torch.ops.deepnmt, name)
    for expected, found in ((operation(*here), operation(*there)), (here, there)):
        for ours, theirs in zip(*(each if isinstance(each, tuple | list) else [each] for each in (expected, found)),
                                strict=True):
            if isinstance(ours, torch.Tensor) and ours.is_floating_point():
                if name.endswith("backward") and ours.shape != theirs.shape:
                    ours, theirs = ours.sum(0), theirs.sum(0)  # parts of sums
                ours, theirs_64, there_is = ours.double(), theirs.cpu().double(), ours.isfinite()
                assert torch.equal(theirs_64.isfinite(), there_is)
                error = (theirs_64 - ours)[there_is].abs().max() / ours[there_is].abs().max().clamp_min(1.0)
                assert float(error) < 32 * torch.finfo(theirs.dtype if theirs.dtype != torch.float32 else dtype).eps
