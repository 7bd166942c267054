"""Work on the lines of a text, shared among processes and put together in the lines' order."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, TypeVar

from deepnmt.processes.ranks import Ranks
from deepnmt.progress import Progress, no_progress

CHUNK = 10_000  # lines held in memory: they are sorted by length, worked on, and written together

Item = TypeVar("Item")

# From some lines, their numbers from 1, and whom to tell how many are done, to a result for each that JSON can hold.
Work = Callable[[list[Item], list[int], Progress], Sequence[Any]]


def in_chunks(items: Iterable[Item], size: int = 0) -> Iterator[list[Item]]:
    """`size` items at a time, by default `CHUNK`."""
    stream = iter(items)
    while chunk := list(itertools.islice(stream, size or CHUNK)):
        yield chunk


def share(
    items: Iterable[Item], length: Callable[[Item], int], work: Work[Item], ranks: Ranks,
    progress: Progress = no_progress, start: int = 0, size: int = 0,
) -> Iterator[Any]:
    """Yields the result of every line in order on rank 0, nothing on other ranks. Collective: all processes pass the
    same `items` and exhaust the iterator.

    Each process takes every `world`-th line of a chunk in order of `length`, so that all finish at about the same time;
    `progress` assumes that the others are as far as this process. Results are gathered as JSON; nothing is unpickled.
    `start`: lines worked on before these; `size`: lines of a chunk, by default `CHUNK`.
    """
    for chunk in in_chunks(items, size):
        by_length = sorted(range(len(chunk)), key=lambda i: (-length(chunk[i]), i))
        mine = by_length[ranks.rank :: ranks.world]
        numbers = [start + i + 1 for i in mine]
        report = partial(_report, progress, start, len(chunk), ranks.world)
        done = work([chunk[i] for i in mine], numbers, report)
        shards = ranks.gather_bytes(json.dumps(list(zip(mine, done, strict=True))).encode())
        start += len(chunk)
        if shards is not None:
            results: list[Any] = [None] * len(chunk)
            for shard in shards:
                for i, result in json.loads(shard):
                    results[i] = result
            yield from results
            progress(start)


def _report(progress: Progress, start: int, size: int, world: int, done: int) -> None:
    """Says how far all processes are with a chunk of `size` lines behind `start`, of which this one has `done` some."""
    progress(start + min(size, done * world))
