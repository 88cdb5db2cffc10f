"""The operator's metrics. No UID and no URL is ever a label; series of an object end with the object.

Counters and histograms are written where things happen; everything that is state (queue, store, status of each
service) is read when Prometheus asks, so it costs no memory and can't go stale.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from sluice import __version__
from sluice.runtime import kinds
from sluice.runtime.events import Recorder
from sluice.runtime.queue import Queue
from sluice.runtime.store import Store

SECONDS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_LABELS: Final = ("namespace", "name")


class Metrics:
    """One registry per process."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        r = self.registry
        self._reconciles = Counter("sluice_reconcile", "Passes.", ("kind", "result"), registry=r)
        self._reconcile_s = Histogram(
            "sluice_reconcile_duration_seconds", "Duration of a pass.", buckets=SECONDS, registry=r
        )
        self._latency_s = Histogram(
            "sluice_queue_latency_seconds", "From dirty to the start of the pass.", buckets=SECONDS, registry=r
        )
        self._watch_events = Counter("sluice_watch_events", "Watch events received.", ("kind", "type"), registry=r)
        self._requests = Counter(
            "sluice_api_requests",
            "Requests to the API server; code 0: no answer.",
            ("verb", "resource", "code"),
            registry=r,
        )
        self._request_s = Histogram(
            "sluice_api_request_duration_seconds", "Requests to the API server.", ("verb",), buckets=SECONDS, registry=r
        )
        self._actions = Counter("sluice_actions", "Actions of plans.", ("action", "outcome"), registry=r)
        self._polls = Counter("sluice_polls", "Questions to agents and routers.", ("source", "result"), registry=r)
        self._lag_s = Histogram("sluice_event_loop_lag_seconds", "Lag of the event loop.", buckets=SECONDS, registry=r)
        self.leader = Gauge("sluice_leader", "1 while this process holds the Lease.", registry=r)
        Gauge("sluice_build_info", "Version.", ("version",), registry=r).labels(__version__).set(1)

    def reconciled(self, kind: str, result: str, seconds: float) -> None:
        self._reconciles.labels(kind, result).inc()
        self._reconcile_s.observe(seconds)

    def waited(self, seconds: float) -> None:
        self._latency_s.observe(seconds)

    def watched(self, kind: str, event: str | None) -> None:
        self._watch_events.labels(kind, event or "LISTED").inc()

    def requested(self, verb: str, resource: str, code: int, seconds: float) -> None:
        self._requests.labels(verb, resource, str(code)).inc()
        self._request_s.labels(verb).observe(seconds)

    def acted(self, action: str, outcome: str) -> None:
        self._actions.labels(action, outcome).inc()

    def polled(self, source: str, ok: bool) -> None:
        self._polls.labels(source, "ok" if ok else "error").inc()

    def lagged(self, seconds: float) -> None:
        self._lag_s.observe(seconds)

    def show(self, collector: Collector) -> None:
        """Add state that is read at scrape time."""
        self.registry.register(collector)

    def text(self) -> bytes:
        return generate_latest(self.registry)


class StateCollector(Collector):
    """Queue and store, and of each service its conditions, generations and instance counts."""

    def __init__(
        self, queue: Queue, store: Store, recorder: Recorder, list_ages: Callable[[], Mapping[str, float]]
    ) -> None:
        self._queue = queue
        self._store = store
        self._recorder = recorder
        self._list_ages = list_ages

    def collect(self) -> Iterator[Metric]:
        yield GaugeMetricFamily("sluice_queue_depth", "Keys that wait.", value=self._queue.depth())
        yield GaugeMetricFamily("sluice_queue_oldest_seconds", "Longest wait.", value=self._queue.oldest_s())
        yield CounterMetricFamily("sluice_queue_retries", "Passes that ended in a back-off.", value=self._queue.retries)
        yield CounterMetricFamily("sluice_events_dropped", "Events not written.", value=self._recorder.dropped)
        objects = GaugeMetricFamily("sluice_store_objects", "Objects known.", labels=("kind",))
        healed = CounterMetricFamily("sluice_store_healed", "Changes only a LIST told of.", labels=("kind",))
        for kind in kinds.WATCHED:
            objects.add_metric((kind.name,), self._store.count(kind))
            healed.add_metric((kind.name,), self._store.healed[kind.name])
        yield objects
        yield healed
        ages = GaugeMetricFamily("sluice_store_list_age_seconds", "Since the last LIST.", labels=("kind",))
        for name, age_s in self._list_ages().items():
            ages.add_metric((name,), age_s)
        yield ages
        yield from self._services()

    def _services(self) -> Iterator[Metric]:
        prefix = "sluice_inferenceservice"
        conditions = GaugeMetricFamily(
            f"{prefix}_status_condition", "1 for the present status.", labels=(*_LABELS, "type", "status")
        )
        numbers = {
            "generation": GaugeMetricFamily(f"{prefix}_generation", "Of the spec.", labels=_LABELS),
            "observed": GaugeMetricFamily(f"{prefix}_observed_generation", "Of the status.", labels=_LABELS),
            "desired": GaugeMetricFamily(f"{prefix}_desired_replicas", "Instances wanted.", labels=_LABELS),
            "serving": GaugeMetricFamily(f"{prefix}_serving_replicas", "Instances that serve.", labels=_LABELS),
        }
        for key in self._store.services():
            view = self._store.view(key)
            if view is None:
                continue
            status: dict[str, Any] = view.service.get("status") or {}
            for entry in status.get("conditions") or ():
                conditions.add_metric((*key[1:], entry["type"], entry["status"]), 1)
            pools = status.get("pools") or ()
            numbers["generation"].add_metric(key[1:], view.service["metadata"].get("generation", math.nan))
            numbers["observed"].add_metric(key[1:], status.get("observedGeneration", math.nan))
            if pools:
                numbers["desired"].add_metric(key[1:], sum(pool.get("desired", 0) for pool in pools))
                numbers["serving"].add_metric(key[1:], sum(pool.get("serving", 0) for pool in pools))
        yield conditions
        yield from numbers.values()
