"""SGLang 0.5.23's metrics, as read in its source; never compared with a run.

Two traps are kept: `generation_tokens_total` moves only when a request ends (progress is `realtime_tokens_total`), and
there are no `_created` twins (SGLang collects from several processes).
"""

from typing import Final

from prometheus_client import Counter

from sluice_sim.config import Config
from sluice_sim.metrics import Gauges, Metrics

_TIME_BUCKETS: Final = (
    0.1,
    0.2,
    0.4,
    0.6,
    0.8,
    1.0,
    2.0,
    4.0,
    6.0,
    8.0,
    10.0,
    20.0,
    40.0,
    60.0,
    80.0,
    100.0,
    200.0,
    400.0,
)
_GAP_BUCKETS: Final = (
    0.002,
    0.004,
    0.006,
    0.008,
    0.01,
    0.015,
    0.02,
    0.03,
    0.04,
    0.06,
    0.08,
    0.1,
    0.2,
    0.5,
    1.0,
    2.0,
    8.0,
)
_MB_BUCKETS: Final = tuple(4.0**i for i in range(9))
_MS_BUCKETS: Final = tuple(2.0**i for i in range(15))
_MB: Final = 1024 * 1024


class SglangMetrics(Metrics):
    def __init__(self, config: Config) -> None:
        labels = {
            "model_name": config.served_names[0],
            "engine_type": str(config.role),
            "tp_rank": "0",
            "pp_rank": "0",
            "moe_ep_rank": "0",
        }
        super().__init__("sglang", labels, has_created=False)
        self._running = self._gauge("num_running_reqs", "Running requests.")
        self._queued = self._gauge("num_queue_reqs", "Requests in the waiting queue.")
        self._bootstrapping = self._gauge("num_prefill_bootstrap_queue_reqs", "Prefill: wait for the decode side.")
        self._sending = self._gauge("num_prefill_inflight_queue_reqs", "Prefill: KV not handed over yet.")
        self._preallocating = self._gauge("num_decode_prealloc_queue_reqs", "Decode: wait for room.")
        self._receiving = self._gauge("num_decode_transfer_queue_reqs", "Decode: wait for the KV.")
        self._usage = self._gauge("token_usage", "Share of KV tokens in use, 0 to 1.")
        self._gauge("max_total_num_tokens", "KV tokens.").set(config.num_blocks * config.block_size)
        self._prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of ended requests.")
        self._generation_tokens = self._counter("generation_tokens", "Generated tokens of ended requests.")
        self._cached_tokens = self._counter("cached_tokens", "Prompt tokens found in the prefix cache.")
        realtime = self._family(Counter, "realtime_tokens", "Tokens as they are processed.", ["mode"])
        self._realtime = {
            mode: realtime.labels(**self._labels, mode=mode) for mode in ("prefill_compute", "prefill_cache", "decode")
        }
        self._requests = self._counter("num_requests", "Requests processed.")
        self._aborted = self._counter("num_aborted_requests", "Requests aborted.")
        self._retracted = self._counter("num_retracted_requests", "Retractions of running requests.")
        self._failed = self._counter("num_transfer_failed_reqs", "Requests whose KV transfer failed.")
        self._unpaired = self._counter("num_bootstrap_failed_reqs", "Requests whose two sides did not meet.")
        self._ttft = self._histogram("time_to_first_token_seconds", "Arrival to first token.", _TIME_BUCKETS)
        self._token_gap = self._histogram("inter_token_latency_seconds", "Token to token.", _GAP_BUCKETS)
        self._e2e = self._histogram("e2e_request_latency_seconds", "Arrival to last token.", _TIME_BUCKETS)
        self._queue_time = self._histogram("queue_time_seconds", "Arrival to running.", _TIME_BUCKETS)
        self._moved_mb = self._histogram("kv_transfer_total_mb", "Megabytes per KV transfer.", _MB_BUCKETS)
        self._moved_ms = self._histogram("kv_transfer_latency_ms", "Milliseconds per KV transfer.", _MS_BUCKETS)

    def stepped(self, computed: int, produced: int, preemptions: int) -> None:
        self._realtime["decode"].inc(produced)
        self._realtime["prefill_compute"].inc(computed - produced)
        self._retracted.inc(preemptions)

    def admitted(self, prompt: int, cached: int, queued_s: float) -> None:  # noqa: ARG002  # vLLM counts more
        self._realtime["prefill_cache"].inc(cached)
        self._queue_time.observe(queued_s)

    def first_token(self, prompt: int, cached: int, external: int, ttft_s: float) -> None:  # noqa: ARG002  # vLLM counts more
        self._ttft.observe(ttft_s)
        self._prompt_tokens.inc(prompt)
        self._cached_tokens.inc(cached)

    def next_token(self, gap_s: float) -> None:
        self._token_gap.observe(gap_s)

    def finished(self, reason: str, generated: int, e2e_s: float | None) -> None:  # noqa: ARG002  # vLLM counts more
        self._requests.inc()
        self._generation_tokens.inc(generated)
        if e2e_s is None:
            self._aborted.inc()
        else:
            self._e2e.observe(e2e_s)

    def moved(self, size_bytes: int, blocks: int, took_s: float) -> None:  # noqa: ARG002  # vLLM counts more
        self._moved_mb.observe(size_bytes / _MB)
        self._moved_ms.observe(took_s * 1000)

    def transfer_failed(self) -> None:
        self._failed.inc()

    def bootstrap_failed(self) -> None:
        self._unpaired.inc()

    def set_gauges(self, gauges: Gauges) -> None:
        waits_for_kv = self._labels["engine_type"] == "decode"
        new = gauges.waiting - gauges.deferred
        self._running.set(gauges.running)
        self._queued.set(0 if waits_for_kv else new)
        self._preallocating.set(new if waits_for_kv else 0)
        self._receiving.set(gauges.deferred)
        self._bootstrapping.set(gauges.bootstrapping)
        self._sending.set(gauges.sending)
        self._usage.set(gauges.kv_usage)
