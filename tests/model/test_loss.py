"""The fused loss against PyTorch's cross-entropy: values and gradients."""

from __future__ import annotations

import pytest
import torch
from small_models import r_drop_loss
from torch import Tensor
from torch.nn import functional as F

from deepnmt.model import loss as loss_module
from deepnmt.model.loss import label_smoothed_loss

PAD, V, D = 3, 29, 16


def inputs(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(11)
    hidden = torch.randn(3, 7, D).to(dtype).requires_grad_()
    weight = torch.randn(V, D).to(dtype).requires_grad_()
    targets = torch.randint(0, V, (3, 7))
    targets[1, 4:] = targets[2, 1:] = PAD
    return hidden, weight, targets


def reference(logits: Tensor, targets: Tensor, smoothing: float) -> Tensor:
    return F.cross_entropy(
        logits.flatten(0, 1), targets.flatten(), label_smoothing=smoothing, reduction="sum", ignore_index=PAD
    )


@pytest.mark.parametrize("chunk_rows", [1, 4, 1000])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_value_and_gradients_are_pytorchs(
    smoothing: float, chunk_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(loss_module._CHUNK_LOGITS, "cpu", chunk_rows * V)
    hidden, weight, targets = inputs()
    sums = label_smoothed_loss(hidden, weight, targets, smoothing, PAD)
    logits = F.linear(hidden, weight)
    expected = reference(logits, targets, smoothing)
    torch.testing.assert_close(sums.loss, expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(sums.nll, reference(logits, targets, 0.0).detach(), rtol=1e-6, atol=1e-6)
    scale = 128.0  # as a loss scaler would multiply
    ours = torch.autograd.grad(scale * sums.loss, (hidden, weight))
    theirs = torch.autograd.grad(scale * expected, (hidden, weight))
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-4)
    assert not sums.nll.requires_grad


@pytest.mark.parametrize(("dtype", "error"), [(torch.float32, 1e-5), (torch.bfloat16, 3e-2)])
@pytest.mark.parametrize("chunk_rows", [1, 4, 1000])
def test_r_drop_is_half_of_the_papers_loss(
    chunk_rows: int, dtype: torch.dtype, error: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(loss_module._CHUNK_LOGITS, "cpu", 4 * chunk_rows * V)
    _, weight, targets = inputs(dtype)
    hidden = (torch.randn(6, 7, D) / 4).to(dtype).requires_grad_()
    sums = r_drop_loss(hidden, weight, targets, 0.1, 5.0)
    logits = F.linear(hidden, weight).float()
    p, q = (half[targets != PAD].log_softmax(-1) for half in logits.chunk(2))
    apart = [F.kl_div(a, b, log_target=True, reduction="sum") for a, b in ((p, q), (q, p))]
    paper = reference(logits, torch.cat([targets, targets]), 0.1) + 5.0 * sum(apart) / 2
    torch.testing.assert_close(sums.loss, paper / 2, rtol=error, atol=error)
    torch.testing.assert_close(sums.nll, reference(logits, torch.cat([targets, targets]), 0.0).detach() / 2, rtol=error,
                               atol=error)
    ours = torch.autograd.grad(3 * sums.loss, (hidden, weight))
    theirs = torch.autograd.grad(3 * paper / 2, (hidden, weight))
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=error, atol=error * float(other.abs().max()))
    alike = torch.cat([hidden[:3], hidden[:3]])
    torch.testing.assert_close(r_drop_loss(alike, weight, targets, 0.1, 5.0).loss,
                               label_smoothed_loss(hidden[:3], weight, targets, 0.1, PAD).loss)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_loss_is_exact_if_a_probability_underflows(dtype: torch.dtype) -> None:
    """A target token whose probability underflows fp32 still has its loss and gradients; in bf16 those of the rounded
    logits."""
    hidden, weight, targets = inputs(dtype)
    far = (hidden.detach() * 100).requires_grad_()
    logits = F.linear(far, weight).float()
    likely = logits.softmax(-1).gather(-1, targets[..., None])
    assert (likely == 0).any() and (likely > 0.1).any()

    smoothed, plain = (reference(logits, targets, smoothing) for smoothing in (0.1, 0.0))
    sums = label_smoothed_loss(far, weight, targets, 0.1, PAD)
    torch.testing.assert_close(sums.loss, smoothed, rtol=1e-6 if dtype == torch.float32 else 1e-4, atol=1e-3)
    torch.testing.assert_close(sums.nll, plain, rtol=1e-6, atol=1e-3)
    ours, theirs = (torch.autograd.grad(loss, (far, weight)) for loss in (sums.loss, smoothed))
    for actual, expected in zip(ours, theirs, strict=True):
        difference = float((actual - expected).float().norm() / expected.float().norm())
        assert difference < (1e-5 if dtype == torch.float32 else 2**-7)


def test_non_finite_logits_give_a_non_finite_loss() -> None:
    hidden, weight, targets = inputs()
    for value in (torch.nan, torch.inf):
        broken = hidden.detach().clone()
        broken[0, 0, 0] = value
        assert not label_smoothed_loss(broken, weight, targets, 0.1, PAD).loss.isfinite()


def test_no_gradient_is_computed_without_need() -> None:
    hidden, weight, targets = inputs()
    expected = label_smoothed_loss(hidden, weight, targets, 0.1, PAD).loss
    with torch.no_grad():
        sums = label_smoothed_loss(hidden, weight, targets, 0.1, PAD)
    assert not sums.loss.requires_grad
    assert torch.equal(sums.loss, expected)


def test_a_batch_of_padding_costs_nothing() -> None:
    hidden, weight, _ = inputs()
    sums = label_smoothed_loss(hidden, weight, torch.full((3, 7), PAD), 0.1, PAD)
    sums.loss.backward()
    assert sums.loss.item() == sums.nll.item() == 0
    assert hidden.grad is not None and not hidden.grad.any()
    assert weight.grad is not None and not weight.grad.any()


def test_a_weight_used_twice_gets_both_gradients() -> None:
    """Tied embeddings: the weight makes the hidden states and projects them."""
    _, weight, targets = inputs()
    ids = torch.randint(0, V, (3, 7))
    ours = torch.autograd.grad(
        label_smoothed_loss(F.embedding(ids, weight).tanh(), weight, targets, 0.1, PAD).loss, weight
    )
    logits = F.linear(F.embedding(ids, weight).tanh(), weight)
    theirs = torch.autograd.grad(reference(logits, targets, 0.1), weight)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("scale", [1.0, 2.0**15])
def test_what_fp16_loses_of_the_gradient_before_the_scale(scale: float) -> None:
    """At any loss scale, words with a probability below 2^-25 have no gradient, and others an error up to 2^-25;
    the gradient of label smoothing is exact for all."""
    logits = torch.tensor([0.0, -12.0, -16.0, -99.0, -18.0, -20.0])
    weight = torch.zeros(len(logits), 8)
    weight[:, 0] = logits
    hidden = torch.eye(1, 8)[None]
    exact = torch.softmax(logits, 0)
    assert (exact < 2**-25).tolist() == [False, False, False, True, True, True]

    def gradients(smoothing: float) -> Tensor:
        half = weight.half().requires_grad_()
        loss = label_smoothed_loss(hidden.half(), half, torch.tensor([[0]]), smoothing, PAD).loss
        return torch.autograd.grad(scale * loss, half)[0][:, 0].float() / scale

    plain = gradients(0.0)
    assert plain[1:3].all() and not plain[3:].any()
    assert ((plain - exact)[1:].abs() <= 2**-25).all()
    torch.testing.assert_close(gradients(0.125)[3:], torch.full((3,), -0.125 / len(logits)), rtol=2**-10, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_has_fp32_statistics(dtype: torch.dtype) -> None:
    hidden, weight, targets = inputs(dtype)
    sums = label_smoothed_loss(hidden, weight, targets, 0.1, PAD)
    assert sums.loss.dtype == sums.nll.dtype == torch.float32
    expected = reference(F.linear(hidden, weight).float(), targets, 0.1)
    torch.testing.assert_close(sums.loss, expected, rtol=1e-3, atol=0)
    ours, theirs = (torch.autograd.grad(x, (hidden, weight)) for x in (sums.loss, expected))
    for a, b in zip(ours, theirs, strict=True):
        assert a.dtype == dtype
        assert F.cosine_similarity(a.float().flatten(), b.float().flatten(), dim=0) > 0.9999


@pytest.mark.parametrize("chunk", [1, V * 3, 2**22])
def test_chunks_of_bf16_are_summed_in_fp32(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a thousand chunks of one row each, sums in 16 bits would stop growing after 256."""
    monkeypatch.setitem(loss_module._CHUNK_LOGITS, "cpu", chunk)
    torch.manual_seed(3)
    hidden = torch.ones(1, 1024, D, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(V, D).bfloat16().requires_grad_()
    targets = torch.full((1, 1024), 5)
    ours = torch.autograd.grad(label_smoothed_loss(hidden, weight, targets, 0.1, PAD).loss, weight)[0].float()
    exact_weight = weight.detach().float().requires_grad_()
    logits = F.linear(hidden.detach().float(), exact_weight)
    exact = torch.autograd.grad(reference(logits, targets, 0.1), exact_weight)[0]
    torch.testing.assert_close(ours, exact, rtol=2**-7, atol=2**-8 * float(exact.abs().max()))


@pytest.mark.parametrize("size", [1, 100, V * D])
def test_add_product_works_with_scratch_of_any_size(size: int) -> None:
    torch.manual_seed(4)
    a, b, total = torch.randn(V, 8).bfloat16(), torch.randn(8, D).bfloat16(), torch.randn(V, D)
    expected = total + torch.mm(a, b)
    loss_module.add_product(total, a, b, torch.empty(size))
    assert torch.equal(total, expected)
