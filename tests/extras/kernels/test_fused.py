"""The operations that a GPU computes in one go, by their twins in PyTorch: against plain autograd, and in every block
against the plain operations. test_kernels.py holds the Triton kernels to the twins."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import twins
from refusals import user_error
from small_models import BLOCKS, VOCAB, batch, batch_of, model_of, shapes
from torch import Tensor
from torch.nn import functional as F

from deepnmt import device
from deepnmt.decode.next_tokens import LengthPenalty
from deepnmt.decode.search import beam_search
from deepnmt.decode.steppers import CachedStepper
from deepnmt.extras.kernels import fused, replacements
from deepnmt.model import overrides
from deepnmt.model.blocks import LayerNorm, RMSNorm
from deepnmt.model.init import new_model
from deepnmt.model.sublayers import SelfAttention

P = 0.25
KEY = torch.tensor([2**62 + 3, 8])
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    """The plain operations, after each test."""
    yield
    overrides.restore()


def random(*shape: int, number: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(number), dtype=torch.float64).requires_grad_()


@pytest.mark.parametrize("p", [0.0, P])
@pytest.mark.parametrize("kind", ["plain", "omega", "alpha", "other", "rms"])
def test_the_sum_and_norm_are_those_of_autograd(kind: str, p: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """norm(other + ω ⊙ x + mask ⊙ branch): result and all gradients."""
    monkeypatch.setattr(fused, "_draw", lambda *_: KEY)
    norm: Any = (RMSNorm(12, eps=1e-5) if kind == "rms" else LayerNorm(12)).double()
    for number, weight in enumerate(norm.parameters()):
        weight.data = random(12, number=number).data
    branch, x = random(2, 5, 12, number=3), random(2, 5, 12, number=4)
    other = random(2, 5, 12, number=5) if kind == "other" else None
    omega: Any = {"omega": random(12, number=6), "alpha": 1.7}.get(kind, 1.0)
    given = [t for t in (branch, x, other, omega, *norm.parameters()) if isinstance(t, Tensor)]
    plain = norm((0.0 if other is None else other) + omega * x + branch * twins.kept(branch, KEY, p))
    one = fused.add_norm(branch, p, x, norm, omega, other)
    assert torch.allclose(one, plain, rtol=1e-12, atol=1e-12)
    weights = random(2, 5, 12, number=7).detach()
    for ours, theirs in zip(*(torch.autograd.grad((out * weights).sum(), given) for out in (one, plain)), strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-10, atol=1e-10)


def test_a_linear_map_with_relu_is_that_of_autograd() -> None:
    linear, x = torch.nn.Linear(6, 9).double(), random(3, 4, 6, number=1)
    one, plain = fused.linear_relu(x, linear), F.relu(linear(x))
    assert torch.equal(one, plain)
    weights, given = random(3, 4, 9, number=2).detach(), (x, *linear.parameters())
    for ours, theirs in zip(*(torch.autograd.grad((out * weights).sum(), given) for out in (one, plain)), strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-12, atol=1e-12)


def test_masks_are_philoxs_numbers() -> None:
    """Philox 4x32 with ten rounds of counter (0, 0, 0, 0) and key 0, and of all ones: the known answers of Random123,
    the library of the paper. Of the mask: its share, its scale, and that rows and keys differ."""
    zeros = ["6627e8d5", "e169c58d", "bc57ac4c", "9b00dbd8"]
    assert [f"{int(word):08x}" for word in twins.philox([torch.tensor([0])] * 4, 0)] == zeros
    ones = ["408f276d", "41c83b0e", "a20bc7c6", "6d5451fd"]
    assert [f"{int(word):08x}" for word in twins.philox([torch.tensor([2**32 - 1])] * 4, -1)] == ones
    mask = twins.kept(torch.empty(4000, 50), KEY, P)
    assert mask.unique().tolist() == pytest.approx([0.0, 4 / 3])
    assert float(mask.mean()) == pytest.approx(1.0, abs=0.01)
    assert mask.unique(dim=0).shape == mask.shape
    assert not torch.equal(mask, twins.kept(mask, KEY + torch.tensor([0, 4]), P))
    assert not torch.equal(mask, twins.kept(mask, KEY + torch.tensor([2**32, 0]), P))


def computed(block: str, dropout: float, watched: bool = False) -> Tensor:
    """The loss of a small model and all its gradients."""
    model = new_model(shapes(block, dropout=dropout), VOCAB, VOCAB, 1, 0.1)
    handles = [m.register_forward_pre_hook(lambda *_: None) for m in model.modules() if watched]
    loss = model(batch_of(*batch([5, 9, 3], [4, 6, 7]), key=5)).loss
    loss.backward()
    for handle in handles:
        handle.remove()
    return torch.cat([loss.detach()[None], *(p.grad.flatten() for p in model.parameters() if p.grad is not None)])


@pytest.mark.parametrize("block", BLOCKS)
def test_every_block_computes_the_same_in_one_go(block: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without dropout as on a CPU. With dropout as where hooks look at the modules, or DeepSpeed at the weights."""
    plain = computed(block, 0.0)
    calls: list[str] = []

    def counted(name: str) -> None:
        call = getattr(fused, name)
        monkeypatch.setattr(fused, name, lambda *args: (calls.append(name), call(*args))[1])

    for name in ("add_norm", "drop", "linear_relu", "cross_entropy_"):
        counted(name)
    monkeypatch.setattr(device, "on_gpu", lambda tensor: True)
    overrides.use(["triton"], CPU)
    one = computed(block, 0.0)
    assert float((one - plain).norm() / plain.norm()) < 1e-5
    calls.clear()
    one = computed(block, P)
    plain_ffn = block not in ("fixup", "looks_linear", "sub_ln")
    expected = {"cross_entropy_", "drop"} | ({"linear_relu"} if plain_ffn else set())
    normed = block in ("post_ln", "admin", "admin_closed_form", "b2t", "deepnorm", "rezero_post_ln", "looks_linear",
                       "dlcl_post")
    assert set(calls) == expected | {"add_norm"} if normed else set(calls) == expected
    calls.clear()
    watched = computed(block, P, watched=True)
    assert set(calls) == {"cross_entropy_", "drop"}
    assert float((one - watched).norm() / watched.norm()) < 1e-5


