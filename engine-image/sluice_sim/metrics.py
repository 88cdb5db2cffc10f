"""What `/metrics` says: vLLM 0.32's names, labels and buckets, through prometheus-client as in vLLM itself.

`--metrics-version old` gives the names from before vLLM's renames. Metric faults act on what was collected, just before
it is written out, so the values underneath stay right. Names come from vLLM's own documentation and from measurement.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

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

from sluice_sim.cli import Config
from sluice_sim.faults import FaultBook

_TTFT_BUCKETS: Final = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
_TOKEN_GAP_BUCKETS: Final = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
_REQUEST_BUCKETS: Final = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0),
    *(40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
_ITERATION_BUCKETS: Final = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)

_OLD_NAMES: Final = {
    "kv_cache_usage_perc": "gpu_cache_usage_perc",
    "prefix_cache_queries": "gpu_prefix_cache_queries",
    "prefix_cache_hits": "gpu_prefix_cache_hits",
    "inter_token_latency_seconds": "time_per_output_token_seconds",
}
_FINISH_REASONS: Final = ("stop", "length", "abort", "error")


@dataclass(frozen=True, slots=True)
class Gauges:
    """What is read from the engine at the moment of a scrape."""

    running: int
    waiting: int
    kv_usage: float
    """0..1."""


class Metrics:
    def __init__(self, config: Config) -> None:
        self._registry = CollectorRegistry(auto_describe=False)
        self._labels = {"model_name": config.served_names[0], "engine": "0"}
        self._old = config.metrics_version == "old"
        self._frozen: list[Metric] | None = None
        self._offsets: dict[tuple[str, frozenset[tuple[str, str]]], float] = {}
        self._created: dict[str, float] = {}
        ProcessCollector(registry=self._registry)
        enable_created_metrics()  # type: ignore[no-untyped-call]  # the library's switch; vLLM publishes the twins

        self._running = self._gauge("num_requests_running", "Requests in the running batch.")
        self._waiting = self._gauge("num_requests_waiting", "Requests waiting to be processed.")
        self._waiting_by_reason = self._family(
            Gauge, "num_requests_waiting_by_reason", "Waiting requests by what they wait for.", ["reason"]
        )
        self._kv_usage = self._gauge("kv_cache_usage_perc", "Share of KV cache blocks in use; 1 is 100 percent.")
        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens processed.")
        self.generation_tokens = self._counter("generation_tokens", "Tokens generated.")
        self.cached_tokens = self._counter("prompt_tokens_cached", "Prompt tokens found in the prefix cache.")
        by_source = self._family(
            Counter, "prompt_tokens_by_source", "Prompt tokens by where their KV came from.", ["source"]
        )
        self.computed_here = by_source.labels(**self._labels, source="local_compute")
        self.hit_here = by_source.labels(**self._labels, source="local_cache_hit")
        by_source.labels(**self._labels, source="external_kv_transfer")
        self.cache_queries = self._counter("prefix_cache_queries", "Tokens looked up in the prefix cache.")
        self.cache_hits = self._counter("prefix_cache_hits", "Tokens found in the prefix cache.")
        self.preemptions = self._counter("num_preemptions", "Preemptions of running requests.")
        self._success = self._family(Counter, "request_success", "Finished requests.", ["finished_reason"])
        for reason in _FINISH_REASONS:
            self._success.labels(**self._labels, finished_reason=reason)
        self.rejections = Counter(
            "vllm:admission_rejections", "Requests turned away.", ["model_name", "reason"], registry=self._registry
        )
        self.ttft = self._histogram("time_to_first_token_seconds", "Arrival to first token.", _TTFT_BUCKETS)
        self.token_gap = self._histogram("inter_token_latency_seconds", "Token to token.", _TOKEN_GAP_BUCKETS)
        self.e2e = self._histogram("e2e_request_latency_seconds", "Arrival to last token.", _REQUEST_BUCKETS)
        self.queue_time = self._histogram("request_queue_time_seconds", "Arrival to running.", _REQUEST_BUCKETS)
        self.iteration_tokens = self._histogram("iteration_tokens_total", "Tokens per step.", _ITERATION_BUCKETS)
        self._publish_config(config)

    def finished(self, reason: str) -> None:
        self._success.labels(**self._labels, finished_reason=reason).inc()

    def rejected(self, reason: str) -> None:
        self.rejections.labels(model_name=self._labels["model_name"], reason=reason).inc()

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
        self._running.set(gauges.running)
        self._waiting.set(gauges.waiting)
        self._waiting_by_reason.labels(**self._labels, reason="capacity").set(gauges.waiting)
        self._waiting_by_reason.labels(**self._labels, reason="deferred").set(0)
        self._kv_usage.set(gauges.kv_usage)
        families = list(self._registry.collect())
        return [self._with_offsets(family) for family in families] if self._offsets else families

    def _with_offsets(self, family: Metric) -> Metric:
        samples = []
        for sample in family.samples:
            value = sample.value - self._offsets.get(_key(sample), 0.0)
            if sample.name.endswith("_created"):
                value = self._created.get(family.name, value)
            samples.append(sample._replace(value=value))
        return _copy(family, family.name, samples)

    def _publish_config(self, config: Config) -> None:
        tokens = config.num_blocks * config.block_size
        info = {
            "block_size": config.block_size,
            "num_gpu_blocks": config.num_blocks,
            "kv_cache_size_tokens": tokens,
            "kv_cache_max_concurrency": round(tokens / config.max_model_len, 2),
            "gpu_memory_utilization": config.gpu_memory_utilization,
            "enable_prefix_caching": True,
            "engine": "0",
        }
        gauge = Gauge("vllm:cache_config_info", "The KV cache.", list(info), registry=self._registry)
        gauge.labels(**{key: str(value) for key, value in info.items()}).set(1)

    def _family(self, kind: Any, name: str, text: str, labels: Iterable[str] = (), **options: Any) -> Any:
        published = _OLD_NAMES.get(name, name) if self._old else name
        return kind(f"vllm:{published}", text, [*self._labels, *labels], registry=self._registry, **options)

    def _gauge(self, name: str, text: str) -> Gauge:
        child: Gauge = self._family(Gauge, name, text).labels(**self._labels)
        return child

    def _counter(self, name: str, text: str) -> Counter:
        child: Counter = self._family(Counter, name, text).labels(**self._labels)
        return child

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
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
