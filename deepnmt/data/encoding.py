"""Text to pieces in several processes. Order and result do not depend on how many there are.

Pairs travel in chunks of a fixed number, and a chunk's random segmentations are seeded by its number alone.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing.connection import wait
from typing import Literal, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from deepnmt.config import Filters
from deepnmt.data.filters import KEPT, Verdicts, judge_lengths
from deepnmt.data.prepared import Tokens
from deepnmt.data.subwords import SAMPLERS
from deepnmt.data.text import Pair
from deepnmt.data.vocab import Vocabulary
from deepnmt.errors import UserError

CHUNK = 2000  # pairs; another number would seed the random segmentations otherwise
SEED = 1

T = TypeVar("T")


@dataclass(frozen=True)
class Encoding:
    """What is to be done with every pair; `filters` None keeps all pairs, as validation and tests need it.

    `kind` and `alpha` serve the sampled segmentations.
    """

    src_model: bytes
    trg_model: bytes
    filters: Filters | None = None
    variants: int = 0
    kind: Literal["bpe", "unigram"] = "bpe"
    alpha: float = 0.0


class Pieces(NamedTuple):
    """Sentences one after the other: `tokens` uint16, and `lengths` int64 [N] in pieces."""

    tokens: Tokens
    lengths: npt.NDArray[np.int64]


class Chunk(NamedTuple):
    """The pairs of one chunk that were kept: `sides[v]` is (source, target), the plain segmentation at v = 0 and
    sampled segmentation k at v = k + 1. `verdicts` judges all pairs of the chunk."""

    sides: list[list[Pieces]]
    verdicts: Verdicts


class Encoder:
    """Does an `Encoding`, chunk by chunk, in one process."""

    def __init__(self, job: Encoding) -> None:
        self._job = job
        self._vocabs = [Vocabulary(job.src_model), Vocabulary(job.trg_model)]
        self._samplers = [SAMPLERS[job.kind](vocab, job.alpha) for vocab in self._vocabs] if job.variants else []

    def __call__(self, number: int, pairs: list[Pair]) -> Chunk:
        """Encodes chunk `number`. A sampled segmentation that is too long gives way to the plain one."""
        filters = self._job.filters
        texts = [list(side) for side in zip(*pairs)]
        plain = [vocab.encode_batch(side) for vocab, side in zip(self._vocabs, texts)]
        verdicts = np.full(len(pairs), KEPT, dtype=np.uint8)
        if filters:
            src, trg = (_pack(side).lengths for side in plain)
            verdicts = judge_lengths(src, trg, filters)
        kept = np.flatnonzero(verdicts == KEPT).tolist()
        texts = [[side[i] for i in kept] for side in texts]
        plain = [[side[i] for i in kept] for side in plain]
        sides = [[_pack(side) for side in plain]]
        for variant in range(self._job.variants):
            sides.append([])
            for side, sampler in enumerate(self._samplers):
                seed = int(np.random.SeedSequence([SEED, number, variant, side]).generate_state(1)[0])
                sampled = sampler.sample_batch(texts[side], seed)
                if filters:
                    sampled = [some if len(some) <= filters.max_tokens else best
                               for some, best in zip(sampled, plain[side])]
                sides[-1].append(_pack(sampled))
        return Chunk(sides, verdicts)


def _pack(sentences: list[list[int]]) -> Pieces:
    flat = np.fromiter(itertools.chain.from_iterable(sentences), dtype=np.uint16)
    return Pieces(flat, np.fromiter(map(len, sentences), dtype=np.int64))


def encode_pairs(pairs: Iterable[Pair], job: Encoding, workers: int) -> Iterator[Chunk]:
    """Encodes pairs in `workers` processes, in order. Only a few chunks per process are in memory at a time.

    Raises:
        UserError: a process was killed, as systems do when memory runs out.
    """
    stream = iter(pairs)
    chunks = enumerate(iter(lambda: list(itertools.islice(stream, CHUNK)), []))
    if workers == 1:
        yield from itertools.starmap(Encoder(job), chunks)
        return
    # Processes are spawned, not forked: a fork beside the threads of PyTorch or of the progress line can deadlock.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=context, initializer=_start_worker, initargs=(job,)) as pool:
        pending: deque[Future[Chunk]] = deque()
        try:
            for chunk in chunks:
                pending.append(submit(pool, _run_worker, *chunk))
                if len(pending) > 2 * workers:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        except BrokenProcessPool:
            raise UserError(f"one of the {workers} processes that encode the text was killed, perhaps for want of "
                            "memory; set data.workers lower") from None
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


_encoder: Encoder  # of a worker process, set once when it starts


def _start_worker(job: Encoding) -> None:
    global _encoder
    end_with_parent()
    _encoder = Encoder(job)


def _run_worker(number: int, pairs: list[Pair]) -> Chunk:
    return _encoder(number, pairs)


def submit(pool: ProcessPoolExecutor, work: Callable[..., T], *arguments: object) -> Future[T]:
    """Like `pool.submit`, in whose course processes start. These never see Ctrl-C, even while they import.

    A terminal sends it to every process, and each would end with a traceback of its own.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # a new process has the mask of its parent
    try:
        return pool.submit(work, *arguments)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def end_with_parent() -> None:
    """Called in a process of a pool, which would else wait for ever on a queue whose other end was killed."""
    def watch() -> None:
        parent = multiprocessing.parent_process()
        assert parent is not None
        wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
