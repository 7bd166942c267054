"""In 16 bits, as DeepSpeed's engines hold the model, LayerNorm's statistics and attention's softmax are those of fp32.

Each test shows beside it how far the same sums in 16 bits would be off.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from deepnmt.config import Model
from deepnmt.model.attention import attend
from deepnmt.model.transformer import Transformer

TYPES = (torch.bfloat16, torch.float16)
WIDTH = 64


def close(found: Tensor, exact: Tensor) -> bool:
    """Whether `found` is fp32's `exact`, but for the rounding of the result and one more place."""
    step = torch.finfo(found.dtype).eps
    return bool(((found.float() - exact).abs() <= step * exact.abs().clamp(min=1.0)).all())


@pytest.mark.parametrize("dtype", TYPES)
def test_statistics_of_norms(dtype: torch.dtype) -> None:
    model = Transformer(Model.model_validate({"width": WIDTH, "heads": 2, "ffn": 8, "encoder": {"layers": 1},
                                              "decoder": {"layers": 1}}), 8, 8, 1)
    norm = model.to(dtype).encoder.layers[0].rule.norms[0]
    x = (30 + torch.randn(20, WIDTH, generator=torch.Generator().manual_seed(1))).to(dtype)  # far from 0: sums cancel
    exact = F.layer_norm(x.float(), (WIDTH,))
    mean = x.cumsum(1, dtype=dtype)[:, -1:] / WIDTH
    spread = (x * x).cumsum(1, dtype=dtype)[:, -1:] / WIDTH - mean * mean
    assert close(norm(x), exact)
    assert not close((x - mean) / (spread.abs() + 1e-5).sqrt(), exact), "the same in 16 bits"


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("dtype", TYPES)
def test_sums_of_softmax(dtype: torch.dtype, training: bool) -> None:
    """Over 6,000 keys, where sums in 16 bits come to a stop."""
    draw = torch.Generator().manual_seed(1)
    q, keys = (torch.randn(1, 1, n, 8, generator=draw).to(dtype).requires_grad_(training) for n in (2, 6000))
    values = torch.rand(1, 1, 6000, 8, generator=draw).to(dtype)
    exact = F.scaled_dot_product_attention(q.float(), keys.float(), values.float())
    assert close(attend(q, keys, values), exact)
    scores = ((q @ keys.transpose(2, 3)) / 8**0.5).exp().detach()
    mixed, total = torch.zeros(1, 1, 2, 8, dtype=dtype), torch.zeros(1, 1, 2, 1, dtype=dtype)
    for key in range(6000):  # one by one: PyTorch's own sums keep more places
        total = total + scores[..., key : key + 1]
        mixed = mixed + scores[..., key : key + 1] * values[:, :, key : key + 1]
    assert not close(mixed / total, exact), "the same in 16 bits"
