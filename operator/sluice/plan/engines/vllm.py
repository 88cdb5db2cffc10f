"""vLLM: `vllm serve` on weights from a PersistentVolumeClaim, tensor-parallel inside one pod.

Flags and metric names are those of vLLM 0.32 (older metric names as aliases); a version bump starts here.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from sluice.api.agent import MetricKind, MetricSource, Signal
from sluice.api.config import OperatorConfig
from sluice.plan.declared import PoolDeclaration, Refused
from sluice.plan.engines.adapter import (
    ENGINE_PORT,
    POD_IP,
    SHUTDOWN_TIMEOUT_S,
    Launch,
    Publishes,
    check_args,
    check_env,
    merged_env,
    user_args,
)

WEIGHTS_PATH: Final = "/weights"
USER: Final = 2000
"""The user that the official images are made for."""
HOME: Final = "/home/engine"

HOST_IP: Final = {"name": "VLLM_HOST_IP", "value": "$(POD_IP)"}

_CLAIM_URI = re.compile(r"^pvc://(?P<claim>[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?)(?P<path>(/[^/]+)*)/?$")

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
        if _claim(declaration.model.uri) is None:
            yield Refused(
                f"spec.model.uri: {declaration.model.uri!r} can't be served by engine type vLLM, which takes models "
                "from a PersistentVolumeClaim only: write pvc://<claim>/<path>, without '..'"
            )
        yield from check_args(declaration.engine.args, "spec.engine.args")
        yield from check_args(declaration.pool_engine.args, "spec.pools[].engine.args")
        yield from check_env(declaration.engine.env, "spec.engine.env")
        yield from check_env(declaration.pool_engine.env, "spec.pools[].engine.env")

    def launch(self, declaration: PoolDeclaration, default_args: Sequence[str]) -> Launch:
        """The command line; the declaration has passed `check`.

        Raises:
            ValueError: the model's URI is not a claim (a bug: it was not checked).
        """
        claimed = _claim(declaration.model.uri)
        if claimed is None:
            raise ValueError(f"not checked before: model URI {declaration.model.uri!r}")
        claim, path = claimed
        tensor = declaration.parallelism.tensor
        return Launch(
            command=("vllm", "serve"),
            args=(WEIGHTS_PATH + path, *serving_args(declaration), *default_args, *user_args(declaration)),
            env=merged_env(
                _defaults(declaration), declaration, (POD_IP, {"name": "VLLM_HOST_IP", "value": "$(POD_IP)"})
            ),
            user=USER,
            read_only_root=False,
            # 420 MB of segments per small engine (measured); NCCL and the workers' queues grow with the ranks.
            shm_gib=min(16, max(2, 2 * tensor)),
            requests={},
            claim=claim,
        )

    def publishes(self) -> Publishes:
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
        f"--tensor-parallel-size={declaration.parallelism.tensor}",
    )


def _defaults(declaration: PoolDeclaration) -> dict[str, str]:
    """Variables that a user may change. All that is written goes to an emptyDir; the name of the user is given,
    because an image without it in /etc/passwd fails at `getpwuid` (kserve/kserve#5666)."""
    return {
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        # vLLM's own limit must not end a load that the service allows (an earlier kill orphans its workers).
        "VLLM_ENGINE_READY_TIMEOUT_S": str(declaration.health.startup_timeout_seconds),
        "HOME": HOME,
        "USER": "engine",
        "LOGNAME": "engine",
        "XDG_CACHE_HOME": f"{HOME}/.cache",
        "HF_HOME": f"{HOME}/.cache/huggingface",
        "VLLM_CACHE_ROOT": f"{HOME}/.cache/vllm",
        "TORCHINDUCTOR_CACHE_DIR": f"{HOME}/.cache/torchinductor",
        "TRITON_CACHE_DIR": f"{HOME}/.cache/triton",
    }


def _claim(uri: str) -> tuple[str, str] | None:
    """(claim, path inside it, "" or with a leading slash) of a pvc:// URI; None if it is none or leaves the claim."""
    match = _CLAIM_URI.match(uri)
    if match is None or any(part in (".", "..") for part in match["path"].split("/")):
        return None
    return match["claim"], match["path"]
