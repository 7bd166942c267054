"""Which loss a recipe minimises, of those that there are. `loss.py` has the base class and plain cross-entropy."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from deepnmt.batch import TRANSLATION, Batch
from deepnmt.config import Recipe
from deepnmt.config.plugins import Table
from deepnmt.model.adaptive import Bands
from deepnmt.model.dropout import seed_dropout
from deepnmt.model.embedding import bands_of
from deepnmt.model.loss import CrossEntropy, LossSums, Objective, divergence, token_rows
from deepnmt.tokens import PAD
from deepnmt.visitors import require_visitors, visitor_modules


class RDrop(Objective):
    """The mean of another loss over two passes with two dropout masks, plus α/4 (KL(p‖q) + KL(q‖p)), p and q the
    predictions of a token in the two. Liang et al. 2021, R-Drop, eq. 4, halved, so that it is the loss of one pass
    where the two agree. Evaluation takes one pass."""

    def __init__(self, inner: Objective, alpha: float) -> None:
        super().__init__(inner.smoothing)
        self.inner, self.alpha = inner, alpha
        self.figures = inner.figures

    def attach(self, model: Any) -> None:
        self.inner.attach(model)

    def prepare(self, batch: Batch) -> Batch:
        batch = self.inner.prepare(batch)
        if not self.training:
            return batch
        twice = batch.with_tensors(**{name: torch.cat([batch[name], batch[name]]) for name in TRANSLATION
                                      if name in batch})
        return Batch(twice.tensors, batch.key, 2 * batch.tokens)

    def loss(self, hidden: Tensor, weight: Tensor, batch: Batch) -> LossSums:
        sums = self.inner.loss(hidden, weight, batch)
        if not self.training:
            return sums
        first, second = hidden.chunk(2)
        targets = batch["trg_out"].chunk(2)[0]
        apart = divergence(first, second, weight, targets, PAD, batch.tokens // 2)
        others = {name: value / 2 for name, value in sums.others.items()}
        return LossSums((sums.loss + self.alpha / 2 * apart) / 2, sums.nll / 2, others)


class BandedCrossEntropy(Objective):
    """Cross-entropy by adaptive softmax. `dropout` is on the further bands' narrow states, in training."""

    def __init__(self, bands: Bands, dropout: float, seed: int) -> None:
        super().__init__()
        self.bands, self.dropout, self.seed = bands, dropout, seed

    def loss(self, hidden: Tensor, weight: Tensor, batch: Batch) -> LossSums:
        [rows], targets = token_rows([hidden], batch["trg_out"], PAD, batch.tokens)
        if self.training and self.dropout:
            seed_dropout(rows.device, self.seed, batch.key, "output.bands")
        return LossSums(*self.bands.losses(rows, weight, targets, self.dropout if self.training else 0.0))


def _fault(objective: Any) -> str | None:
    """What a plug-in's objective must be, if it is not."""
    if isinstance(objective, type) and issubclass(objective, Objective):
        return None
    return f"is {objective!r}, must be a subclass of deepnmt.model.objective.Objective"


OBJECTIVES: Table[type[Objective]] = Table("OBJECTIVES", {"cross_entropy": CrossEntropy}, _fault)


def objective_of(recipe: Recipe, vocab: int = 0) -> Objective:
    """What a recipe minimises: `train.objective`, in R-Drop and in what visitors add to it. `vocab`: the size of the
    target vocabulary, for one in bands.

    Raises:
        UserError: the recipe needs a visitor whose folder is not there.
    """
    objective = OBJECTIVES[recipe.train.objective].of(recipe)
    if (bands := bands_of(recipe.model, vocab)) is not None:
        objective = BandedCrossEntropy(bands, recipe.model.band_dropout, recipe.seed)
    if recipe.train.r_drop:
        objective = RDrop(objective, recipe.train.r_drop)
    require_visitors(recipe.train, "train")
    for visitor in visitor_modules("objective"):
        objective = visitor.around(objective, recipe)
    return objective
