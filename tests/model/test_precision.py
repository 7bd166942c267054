"""In a 16-bit model, as in DeepSpeed's engines, LayerNorm's statistics and attention's softmax are computed in fp32.

Each test also shows that the same sums in 16 bits would be wrong.
"""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_engines import batch_of
from torch import Tensor
from torch.func import functional_call
from torch.nn import functional as F

from deepnmt.batch import Batch
from deepnmt.config import Model
from deepnmt.config.choices import BLOCKS
from deepnmt.model.admin_profile import measure
from deepnmt.model.blocks import LayerNorm
from deepnmt.model.init import new_model
from deepnmt.model.sublayers import attend
from deepnmt.model.transformer import Transformer

TYPES = (torch.bfloat16, torch.float16)
WIDTH = 64


def close(actual: Tensor, exact: Tensor) -> bool:
    """Whether `actual` equals `exact` (fp32) to within one eps of its type."""
    step = torch.finfo(actual.dtype).eps
    return bool(((actual.float() - exact).abs() <= step * exact.abs().clamp(min=1.0)).all())


@pytest.mark.parametrize("dtype", TYPES)
def test_statistics_of_norms(dtype: torch.dtype) -> None:
    model = new_model(Model.model_validate({"width": WIDTH, "heads": 2, "ffn": 8, "encoder": {"layers": 1},
                                              "decoder": {"layers": 1}}), 8, 8, 1)
    norm = model.to(dtype).encoder.layers[0].rule.norms[0]
    x = (30 + torch.randn(20, WIDTH, generator=torch.Generator().manual_seed(1))).to(dtype)  # far from 0: sums cancel
    exact = F.layer_norm(x.float(), (WIDTH,))
    mean = x.cumsum(1, dtype=dtype)[:, -1:] / WIDTH
    spread = (x * x).cumsum(1, dtype=dtype)[:, -1:] / WIDTH - mean * mean
    assert close(norm(x), exact)
    assert not close((x - mean) / (spread.abs() + 1e-5).sqrt(), exact), "the same in 16 bits"


@pytest.mark.parametrize("dtype", TYPES)
def test_statistics_of_norms_in_the_backward_pass(dtype: torch.dtype) -> None:
    """The largest error of all three gradients against float64, in eps of the type relative to the largest value."""
    generator = torch.Generator().manual_seed(2)
    norm = LayerNorm(WIDTH).to(dtype)
    x = (30 + torch.randn(500, WIDTH, generator=generator)).to(dtype)
    upstream = torch.randn(500, WIDTH, generator=generator).to(dtype)

    def gradients(of: Callable[[Tensor, Tensor, Tensor], Tensor], kind: torch.dtype) -> list[Tensor]:
        leaves = [t.detach().to(kind).requires_grad_() for t in (x, norm.weight, norm.bias)]
        of(*leaves).backward(upstream.to(kind))
        return [leaf.grad.double() for leaf in leaves if leaf.grad is not None]

    def plain(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return F.layer_norm(x, (WIDTH,), weight, bias)

    def ours(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return functional_call(norm, {"weight": weight, "bias": bias}, (x,))

    exact = gradients(plain, torch.float64)
    errors = {name: [float((actual - right).abs().max() / right.abs().max()) / torch.finfo(dtype).eps
                     for actual, right in zip(gradients(of, dtype), exact, strict=True)]
              for name, of in (("ours", ours), ("plain", plain))}
    assert max(errors["ours"]) < 0.6
    assert min(errors["plain"][1:]) > 2, "PyTorch now sums in fp32 itself, so its own LayerNorm can be used"


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("dtype", TYPES)
def test_sums_of_softmax(dtype: torch.dtype, training: bool) -> None:
    """Over 6,000 keys, for which sums in 16 bits stop growing."""
    generator = torch.Generator().manual_seed(1)
    q, keys = (torch.randn(1, 1, n, 8, generator=generator).to(dtype).requires_grad_(training) for n in (2, 6000))
    values = torch.rand(1, 1, 6000, 8, generator=generator).to(dtype)
    exact = F.scaled_dot_product_attention(q.float(), keys.float(), values.float())
    assert close(attend(q, keys, values), exact)
    scores = ((q @ keys.transpose(2, 3)) / 8**0.5).exp().detach()
    mixed, total = torch.zeros(1, 1, 2, 8, dtype=dtype), torch.zeros(1, 1, 2, 1, dtype=dtype)
    for key in range(6000):  # one by one, because PyTorch's own sums are more precise
        total = total + scores[..., key : key + 1]
        mixed = mixed + scores[..., key : key + 1] * values[:, :, key : key + 1]
    assert not close(mixed / total, exact), "the same in 16 bits"


@pytest.mark.skipif(not os.environ.get("DEEPNMT_LONG"), reason="half a minute of one core; DEEPNMT_LONG=1 runs it")
def test_every_block_in_fp16_as_documented() -> None:
    """The fp16 columns of studies/results/initial_weights.md, printed with `-s`; the page explains the measurement."""
    generator = torch.Generator().manual_seed(1)
    src, trg = (torch.randint(4, 1000, (8, length), generator=generator) for length in (24, 25))
    batch = batch_of(src, torch.full((8,), 24), trg[:, :-1], trg[:, 1:])
    text = (Path(__file__).parents[2] / "studies" / "results" / "initial_weights.md").read_text(encoding="utf-8")
    columns = r"^\| `(\w+)` .*\| ([\d.]+) \| ([\d.]+) %"
    rows = {block: (float(largest), float(zeros)) for block, largest, zeros in re.findall(columns, text, re.MULTILINE)}
    for block in BLOCKS:
        stack = {"block": block, "layers": 18}
        shape = Model.model_validate({"width": 128, "heads": 2, "ffn": 512, "dropout": 0.1, "encoder": stack,
                                      "decoder": stack})
        profile = measure(shape, 1000, 1000, 1, [batch]) if shape.profiled else None
        model = new_model(shape, 1000, 1000, 1, 0.0, profile.omega if profile else None).train()
        half, (largest, loss) = copy.deepcopy(model).half(), largest_output(model, batch)
        in_fp16 = half(batch).loss / batch.tokens
        (in_fp16.float() * 128).backward()
        grads = [p.grad for p in half.parameters() if p.grad is not None]
        zeros = sum(int((grad == 0).sum()) for grad in grads) / sum(grad.numel() for grad in grads)
        print(f"{block}: {largest:.1f}; {100 * zeros:.1f} %, loss {loss:.3f}, in fp16 {float(in_fp16.detach()):.3f}")
        assert all(bool(grad.isfinite().all()) for grad in grads) and abs(float(in_fp16.detach()) - loss) < 0.01
        assert (largest, 100 * zeros) == pytest.approx(rows[block], abs=0.1)


@torch.no_grad()
def largest_output(model: Transformer, batch: Batch) -> tuple[float, float]:
    """The largest magnitude of any module's output or any norm's input, and the loss in nats a token."""
    magnitudes: list[float] = []

    def record(module: torch.nn.Module, inputs: Any, output: Any) -> None:
        tensors = output if isinstance(output, tuple) else (output,)
        magnitudes.extend(float(x.abs().max()) for x in (*tensors, *(inputs if isinstance(module, LayerNorm) else ()))
                          if isinstance(x, Tensor) and x.is_floating_point())

    handles = [module.register_forward_hook(record) for name, module in model.named_modules() if name]
    loss = float(model(batch).loss / batch.tokens)
    for handle in handles:
        handle.remove()
    return max(magnitudes), loss
