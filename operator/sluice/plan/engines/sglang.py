"""SGLang: `sglang.launch_server` on weights from a PersistentVolumeClaim; all ranks of an instance in one pod.

Flags and metric names are those of SGLang 0.5.23, read in its source and never run here; a version bump starts here.
There is no flag for the drain: after SIGTERM SGLang waits without bound for its requests and still accepts new ones,
so the wait in preStop is what bounds it.
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
    OFFLINE,
    POD_IP,
    Launch,
    Publishes,
    check_user_options,
    merged_env,
    user_args,
)
from sluice.plan.engines.weights import check_model, claimed, launch_with_weights

_CORE: Final = "dp_rank"
"""Tensor and pipeline ranks of one data-parallel core publish that core's figures, each under its own labels."""
_LOADS: Final = "/v1/loads?include=core"
"""Asks every scheduler, so it is up to date where the gauges lag: they are written when a batch is logged, every 40
decode steps, and up to 30 s after the last request of an idle engine."""

SIGNALS: Final = {
    Signal.RUNNING: (MetricSource(name="sglang:num_running_reqs", per=_CORE),),
    Signal.WAITING: (MetricSource(name="sglang:num_queue_reqs", per=_CORE),),
    Signal.KV_UTILIZATION: (MetricSource(name="sglang:token_usage", reduce="mean", per=_CORE),),
    # These two move only when a request ends, which is why progress is read off the third.
    Signal.GENERATION_TOKENS: (MetricSource(name="sglang:generation_tokens_total", kind=MetricKind.COUNTER),),
    Signal.PROMPT_TOKENS: (MetricSource(name="sglang:prompt_tokens_total", kind=MetricKind.COUNTER),),
    Signal.ITERATIONS: (MetricSource(name="sglang:realtime_tokens_total", kind=MetricKind.COUNTER),),
}
PUBLISHES: Final = Publishes(
    signals=SIGNALS,
    load_path=_LOADS,
    load_fields=("loads.num_running_reqs", "loads.num_waiting_reqs"),
    version_path=_LOADS,
)


@dataclass(frozen=True, slots=True)
class SglangAdapter:
    def default_image(self, config: OperatorConfig) -> str:
        return config.images.sglang

    def default_args(self, config: OperatorConfig) -> tuple[str, ...]:
        return config.engine_defaults.sglang_args

    def check(self, declaration: PoolDeclaration) -> Iterator[Refused]:
        yield from check_model(declaration)
        yield from check_user_options(declaration)

    def launch(self, declaration: PoolDeclaration, default_args: Sequence[str]) -> Launch:
        _, path = claimed(declaration)
        return launch_with_weights(
            declaration,
            command=("python3", "-m", "sglang.launch_server"),
            args=(
                f"--model-path={path}",
                f"--served-model-name={declaration.served_model}",
                "--host=0.0.0.0",  # its own default is loopback
                f"--port={ENGINE_PORT}",
                "--enable-metrics",
                *layout_args(declaration.parallelism),
                *default_args,
                *user_args(declaration),
            ),
            env=merged_env(_DEFAULTS, declaration, (POD_IP,)),
        )

    def publishes(self, declaration: PoolDeclaration) -> Publishes:
        del declaration
        return PUBLISHES


def layout_args(layout: Parallelism) -> tuple[str, ...]:
    """SGLang's tensor and expert sizes count all ranks of a stage, which the cores of its attention then divide:
    tensor 2 with data 4 is `--tp-size=8 --attn-dp-size=4`."""
    ranks = layout.tensor * layout.data
    args = [f"--tp-size={ranks}"]
    if layout.pipeline > 1:
        args.append(f"--pp-size={layout.pipeline}")
    if layout.data > 1:
        args += [f"--attn-dp-size={layout.data}", "--enable-metrics-for-all-schedulers"]
    if layout.expert:
        args.append(f"--ep-size={ranks}")
    return tuple(args)


_DEFAULTS: Final = {
    **OFFLINE,
    "DO_NOT_TRACK": "1",
    # SGLang's /health is a generation of one token: behind a full batch it takes longer than the router waits for an
    # answer, and one failure makes the next SIGTERM skip the drain. The agent's self-test is our generation.
    "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "false",
    **AT_HOME,
    **COMPILE_CACHES,
}
