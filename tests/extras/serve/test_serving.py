"""`deepnmt serve` in a process of its own, asked over HTTP by many clients and a browser."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import os
import re
import signal
import socket
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import browser
import psutil
import pytest
from refusals import Refused
from warm import Warm, waiting

import deepnmt
from deepnmt.cli import main
from deepnmt.decode.formats import as_record
from deepnmt.extras.serve.batches import Batches

pytest.importorskip("uvicorn", reason="uvicorn is not installed; pip install 'deepnmt[serve]'")

LINES = ["the old dog sees the house", "", "  two cats sleep ", "a child gives the teacher a book", "the"] * 10


def serve(*arguments: str) -> int:
    """What the process calls, in which patience is short."""
    from deepnmt.extras.serve import server

    server.READ_SECONDS = server.WRITE_SECONDS = 1.5
    return main("serve", list(arguments))


def serve_once_there_is(gate: str, *arguments: str) -> int:
    """`serve`, in which nothing is translated before a file is there."""
    answer = Batches._answer

    async def wait_and_answer(*batch: Any) -> None:
        while not Path(gate).exists():
            await asyncio.sleep(0.01)
        await answer(*batch)

    Batches._answer = wait_and_answer  # type: ignore[method-assign]
    return serve(*arguments)


@pytest.fixture(scope="module")
def run(prepared: Path, tmp_path_factory: pytest.TempPathFactory) -> deepnmt.Run:
    folder = tmp_path_factory.mktemp("serving") / "run"
    return deepnmt.train(prepared / "recipe.yaml", {"run": folder, "train.updates": 3, "train.validate_every": 3,
                                                    "train.valid_bleu": False})


class Server:
    """A server in a forked process, and clients of it."""

    def __init__(self, warm: Warm, *arguments: str, program: Sequence[object] = ("test_serving:serve",)) -> None:
        self.warm = warm
        target, *first = program
        [self.pid] = warm.start(1, str(target), *first, *arguments, "--port=0")
        for _ in waiting(120, "the server"):
            said = warm.said() if warm.log.exists() else ""
            if address := re.search(r"serving .* at http://127.0.0.1:(\d+)\n", said):
                break
            assert "Error" not in said, said
        self.port = int(address[1])

    def ask(self, method: str, path: str, body: Any = None, kind: str = "application/json",
            **headers: str) -> tuple[int, Any]:
        """The status and content of a response."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        connection.request(method, path, data, {"content-type": kind, **headers} if data is not None else headers)
        response = connection.getresponse()
        content = response.read().decode()
        connection.close()
        return response.status, json.loads(content) if response.getheader("content-type") == kind else content

    def translate(self, **body: Any) -> tuple[int, Any]:
        return self.ask("POST", "/translate", body)

    def stop(self) -> None:
        """Sends SIGTERM."""
        os.kill(self.pid, signal.SIGTERM)
        self.pid = 0

    def end(self) -> str:
        """What the process has said when SIGTERM has ended it."""
        self.stop()
        assert self.warm.wait(60) == [0], self.warm.said()
        return self.warm.said()


@pytest.fixture(scope="module")
def server(run: deepnmt.Run, warm: Warm) -> Iterator[Server]:
    started = Server(warm, str(run.folder), "--sentences=60", "--bytes=4096", "--queue=400",
                     "--allow-host=DeepNMT.example:8000")
    yield started
    if started.pid:
        started.end()


def test_many_requests_at_once_get_what_a_file_gets(run: deepnmt.Run, server: Server, tmp_path: Path,
                                                    threads: None) -> None:
    (tmp_path / "in").write_text("".join(f"{line}\n" for line in LINES), encoding="utf-8")
    assert main("translate", [str(run.folder), f"--input={tmp_path}/in", f"--output={tmp_path}/out"]) == 0
    expected = (tmp_path / "out").read_text(encoding="utf-8").splitlines()
    with ThreadPoolExecutor(50) as clients:
        answers = list(clients.map(lambda line: server.translate(text=line), LINES))
    assert answers == [(200, {"translations": [line]}) for line in expected]
    assert server.translate(text=LINES) == (200, {"translations": expected})
    figures = server.ask("GET", "/metrics")[1]
    assert 'deepnmt_requests_total{status="200"} 51.0\n' in figures and "deepnmt_sentences_total 100.0\n" in figures
    assert f'deepnmt_info{{version="{deepnmt.__version__}"}} 1.0\n' in figures
    assert "deepnmt_waiting_sentences 0.0\n" in figures and "_created" not in figures
    batches = int(re.search(r"deepnmt_batches_total (\d+)", figures)[1])  # type: ignore[index]
    assert 2 <= batches < 51, "requests that come together are translated together"
    assert 'deepnmt_request_seconds_bucket{le="+Inf"} 51.0\n' in figures


