"""The metrics that `/metrics` returns, in the Prometheus text format: sizes of queues, and durations of requests.

Every name begins with `lakeshore_`. Whatever clients send, the set of labels stays small: names of routes, known
methods, statuses, states, and a limited number of queues. No label holds an id, a key, a worker or a token.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Gauge, Histogram, generate_latest

from ..planes.protocol.routes import ROUTES

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable, Mapping

    from ..planes.plane import Plane

__all__ = ["MAX_QUEUES", "METRICS_TYPE", "OTHER", "Metrics"]

METRICS_TYPE = CONTENT_TYPE_LATEST
"""The content type of the text that `render` returns."""

MAX_QUEUES = 500
"""Queues with lines of their own; all smaller ones share the label `OTHER`."""
OTHER = "(other)"
MAX_QUEUE_NAME_LENGTH = 100
"""Characters of a queue's name in a label; the rest is cut off."""

# The requests include long polls, which take up to five minutes.
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
_KNOWN_ROUTES = frozenset({*ROUTES, "healthz", "readyz", "metrics"})
_KNOWN_METHODS = frozenset({"GET", "POST", "HEAD", "PUT", "PATCH", "DELETE", "OPTIONS"})


class Metrics:
    """The counters of one server, in a registry of their own."""

    def __init__(self, plane: Plane) -> None:
        self._plane = plane
        self.registry = registry = CollectorRegistry()
        self._invocations = Gauge(
            "lakeshore_invocations", "Invocations by queue and state.", ["queue", "state"], registry=registry
        )
        self._oldest = Gauge(
            "lakeshore_oldest_ready_seconds",
            "Seconds since the oldest invocation that can be claimed became ready.",
            ["queue"],
            registry=registry,
        )
        self._requests = Histogram(
            "lakeshore_request_seconds",
            "Seconds from a request's headers to the end of its answer; long polls are held in that time.",
            ["route", "method", "status"],
            registry=registry,
            buckets=_SECONDS,
        )
        self._claims = Histogram(
            "lakeshore_claim_seconds",
            "Seconds that the plane took for a claim that gave something out.",
            registry=registry,
            buckets=_SECONDS,
        )
        self._streams = Gauge("lakeshore_stream_readers", "Streams that are being read now.", registry=registry)
        self._series: dict[tuple[str, str, int], Histogram] = {}

    def observe(self, route: str, method: str, status: int, seconds: float) -> None:
        """Count a finished request.

        route: its name in ROUTES, or healthz, readyz or metrics; every other name is counted as `OTHER`.
        seconds: its duration.
        """
        key = route, method, status
        series = self._series.get(key)
        if series is None:
            known = (
                route if route in _KNOWN_ROUTES else OTHER,
                method if method in _KNOWN_METHODS else OTHER,
                status if 100 <= status <= 599 else 0,
            )
            series = self._requests.labels(*map(str, known))
            if known == key:  # never keep a key that a client made up
                self._series[key] = series
        series.observe(seconds)

    def claimed(self, seconds: float) -> None:
        """Count a claim that returned at least one invocation."""
        self._claims.observe(seconds)

    @contextmanager
    def stream(self) -> Generator[None]:
        """Count a stream as being read inside the block."""
        self._streams.inc()
        try:
            yield
        finally:
            self._streams.dec()

    async def render(self, plane: Plane | None = None) -> bytes:
        """Return all metrics as text. plane: the plane whose queues are counted; None for the server's own."""
        if plane is None:
            plane = self._plane
        counts = await plane.counts()
        ages = await plane.ages()
        label = _labels(counts, ages)
        # No await from here on, so that two requests at the same time do not mix their numbers.
        self._invocations.clear()
        self._oldest.clear()
        for (queue, state), count in counts.items():
            self._invocations.labels(label[queue], state).inc(count)
        for queue, age in sorted(
            ages.items(), key=lambda one: one[1]
        ):  # the oldest of several under one label is set last
            self._oldest.labels(label[queue]).set(age)
        return generate_latest(self.registry)


def _labels(counts: Mapping[tuple[str, str], int], ages: Iterable[str]) -> dict[str, str]:
    """The label of each queue: its name, cut to length, for the largest queues, and `OTHER` for the rest."""
    sizes = dict.fromkeys(ages, 0)
    for (queue, _), count in counts.items():
        sizes[queue] = sizes.get(queue, 0) + count
    largest = sorted(sizes, key=lambda queue: (-sizes[queue], queue))
    return dict.fromkeys(largest, OTHER) | {queue: queue[:MAX_QUEUE_NAME_LENGTH] for queue in largest[:MAX_QUEUES]}
