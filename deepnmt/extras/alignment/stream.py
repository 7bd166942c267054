"""Micro-batches with the links of their pieces."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from deepnmt.batch import Batch
from deepnmt.config import Recipe
from deepnmt.data.arrays import Indices
from deepnmt.data.batching import Stream, Text
from deepnmt.data.prepared import PreparedData
from deepnmt.device import upload
from deepnmt.extras.alignment.annotations import Links


def around(kind: Callable[..., Stream], recipe: Recipe, data: PreparedData) -> Callable[..., Stream]:
    """The stream of a recipe's training text: with links if `train.guided_alignment` needs them."""
    return partial(GuidedStream, Links(data, "train")) if recipe.train.guided_alignment else kind


class GuidedStream(Stream):
    """A stream whose micro-batches have the links of their pieces as `links`."""

    def __init__(self, links: Links, text: Text, tokens: int, seed: int,
                 rows: Callable[[int], Indices] | None = None) -> None:
        super().__init__(text, tokens, seed, rows)
        self._links = links

    def batch(self, epoch: int, index: int, device: torch.device) -> Batch:
        batch = super().batch(epoch, index, device)
        links = self._links.of_pieces(*self.sentences(epoch, index))
        return batch.with_tensors(links=upload(torch.from_numpy(links), device))
