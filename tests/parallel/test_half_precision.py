"""`HalfPrecisionCopy`: the copy in 16 bits computes, the fp32 weights get the gradients."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from deepnmt.parallel.deepspeed import HalfPrecisionCopy, MasterWeights


class Twice(nn.Module):
    """Multiplies by the same weight twice."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor([1.00390625, 1.0]))  # 1 + 2^-8: between two numbers of bf16
        self.register_buffer("table", torch.tensor(1 / 3))

    def forward(self, x: Tensor) -> Tensor:
        return (self.scale * x + self.scale * x).sum()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gradients_of_16_bits_are_summed_in_fp32(dtype: torch.dtype) -> None:
    weights = Twice()
    rounded = HalfPrecisionCopy(weights, dtype)
    assert rounded.module.scale.dtype == dtype and rounded.module.table.dtype == torch.float32
    for x in (1024.0, 0.5):  # neither bf16 nor fp16 can represent 2048 + 1
        rounded.module(torch.tensor([x, 0.0], dtype=dtype)).backward()
        assert rounded.module.scale.grad is None
    assert weights.scale.grad is not None and weights.scale.grad.tolist() == [2049.0, 0.0]


def test_the_copy_takes_the_rounded_weights() -> None:
    weights = Twice()
    rounded = HalfPrecisionCopy(weights, torch.bfloat16)
    with torch.no_grad():
        weights.scale += 1
    assert rounded.module.scale.tolist() == [1.0, 1.0]
    rounded.refresh()
    assert rounded.module.scale.tolist() == [2.0, 2.0] and weights.scale.tolist() == [2.00390625, 2.0]


def test_deepspeed_sees_the_fp32_weights_alone() -> None:
    weights = Twice()
    rounded = HalfPrecisionCopy(weights, torch.bfloat16)
    seen = MasterWeights(weights, rounded.module)
    assert [id(p) for p in seen.parameters()] == [id(weights.scale)]
    assert seen(torch.ones(2, dtype=torch.bfloat16)).dtype == torch.bfloat16
    seen.eval()
    assert not rounded.module.training
    seen.train()
    assert rounded.module.training
