"""Attention, layers and whole models against PyTorch's own modules with the same weights; effect of padding."""

from __future__ import annotations

import pytest
import torch
from small_models import BLOCKS, VOCAB, batch, batch_of, model_of
from torch import Tensor, nn
from torch.nn import functional as F

from deepnmt.model.layers import DecoderLayer, EncoderLayer, Layer
from deepnmt.model.positions import sinusoids
from deepnmt.model.sublayers import CrossAttention, SelfAttention, attend, key_mask
from deepnmt.model.transformer import Transformer

D, H = 16, 4
LENGTHS = torch.tensor([7, 3, 5])


def copy_weights(theirs: nn.MultiheadAttention, ours: SelfAttention | CrossAttention) -> None:
    fused = [ours.qkv] if isinstance(ours, SelfAttention) else [ours.q, ours.kv]
    theirs.in_proj_weight.copy_(torch.cat([linear.weight for linear in fused]))
    theirs.in_proj_bias.copy_(torch.cat([linear.bias for linear in fused]))
    theirs.out_proj.load_state_dict(ours.out.state_dict())


def both(kind: type[SelfAttention] | type[CrossAttention]) -> tuple[nn.Module, nn.MultiheadAttention]:
    """Our module with random weights, and PyTorch's with the same weights."""
    ours = kind(D, H, 0.0)
    torch.manual_seed(5)
    for parameter in ours.parameters():
        nn.init.normal_(parameter, std=0.3)
    theirs = nn.MultiheadAttention(D, H, batch_first=True).eval()
    copy_weights(theirs, ours)
    return ours.eval(), theirs


