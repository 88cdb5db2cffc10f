"""What `/metrics` says, whatever the names are: collecting, freezing, resetting, and the metric faults.

`vllm_metrics` and `sglang_metrics` have the names. Metric faults act on what was collected, just before it is written
out, so the values underneath stay right.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    enable_created_metrics,
    generate_latest,
)
from prometheus_client.metrics_core import Metric
from prometheus_client.samples import Sample

from sluice_sim.faults import FaultBook


@dataclass(frozen=True, slots=True)
class Gauges:
    """What is read from the engine at the moment of a scrape."""

    running: int
    waiting: int
    """All requests that do not run yet."""
    deferred: int
    """Those of the waiting ones whose KV is on its way."""
    kv_usage: float
    """0..1."""
    bootstrapping: int = 0
    """SGLang prefill: requests that wait for their decode side."""
    sending: int = 0
    """SGLang prefill: requests whose KV is computed and not handed over yet."""


class Metrics:
    """One engine's metrics. The methods up to `late_notification` are told what happens; a flavour counts what it
    counts. Times in seconds."""

    def __init__(self, prefix: str, labels: Mapping[str, str], *, has_created: bool) -> None:
        self._registry = CollectorRegistry(auto_describe=False)
        self._prefix = prefix
        self._labels = dict(labels)
        self._has_created = has_created
        self._frozen: list[Metric] | None = None
        self._offsets: dict[tuple[str, frozenset[tuple[str, str]]], float] = {}
        self._created: dict[str, float] = {}
        ProcessCollector(registry=self._registry)
        enable_created_metrics()  # type: ignore[no-untyped-call]  # the library's switch; vLLM publishes the twins

    def arrived(self) -> None:
        """A request was taken in."""

    def rejected(self, reason: str) -> None:
        """A request was turned away for want of room."""

    def stepped(self, computed: int, produced: int, preemptions: int) -> None:
        """A step ended: tokens computed, of which so many gave a new one."""

    def admitted(self, prompt: int, cached: int, queued_s: float) -> None:
        """A request left the queue; `cached` prompt tokens were in the prefix cache."""

    def first_token(self, prompt: int, cached: int, external: int, ttft_s: float) -> None:
        """`external` prompt tokens had their KV from another engine."""

    def next_token(self, gap_s: float) -> None: ...

    def finished(self, reason: str, generated: int, e2e_s: float | None) -> None:
        """`e2e_s`: null unless the answer is whole."""

    def external_counted(self, prompt: int) -> None:
        """A transfer of so many prompt tokens failed and the request with it (vLLM counts them all the same)."""

    def moved(self, size_bytes: int, blocks: int, took_s: float) -> None:
        """KV was handed over."""

    def transfer_failed(self) -> None: ...

    def bootstrap_failed(self) -> None:
        """Two sides of a request did not find each other."""

    def notification_failed(self) -> None:
        """The prefill side could not be told that its KV was read."""

    def lease_expired(self) -> None:
        """KV was given up before it was read."""

    def late_notification(self) -> None:
        """KV was read after it was given up."""

    def set_gauges(self, gauges: Gauges) -> None:
        raise NotImplementedError

    def names(self) -> frozenset[str]:
        """Names that a metric fault can have: of families, counters also with `_total`."""
        names = set()
        for family in self._registry.collect():
            names.add(family.name)
            if family.type == "counter":
                names.add(f"{family.name}_total")
        return frozenset(names)

    def freeze(self, gauges: Gauges) -> None:
        """From now on scrapes see this moment, until `thaw`."""
        if self._frozen is None:
            self._frozen = self._collect(gauges)

    def thaw(self) -> None:
        self._frozen = None

    def reset(self, name: str, wall: float) -> None:
        """Counters and histograms of this name (`*`: all) start again at 0; gauges stay. `wall`: seconds since 1970."""
        for family in self._registry.collect():
            if not _is_named(family, name) or family.type not in ("counter", "histogram"):
                continue
            self._created[family.name] = wall
            for sample in family.samples:
                if not sample.name.endswith("_created"):
                    self._offsets[_key(sample)] = sample.value

    def render(self, gauges: Gauges, faults: FaultBook, now: float) -> bytes:
        """The page. `now`: steady clock, for the faults."""
        families = self._frozen if self._frozen is not None else self._collect(gauges)
        for args in faults.states("metricsDrop", now):
            families = [family for family in families if not _is_named(family, args["metric"])]
        for args in faults.states("metricsNaN", now):
            families = [_with_nan(f) if _is_named(f, args["metric"]) else f for f in families]
        for args in faults.states("metricsRename", now):
            families = [_renamed(f, args["to"]) if _is_named(f, args["metric"]) else f for f in families]
        return generate_latest(_Page(families))

    def _collect(self, gauges: Gauges) -> list[Metric]:
        self.set_gauges(gauges)
        families = list(self._registry.collect())
        if not self._has_created:
            families = [_copy(f, f.name, [s for s in f.samples if not s.name.endswith("_created")]) for f in families]
        return [self._with_offsets(family) for family in families] if self._offsets else families

    def _with_offsets(self, family: Metric) -> Metric:
        samples = []
        for sample in family.samples:
            value = sample.value - self._offsets.get(_key(sample), 0.0)
            if sample.name.endswith("_created"):
                value = self._created.get(family.name, value)
            samples.append(sample._replace(value=value))
        return _copy(family, family.name, samples)

    def _family(self, kind: Any, name: str, text: str, labels: Iterable[str] = (), **options: Any) -> Any:
        return kind(f"{self._prefix}:{name}", text, [*self._labels, *labels], registry=self._registry, **options)

    def _gauge(self, name: str, text: str) -> Gauge:
        child: Gauge = self._family(Gauge, name, text).labels(**self._labels)
        return child

    def _counter(self, name: str, text: str) -> Counter:
        child: Counter = self._family(Counter, name, text).labels(**self._labels)
        return child

    def _histogram(self, name: str, text: str, buckets: Iterable[float]) -> Histogram:
        child: Histogram = self._family(Histogram, name, text, buckets=buckets).labels(**self._labels)
        return child


class _Page(CollectorRegistry):
    """What `generate_latest` asks for: a registry that holds just these families."""

    def __init__(self, families: list[Metric]) -> None:
        super().__init__()
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families


def _key(sample: Sample) -> tuple[str, frozenset[tuple[str, str]]]:
    return sample.name, frozenset(sample.labels.items())


def _is_named(family: Metric, name: str) -> bool:
    return name == "*" or name == family.name or (family.type == "counter" and name == f"{family.name}_total")


def _with_nan(family: Metric) -> Metric:
    return _copy(family, family.name, [sample._replace(value=math.nan) for sample in family.samples])


def _renamed(family: Metric, to: str) -> Metric:
    name = to.removesuffix("_total") if family.type == "counter" else to
    samples = [sample._replace(name=name + sample.name.removeprefix(family.name)) for sample in family.samples]
    return _copy(family, name, samples)


def _copy(family: Metric, name: str, samples: list[Sample]) -> Metric:
    copy = Metric(name, family.documentation, family.type)
    copy.samples = samples
    return copy
