"""Sentences of many requests in one batch: none harms another."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress

import pytest

from deepnmt.decode.translate import Hypothesis
from deepnmt.errors import UserError
from deepnmt.extras.serve.batches import Batches, QueueFullError


class Model:
    """Translates into upper case, once it may; never "bad"."""

    def __init__(self) -> None:
        self.batches: list[list[tuple[str, int]]] = []
        self.may = threading.Event()
        self.may.set()

    def __call__(self, texts: Sequence[str], numbers: Sequence[int]) -> list[list[Hypothesis]]:
        self.batches.append(list(zip(texts, numbers, strict=True)))
        assert self.may.wait(60)
        if "bad" in texts:
            raise UserError("NaN")
        return [[Hypothesis(text.upper(), 0.0, 0.0, 1, True)] for text in texts]


def run(scenario: Callable[[Batches, Model], Awaitable[None]], most: int = 3, longest: int = 4) -> Model:
    """Runs a scenario beside the batches' own task."""
    model = Model()

    async def both() -> None:
        batches = Batches(model, most, longest, lambda _: None)
        working = asyncio.create_task(batches.run())
        try:
            await asyncio.wait_for(scenario(batches, model), 60)
        finally:
            model.may.set()
            working.cancel()
            with suppress(asyncio.CancelledError):
                await working

    asyncio.run(both())
    return model


async def busy(batches: Batches, model: Model) -> asyncio.Task[list[list[Hypothesis]]]:
    """A request that is being translated until the model may."""
    model.may.clear()
    first = asyncio.create_task(batches.translate(["a"]))
    while not model.batches:
        await asyncio.sleep(0.001)
    return first


def texts(answers: list[list[Hypothesis]]) -> list[str]:
    return [best[0].text for best in answers]


def test_requests_share_batches_and_keep_their_order() -> None:
    async def scenario(batches: Batches, model: Model) -> None:
        first = await busy(batches, model)
        others = [asyncio.create_task(batches.translate(words)) for words in (["b", "c"], ["d", "e"], [])]
        await asyncio.sleep(0)
        assert batches.waiting == 4
        model.may.set()
        assert [texts(await one) for one in (first, *others)] == [["A"], ["B", "C"], ["D", "E"], []]

    assert run(scenario).batches == [[("a", 1)], [("b", 1), ("c", 2), ("d", 1)], [("e", 2)]]


def test_a_sentence_that_fails_harms_no_other_request() -> None:
    async def scenario(batches: Batches, model: Model) -> None:
        first = await busy(batches, model)
        good, bad = (asyncio.create_task(batches.translate(words)) for words in (["b"], ["bad", "c"]))
        await asyncio.sleep(0)
        model.may.set()
        assert texts(await first) == ["A"] and texts(await good) == ["B"]
        with pytest.raises(UserError, match="NaN"):
            await bad
        assert texts(await batches.translate(["d"])) == ["D"]

    run(scenario)


def test_a_full_queue_and_clients_that_go() -> None:
    async def scenario(batches: Batches, model: Model) -> None:
        first = await busy(batches, model)
        gone = asyncio.create_task(batches.translate(["x", "y"]))
        last = asyncio.create_task(batches.translate(["b"]))
        await asyncio.sleep(0)
        with pytest.raises(QueueFullError):
            await batches.translate(["c", "d"])
        gone.cancel()
        model.may.set()
        assert texts(await first) == ["A"] and texts(await last) == ["B"]
        assert texts(await batches.translate(["e"] * 9)) == ["E"] * 9, "an empty queue takes any request"

    assert all(("x", 1) not in batch for batch in run(scenario).batches)


def test_who_has_gone_keeps_no_place_in_the_queue() -> None:
    async def scenario(batches: Batches, model: Model) -> None:
        first = await busy(batches, model)
        gone = asyncio.ensure_future(batches.translate(["b", "c", "d", "e"]))
        await asyncio.sleep(0)
        assert batches.waiting == 4
        gone.cancel()
        await asyncio.wait([gone])
        assert batches.waiting == 0
        last = asyncio.ensure_future(batches.translate(["f", "g"]))
        model.may.set()
        assert texts(await first) == ["A"] and texts(await last) == ["F", "G"]

    model = run(scenario)
    assert model.batches == [[("a", 1)], [("f", 1), ("g", 2)]]
