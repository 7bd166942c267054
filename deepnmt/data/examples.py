"""Examples of a task that are no pairs of sentences, as `batching.Stream` asks for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar, cast

import torch

from deepnmt.batch import Batch
from deepnmt.data.arrays import Indices, Lengths
from deepnmt.data.batching import Rows, Sentences, Stream

_Examples = TypeVar("_Examples", bound="Examples")


class Examples:
    """A text of a task that makes its micro-batches itself: all examples are planned together, and an epoch has each
    once. A subclass has a `name`, a length, and the lengths `src_lengths` and `trg_lengths` [N] to plan by."""

    name: str

    def __len__(self) -> int:
        raise NotImplementedError

    @property
    def src_lengths(self) -> Lengths:
        raise NotImplementedError

    @property
    def trg_lengths(self) -> Lengths:
        raise NotImplementedError

    def batch(self, rows: Indices | Sequence[int], key: int, device: torch.device) -> Batch:
        """The examples `rows` as one micro-batch."""
        raise NotImplementedError

    def windows(self, epoch: int) -> int:
        """One."""
        return 1

    def window(self: _Examples, epoch: int, number: int) -> _Examples:
        """The examples of an epoch, which are the same in every one."""
        return self

    @property
    def sources(self) -> Rows:
        raise TypeError("examples are put together by `batch`")

    targets = sources

    def column(self, name: str) -> Rows:
        raise KeyError(name)


class ExampleStream(Stream):
    """The training micro-batches of `Examples`."""

    def collate(self, sentences: Sentences, rows: Indices, key: int, device: torch.device) -> Batch:
        return cast(Examples, sentences).batch(rows, key, device)
