"""The model: an encoder, and BERT's head for masked tokens.

`B` sequences, `S` length, `D` width, `V` vocabulary, `R` tokens to predict.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from deepnmt.batch import Batch
from deepnmt.config.encoders import EncoderModel
from deepnmt.model.blocks import LayerPosition
from deepnmt.model.encoder import Encoder, class_losses
from deepnmt.model.loss import LossSums, token_rows
from deepnmt.model.sublayers import ACTIVATIONS
from deepnmt.model.transformer import fill_with_nan
from deepnmt.model.unfilled import unfilled
from deepnmt.tasks.masked_lm.settings import MaskedRecipe
from deepnmt.tokens import BOS, EOS, PAD


class Head(nn.Module):
    """norm(activation(dense(h))) times the embedding table, plus a bias, as in the code of Devlin et al. 2019."""

    def __init__(self, model: EncoderModel, vocab: int) -> None:
        super().__init__()
        self.dense = unfilled(nn.Linear, model.width, model.width)
        self.activation = ACTIVATIONS[model.activation].apply
        self.norm = LayerPosition.of(model.of_layers, "encoder", 0).norm()
        self.bias = nn.Parameter(torch.empty(vocab))

    def forward(self, rows: Tensor, table: Tensor) -> Tensor:
        """rows [R, D] and the table [V, D] to logits [R, V], in fp32."""
        return F.linear(self.norm(self.activation(self.dense(rows))), table, self.bias.to(table.dtype)).float()


class MaskedModel(Encoder):
    """The sums over the tokens to predict. For the arguments see `Encoder`."""

    def __init__(
        self, model: EncoderModel, vocab: int, seed: int, smoothing: float = 0.0,
        after_build: Callable[[nn.Module], None] = fill_with_nan,
    ) -> None:
        super().__init__(model, vocab, seed, Head, after_build)
        self.smoothing = smoothing

    def predictions(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """The logits [R, V] at the tokens to predict, and these tokens [R]."""
        [rows], targets = token_rows([self.encode(batch)], batch["targets"], PAD, batch.tokens)
        return self.head(rows, self.table), targets

    def forward(self, batch: Batch) -> LossSums:
        return class_losses(*self.predictions(batch), self.smoothing)

    @staticmethod
    def smallest_batch(device: torch.device) -> Batch:
        """One sequence of one token, for an update that must not change the weights."""
        src = torch.tensor([[BOS, PAD + 1, EOS]], device=device)
        targets = torch.tensor([[PAD, PAD + 1, PAD]], device=device)
        return Batch({"src": src, "src_lengths": torch.tensor([3], device=device), "targets": targets}, key=0, tokens=1)


def build_of(recipe: MaskedRecipe, vocab: int) -> Callable[[Callable[[nn.Module], None]], MaskedModel]:
    """Builds the recipe's model."""
    return lambda after_build: MaskedModel(recipe.model, vocab, recipe.seed, recipe.train.label_smoothing, after_build)
