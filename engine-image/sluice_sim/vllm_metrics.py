"""vLLM 0.32's metrics: names, labels and buckets, through prometheus-client as in vLLM itself.

`--metrics-version old` gives the names from before vLLM's renames. Names come from vLLM's own documentation and from
measurement; those of the NIXL connector are published only by an engine that has it, as there.
"""

from typing import Any, Final

from prometheus_client import Counter, Gauge

from sluice_sim.config import Config
from sluice_sim.metrics import Gauges, Metrics

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

_BYTE_BUCKETS: Final = tuple(2.0 ** (10 + i) for i in range(1, 25, 2))
_TRANSFER_BUCKETS: Final = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 5.0)
_DESCRIPTOR_BUCKETS: Final = (10.0, 20.0, 30.0, 50.0, 75.0, 100.0, 200.0, 400.0, 1000.0, 2000.0, 4000.0, 10000.0)
_OLD_NAMES: Final = {
    "kv_cache_usage_perc": "gpu_cache_usage_perc",
    "prefix_cache_queries": "gpu_prefix_cache_queries",
    "prefix_cache_hits": "gpu_prefix_cache_hits",
    "inter_token_latency_seconds": "time_per_output_token_seconds",
}
_FINISH_REASONS: Final = ("stop", "length", "abort", "error")


class VllmMetrics(Metrics):
    def __init__(self, config: Config) -> None:
        self._old = config.metrics_version == "old"
        super().__init__("vllm", {"model_name": config.served_names[0], "engine": "0"}, has_created=True)
        self._running = self._gauge("num_requests_running", "Requests in the running batch.")
        self._waiting = self._gauge("num_requests_waiting", "Requests waiting to be processed.")
        self._waiting_by_reason = self._family(
            Gauge, "num_requests_waiting_by_reason", "Waiting requests by what they wait for.", ["reason"]
        )
        self._kv_usage = self._gauge("kv_cache_usage_perc", "Share of KV cache blocks in use; 1 is 100 percent.")
        self._prompt_tokens = self._counter("prompt_tokens", "Prompt tokens processed.")
        self._generation_tokens = self._counter("generation_tokens", "Tokens generated.")
        self._cached_tokens = self._counter("prompt_tokens_cached", "Prompt tokens that need not be computed.")
        by_source = self._family(
            Counter, "prompt_tokens_by_source", "Prompt tokens by where their KV came from.", ["source"]
        )
        self._computed_here = by_source.labels(**self._labels, source="local_compute")
        self._hit_here = by_source.labels(**self._labels, source="local_cache_hit")
        self._external = by_source.labels(**self._labels, source="external_kv_transfer")
        self._cache_queries = self._counter("prefix_cache_queries", "Tokens looked up in the prefix cache.")
        self._cache_hits = self._counter("prefix_cache_hits", "Tokens found in the prefix cache.")
        self._preemptions = self._counter("num_preemptions", "Preemptions of running requests.")
        self._success = self._family(Counter, "request_success", "Finished requests.", ["finished_reason"])
        for reason in _FINISH_REASONS:
            self._success.labels(**self._labels, finished_reason=reason)
        self._rejections = Counter(
            "vllm:admission_rejections", "Requests turned away.", ["model_name", "reason"], registry=self._registry
        )
        self._ttft = self._histogram("time_to_first_token_seconds", "Arrival to first token.", _TTFT_BUCKETS)
        self._token_gap = self._histogram("inter_token_latency_seconds", "Token to token.", _TOKEN_GAP_BUCKETS)
        self._e2e = self._histogram("e2e_request_latency_seconds", "Arrival to last token.", _REQUEST_BUCKETS)
        self._queue_time = self._histogram("request_queue_time_seconds", "Arrival to running.", _REQUEST_BUCKETS)
        self._iteration_tokens = self._histogram("iteration_tokens_total", "Tokens per step.", _ITERATION_BUCKETS)
        self._publish_config(config)
        if config.transfer is not None:
            self._add_transfer()

    def _add_transfer(self) -> None:
        self._external_queries = self._counter("external_prefix_cache_queries", "Tokens asked of other engines.")
        self._external_hits = self._counter("external_prefix_cache_hits", "Tokens that other engines gave.")
        self._bytes = self._histogram("nixl_bytes_transferred", "Bytes per transfer.", _BYTE_BUCKETS)
        self._transfer_time = self._histogram("nixl_xfer_time_seconds", "Time per transfer.", _TRANSFER_BUCKETS)
        self._descriptors = self._histogram("nixl_num_descriptors", "Descriptors per transfer.", _DESCRIPTOR_BUCKETS)
        self._failed = self._counter("nixl_num_failed_transfers", "Failed transfers.")
        self._unnotified = self._counter("nixl_num_failed_notifications", "Failed notifications.")
        self._expired = self._counter("nixl_num_kv_expired_reqs", "Requests whose KV expired, on the prefill side.")
        self._late = self._counter("nixl_num_notifications_after_expiry", "Reads of KV that had expired.")

    def rejected(self, reason: str) -> None:
        self._rejections.labels(model_name=self._labels["model_name"], reason=reason).inc()

    def stepped(self, computed: int, produced: int, preemptions: int) -> None:
        self._iteration_tokens.observe(computed)
        self._generation_tokens.inc(produced)
        self._preemptions.inc(preemptions)

    def admitted(self, prompt: int, cached: int, queued_s: float) -> None:
        self._cache_queries.inc(prompt)
        self._cache_hits.inc(cached)
        self._queue_time.observe(queued_s)

    def first_token(self, prompt: int, cached: int, external: int, ttft_s: float) -> None:
        self._ttft.observe(ttft_s)
        self._prompt_tokens.inc(prompt)
        self._cached_tokens.inc(cached + external)
        self._hit_here.inc(cached)
        self._external.inc(external)
        self._computed_here.inc(prompt - cached - external)
        if external:
            self._external_queries.inc(prompt - cached)
            self._external_hits.inc(external)

    def next_token(self, gap_s: float) -> None:
        self._token_gap.observe(gap_s)

    def finished(self, reason: str, generated: int, e2e_s: float | None) -> None:  # noqa: ARG002  # SGLang's
        self._success.labels(**self._labels, finished_reason=reason).inc()
        if e2e_s is not None:
            self._e2e.observe(e2e_s)

    def external_counted(self, prompt: int) -> None:
        self._external.inc(prompt)

    def moved(self, size_bytes: int, blocks: int, took_s: float) -> None:
        self._bytes.observe(size_bytes)
        self._transfer_time.observe(took_s)
        self._descriptors.observe(blocks)

    def transfer_failed(self) -> None:
        self._failed.inc()

    def notification_failed(self) -> None:
        self._unnotified.inc()

    def lease_expired(self) -> None:
        self._expired.inc()

    def late_notification(self) -> None:
        self._late.inc()

    def set_gauges(self, gauges: Gauges) -> None:
        self._running.set(gauges.running)
        self._waiting.set(gauges.waiting)
        by_reason = {"capacity": gauges.waiting - gauges.deferred, "deferred": gauges.deferred}
        for reason, count in by_reason.items():
            self._waiting_by_reason.labels(**self._labels, reason=reason).set(count)
        self._kv_usage.set(gauges.kv_usage)

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

    def _family(self, kind: Any, name: str, text: str, labels: Any = (), **options: Any) -> Any:
        return super()._family(kind, _OLD_NAMES.get(name, name) if self._old else name, text, labels, **options)
