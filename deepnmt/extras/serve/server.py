"""`deepnmt serve`: loads a model and answers until a signal ends it."""

from __future__ import annotations

import asyncio
import ipaddress
import os
import signal
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from deepnmt import config
from deepnmt.config import Recipe
from deepnmt.decode.models import Folders, load_models, max_length
from deepnmt.decode.translate import require_choosable, translate_lines
from deepnmt.errors import UserError
from deepnmt.extras.serve.app import App, Limits, without_port
from deepnmt.extras.serve.batches import Batches, Hypothesis
from deepnmt.extras.serve.metrics import Metrics
from deepnmt.processes.ranks import Ranks
from deepnmt.progress import print_status

CONNECTIONS = 500  # open at once; more are answered with 503. Many systems give a process 1,024 files.
READ_SECONDS = 10.0  # for a request's headers, and again for its body
WRITE_SECONDS = 30.0  # for a client to read what it was sent
LOCAL = ("localhost", "127.0.0.1", "[::1]")


def serve(
    recipe: Recipe,
    ranks: Ranks,
    *,
    checkpoints: Folders,
    expected: config.Model | None,
    host: str,
    port: int,
    batch: int,
    queue: int,
    sentences: int,
    body: int,
    drain: int,
    allow_hosts: Sequence[str],
) -> None:
    """Serves a run's model until SIGTERM or SIGINT, which lets the requests that have come be answered.

    Args:
        recipe: of the run; its search settings and seed are used. A sentence's number, on which samples depend, is its
            place in its request.
        ranks: this process and its device.
        checkpoints, expected: as for `load_models`; without checkpoints, the run's.
        host, port: where it listens; port 0: any free one, which it prints.
        batch: sentences translated together.
        queue: sentences that may wait.
        sentences, body: the largest request, in sentences and bytes.
        drain: seconds in which requests are answered after a signal.
        allow_hosts: names under which clients reach it, besides `host` and this machine's. Where it listens to this
            machine alone, or where names are given, requests to others are refused.

    Raises:
        UserError: no such checkpoint, another process has the port, or what chooses translations is not here.
    """
    require_choosable(recipe.translate, None, None)
    models = load_models(checkpoints or recipe.run, recipe.translate, ranks, expected)
    first = models.members[0]

    def translate(texts: Any, numbers: Any) -> list[list[Hypothesis]]:
        return translate_lines(models.all[0], models.vocabs, texts, recipe.translate, seed=recipe.seed,
                               numbers=numbers, stepper=models.stepper, searcher=models.searcher)

    facts = {"run": Path(recipe.run).absolute().name, "update": first.state.update,
             "languages": [recipe.data.src_lang, recipe.data.trg_lang], "tags": list(first.src_vocab.tags)}
    limits = Limits(body, sentences, max_length(models.all[0]) - 1, READ_SECONDS)

    async def run() -> None:
        metrics = Metrics()
        batches = Batches(translate, batch, queue, metrics.count_batch)
        metrics.waiting.set_function(lambda: batches.waiting)
        where, opened = listening.getsockname()[:2]
        address = f"[{where}]" if ":" in where else where
        local = ipaddress.ip_address(where.partition("%")[0]).is_loopback
        hosts = {*LOCAL, address, host, *allow_hosts} if local or allow_hosts else set()
        names = {without_port(name) for name in hosts}
        app = App(batches, first.src_vocab, limits, metrics, facts).application(names)
        server = _Server(uvicorn.Config(
            app, http=_Protocol, ws="none", lifespan="off",
            log_config=None, log_level="error", access_log=False, server_header=False,
            limit_concurrency=CONNECTIONS, timeout_graceful_shutdown=drain,
        ))
        working = asyncio.create_task(batches.run())
        folders = ", ".join(str(one.folder) for one in models.members)
        print(f"serving {folders} at http://{address}:{opened}", flush=True)
        await server.serve([listening])
        working.cancel()
        with suppress(asyncio.CancelledError):
            await working
        print_status(str(metrics))

    with _listening(host, port) as listening:
        asyncio.run(run())


@contextmanager
def _listening(host: str, port: int) -> Iterator[socket.socket]:
    """A socket that listens. Raises `UserError`."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        listening = socket.create_server(address, family=family)
    except (OSError, UnicodeError) as error:
        number = getattr(error, "errno", None) or 0
        reason = os.strerror(number) if number > 0 else getattr(error, "strerror", None) or error
        raise UserError(f"port {port} of {host} cannot be opened: {reason}; give another --port, 0 for any free "
                        "one, or another --host") from None
    with listening:
        yield listening


class _Server(uvicorn.Server):
    """Ends at a signal with its own exit code, where uvicorn would raise the signal again once it has drained."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.handle_exit, number, None)
        try:
            yield
        finally:
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.remove_signal_handler(number)


class _Protocol(H11Protocol):
    """Ends a connection whose client is too slow: to send a request's headers, or to read what it was sent. uvicorn
    would wait for ever."""

    _late: asyncio.TimerHandle | None = None
    _unread: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=0)  # so that writing pauses as long as anything is unread
        self._late = self.loop.call_later(READ_SECONDS, transport.close)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.conn.their_state is not h11.IDLE:
            _cancel(self._late)
            self._late = None
        elif self._late is None:
            self._late = self.loop.call_later(READ_SECONDS, self.transport.close)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._unread = self.loop.call_later(WRITE_SECONDS, self.transport.abort)

    def resume_writing(self) -> None:
        _cancel(self._unread)
        super().resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        _cancel(self._late)
        _cancel(self._unread)
        super().connection_lost(exc)


def _cancel(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()
