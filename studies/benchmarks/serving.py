"""Requests a second of a translation server, and how long each takes: `python -m studies.benchmarks.serving PORT`.

Start the server first, `deepnmt serve RUN --port PORT`. Each client keeps its connection and asks again as soon as it
is answered, for one sentence.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from statistics import quantiles

from deepnmt.files import table

BODY = json.dumps({"text": "the old dog sees the house"}).encode()
REQUEST = (b"POST /translate HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
           b"Content-Length: %d\r\n\r\n" % len(BODY)) + BODY


async def ask(port: int, requests: int) -> list[float]:
    """Seconds of each of a client's requests."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    seconds = []
    for _ in range(requests):
        begin = time.perf_counter()
        writer.write(REQUEST)
        head = (await reader.readuntil(b"\r\n\r\n")).lower()
        assert head.startswith(b"http/1.1 200"), head
        length = head.partition(b"content-length:")[2].split(b"\r")[0]
        await reader.readexactly(int(length))
        seconds.append(time.perf_counter() - begin)
    writer.close()
    return seconds


async def measure(port: int, clients: int, requests: int) -> list[str]:
    """A row: clients, requests a second, and the median and the 99th percentile of their milliseconds."""
    begin = time.perf_counter()
    answers = await asyncio.gather(*(ask(port, requests // clients) for _ in range(clients)))
    wall = time.perf_counter() - begin
    seconds = [one for some in answers for one in some]
    cuts = quantiles(seconds, n=100)
    return [str(clients), f"{len(seconds) / wall:,.0f}", f"{1000 * cuts[49]:.1f}", f"{1000 * cuts[98]:.1f}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("port", type=int)
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 50])
    parser.add_argument("--requests", type=int, default=1000)
    args = parser.parse_args()
    asyncio.run(measure(args.port, 1, 50))  # what is slow only once
    rows = [asyncio.run(measure(args.port, clients, args.requests)) for clients in args.clients]
    print(table([["clients", "requests/s", "median ms", "p99 ms"], *rows]))


if __name__ == "__main__":
    main()