def test_hypotheses_and_health(run: deepnmt.Run, server: Server, threads: None) -> None:
    status, answer = server.translate(text=["the dog"], hypotheses=True)
    assert status == 200
    assert answer["hypotheses"] == [[as_record(best) for best in run.translate_nbest(["the dog"])[0]]]
    assert server.ask("GET", "/health") == (200, {
        "status": "ok", "run": "run", "update": 3, "languages": ["en", "de"], "tags": [], "waiting_sentences": 0})
    assert server.ask("HEAD", "/") == (200, "") and "<textarea" in server.ask("GET", "/")[1]
    assert server.translate(text=[]) == (200, {"translations": []})


@pytest.mark.parametrize(("body", "status", "said"), [
    ({"text": "the " * 200}, 413, "sentence 1 has 200 tokens, the model takes 63; divide it"),
    ({"text": ["a"] * 61}, 413, "61 sentences, at most 60"),
    ({"text": "a" * 5000}, 413, "more than 4,096 bytes"),
    (b'{"text": "' + b"a" * 200_000, 413, "more than 4,096 bytes"),
    (b'{"text": "\xff"}', 400, r"not valid UTF-8 \(invalid start byte at byte 11\)"),
    (b'{"text": "\\ud83d"}', 400, "half of a surrogate pair"),
    (b'{"text": ', 400, "not valid JSON"),
    (b"[" * 4000, 400, "not valid JSON"),
    ({"text": "a\nb"}, 400, "sentence 1 has a line break"),
    ({"text": [1]}, 400, "must be a sentence or a list"),
    ({"text": "a", "hypothesis": True}, 400, "did you mean hypotheses"),
    ({"text": "a", "hypotheses": 1}, 400, "true or false"),
    (["a"], 400, "must be an object"),
], ids=lambda value: None if isinstance(value, (dict, list, bytes)) else str(value))
def test_what_is_refused(server: Server, body: Any, status: int, said: str) -> None:
    answered, answer = server.ask("POST", "/translate", body)
    assert answered == status and re.search(said, answer["error"]), answer
    assert server.translate(text="\0 \u2028 ok \U0001f600")[0] == 200


def test_paths_methods_and_types(server: Server) -> None:
    assert server.ask("GET", "/nothing") == (404, {
        "error": "there is no /nothing; POST to /translate, or GET /, /health or /metrics"})
    assert server.ask("GET", "/translate")[0] == 405
    assert server.ask("POST", "/", {}) == (405, {"error": "/ is for GET, HEAD, not for POST"})
    status, answer = server.ask("POST", "/translate", b'{"text": "a"}', "text/plain")
    assert status == 415 and "must be application/json" in answer


def test_slow_clients_and_those_that_go(server: Server) -> None:
    """The connection ends with headers and bodies that do not come in READ_SECONDS."""
    head = b"POST /translate HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nContent-Length: 99\r\n"
    slow = [(b"", b""), (head, b""), (head + b"\r\n{", b"HTTP/1.1 408 ")]
    begin = time.monotonic()
    clients = [socket.create_connection(("127.0.0.1", server.port), timeout=60) for _ in slow]
    for client, (sent, _) in zip(clients, slow, strict=True):
        client.sendall(sent)
    gone = socket.create_connection(("127.0.0.1", server.port))
    gone.sendall(head.replace(b"99", b"15") + b'\r\n{"text": "the"}')
    gone.close()
    assert server.translate(text="the dog")[0] == 200, "others are answered meanwhile"
    for client, (_, answer) in zip(clients, slow, strict=True):
        assert client.recv(1000).startswith(answer)
        client.close()
    assert 1 < time.monotonic() - begin < 100
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as client:
        client.sendall(b"\x16\x03\x01 no HTTP\r\n\r\n")
        assert client.recv(1000).startswith(b"HTTP/1.1 400")


def test_clients_that_never_read(server: Server) -> None:
    """They are ended after WRITE_SECONDS, however little is left unread, and lock nobody out."""
    asked = b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
    clients = []
    for _ in range(5):
        client = socket.socket()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        client.connect(("127.0.0.1", server.port))
        client.setblocking(False)
        with contextlib.suppress(OSError):
            client.sendall(asked * 2000)
        clients.append(client)
    assert server.translate(text="the dog")[0] == 200
    for _ in waiting(120, "the server to end them"):
        if not any(one.laddr.port == server.port for one in psutil.Process(server.pid).net_connections("tcp")
                   if one.status == psutil.CONN_ESTABLISHED):
            break
        time.sleep(0.2)
    for client in clients:
        client.close()
    assert server.translate(text="the dog")[0] == 200


