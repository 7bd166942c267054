"""Tiny models and a batch for the tests of the doctor's probes."""

from __future__ import annotations

from typing import Any

import torch
from tiny_engines import batch_of

from deepnmt.batch import Batch
from deepnmt.config import Model
from deepnmt.model.init import new_model
from deepnmt.model.transformer import Transformer

VOCAB, PAD = 40, 3


def model_of(encoder: str, decoder: str | None = None, layers: tuple[int, int] = (2, 2), *, noise: float = 0.1,
             **more: Any) -> Transformer:
    """A tiny model in evaluation mode, with noise added to all parameters but the biases of norms."""
    shape = Model.model_validate({
        "width": 8, "heads": 2, "ffn": 16, "dropout": 0.0, "max_length": 16, **more,
        "encoder": {"block": encoder, "layers": layers[0]},
        "decoder": {"block": decoder or encoder, "layers": layers[1]}})
    model = new_model(shape, VOCAB, VOCAB, 5, label_smoothing=0.1).eval()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" not in name or "weight" in name:
                parameter.add_(torch.empty_like(parameter).normal_(std=noise, generator=generator))
    return model


def batch() -> Batch:
    """Three sentences of different lengths."""
    generator = torch.Generator().manual_seed(11)
    src = torch.randint(4, VOCAB, (3, 6), generator=generator)
    trg = torch.randint(4, VOCAB, (3, 5), generator=generator)
    src[0, 4:], trg[1, 3:] = PAD, PAD
    return batch_of(src, torch.tensor([4, 6, 6]), trg.roll(1, 1), trg)
