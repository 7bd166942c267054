"""Guided alignment: the cross-attention of one decoder layer learns word alignments in training.

Chen et al. 2016, Guided Alignment Training for Topic-Aware Neural Machine Translation: cross-entropy is added to the
loss. As in Garg et al. 2019, Jointly Learning to Align and Translate with Transformer Models, it is that of one layer's
weights, averaged over heads, and a target with several links has the same share of each. Targets without links, eos
among them, add nothing.

`B` sentences, `S` source length, `T` target length, `D` width, `H` heads, `L` links.
"""

from __future__ import annotations

import math
from operator import attrgetter

from torch import Tensor

from deepnmt.batch import Batch
from deepnmt.config import Recipe
from deepnmt.model.attention_weights import AttentionHook, layer_index
from deepnmt.model.loss import LossSums, Objective
from deepnmt.model.transformer import Transformer

FORMER_FIGURES = {"alignment": "alignment_loss"}  # until version 0.2.0


def around(objective: Objective, recipe: Recipe) -> Objective:
    """What a recipe minimises, with `train.guided_alignment`."""
    train = recipe.train
    if train.guided_alignment:
        return Guided(objective, train.guided_layer, train.guided_alignment)
    return objective


def alignment_loss(scores: Tensor, links: Tensor, sentences: int) -> Tensor:
    """The sum over targets of the cross-entropy of attention from the links.

    Args:
        scores: [n·B, H, T, S], of n passes of the B = `sentences` sentences, whose mean it is.
        links: int64 [4, L]: sentence, position of the target, position of the source, links of that target.
    """
    sentence, target, source, count = links
    logs = scores.log_softmax(3).unflatten(0, (-1, sentences))[:, sentence, :, target, source]  # [L, n, H]
    return -((logs.logsumexp(2) - math.log(scores.size(1))).mean(1) / count).sum()


class Guided(Objective):
    """Another loss and `weight` times the loss of alignment, of micro-batches that have `links`, in training.

    With recomputation the layer runs again in the backward pass, and makes the same scores, which nobody takes then.

    Args:
        layer: of the decoder, see `layer_index`.
    """

    def __init__(self, inner: Objective, layer: int, weight: float) -> None:
        super().__init__(inner.smoothing)
        self.inner, self.layer, self.weight = inner, layer, weight
        self.figures = (*inner.figures, "alignment_loss")
        self._links: Tensor | None = None
        self._scores: Tensor | None = None
        self._sentences = 0

    def attach(self, model: Transformer) -> None:
        self.inner.attach(model)
        layers = model.decoder_layers
        layer = layers[layer_index(self.layer, len(layers))]
        AttentionHook(self._see, attrgetter("training")).attach(layer.cross_attn)

    def prepare(self, batch: Batch) -> Batch:
        self._links = None
        if self.training and "links" in batch:
            self._links = batch["links"]
        self._sentences = len(batch["src"])
        return self.inner.prepare(batch)

    def _see(self, scores: Tensor) -> None:
        self._scores = scores if self._links is not None else None

    def loss(self, hidden: Tensor, weight: Tensor, batch: Batch) -> LossSums:
        sums = self.inner.loss(hidden, weight, batch)
        if self._links is None or self._scores is None:
            return sums
        alignment = alignment_loss(self._scores, self._links, self._sentences)
        self._links = self._scores = None
        others = {**sums.others, "alignment_loss": alignment.detach()}
        return LossSums(sums.loss + self.weight * alignment, sums.nll, others)
