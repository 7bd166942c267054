"""The language models of the papers are fairseq's: from its published names, our model has the same logits."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from deepnmt.config import Model
from deepnmt.model.adaptive import Bands
from deepnmt.model.init import new_model
from deepnmt.tokens import EOS, PAD

VOCAB, WIDTH, HEADS, INNER, LAYERS, BOUNDS = 30, 16, 2, 24, 2, (10, 18)


def published(before: bool) -> dict[str, Tensor]:
    """Random weights under the names of fairseq 0.12.2's `transformer_lm`, with adaptive inputs and softmax that share
    vectors and projections."""
    draw = torch.Generator().manual_seed(3)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw) * 0.3

    weights = {}
    for layer in range(LAYERS):
        name = f"decoder.layers.{layer}"
        for matrix in ("q_proj", "k_proj", "v_proj", "out_proj"):
            weights[f"{name}.self_attn.{matrix}.weight"] = random(WIDTH, WIDTH)
            weights[f"{name}.self_attn.{matrix}.bias"] = random(WIDTH)
        for matrix, rows, columns in (("fc1", INNER, WIDTH), ("fc2", WIDTH, INNER)):
            weights[f"{name}.{matrix}.weight"], weights[f"{name}.{matrix}.bias"] = random(rows, columns), random(rows)
        for norm in ("self_attn_layer_norm", "final_layer_norm"):
            weights[f"{name}.{norm}.weight"], weights[f"{name}.{norm}.bias"] = 1 + random(WIDTH), random(WIDTH)
    if before:
        weights["decoder.layer_norm.weight"], weights["decoder.layer_norm.bias"] = 1 + random(WIDTH), random(WIDTH)
    for band, (start, stop) in enumerate(zip((0, *BOUNDS), (*BOUNDS, VOCAB), strict=True)):
        narrow = WIDTH // 2**band
        weights[f"decoder.embed_tokens.embeddings.{band}.0.weight"] = random(stop - start, narrow)
        weights[f"decoder.embed_tokens.embeddings.{band}.1.weight"] = random(WIDTH, narrow)
    weights["decoder.adaptive_softmax.head.class_proj.weight"] = random(len(BOUNDS), WIDTH)
    return weights


def reference(weights: dict[str, Tensor], ids: Tensor, before: bool) -> Tensor:
    """The log-probabilities [B, T, V] as fairseq computes them, in a few lines of PyTorch."""
    def linear(x: Tensor, name: str) -> Tensor:
        return F.linear(x, weights[f"{name}.weight"], weights.get(f"{name}.bias"))

    def norm(x: Tensor, name: str) -> Tensor:
        return F.layer_norm(x, (WIDTH,), weights[f"{name}.weight"], weights[f"{name}.bias"])

    x = torch.zeros(*ids.shape, WIDTH)
    for band, (start, stop) in enumerate(zip((0, *BOUNDS), (*BOUNDS, VOCAB), strict=True)):
        inside, name = (ids >= start) & (ids < stop), f"decoder.embed_tokens.embeddings.{band}"
        x[inside] = linear(weights[f"{name}.0.weight"][ids[inside] - start], f"{name}.1")
    half = WIDTH // 2
    angles = torch.arange(2, ids.size(1) + 2)[:, None] * torch.exp(torch.arange(half) * -(math.log(10000) / (half - 1)))
    x = math.sqrt(WIDTH) * x + torch.cat([angles.sin(), angles.cos()], 1)
    for layer in range(LAYERS):
        name = f"decoder.layers.{layer}"
        h = norm(x, f"{name}.self_attn_layer_norm") if before else x
        q, k, v = (linear(h, f"{name}.self_attn.{each}_proj").unflatten(-1, (HEADS, -1)).transpose(1, 2)
                   for each in "qkv")
        scores = (q / math.sqrt(WIDTH // HEADS)) @ k.transpose(2, 3)
        scores = scores.masked_fill(torch.ones(ids.size(1), ids.size(1)).triu(1) > 0, -math.inf)
        x = x + linear((scores.softmax(-1) @ v).transpose(1, 2).flatten(2), f"{name}.self_attn.out_proj")
        x = x if before else norm(x, f"{name}.self_attn_layer_norm")
        h = norm(x, f"{name}.final_layer_norm") if before else x
        x = x + linear(F.relu(linear(h, f"{name}.fc1")), f"{name}.fc2")
        x = x if before else norm(x, f"{name}.final_layer_norm")
    x = norm(x, "decoder.layer_norm") if before else x
    words = weights["decoder.embed_tokens.embeddings.0.0.weight"]
    classes = weights["decoder.adaptive_softmax.head.class_proj.weight"]
    head = F.linear(x, torch.cat([words, classes])).log_softmax(-1)
    parts = [head[..., : BOUNDS[0]]]
    for band in range(1, len(BOUNDS) + 1):
        name = f"decoder.embed_tokens.embeddings.{band}"
        tail = F.linear(x @ weights[f"{name}.1.weight"], weights[f"{name}.0.weight"]).log_softmax(-1)
        parts.append(tail + head[..., BOUNDS[0] + band - 1, None])
    return torch.cat(parts, -1)


@torch.no_grad()
@pytest.mark.parametrize("block", ["post_ln", "pre_ln"])
def test_logits_are_those_of_fairseq(block: str) -> None:
    before = block == "pre_ln"
    weights = published(before)
    model = new_model(Model.model_validate({
        "width": WIDTH, "heads": HEADS, "ffn": INNER, "positions": "fairseq", "encoder": None, "bands": list(BOUNDS),
        "band_factor": 2, "decoder": {"block": block, "layers": LAYERS}}), VOCAB, VOCAB, 1).eval()
    ours = dict(model.named_parameters())
    for layer in range(LAYERS):
        name, norms = f"decoder.layers.{layer}", ("self_attn_layer_norm", "final_layer_norm")
        for kind in ("weight", "bias"):
            ours[f"{name}.self_attn.qkv.{kind}"].copy_(
                torch.cat([weights[f"{name}.self_attn.{each}_proj.{kind}"] for each in "qkv"]))
            ours[f"{name}.self_attn.out.{kind}"].copy_(weights[f"{name}.self_attn.out_proj.{kind}"])
            for matrix in ("fc1", "fc2"):
                ours[f"{name}.ffn.{matrix}.{kind}"].copy_(weights[f"{name}.{matrix}.{kind}"])
            for number, norm in enumerate(norms):
                ours[f"{name}.rule.norms.{number}.{kind}"].copy_(weights[f"{name}.{norm}.{kind}"])
    for kind in ("weight", "bias") if before else ():
        ours[f"decoder.norm.{kind}"].copy_(weights[f"decoder.layer_norm.{kind}"])
    bands, table = Bands(VOCAB, WIDTH, BOUNDS, 2), ours["embeddings.shared.weight"]
    for band in range(len(BOUNDS) + 1):
        name = f"decoder.embed_tokens.embeddings.{band}"
        bands.vectors(table, band).copy_(weights[f"{name}.0.weight"])
        bands.projection(table, band).copy_(weights[f"{name}.1.weight"].t())
    table[BOUNDS[0] : bands.head] = weights["decoder.adaptive_softmax.head.class_proj.weight"]
    ids = torch.randint(PAD + 1, VOCAB, (3, 9), generator=torch.Generator().manual_seed(4))
    ids[:, 0] = EOS
    hidden = model.decode(ids, None, None)
    torch.testing.assert_close(model.log_probabilities(hidden), reference(weights, ids, before), rtol=1e-5, atol=1e-5)
