"""Which sentences an epoch has when the training text is several corpora.

Corpus i has n_i pairs and weight w_i. Its share of an epoch is p_i^(1/T) / Σ p_j^(1/T), where p_i = w_i·n_i / Σ w_j·n_j
and T is `data.temperature` (Arivazhagan et al. 2019, Massively Multilingual Neural Machine Translation in the Wild,
section 4.2, with weights added). So a weight of 3 is as if the corpus were given three times, and a high temperature
makes all corpora equally large. An epoch has as many pairs as all corpora together.

With stages (`data.stages`) the shares are those of the epoch's stage, and it has as many pairs as the corpora of that
together. A stage begins with an epoch. It is a function of the epoch and of where stages have ended for another reason
than their number of epochs, which the run's state holds: the epoch in which that happens is cut short.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt

from deepnmt.config import Recipe
from deepnmt.data.arrays import Indices
from deepnmt.data.batching import Stream, random_order
from deepnmt.data.prepared import PreparedData
from deepnmt.data.shards import ShardedText
from deepnmt.data.windows import Windows
from deepnmt.visitors import require_visitors, visitor_modules


@dataclass
class Mixture:
    """The corpora of a training text.

    Attributes:
        sizes: their pairs, in the order in which they lie in the prepared data.
        weights: above 0.
        temperature: above 0; 1 leaves the shares as they are.
        mixes: of each stage, the corpora's shares in proportion, 0 where it has none; without stages there are none.
        epochs: how many each stage has at most.
        begun: the first epochs of the second and later stages, as far as they have begun.
    """

    sizes: Sequence[int]
    weights: Sequence[float]
    temperature: float = 1.0
    mixes: Sequence[Sequence[float]] = ()
    epochs: Sequence[int | None] = ()
    begun: Sequence[int] = ()

    @classmethod
    def of(cls, recipe: Recipe, corpora: dict[str, int]) -> Mixture:
        """That of a recipe; `corpora`: their sizes in the prepared data."""
        text, stages = recipe.data.train, recipe.data.stages
        weights = [text.corpora[name].weight if name in text.corpora else 1.0 for name in corpora]
        mixes: list[list[float]] = []
        for stage in stages:
            mixes.append([stage.mix.get(name, 0.0) for name in corpora])
        return cls(list(corpora.values()), weights, text.temperature, mixes, [stage.until.epochs for stage in stages])

    def firsts(self) -> list[int]:
        """The first epochs of all stages that have one: of those begun, and of those that follow a number of epochs."""
        firsts = [0, *self.begun]
        for epochs in self.epochs[len(self.begun):]:
            if epochs is None or len(firsts) == len(self.mixes):
                break
            firsts.append(firsts[-1] + epochs)
        return firsts

    def counts(self, epoch: int = 0) -> list[int]:
        """How many pairs of each corpus are in an epoch. With equal weights and temperature 1: all, each once."""
        return self._counts(bisect_right(self.firsts(), epoch) - 1)

    def starts(self, epoch: int) -> list[int]:
        """How many pairs of each corpus the epochs before have taken; one that was cut short counts in full."""
        firsts = [first for first in self.firsts() if first < epoch]
        starts = np.zeros(len(self.sizes), dtype=np.int64)
        for stage, (first, end) in enumerate(zip(firsts, [*firsts, epoch][1:], strict=True)):
            starts += (end - first) * np.array(self._counts(stage))
        return starts.tolist()

    def rows(self, seed: int, epoch: int) -> Indices:
        """The numbers of an epoch's pairs in ascending order; a pair may be there several times.

        Each corpus is read in random order, over and over, and an epoch goes on where the one before ended: every pair
        is used equally often, give or take one.
        """
        parts, begin = [], 0
        each = zip(self.sizes, self.starts(epoch), self.counts(epoch), strict=True)
        for corpus, (size, start, count) in enumerate(each):
            stop = start + count
            first = start // size
            passes = [random_order(size, seed, corpus, number, 4) for number in range(first, -(-stop // size))]
            if passes:
                parts.append(begin + np.concatenate(passes)[start - first * size:stop - first * size])
            begin += size
        return np.sort(np.concatenate(parts))

    def _counts(self, stage: int) -> list[int]:
        """How many pairs of each corpus are in an epoch of a stage."""
        if self.mixes:
            mix = np.array(self.mixes[stage])
            return _apportion(mix, int(np.array(self.sizes)[mix > 0].sum()))
        sizes, weights = np.array(self.sizes, float), np.array(self.weights)
        with np.errstate(over="ignore", under="ignore"):
            shares = (sizes * weights) ** (1.0 / self.temperature)
            if not 0 < shares.sum() < np.inf:  # beyond the range of numbers: the same shares from smaller ones
                logs = (np.log(sizes) + np.log(weights)) / self.temperature
                shares = np.exp(logs - logs.max())
        return _apportion(shares, sum(self.sizes))


def _apportion(shares: npt.NDArray[np.float64], total: int) -> list[int]:
    """Whole numbers in these shares, of this sum."""
    exact = shares / shares.sum() * total
    counts = np.floor(exact).astype(np.int64)
    for i in np.argsort(counts - exact, kind="stable")[: total - int(counts.sum())]:  # the largest remainders
        counts[i] += 1
    return counts.tolist()


def stream_kind(recipe: Recipe, data: PreparedData) -> Callable[..., Stream]:
    """The kind of stream that a recipe's training reads, by its visitors. Raises `UserError` if one is not there, or
    has not what it needs."""
    require_visitors(recipe.data, "data")
    kind: Callable[..., Stream] = Stream
    for visitor in visitor_modules("stream"):
        kind = visitor.around(kind, recipe, data)
    return kind


def training_stream(recipe: Recipe, data: PreparedData, kind: Callable[..., Stream] = Stream) -> Stream:
    """The micro-batches of a recipe's training text, in a stream of this kind. Raises `UserError` if it is empty."""
    mixture, train = Mixture.of(recipe, data.corpora("train")), data.train
    kind = partial(kind, update_tokens=recipe.batch.update_tokens)
    if isinstance(train, ShardedText):
        stream = kind(Windows(train, mixture, recipe.seed, recipe.data.window_pairs), recipe.batch.tokens, recipe.seed)
    elif not mixture.mixes and mixture.counts() == mixture.sizes:
        stream = kind(train, recipe.batch.tokens, recipe.seed)
    else:
        stream = kind(train, recipe.batch.tokens, recipe.seed, lambda epoch: mixture.rows(recipe.seed, epoch))
    stream.mixture = mixture
    return stream
