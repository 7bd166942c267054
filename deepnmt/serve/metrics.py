"""What a server counts, as Prometheus reads it (text format 0.0.4)."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter

from deepnmt.version import __version__

SECONDS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)  # upper ends of the histogram's buckets


class Metrics:
    """Counters of one server."""

    def __init__(self) -> None:
        self.responses: Counter[int] = Counter()  # by status, of requests for translations
        self.sentences = self.tokens = self.batches = self.batched = 0
        self._seconds, self._buckets = 0.0, [0] * (len(SECONDS) + 1)

    def count_batch(self, sentences: int) -> None:
        self.batches += 1
        self.batched += sentences

    def count_response(self, status: int, seconds: float) -> None:
        self.responses[status] += 1
        self._seconds += seconds
        self._buckets[bisect_left(SECONDS, seconds)] += 1

    def text(self, waiting: int) -> str:
        """All of them; `waiting` sentences are in the queue."""
        below = [sum(self._buckets[: n + 1]) for n in range(len(self._buckets))]
        ends = [*map(str, SECONDS), "+Inf"]
        tables: list[tuple[str, str, str, dict[str, float]]] = [
            ("info", "gauge", "The version of deepnmt.", {f'{{version="{__version__}"}}': 1}),
            ("requests_total", "counter", "Requests for translations by the status of the response.",
             {f'{{status="{status}"}}': count for status, count in sorted(self.responses.items())}),
            ("request_seconds", "histogram", "Time from a request's headers to its response.",
             {**{f'_bucket{{le="{end}"}}': count for end, count in zip(ends, below, strict=True)},
              "_sum": self._seconds, "_count": below[-1]}),
            ("sentences_total", "counter", "Sentences translated.", {"": self.sentences}),
            ("tokens_total", "counter", "Tokens of their best translations.", {"": self.tokens}),
            ("batches_total", "counter", "Batches translated.", {"": self.batches}),
            ("batch_sentences_total", "counter", "Sentences in these batches.", {"": self.batched}),
            ("waiting_sentences", "gauge", "Sentences that wait for a batch.", {"": waiting}),
        ]
        lines = []
        for name, kind, explained, values in tables:
            lines += [f"# HELP deepnmt_{name} {explained}", f"# TYPE deepnmt_{name} {kind}",
                      *(f"deepnmt_{name}{labels} {value}" for labels, value in values.items())]
        return "\n".join([*lines, ""])
