"""vLLM: `vllm serve` on weights from a PersistentVolumeClaim; all ranks of an instance in one pod.

Flags and metric names are those of vLLM 0.32 (older metric names as aliases); a version bump starts here.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from sluice.api.agent import MetricKind, MetricSource, Signal
from sluice.api.config import OperatorConfig
from sluice.api.v1alpha1 import Parallelism
from sluice.plan.declared import PoolDeclaration, Refused
from sluice.plan.engines.adapter import (
    AT_HOME,
    COMPILE_CACHES,
    ENGINE_PORT,
    HOME,
    OFFLINE,
    POD_IP,
    SHUTDOWN_TIMEOUT_S,
    Launch,
    Publishes,
    check_user_options,
    merged_env,
    user_args,
)
from sluice.plan.engines.weights import check_model, claimed, launch_with_weights

HOST_IP: Final = {"name": "VLLM_HOST_IP", "value": "$(POD_IP)"}

SIGNALS: Final = {
    Signal.RUNNING: (MetricSource(name="vllm:num_requests_running"),),
    Signal.WAITING: (MetricSource(name="vllm:num_requests_waiting"),),
    Signal.KV_UTILIZATION: (
        MetricSource(name="vllm:kv_cache_usage_perc", reduce="mean"),
        MetricSource(name="vllm:gpu_cache_usage_perc", reduce="mean"),  # until 0.9
    ),
    Signal.GENERATION_TOKENS: (MetricSource(name="vllm:generation_tokens_total", kind=MetricKind.COUNTER),),
    Signal.PROMPT_TOKENS: (MetricSource(name="vllm:prompt_tokens_total", kind=MetricKind.COUNTER),),
    Signal.ITERATIONS: (MetricSource(name="vllm:iteration_tokens_total_count", kind=MetricKind.COUNTER),),
}
PUBLISHES: Final = Publishes(signals=SIGNALS, load_path="/load", version_path="/version")


@dataclass(frozen=True, slots=True)
class VllmAdapter:
    def default_image(self, config: OperatorConfig) -> str:
        return config.images.vllm

    def default_args(self, config: OperatorConfig) -> tuple[str, ...]:
        return config.engine_defaults.vllm_args

    def check(self, declaration: PoolDeclaration) -> Iterator[Refused]:
        yield from check_model(declaration)
        yield from check_user_options(declaration)

    def launch(self, declaration: PoolDeclaration, default_args: Sequence[str]) -> Launch:
        _, path = claimed(declaration)
        return launch_with_weights(
            declaration,
            command=("vllm", "serve"),
            args=(path, *serving_args(declaration), *default_args, *user_args(declaration)),
            env=merged_env(_defaults(declaration), declaration, (POD_IP, HOST_IP)),
        )

    def publishes(self, declaration: PoolDeclaration) -> Publishes:
        del declaration
        return PUBLISHES


def serving_args(declaration: PoolDeclaration) -> tuple[str, ...]:
    """Address, name, drain and layout; the simulated engine takes the same flags."""
    return (
        f"--served-model-name={declaration.served_model}",
        "--host=0.0.0.0",
        f"--port={ENGINE_PORT}",
        f"--shutdown-timeout={SHUTDOWN_TIMEOUT_S}",
        "--enable-server-load-tracking",
        "--enable-request-id-headers",
        *layout_args(declaration.parallelism),
    )


def layout_args(layout: Parallelism) -> tuple[str, ...]:
    """Sizes of 1 are vLLM's defaults and left out, but for tensor.

    One API server for all data-parallel cores, where vLLM would start one for each: `/load` counts the requests of the
    process that happens to answer, so with several of them a drain would see 0 while requests run.
    """
    args = [f"--tensor-parallel-size={layout.tensor}"]
    if layout.pipeline > 1:
        args.append(f"--pipeline-parallel-size={layout.pipeline}")
    if layout.data > 1:
        args += [f"--data-parallel-size={layout.data}", "--api-server-count=1"]
    if layout.expert:
        args.append("--enable-expert-parallel")
    return tuple(args)


def _defaults(declaration: PoolDeclaration) -> dict[str, str]:
    """Variables that a user may change."""
    return {
        **OFFLINE,
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        # vLLM's own limit must not end a load that the service allows (an earlier kill orphans its workers).
        "VLLM_ENGINE_READY_TIMEOUT_S": str(declaration.health.startup_timeout_seconds),
        **AT_HOME,
        "VLLM_CACHE_ROOT": f"{HOME}/.cache/vllm",
        **COMPILE_CACHES,
    }
