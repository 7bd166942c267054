"""Micro-batches with the links of their pieces."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch

from deepnmt.batch import Batch
from deepnmt.config import Recipe
from deepnmt.data.arrays import Indices
from deepnmt.data.batching import Sentences, Stream
from deepnmt.data.prepared import PreparedData
from deepnmt.device import upload
from deepnmt.extras.alignment.annotations import Links


def around(kind: Callable[..., Stream], recipe: Recipe, data: PreparedData) -> Callable[..., Stream]:
    """The stream of a recipe's training text: with links if `train.guided_alignment` needs them."""
    if recipe.train.guided_alignment:
        return partial(GuidedStream, Links(data, "train"))
    return kind


class GuidedStream(Stream):
    """A stream whose micro-batches have the links of their pieces as `links`."""

    def __init__(self, links: Links, *stream: Any, **named: Any) -> None:
        super().__init__(*stream, **named)
        self._links = links

    def collate(self, sentences: Sentences, rows: Indices, key: int, device: torch.device) -> Batch:
        batch = super().collate(sentences, rows, key, device)
        links = self._links.of_pieces(sentences, rows) if len(rows) else np.zeros((4, 0), dtype=np.int64)
        return batch.with_tensors(links=upload(torch.from_numpy(links), device))