@torch.inference_mode()
@pytest.mark.parametrize("block", BLOCKS)
def test_a_search_in_one_go_finds_the_same(block: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beams, and one hypothesis alone; sentences that end early leave the batch."""
    model, calls, attend = model_of(block), [0], fused.attend_step
    src, lengths = batch([5, 9, 3, 7, 2], [1] * 5)[:2]
    limits, penalty = torch.tensor([20, 3, 12, 20, 8]), LengthPenalty("average", 1.0)

    def search() -> list[Any]:
        return [best for beams in (3, 1) for best in beam_search(
            CachedStepper(model, src, lengths, beams, 20), limits, beams, beams, penalty)]

    def counted(*given: Any) -> Tensor:
        calls[0] += 1
        return attend(*given)

    monkeypatch.setattr(fused, "attend_step", counted)
    plain = search()
    assert calls == [0]
    monkeypatch.setattr(device, "on_gpu", lambda tensor: True)
    overrides.use(["triton"], CPU)
    for ours, theirs in zip(search(), plain, strict=True):
        assert [c.tokens for c in ours] == [c.tokens for c in theirs]
        assert [c.score for c in ours] == pytest.approx([c.score for c in theirs], abs=1e-5)
    assert calls[0] >= 2 * 2 * 8


def test_packed_attention_gives_its_gradients_in_one_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the two kernels of a GPU in PyTorch's own attention, and their layouts: tensors are [B, T, H, d]."""
    layouts: list[bool] = []

    def forward(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, *rest: Any, compute_log_sumexp: bool) -> Any:
        assert rest == (None, None, None, None, 0.0, 0) and compute_log_sumexp
        q, k, v = (each.transpose(1, 2) for each in (q, k, v))
        none = torch.empty(0)
        return F.scaled_dot_product_attention(q, k, v, bias).transpose(1, 2).contiguous(), none, none, none, 0, 0

    def backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Tensor, out: Tensor, *rest: Any,
                 shared_storage_dqdkdv: bool) -> Any:
        assert rest[:4] == (None, None, 7, 7) and rest[5:] == (0.0, rest[6], rest[7], 0, False)
        with torch.enable_grad():
            given = [each.detach().requires_grad_() for each in (q, k, v)]
            again = forward(*given, bias, None, None, None, None, 0.0, 0, compute_log_sumexp=True)[0]
        grads = torch.autograd.grad(again, given, grad)
        chunk = torch.stack(grads, 2)
        return (*(chunk.unbind(2) if layouts.pop() else grads), None)

    monkeypatch.setattr(torch.ops.aten, "_efficient_attention_forward", forward)
    monkeypatch.setattr(torch.ops.aten, "_efficient_attention_backward", backward)
    layer = SelfAttention(8, 2, 0.0).double()
    for number, weight in enumerate(layer.parameters()):
        weight.data = random(*weight.shape, number=number).data
    x, weights = random(2, 7, 8, number=5), random(2, 7, 8, number=6).detach()
    mask = torch.zeros(2, 1, 1, 8, dtype=torch.float64)[..., :7]
    mask[1, ..., 5:] = -torch.inf
    given = [x, *layer.parameters()]
    plain = torch.autograd.grad((layer(x, mask, causal=False) * weights).sum(), given)
    monkeypatch.setattr(replacements, "attends_packed", lambda *_: True)
    overrides.use(["triton"], CPU)
    for packed in (True, False):
        layouts.append(packed)
        found = torch.autograd.grad((layer(x, mask, causal=False) * weights).sum(), given)
        assert not layouts
        for ours, theirs in zip(found, plain, strict=True):
            assert torch.allclose(ours, theirs, rtol=1e-10, atol=1e-10)


