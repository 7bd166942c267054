"""Which sentences an epoch has when the training text is several corpora with weights.

Corpus i has n_i pairs and weight w_i. Its share of an epoch is p_i^(1/T) / Σ p_j^(1/T), where p_i = w_i·n_i / Σ w_j·n_j
and T is `data.temperature` (Arivazhagan et al. 2019, Massively Multilingual Neural Machine Translation in the Wild,
section 4.2, with weights added). So a weight of 3 is as if the corpus were given three times, and a high temperature
makes all corpora equally large. An epoch has as many pairs as all corpora together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from deepnmt.config import Recipe
from deepnmt.data.arrays import Indices
from deepnmt.data.batching import Stream, random_order
from deepnmt.data.prepared import PreparedData
from deepnmt.data.shards import ShardedText
from deepnmt.data.windows import Windows


@dataclass(frozen=True)
class Mixture:
    """The corpora of a training text.

    Attributes:
        sizes: their pairs, in the order in which they lie in the prepared data.
        weights: above 0.
        temperature: above 0; 1 leaves the shares as they are.
    """

    sizes: Sequence[int]
    weights: Sequence[float]
    temperature: float = 1.0

    def counts(self) -> list[int]:
        """How many pairs of each corpus are in an epoch. With equal weights and temperature 1: all, each once."""
        total = sum(self.sizes)
        shares = (np.array(self.sizes, float) * np.array(self.weights)) ** (1.0 / self.temperature)
        exact = shares / shares.sum() * total
        counts = np.floor(exact).astype(np.int64)
        for i in np.argsort(counts - exact, kind="stable")[: total - int(counts.sum())]:  # the largest remainders
            counts[i] += 1
        return counts.tolist()

    def rows(self, seed: int, epoch: int) -> Indices:
        """The numbers of an epoch's pairs in ascending order; a pair may be there several times.

        Each corpus is read in random order, over and over, and an epoch goes on where the one before ended: every pair
        is used equally often, give or take one.
        """
        parts, begin = [], 0
        for corpus, (size, count) in enumerate(zip(self.sizes, self.counts(), strict=True)):
            start, stop = epoch * count, (epoch + 1) * count
            first = start // size
            passes = [random_order(size, seed, corpus, number, 4) for number in range(first, -(-stop // size))]
            if passes:
                parts.append(begin + np.concatenate(passes)[start - first * size:stop - first * size])
            begin += size
        return np.sort(np.concatenate(parts))


def training_stream(recipe: Recipe, data: PreparedData, kind: Callable[..., Stream] = Stream) -> Stream:
    """The micro-batches of a recipe's training text, in a stream of this kind. Raises `UserError` if it is empty."""
    corpora, text = data.corpora("train"), recipe.data.train
    weights = [text.corpora[name].weight if name in text.corpora else 1.0 for name in corpora]
    mixture, train = Mixture(list(corpora.values()), weights, text.temperature), data.train
    if isinstance(train, ShardedText):
        return kind(Windows(train, mixture.counts(), recipe.seed, recipe.data.window_pairs), recipe.batch.tokens,
                    recipe.seed)
    rows = None if mixture.counts() == mixture.sizes else lambda epoch: mixture.rows(recipe.seed, epoch)
    return kind(train, recipe.batch.tokens, recipe.seed, rows)