@torch.no_grad()
@pytest.mark.parametrize("causal", [False, True])
def test_self_attention_is_pytorchs(causal: bool) -> None:
    ours, theirs = both(SelfAttention)
    x, mask = torch.randn(3, 7, D), key_mask(LENGTHS, 7, torch.float32)
    hidden = torch.ones(7, 7, dtype=torch.bool).triu(1) if causal else None
    padding = None if causal or mask is None else ~mask[:, 0, 0]
    expected, _ = theirs(x, x, x, key_padding_mask=padding, attn_mask=hidden, need_weights=False)
    torch.testing.assert_close(ours(x, None if causal else mask, causal), expected, rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_cross_attention_is_pytorchs() -> None:
    ours, theirs = both(CrossAttention)
    x, memory, mask = torch.randn(3, 4, D), torch.randn(3, 7, D), key_mask(LENGTHS, 7, torch.float32)
    assert mask is not None
    expected, _ = theirs(x, memory, memory, key_padding_mask=~mask[:, 0, 0], need_weights=False)
    torch.testing.assert_close(ours(x, *ours.keys_values(memory), mask), expected, rtol=1e-5, atol=1e-5)


def attended(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, causal: bool) -> list[Tensor]:
    """The output and the gradients of the three inputs, in float64."""
    inputs = [x.detach().requires_grad_() for x in (q, keys, values)]
    output = attend(*inputs, mask, 0.0, causal)
    upstream = torch.randn(output.shape, generator=torch.Generator().manual_seed(2)).to(output.dtype)
    return [x.detach().double() for x in (output, *torch.autograd.grad(output, inputs, upstream))]


@pytest.mark.parametrize("form", ["causal", "masked", "open"])
def test_bf16_attention_in_training_on_a_cpu_is_pytorchs(form: str) -> None:
    """Output and gradients equal those in float64, except for rounding."""
    torch.manual_seed(1)
    queries = 9 if form == "causal" else 6
    q, keys, values = (torch.randn(3, n, 2, 16).bfloat16().transpose(1, 2) for n in (queries, 9, 9))
    mask = key_mask(torch.tensor([9, 1, 5]), 9, torch.float32) if form == "masked" else None
    ours = attended(q, keys, values, mask, form == "causal")
    exact = attended(q.double(), keys.double(), values.double(), mask, form == "causal")
    for actual, expected in zip(ours, exact, strict=True):
        assert float((actual - expected).norm()) <= 2**-8 * float(expected.norm())
    if mask is not None:
        hidden = (~mask).transpose(2, 3).expand_as(keys)
        assert not ours[2][hidden].any() and not ours[3][hidden].any(), "padding got a gradient"


def test_key_mask_follows_the_lengths_and_is_none_without_padding() -> None:
    mask = key_mask(torch.tensor([2, 3]), 3, torch.float32)
    assert mask is not None and mask[:, 0, 0].tolist() == [[True, True, False], [True, True, True]]
    assert key_mask(torch.tensor([3, 3]), 3, torch.float32) is None


def pytorch_layer(ours: Layer, pre: bool) -> nn.TransformerEncoderLayer | nn.TransformerDecoderLayer:
    """PyTorch's layer with the weights of ours."""
    inner = ours.ffn.fc1.out_features
    theirs: nn.TransformerEncoderLayer | nn.TransformerDecoderLayer
    if isinstance(ours, DecoderLayer):
        theirs = nn.TransformerDecoderLayer(D, H, inner, 0.0, batch_first=True, norm_first=pre)
        copy_weights(theirs.multihead_attn, ours.cross_attn)
        theirs.norm3.load_state_dict(ours.rule.norms[2].state_dict())
    else:
        theirs = nn.TransformerEncoderLayer(D, H, inner, 0.0, batch_first=True, norm_first=pre)
    copy_weights(theirs.self_attn, ours.self_attn)
    theirs.linear1.load_state_dict(ours.ffn.fc1.state_dict())
    theirs.linear2.load_state_dict(ours.ffn.fc2.state_dict())
    theirs.norm1.load_state_dict(ours.rule.norms[0].state_dict())
    theirs.norm2.load_state_dict(ours.rule.norms[1].state_dict())
    return theirs


def embedded(model: Transformer, ids: Tensor) -> Tensor:
    return D**0.5 * F.embedding(ids, model.output_weight) + sinusoids(ids.size(1), D)


@torch.no_grad()
@pytest.mark.parametrize("block", ["post_ln", "pre_ln"])
def test_whole_model_is_pytorchs(block: str) -> None:
    """Logits against a model assembled from PyTorch's layers (in train mode, which keeps them off their fast path)."""
    model = model_of(block)
    src, lengths, trg_in, _ = batch([7, 3, 5], [6, 2, 4])
    padding = torch.arange(7) >= lengths[:, None]
    causal = torch.ones(6, 6, dtype=torch.bool).triu(1)
    x = embedded(model, src)
    for ours in model.encoder.layers:
        assert isinstance(ours, EncoderLayer)
        x = pytorch_layer(ours, block == "pre_ln")(x, src_key_padding_mask=padding)
    memory = model.encoder.norm(x)
    y = embedded(model, trg_in)
    for ours in model.decoder.layers:
        assert isinstance(ours, DecoderLayer)
        y = pytorch_layer(ours, block == "pre_ln")(y, memory, tgt_mask=causal, memory_key_padding_mask=padding)
    expected = model.decoder.norm(y) @ model.output_weight.T
    logits = model.logits(model.decode(trg_in, model.encode(src, lengths), lengths))
    assert torch.isneginf(logits[..., 3]).all()
    others = [i for i in range(VOCAB) if i != 3]
    torch.testing.assert_close(logits[..., others], expected[..., others], rtol=1e-4, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("block", BLOCKS)
def test_padding_changes_no_result(block: str) -> None:
    model = model_of(block)
    src, lengths, trg_in, trg_out = batch([4, 9, 2], [3, 5, 8])
    memory = model.encode(src, lengths)
    hidden = model.decode(trg_in, memory, lengths)
    losses = []
    for b, (s, t) in enumerate(zip([4, 9, 2], [3, 5, 8], strict=True)):
        one, only = slice(b, b + 1), lengths[b : b + 1]
        alone = model.encode(src[one, :s], only)
        torch.testing.assert_close(memory[one, :s], alone, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(hidden[one, :t], model.decode(trg_in[one, :t], alone, only), rtol=1e-5, atol=1e-5)
        losses.append(model(batch_of(src[one, :s], only, trg_in[one, :t], trg_out[one, :t])).loss)
    torch.testing.assert_close(model(batch_of(src, lengths, trg_in, trg_out)).loss, sum(losses), rtol=1e-5, atol=1e-5)
