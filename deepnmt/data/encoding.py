"""Segments text into pieces in several processes. The result does not depend on their number.

Pairs are sent in chunks of fixed size, and a chunk's random segmentations are seeded by its number alone.
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
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from deepnmt.config import Filters
from deepnmt.data.arrays import Tokens
from deepnmt.data.filters import KEPT, Codes, filter_by_length
from deepnmt.data.subword_variants import SAMPLERS, Sampler
from deepnmt.data.text import Pair
from deepnmt.data.vocab import Vocabulary
from deepnmt.errors import UserError

CHUNK = 2000  # pairs; another size would change the random segmentations
SEED = 1

T = TypeVar("T")


@dataclass(frozen=True)
class EncodingJob:
    """How to encode the pairs of a text.

    Attributes:
        src_model, trg_model: SentencePiece models.
        filters: None keeps all pairs, as for validation and test texts.
        variants: the number of sampled segmentations, of this `kind` and `alpha`.
    """

    src_model: bytes
    trg_model: bytes
    filters: Filters | None = None
    variants: int = 0
    kind: str = "bpe"
    alpha: float = 0.0


class Pieces(NamedTuple):
    """N concatenated sentences: `tokens` uint32 of all of them, and `lengths` int64 [N] in pieces."""

    tokens: Tokens
    lengths: npt.NDArray[np.int64]


class Chunk(NamedTuple):
    """The encoded pairs of one chunk.

    Attributes:
        sides: of the pairs kept, [source, target] of each segmentation: first the plain one, then the sampled ones.
        codes: for all pairs of the chunk, whether they were kept or why not (see `filters.py`).
    """

    sides: list[list[Pieces]]
    codes: Codes


class Encoder:
    """Performs an `EncodingJob` in one process, chunk by chunk."""

    def __init__(self, job: EncodingJob) -> None:
        self._job = job
        self._vocabs = [Vocabulary(job.src_model), Vocabulary(job.trg_model)]
        self._samplers: list[Sampler] = []
        if job.variants:
            self._samplers = [SAMPLERS[job.kind](vocab, job.alpha) for vocab in self._vocabs]

    def __call__(self, number: int, pairs: list[Pair]) -> Chunk:
        """Encodes chunk `number`. A sampled segmentation that is too long is replaced by the plain one."""
        filters = self._job.filters
        texts = [list(side) for side in zip(*pairs)]
        plain = [vocab.encode_batch(side) for vocab, side in zip(self._vocabs, texts)]
        codes = np.full(len(pairs), KEPT, dtype=np.uint8)
        if filters:
            src, trg = (_pack(side).lengths for side in plain)
            codes = filter_by_length(src, trg, filters)
        chosen = (codes == KEPT).tolist()
        texts = [list(itertools.compress(side, chosen)) for side in texts]
        plain = [list(itertools.compress(side, chosen)) for side in plain]
        sides = [[_pack(side) for side in plain]]
        for variant in range(self._job.variants):
            sides.append([])
            for side, sampler in enumerate(self._samplers):
                seed = int(np.random.SeedSequence([SEED, number, variant, side]).generate_state(1)[0])
                sampled = sampler.sample_batch(texts[side], seed)
                for row, pieces in enumerate(sampled):
                    if filters and len(pieces) > filters.max_tokens:
                        sampled[row] = plain[side][row]
                sides[-1].append(_pack(sampled))
        return Chunk(sides, codes)


def _pack(sentences: list[list[int]]) -> Pieces:
    flat = np.fromiter(itertools.chain.from_iterable(sentences), dtype=np.uint32)
    return Pieces(flat, np.fromiter(map(len, sentences), dtype=np.int64))


def encode_pairs(pairs: Iterable[Pair], job: EncodingJob, workers: int, first: int = 0) -> Iterator[Chunk]:
    """Encodes pairs in `workers` processes, in order. Only a few chunks per process are in memory at a time.

    Args:
        first: the number of the first chunk.

    Raises:
        UserError: a process was killed, for example because memory ran out.
    """
    stream = iter(pairs)
    chunks = enumerate(iter(lambda: list(itertools.islice(stream, CHUNK)), []), first)
    if workers == 1:
        yield from itertools.starmap(Encoder(job), chunks)
        return
    # Processes are spawned, because a fork can deadlock if PyTorch or the progress bar has threads.
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
            raise UserError(f"one of the {workers} processes that encode the text was killed, perhaps because memory "
                            "ran out; set data.workers lower") from None
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


_encoder: Encoder  # of a worker process, set once when it starts


def _start_worker(job: EncodingJob) -> None:
    global _encoder
    end_with_parent()
    _encoder = Encoder(job)


def _run_worker(number: int, pairs: list[Pair]) -> Chunk:
    return _encoder(number, pairs)


def submit(pool: ProcessPoolExecutor, work: Callable[..., T], *arguments: object) -> Future[T]:
    """Like `pool.submit`, but the processes that it starts ignore Ctrl-C, even while they import.

    A terminal sends Ctrl-C to every process, and each would print its own traceback.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # a new process inherits the mask
    try:
        return pool.submit(work, *arguments)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def end_with_parent() -> None:
    """Ends this process of a pool when its parent dies; otherwise it would wait for ever on the parent's queue."""
    def watch() -> None:
        parent = multiprocessing.parent_process()
        assert parent is not None
        wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
