"""Hooks on modules that are removed again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch.utils.hooks import RemovableHandle


@contextmanager
def hooks() -> Iterator[list[RemovableHandle]]:
    """A list for handles of hooks; removes all hooks in it on exit."""
    handles: list[RemovableHandle] = []
    try:
        yield handles
    finally:
        for handle in handles:
            handle.remove()
