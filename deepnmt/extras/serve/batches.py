"""Sentences of many requests, translated together."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from deepnmt.decode.translate import Hypothesis
from deepnmt.errors import UserError

Translate = Callable[[Sequence[str], Sequence[int]], list[list[Hypothesis]]]  # from texts and their line numbers

log = logging.getLogger(__name__)


class QueueFullError(Exception):
    """As many sentences wait as may."""


@dataclass(eq=False)
class _Request:
    texts: Sequence[str]
    answers: list[list[Hypothesis]]
    left: int
    done: asyncio.Future[list[list[Hypothesis]]]


class Batches:
    """Translates what has come in, `most` sentences at a time, on a thread. Nothing waits for a batch to fill: while
    one is translated, the next collects. All methods are for the event loop's thread.

    Args:
        translate: see `Translate`; called on one thread.
        most: sentences in a batch.
        longest: sentences that may wait.
        count: called with the number of sentences of each batch.
    """

    def __init__(self, translate: Translate, most: int, longest: int, count: Callable[[int], object]) -> None:
        self.most, self.longest = most, longest
        self._translate, self._count = translate, count
        self._waiting: deque[tuple[_Request, int]] = deque()
        self._arrived = asyncio.Event()

    @property
    def waiting(self) -> int:
        """Sentences that wait, without those being translated."""
        return len(self._waiting)

    async def translate(self, texts: Sequence[str]) -> list[list[Hypothesis]]:
        """The hypotheses of each text. A cancelled call's sentences are not translated any more.

        Raises:
            QueueFullError: too many wait. An empty queue takes any request.
            Exception: what translating them raised.
        """
        if self._waiting and len(self._waiting) + len(texts) > self.longest:
            raise QueueFullError
        if not texts:
            return []
        request = _Request(texts, [[] for _ in texts], len(texts), asyncio.get_running_loop().create_future())
        self._waiting.extend((request, number) for number in range(len(texts)))
        self._arrived.set()
        try:
            return await request.done
        finally:
            if request.left:  # its client has gone, or it has failed: the rest keeps no place in the queue
                self._waiting = deque(one for one in self._waiting if one[0] is not request)

    async def run(self) -> None:
        """Translates until it is cancelled."""
        with ThreadPoolExecutor(1, "translate") as thread:
            while True:
                await self._arrived.wait()
                batch: list[tuple[_Request, int]] = []
                while self._waiting and len(batch) < self.most:
                    request, number = self._waiting.popleft()
                    if not request.done.done():  # else its client has gone, or it has failed
                        batch.append((request, number))
                if not self._waiting:
                    self._arrived.clear()
                if batch:
                    self._count(len(batch))
                    await self._answer(batch, thread)

    async def _answer(self, batch: Sequence[tuple[_Request, int]], thread: ThreadPoolExecutor) -> None:
        texts = [request.texts[n] for request, n in batch]
        numbers = [n + 1 for _, n in batch]
        try:
            answers = await asyncio.get_running_loop().run_in_executor(thread, self._translate, texts, numbers)
        except Exception as error:
            if len(batch) > 1:  # one request must not fail for another, nor for the size of a batch
                for sentence in batch:
                    await self._answer([sentence], thread)
                return
            if not isinstance(error, UserError):
                log.exception("a sentence could not be translated")
            if not batch[0][0].done.done():
                batch[0][0].done.set_exception(error)
            return
        for (request, number), answer in zip(batch, answers, strict=True):
            request.answers[number], request.left = answer, request.left - 1
            if not request.left and not request.done.done():
                request.done.set_result(request.answers)
