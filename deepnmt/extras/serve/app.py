"""The pages of a translation server, as a Starlette application."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Awaitable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from deepnmt.data.vocab import Vocabulary
from deepnmt.decode.formats import as_record
from deepnmt.errors import UserError, nearest
from deepnmt.extras.serve.batches import Batches, QueueFullError
from deepnmt.extras.serve.metrics import Metrics

READ_ON = 64  # times the largest body are read, and forgotten, so that a client with too large a one reads why
PAGE = Path(__file__).with_name("page.html").read_bytes()
JSON, TEXT = "application/json", "text/plain; version=0.0.4; charset=utf-8"
GONE = 499  # for the metrics, as nginx counts a client that did not wait
HEADERS = {"cache-control": "no-store", "x-content-type-options": "nosniff"}
# The page loads nothing, talks to this server alone, and is shown in no frame of another one.
POLICY = ("default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'; "
          "base-uri 'none'; form-action 'none'; frame-ancestors 'none'")


@dataclass(frozen=True)
class Limits:
    """What a request may hold: bytes of its body, sentences, tokens of a sentence; and the time to send it."""

    body: int
    sentences: int
    tokens: int
    read_seconds: float


class RefusedError(HTTPException):
    """A request that is answered with an error: a status and a sentence."""

    def __init__(self, status: int, message: str, **headers: str) -> None:
        super().__init__(status, message, headers)


def without_port(host: str) -> str:
    """A name of the kind `Host` headers have, in lower case: of `NAME:8000`, `name`."""
    return re.sub(r":\d*$", "", host).lower()


class OnlyHosts:
    """Refuses requests to another host than these. A page of another site whose name has been pointed at this machine
    sends that name, and would read the answers."""

    def __init__(self, app: ASGIApp, hosts: Collection[str]) -> None:
        self.app, self.hosts = app, hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        host = without_port(Headers(scope=scope).get("host", ""))
        if host in self.hosts:
            await self.app(scope, receive, send)
            return
        refusal = (f"this server answers to {', '.join(sorted(self.hosts))}, not to {host[:200]!r}; if that is its "
                   f"name, start it with --allow-host {host[:200]}")
        await JSONResponse({"error": refusal}, 421, {**HEADERS, "connection": "close"})(scope, receive, send)


class App:
    """`POST /translate`, and for people and machines that watch it `GET /`, `/health` and `/metrics`.

    Args:
        batches: what translates.
        vocab: the source's, whose tokens are counted.
        limits: of a request.
        facts: what `/health` says of the model.
    """

    def __init__(
        self, batches: Batches, vocab: Vocabulary, limits: Limits, metrics: Metrics, facts: dict[str, Any]
    ) -> None:
        self.batches, self.vocab, self.limits, self.metrics, self.facts = batches, vocab, limits, metrics, facts

    def application(self, hosts: Collection[str]) -> Starlette:
        """The application; `hosts`: those it answers to, none for any."""
        application = Starlette(
            routes=[Route("/", self._page), Route("/health", self._health), Route("/metrics", self._metrics),
                    Route("/translate", self._translate, methods=["POST"])],
            middleware=[Middleware(OnlyHosts, hosts=hosts)] if hosts else [],
            exception_handlers={HTTPException: _refuse, UserError: _refuse})
        application.router.redirect_slashes = False
        return application

    async def _page(self, request: Request) -> Response:
        return Response(PAGE, headers={**HEADERS, "content-security-policy": POLICY}, media_type="text/html")

    async def _health(self, request: Request) -> Response:
        return JSONResponse({"status": "ok", **self.facts, "waiting_sentences": self.batches.waiting}, headers=HEADERS)

    async def _metrics(self, request: Request) -> Response:
        return Response(self.metrics.text(), headers={**HEADERS, "content-type": TEXT})

    async def _translate(self, request: Request) -> Response:
        begin, status = time.monotonic(), 500
        try:
            answer = await self._translation(request)
            status = 200
            return JSONResponse(answer, headers=HEADERS)
        except HTTPException as refused:
            status = refused.status_code
            raise
        except ClientDisconnect:
            status = GONE
            return Response(status_code=GONE)
        finally:
            self.metrics.count_response(status, time.monotonic() - begin)

    async def _translation(self, request: Request) -> dict[str, Any]:
        """Translates the sentences of a request."""
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != JSON:  # a browser asks this server before it sends that from another site's page
            # the rest of a body that is not read would be taken for the next request
            raise RefusedError(415, f"the content type is {kind!r}, must be {JSON}", connection="close")
        texts, details = self._sentences(await self._body(request))
        await asyncio.to_thread(self._check_lengths, texts)
        try:
            answers = await _unless_gone(self.batches.translate(texts), request.receive)
        except QueueFullError:
            raise RefusedError(503, f"{self.batches.waiting} sentences are waiting, and with the {len(texts)} of this "
                               f"request they would be more than {self.batches.longest}; try again later",
                               **{"retry-after": "1"}) from None
        self.metrics.count_translations(len(answers), sum(best[0].tokens for best in answers))
        answer: dict[str, Any] = {"translations": [best[0].text for best in answers]}
        if details:
            answer["hypotheses"] = [list(map(as_record, best)) for best in answers]
        return answer

    async def _body(self, request: Request) -> bytes:
        """The body of a request, if it is neither too large nor too slow."""
        too_large = RefusedError(413, f"the request's body has more than {self.limits.body:,} bytes; send several "
                                 "requests", connection="close")
        declared = request.headers.get("content-length", "0")
        if declared.isdecimal() and int(declared[:20]) > READ_ON * self.limits.body:
            raise too_large

        async def read() -> bytes:
            body, size = bytearray(), 0
            async for block in request.stream():
                size += len(block)
                if size <= self.limits.body:
                    body += block
                elif size > READ_ON * self.limits.body:
                    break
            if size > self.limits.body:
                raise too_large
            return bytes(body)

        try:
            return await asyncio.wait_for(read(), self.limits.read_seconds)
        except asyncio.TimeoutError:
            raise RefusedError(408, f"the request's body took more than {self.limits.read_seconds:g} seconds",
                               connection="close") from None

    def _sentences(self, body: bytes) -> tuple[list[str], bool]:
        """The sentences of a body, and whether all hypotheses are wanted."""
        try:
            tree = json.loads(body.decode("utf-8"))
        except UnicodeDecodeError as error:
            raise RefusedError(400, f"the body is not valid UTF-8 ({error.reason} at byte {error.start + 1})") from None
        except (ValueError, RecursionError) as error:
            raise RefusedError(400, f"the body is not valid JSON ({error})") from None
        if not isinstance(tree, dict) or "text" not in tree:
            raise RefusedError(400, 'the body must be an object with a text, such as {"text": ["a dog", "two cats"]}')
        known = ("text", "hypotheses")
        for key in tree.keys() - set(known):
            near = nearest(key, known)
            hint = f"did you mean {near}?" if near else "give text or hypotheses"
            raise RefusedError(400, f"{key!r} is unknown; {hint}")
        text, details = tree["text"], tree.get("hypotheses", False)
        texts = [text] if isinstance(text, str) else text
        if not isinstance(texts, list) or not all(isinstance(one, str) for one in texts):
            raise RefusedError(400, "text must be a sentence or a list of sentences")
        if not isinstance(details, bool):
            raise RefusedError(400, "hypotheses must be true or false")
        if len(texts) > self.limits.sentences:
            raise RefusedError(413, f"the request has {len(texts):,} sentences, at most {self.limits.sentences:,} are "
                               "translated at once; send several requests")
        for number, one in enumerate(texts, start=1):
            if "\n" in one.strip():
                raise RefusedError(400, f"sentence {number} has a line break; give a list with a sentence an item")
            if not one.isascii() and any("\ud800" <= char <= "\udfff" for char in one):
                raise RefusedError(400, f"sentence {number} has half of a surrogate pair, which is no character")
        return texts, details

    def _check_lengths(self, texts: Sequence[str]) -> None:
        """Refuses sentences with more tokens than the model takes, of which a file's would be truncated."""
        for number, text in enumerate(texts, start=1):
            tokens = len(self.vocab.encode(text.strip()))
            if tokens > self.limits.tokens:
                raise RefusedError(413, f"sentence {number} has {tokens:,} tokens, the model takes "
                                        f"{self.limits.tokens:,}; divide it")


async def _unless_gone(work: Awaitable[Any], receive: Receive) -> Any:
    """The result of `work`, which is cancelled if the client goes first."""
    working, gone = asyncio.ensure_future(work), asyncio.ensure_future(receive())
    try:
        await asyncio.wait({working, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return working.result()
    finally:
        working.cancel()
        gone.cancel()


async def _refuse(request: Request, error: Exception) -> Response:
    """Answers with a sentence; those of a wrong path and method are Starlette's without one."""
    path, status, message = request.url.path, 500, str(error)
    headers: Mapping[str, str] = {}
    if isinstance(error, HTTPException):
        status, message, headers = error.status_code, error.detail, error.headers or {}
    if status == 404:
        message = f"there is no {path}; POST to /translate, or GET /, /health or /metrics"
    if status == 405:
        allowed = sorted(headers.get("Allow", "other methods").split(", "))  # Starlette's are in no order
        message = f"{path} is for {', '.join(allowed)}, not for {request.method}"
    return JSONResponse({"error": message}, status, {**HEADERS, **headers})
