"""A disk on which no file grows beyond some bytes, as one that becomes full."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def small_disk(most: int) -> Iterator[None]:
    """Within it a write beyond `most` bytes of a file fails: "File too large"."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