@pytest.mark.parametrize(("host", "status"), [
    ("localhost", 200), ("LOCALHOST:80", 200), ("127.0.0.1:8000", 200), ("[::1]", 200), ("[::1]:8000", 200),
    ("deepnmt.example:8000", 200), ("evil.example", 421), ("evil.example:80", 421), ("127.0.0.1.evil.example", 421),
    ("localhost:80@evil.example", 421), ("", 421), ("0.0.0.0", 421), ("[::2]", 421),
])
def test_hosts(server: Server, host: str, status: int) -> None:
    """A page that has pointed its own name at this machine reads nothing, not even which run is served."""
    for answered, answer in (server.ask("GET", "/health", host=host),
                             server.ask("POST", "/translate", {"text": "the"}, host=host)):
        assert answered == status, answer
        if status == 421:
            assert "this server answers to 127.0.0.1, [::1], deepnmt.example, localhost, not to" in answer["error"]


@pytest.mark.skipif(browser.PROGRAM is None, reason="there is no Chromium here; apt-get install chromium")
def test_the_page_in_a_browser(run: deepnmt.Run, server: Server, tmp_path: Path, threads: None) -> None:
    page = browser.Browser(tmp_path / "profile")
    try:
        page.send("Page.navigate", url=f"http://127.0.0.1:{server.port}/")
        page.wait_for("document.getElementById('model')?.textContent === 'run, en to de, update 3'")
        page.click("text")
        page.send("Input.insertText", text="the old dog sees the house\n<b>two</b> cats")
        page.click("go")
        shown = "document.getElementById('translation').textContent"
        page.wait_for(f"{shown} !== ''")
        assert page.value(shown).split("\n") == run.translate(["the old dog sees the house", "<b>two</b> cats"])
        page.photograph(tmp_path / "page.png")
        page.send("Input.insertText", text=" sleep" * 300)
        page.click("text")
        page.key("Enter", 13, modifiers=2)
        page.wait_for("document.getElementById('translation').className === 'fault'")
        assert re.search("tokens, the model takes 63", page.value(shown))
        refused = [message for message in page.messages if "413" not in message]
        assert not refused, refused
    finally:
        page.close()


def test_mistakes(run: deepnmt.Run, refused: Refused, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert f"port {port} of 127.0.0.1 cannot be opened: Address already in use; give another --port" in refused(
            "serve", run.folder, f"--port={port}")
    assert "--batch is 0, must be 1 or more" in refused("serve", run.folder, "--batch=0")
    assert "--port is 70000, must be from 0 to 65535" in refused("serve", run.folder, "--port=70000")
    assert "has no effect here" in refused("serve", run.folder, "train.updates=3")
    assert "translate.choose is chrf, against translations that are there" in refused(
        "serve", run.folder, "--port=0", "translate.beam=2", "translate.candidates=2", "translate.choose=chrf")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert "serve was started on 2 processes" in refused("serve", run.folder)


def test_a_server_searches_with_the_exported_model(run: deepnmt.Run, warm: Warm, server: Server, threads: None) -> None:
    """The server of the other tests ends first."""
    pytest.importorskip("ctranslate2", reason="ctranslate2 is not installed; pip install 'deepnmt[export]'")
    assert re.search(r"served \d+ requests, \d+ sentences", server.end())
    assert main("export", [str(run.folder), "--to", "ctranslate2", "--lines", "2"]) == 0
    settings = {"backend": "ctranslate2", "finish": "best", "patience": 1.0}
    exported = Server(warm, str(run.folder), *(f"translate.{name}={value}" for name, value in settings.items()))
    assert exported.translate(text=LINES[:5]) == (200, {"translations": run.translate(LINES[:5], **settings)})
    exported.end()


def test_a_full_queue_and_a_signal(run: deepnmt.Run, warm: Warm, server: Server, tmp_path: Path) -> None:
    """Runs last: the server of the other tests has ended, and one with a small queue begins. Of eight requests it takes
    one, which is answered although the signal comes first."""
    if server.pid:
        server.end()
    gate = tmp_path / "gate"
    small = Server(warm, str(run.folder), "--checkpoint=newest", "--checkpoint=best", "--queue=1", "--batch=1",
                   program=("test_serving:serve_once_there_is", gate))
    with ThreadPoolExecutor(8) as clients:
        asked = [clients.submit(small.translate, text=["the old dog sees the house"] * 5) for _ in range(8)]
        for _ in waiting(60, "the others to be refused"):
            if sum(one.done() for one in asked) == 7:
                break
        small.stop()
        for _ in waiting(60, "it to take no more"):
            with contextlib.suppress(ConnectionRefusedError):
                socket.create_connection(("127.0.0.1", small.port)).close()
                continue
            break
        gate.touch()
        answers = [one.result() for one in asked]
    assert warm.wait(60) == [0], warm.said()
    assert sorted(status for status, _ in answers) == [200] + 7 * [503]
    full = "4 sentences are waiting, and with the 5 of this request they would be more than 1; try again later"
    assert {answer["error"] for status, answer in answers if status == 503} == {full}