def test_heads_that_the_kernel_for_one_gradient_cannot_read() -> None:
    """12 columns of 16 bits are 24 bytes, and PyTorch's kernel reads 16 at a time."""
    def known(heads: int, dtype: torch.dtype) -> bool:
        return replacements.attends_packed(SimpleNamespace(  # type: ignore[arg-type]
            is_cuda=True, size=lambda dim: 3 * 48, element_size=lambda: dtype.itemsize), heads)

    assert known(3, torch.bfloat16) and known(4, torch.float32)
    assert not known(4, torch.bfloat16) and not known(8, torch.float32)


@torch.no_grad()
def test_a_decoder_by_itself() -> None:
    """That of a language model, without cross-attention."""
    model = new_model(shapes("post_ln", layers=(0, 2)), VOCAB, VOCAB, 1).eval()
    _, _, trg_in, _ = batch([3], [5])
    plain = model.decode(trg_in, None, None)
    overrides.use(["triton"], CPU)
    assert torch.equal(model.decode(trg_in, None, None), plain)


def test_plain_operations_come_back() -> None:
    """Another run of this process may list no kernels; what a recipe lists and is not there has a sentence."""
    before = [getattr(owner, name) for owner, name, _ in replacements.REPLACEMENTS]
    overrides.use(["triton"], CPU)
    assert all(getattr(owner, name) is not plain
               for (owner, name, _), plain in zip(replacements.REPLACEMENTS, before, strict=True))
    overrides.use([], CPU)
    assert [getattr(owner, name) for owner, name, _ in replacements.REPLACEMENTS] == before


def test_kernels_need_triton_and_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    replacements.check(CPU)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    monkeypatch.setattr("shutil.which", lambda name: None)
    with user_error("parallel.overrides lists triton.*no C compiler; install gcc"):
        replacements.check(torch.device("cuda"))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with user_error("parallel.overrides lists triton.*no Triton; pip install triton"):
        replacements.check(torch.device("cuda"))
