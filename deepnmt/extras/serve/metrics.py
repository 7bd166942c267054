"""What a server counts, for Prometheus."""

from __future__ import annotations

import prometheus_client
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info

from deepnmt.version import __version__

SECONDS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)  # upper ends of the histogram's buckets

prometheus_client.disable_created_metrics()  # a time beside every counter, which says nothing here


class Metrics:
    """Counters of one server. `waiting` is for its owner to set: the sentences in the queue."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        Info("deepnmt", "The version of deepnmt.", registry=self.registry).info({"version": __version__})
        self.waiting = Gauge("deepnmt_waiting_sentences", "Sentences that wait for a batch.", registry=self.registry)
        self._responses = Counter("deepnmt_requests", "Requests for translations by the status of the response.",
                                  ["status"], registry=self.registry)
        self._seconds = Histogram("deepnmt_request_seconds", "Time from a request's headers to its response.",
                                  buckets=SECONDS, registry=self.registry)
        self._sentences = Counter("deepnmt_sentences", "Sentences translated.", registry=self.registry)
        self._tokens = Counter("deepnmt_tokens", "Tokens of their best translations.", registry=self.registry)
        self._batches = Counter("deepnmt_batches", "Batches translated.", registry=self.registry)
        self._batched = Counter("deepnmt_batch_sentences", "Sentences in these batches.", registry=self.registry)

    def count_batch(self, sentences: int) -> None:
        self._batches.inc()
        self._batched.inc(sentences)

    def count_response(self, status: int, seconds: float) -> None:
        self._responses.labels(str(status)).inc()
        self._seconds.observe(seconds)

    def count_translations(self, sentences: int, tokens: int) -> None:
        self._sentences.inc(sentences)
        self._tokens.inc(tokens)

    def text(self) -> bytes:
        """All of them, in Prometheus's text format."""
        return prometheus_client.generate_latest(self.registry)

    def __str__(self) -> str:
        requests, sentences = (self.registry.get_sample_value(f"deepnmt_{name}") or 0 for name in
                               ("request_seconds_count", "sentences_total"))
        return f"served {requests:.0f} requests, {sentences:,.0f} sentences"
