"""The model: an encoder, and BERT's head for classes.

`B` examples, `D` width, `K` labels.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from deepnmt.batch import Batch
from deepnmt.config.encoders import EncoderModel
from deepnmt.model.dropout import Dropout, seed_dropout
from deepnmt.model.encoder import Encoder, class_losses
from deepnmt.model.loss import LossSums
from deepnmt.model.transformer import fill_with_nan
from deepnmt.model.unfilled import unfilled
from deepnmt.tasks.classify.settings import ClassifyRecipe
from deepnmt.tokens import BOS, EOS, PAD


class Head(nn.Module):
    """out(dropout(tanh(pooler(h)))) of the output h at bos, as in the code of Devlin et al. 2019."""

    def __init__(self, width: int, labels: int, dropout: float, seed: int) -> None:
        super().__init__()
        self.seed = seed
        self.pooler = unfilled(nn.Linear, width, width)
        self.out = unfilled(nn.Linear, width, labels)
        self.dropout = Dropout(dropout)

    def forward(self, first: Tensor, dropout_key: int) -> Tensor:
        """The encoder's output at bos [B, D] to logits [B, K] in fp32."""
        pooled = torch.tanh(self.pooler(first))
        if self.training and self.dropout.p > 0:
            seed_dropout(first.device, self.seed, dropout_key, "head")
        return self.out(self.dropout(pooled)).float()


class Classifier(Encoder):
    """The sums over the examples. For the arguments see `Encoder`."""

    def __init__(
        self, model: EncoderModel, vocab: int, seed: int, labels: int, dropout: float, smoothing: float = 0.0,
        after_build: Callable[[nn.Module], None] = fill_with_nan,
    ) -> None:
        super().__init__(model, vocab, seed, lambda model, _: Head(model.width, labels, dropout, seed), after_build)
        self.smoothing = smoothing

    def logits(self, batch: Batch) -> Tensor:
        """[B, K]."""
        return self.head(self.encode(batch)[:, 0], batch.key)

    def forward(self, batch: Batch) -> LossSums:
        return class_losses(self.logits(batch), batch["labels"], self.smoothing)

    @staticmethod
    def smallest_batch(device: torch.device) -> Batch:
        """One example of one token, for an update that must not change the weights."""
        src = torch.tensor([[BOS, PAD + 1, EOS]], device=device)
        tensors = {"src": src, "src_lengths": torch.tensor([3], device=device), "segments": torch.zeros_like(src),
                   "labels": torch.zeros(1, dtype=torch.int64, device=device)}
        return Batch(tensors, key=0, tokens=1)


def build_of(recipe: ClassifyRecipe, vocab: int) -> Callable[[Callable[[nn.Module], None]], Classifier]:
    """Builds the recipe's model."""
    train, labels = recipe.train, len(recipe.data.labels)
    return lambda after_build: Classifier(recipe.model, vocab, recipe.seed, labels, train.head_dropout,
                                          train.label_smoothing, after_build)
