"""Small models and batches for the parity tests."""

from __future__ import annotations

import torch
from torch import Tensor

from deepnmt import config
from deepnmt.batch import TRANSLATION, Batch
from deepnmt.model.blocks import Side
from deepnmt.model.init import Initialiser, fill, new_model
from deepnmt.model.layers import Layer
from deepnmt.model.loss import LossSums
from deepnmt.model.objective import CrossEntropy, RDrop
from deepnmt.model.transformer import Transformer, build_layer
from deepnmt.tokens import PAD

BLOCKS: list[str] = list(config.choices.BLOCKS)
VOCAB = 23


def shapes(block: str, layers: tuple[int, int] = (2, 2), dropout: float = 0.0) -> config.Model:
    """A model of width 16 with 4 heads, the same block on both sides."""
    return config.Model(
        width=16,
        heads=4,
        ffn=24,
        dropout=dropout,
        attention_dropout=dropout,
        activation_dropout=dropout,
        max_length=32,
        encoder=config.Stack(block=block, layers=layers[0]),
        decoder=config.Stack(block=block, layers=layers[1]),
    )


def model_of(block: str, seed: int = 1) -> Transformer:
    """A model whose parameters are all random, so that biases, gains and ω take part in the comparison."""
    model = new_model(shapes(block), VOCAB, VOCAB, seed, label_smoothing=0.1).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.empty_like(parameter).normal_(std=0.1, generator=generator))
    return model


def layer_of(model: config.Model, side: Side, index: int, seed: int) -> Layer:
    """A layer alone, with its initial weights."""
    layer = build_layer(model, side, index, seed)
    fill(layer, Initialiser(model, VOCAB, VOCAB, seed), layer.name)
    return layer


def batch(src_lengths: list[int], trg_lengths: list[int], seed: int = 7) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Random (src [B, S], src_lengths [B], trg_in [B, T], trg_out [B, T]) with padding behind the lengths."""
    generator = torch.Generator().manual_seed(seed)

    def ids(lengths: list[int]) -> Tensor:
        table = torch.randint(4, VOCAB, (len(lengths), max(lengths)), generator=generator)
        return table.masked_fill(torch.arange(max(lengths)) >= torch.tensor(lengths)[:, None], PAD)

    return ids(src_lengths), torch.tensor(src_lengths), ids(trg_lengths), ids(trg_lengths)


def batch_of(
    src: Tensor, lengths: Tensor, trg_in: Tensor, trg_out: Tensor, key: int = 0, **more: Tensor
) -> Batch:
    """A micro-batch of these tensors and of further ones by name, with its number of tokens."""
    named = dict(zip(TRANSLATION, (src, lengths, trg_in, trg_out), strict=True))
    return Batch({**named, **more}, key, int((trg_out != PAD).sum()))


def r_drop_loss(hidden: Tensor, weight: Tensor, targets: Tensor, smoothing: float, alpha: float) -> LossSums:
    """Of the hidden states [2B, T, D] of two passes."""
    ids = torch.zeros(len(targets), 1, dtype=torch.int64)
    batch = batch_of(ids, ids[:, 0], targets, targets)
    objective = RDrop(CrossEntropy(smoothing), alpha)
    return objective.loss(hidden, weight, objective.prepare(batch))
