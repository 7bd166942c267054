"""Text to pieces in several processes. Order and result do not depend on how many there are.

Pairs travel in chunks of a fixed number, and a chunk's random segmentations are seeded by its number alone.
"""

from __future__ import annotations

import itertools
import multiprocessing
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from deepnmt.config import Filters
from deepnmt.data.filters import KEPT, Verdicts, judge_lengths
from deepnmt.data.pool import end_with_parent, submit
from deepnmt.data.prepared import Tokens
from deepnmt.data.subwords import Sampler
from deepnmt.data.text import Pair
from deepnmt.data.vocab import Vocabulary
from deepnmt.errors import UserError

CHUNK = 2000  # pairs; another number would seed the random segmentations otherwise
SEED = 1


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


@dataclass(frozen=True)
class Pieces:
    """Sentences one after the other: `tokens` uint16, and `lengths` int64 [N] in pieces."""

    tokens: Tokens
    lengths: npt.NDArray[np.int64]


@dataclass(frozen=True)
class Chunk:
    """The pairs of one chunk that were kept: `sides[v]` is (source, target), the plain segmentation at v = 0 and
    sampled segmentation k at v = k + 1. `verdicts` judges all pairs of the chunk."""

    sides: list[tuple[Pieces, Pieces]]
    verdicts: Verdicts


class Encoder:
    """Does an `Encoding`, chunk by chunk, in one process."""

    def __init__(self, job: Encoding) -> None:
        self._job = job
        self._vocabs = (Vocabulary(job.src_model), Vocabulary(job.trg_model))
        self._samplers = [Sampler(vocab, job.kind, job.alpha) for vocab in self._vocabs] if job.variants else []

    def __call__(self, number: int, pairs: list[Pair]) -> Chunk:
        """Encodes chunk `number`."""
        texts = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
        src, trg = (vocab.encode_batch(side) for vocab, side in zip(self._vocabs, texts))
        verdicts = np.full(len(pairs), KEPT, dtype=np.uint8)
        if self._job.filters:
            verdicts = judge_lengths(_lengths(src), _lengths(trg), self._job.filters)
        kept = np.flatnonzero(verdicts == KEPT).tolist()
        plain = [[side[i] for i in kept] for side in (src, trg)]
        sides = [(_pack(plain[0]), _pack(plain[1]))]
        for variant in range(self._job.variants):
            sides.append((self._sample(0, number, variant, [texts[0][i] for i in kept], plain[0]),
                          self._sample(1, number, variant, [texts[1][i] for i in kept], plain[1])))
        return Chunk(sides, verdicts)

    def _sample(self, side: int, number: int, variant: int, texts: list[str], plain: list[list[int]]) -> Pieces:
        """A sampled segmentation of every text, or its plain one where the sampled one is too long."""
        seed = int(np.random.SeedSequence([SEED, number, variant, side]).generate_state(1)[0])
        sampled = self._samplers[side].sample_batch(texts, seed)
        if self._job.filters:
            most = self._job.filters.max_tokens
            sampled = [some if len(some) <= most else best for some, best in zip(sampled, plain)]
        return _pack(sampled)


def encode_pairs(pairs: Iterable[Pair], job: Encoding, workers: int) -> Iterator[Chunk]:
    """Encodes pairs in `workers` processes, in order. Only a few chunks per process are in memory at a time.

    Raises:
        UserError: a process was killed, as systems do when memory runs out.
    """
    chunks = enumerate(_chunks(pairs))
    if workers == 1:
        encoder = Encoder(job)
        yield from (encoder(number, chunk) for number, chunk in chunks)
        return
    # Processes are spawned, not forked: a fork beside the threads of PyTorch or of the progress line can deadlock.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=context, initializer=_start_worker, initargs=(job,)) as pool:
        pending: deque[Future[Chunk]] = deque()
        try:
            for number, chunk in chunks:
                pending.append(submit(pool, _run_worker, number, chunk))
                if len(pending) > 2 * workers:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        except BrokenProcessPool:
            raise UserError(f"one of the {workers} processes that encode the text was killed, perhaps for want of "
                            "memory; set data.workers lower") from None
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


_encoder: Encoder | None = None  # of a worker process, set once when it starts


def _start_worker(job: Encoding) -> None:
    global _encoder
    end_with_parent()
    _encoder = Encoder(job)


def _run_worker(number: int, pairs: list[Pair]) -> Chunk:
    assert _encoder is not None
    return _encoder(number, pairs)


def _chunks(pairs: Iterable[Pair]) -> Iterator[list[Pair]]:
    stream = iter(pairs)
    while chunk := list(itertools.islice(stream, CHUNK)):
        yield chunk


def _lengths(sentences: list[list[int]]) -> npt.NDArray[np.int64]:
    return np.fromiter(map(len, sentences), dtype=np.int64, count=len(sentences))


def _pack(sentences: list[list[int]]) -> Pieces:
    lengths = _lengths(sentences)
    flat = itertools.chain.from_iterable(sentences)
    return Pieces(np.fromiter(flat, dtype=np.uint16, count=int(lengths.sum())), lengths)
