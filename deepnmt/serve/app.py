"""The pages of a translation server, as an ASGI application."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deepnmt.data.vocab import Vocabulary
from deepnmt.decode.formats import as_record
from deepnmt.errors import UserError, nearest
from deepnmt.serve.batches import Batches, QueueFullError
from deepnmt.serve.metrics import Metrics

Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]

READ_ON = 64  # times the largest body are read, and forgotten, so that a client with too large a one reads why
PAGE = Path(__file__).with_name("page.html").read_bytes()
JSON, TEXT, HTML = "application/json", "text/plain; version=0.0.4; charset=utf-8", "text/html; charset=utf-8"
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


class RefusedError(Exception):
    """A request that is answered with an error: a status and a sentence."""

    def __init__(self, status: int, message: str, **headers: str) -> None:
        super().__init__(message)
        self.status, self.headers = status, headers


class DisconnectedError(Exception):
    """The client has gone."""


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

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        """Answers a request."""
        path, method, begin = scope["path"], scope["method"], time.monotonic()
        status, kind, headers = 200, JSON, {}
        try:
            allowed = {"/": "GET", "/health": "GET", "/metrics": "GET", "/translate": "POST"}.get(path)
            if allowed is None:
                raise RefusedError(404, f"there is no {path}; POST to /translate, or GET /, /health or /metrics")
            if method != allowed and (method, allowed) != ("HEAD", "GET"):
                raise RefusedError(405, f"{path} is for {allowed}, not for {method}", allow=allowed)
            if path == "/":
                kind, body, headers = HTML, PAGE, {"content-security-policy": POLICY}
            elif path == "/health":
                body = _json({"status": "ok", **self.facts, "waiting_sentences": self.batches.waiting})
            elif path == "/metrics":
                kind, body = TEXT, self.metrics.text(self.batches.waiting).encode()
            else:
                body = _json(await self._translate(dict(scope["headers"]), receive))
        except RefusedError as refused:
            # the rest of a body that was not read would be taken for the next request
            status, body, headers = refused.status, _json({"error": str(refused)}), refused.headers
        except UserError as error:
            status, body = 500, _json({"error": str(error)})
        except DisconnectedError:
            status, body = 499, b""  # for the metrics, as nginx counts it
        if path == "/translate":
            self.metrics.count_response(status, time.monotonic() - begin)
        if status != 499:
            headers = {"content-type": kind, "content-length": str(len(body)), "cache-control": "no-store",
                       "x-content-type-options": "nosniff", **headers}
            await send({"type": "http.response.start", "status": status,
                        "headers": [(name.encode(), value.encode()) for name, value in headers.items()]})
            await send({"type": "http.response.body", "body": b"" if method == "HEAD" else body})

    async def _translate(self, headers: dict[bytes, bytes], receive: Receive) -> dict[str, Any]:
        """Translates the sentences of a request."""
        kind = headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
        if kind != JSON.encode():  # a browser asks this server before it sends that from another site's page
            raise RefusedError(415, f"the content type is {kind.decode('latin-1')!r}, must be {JSON}",
                               connection="close")
        texts, details = self._sentences(await self._body(headers, receive))
        await asyncio.to_thread(self._check_lengths, texts)
        try:
            answers = await _unless_gone(self.batches.translate(texts), receive)
        except QueueFullError:
            raise RefusedError(503, f"{self.batches.waiting} sentences are waiting, as many as may; try again later",
                          **{"retry-after": "1"}) from None
        self.metrics.sentences += len(answers)
        self.metrics.tokens += sum(best[0].tokens for best in answers)
        answer: dict[str, Any] = {"translations": [best[0].text for best in answers]}
        if details:
            answer["hypotheses"] = [[as_record(hypothesis) for hypothesis in best] for best in answers]
        return answer

    async def _body(self, headers: dict[bytes, bytes], receive: Receive) -> bytes:
        """The body of a request, if it is neither too large nor too slow."""
        large = RefusedError(413, f"the request's body has more than {self.limits.body:,} bytes; send several requests",
                        connection="close")
        body, size = bytearray(), 0
        declared = headers.get(b"content-length", b"0")
        if declared.isdigit() and int(declared[:20]) > READ_ON * self.limits.body:
            raise large
        end = time.monotonic() + self.limits.read_seconds
        more = True
        while more and size <= READ_ON * self.limits.body:
            try:
                message = await asyncio.wait_for(receive(), end - time.monotonic())
            except asyncio.TimeoutError:
                raise RefusedError(408, f"the request's body took more than {self.limits.read_seconds:g} seconds",
                              connection="close") from None
            if message["type"] == "http.disconnect":
                raise DisconnectedError
            size += len(message.get("body", b""))
            if size <= self.limits.body:
                body += message.get("body", b"")
            more = message.get("more_body", False)
        if size > self.limits.body:
            raise large
        return bytes(body)

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
            if (tokens := len(self.vocab.encode(text.strip()))) > self.limits.tokens:
                raise RefusedError(413, f"sentence {number} has {tokens:,} tokens, the model takes "
                                        f"{self.limits.tokens:,}; divide it")


async def _unless_gone(work: Awaitable[Any], receive: Receive) -> Any:
    """The result of `work`, which is cancelled if the client goes first."""
    working, gone = asyncio.ensure_future(work), asyncio.ensure_future(receive())
    try:
        await asyncio.wait({working, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise DisconnectedError
        return working.result()
    finally:
        working.cancel()
        gone.cancel()


def _json(tree: Any) -> bytes:
    return json.dumps(tree, ensure_ascii=False).encode()
