"""What every engine adapter answers, and the refusals that hold for all engines.

The CRD refuses owned flags and variables at admission; they are checked here again, because objects may have been
stored before a rule existed, and because a command-line parser accepts more spellings than a rule can list.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

from sluice.api import owned
from sluice.api.agent import MetricSource, Signal
from sluice.api.config import OperatorConfig
from sluice.api.v1alpha1 import EngineType, EnvVar
from sluice.plan.declared import PoolDeclaration, Refused

ENGINE_PORT: Final = 8000
"""Of every engine that takes its port from us, so that routers, policies and scrapers know one number. An engine of
type Custom may have another: ask `engine_port`."""
SHUTDOWN_TIMEOUT_S: Final = 30
"""Seconds that an engine may finish streams after SIGTERM. It normally finds none: preStop waited before. vLLM's own
default of 0 cuts them: 4 of 7 runs left clients hanging for ever (measured, vLLM 0.32; S020)."""
GPU_IMAGE_USER: Final = 2000
"""User that vLLM's official images are made for. SGLang's are made for root and have no user of their own, which
engine pods may not be; with a home that can be written to any id does."""
HOME: Final = "/home/engine"
"""An emptyDir: home and caches of the engine."""


@dataclass(frozen=True, slots=True)
class Publishes:
    """What the agent reads from the engine."""

    signals: Mapping[Signal, tuple[MetricSource, ...]]
    """First present name wins; an absent signal is one that the engine lacks."""
    metrics_path: str = "/metrics"
    load_path: str | None = None
    load_fields: tuple[str, ...] = ()
    """Where the count stands in the answer of `load_path`; empty: as in vLLM's."""
    version_path: str | None = None


@dataclass(frozen=True, slots=True)
class Launch:
    """How the engine's container is started."""

    command: tuple[str, ...]
    args: tuple[str, ...]
    env: tuple[Mapping[str, Any], ...]
    """As in a container; the user's come last but for ours, which can't be set by a user."""
    user: int
    """Numeric user and group id."""
    read_only_root: bool
    shm_gib: int
    """GiB of /dev/shm; 0: none of its own."""
    requests: Mapping[str, str]
    """CPU and memory asked for when the pod template says nothing."""
    claim: str = ""
    """PersistentVolumeClaim with the weights, mounted read-only at `weights.WEIGHTS_PATH`; "": none."""


class EngineAdapter(Protocol):
    def default_image(self, config: OperatorConfig) -> str: ...

    def default_args(self, config: OperatorConfig) -> tuple[str, ...]: ...

    def check(self, declaration: PoolDeclaration) -> Iterator[Refused]:
        """Whatever of the declaration this engine can't be started with."""

    def launch(self, declaration: PoolDeclaration, default_args: Sequence[str]) -> Launch: ...

    def publishes(self, declaration: PoolDeclaration) -> Publishes: ...


def engine_port(declaration: PoolDeclaration) -> int:
    """Where an instance serves its API and metrics."""
    custom = declaration.engine.custom
    return custom.port if custom is not None and declaration.engine.type is EngineType.CUSTOM else ENGINE_PORT


def check_user_options(declaration: PoolDeclaration) -> Iterator[Refused]:
    """Arguments and variables of service and pool that are not the user's to set."""
    yield from check_args(declaration.engine.args, "spec.engine.args")
    yield from check_args(declaration.pool_engine.args, "spec.pools[].engine.args")
    yield from check_env(declaration.engine.env, "spec.engine.env")
    yield from check_env(declaration.pool_engine.env, "spec.pools[].engine.env")


def check_args(args: Sequence[str], path: str) -> Iterator[Refused]:
    """Arguments that set what the operator sets. Abbreviations count: `--hos` means `--host` to argparse."""
    for number, arg in enumerate(args):
        flag = _owned_flag(arg)
        if flag:
            yield Refused(f"{path}[{number}]: {arg!r} sets {flag}, which the operator sets itself; remove it")


def check_env(env: Sequence[EnvVar], path: str) -> Iterator[Refused]:
    for number, variable in enumerate(env):
        if owned.is_owned_env(variable.name):
            yield Refused(f"{path}[{number}]: {variable.name} is set or ruled out by the operator; remove it")


def user_args(declaration: PoolDeclaration) -> tuple[str, ...]:
    return (*declaration.engine.args, *declaration.pool_engine.args)


def shm_gib(declaration: PoolDeclaration) -> int:
    """GiB of /dev/shm: 420 MB of segments per small engine (measured, vLLM 0.32); NCCL and the workers' queues grow
    with the ranks."""
    return min(16, max(2, 2 * declaration.parallelism.accelerators))


def merged_env(
    before: Mapping[str, str], declaration: PoolDeclaration, after: Sequence[Mapping[str, Any]]
) -> tuple[Mapping[str, Any], ...]:
    """Our defaults, then the service's, then the pool's variables, one entry per name; `after` can't be overridden.

    `after` comes first in the list, because `$(POD_IP)` is expanded only from variables defined before.
    """
    fixed = {str(e["name"]) for e in after}
    values = dict(before)
    for variable in (*declaration.engine.env, *declaration.pool_engine.env):
        values[variable.name] = variable.value
    return (*after, *({"name": k, "value": v} for k, v in values.items() if k not in fixed))


POD_IP: Final[Mapping[str, Any]] = {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}

OFFLINE: Final[Mapping[str, str]] = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
"""The weights are mounted: a lookup on a hub would only wait for a NetworkPolicy."""

AT_HOME: Final[Mapping[str, str]] = {
    "HOME": HOME,
    "USER": "engine",
    "LOGNAME": "engine",
    "XDG_CACHE_HOME": f"{HOME}/.cache",
    "HF_HOME": f"{HOME}/.cache/huggingface",
}
"""All that is written goes to an emptyDir; the name of the user is given, because an image without it in /etc/passwd
fails at `getpwuid` (kserve/kserve#5666)."""

COMPILE_CACHES: Final[Mapping[str, str]] = {
    "TORCHINDUCTOR_CACHE_DIR": f"{HOME}/.cache/torchinductor",
    "TRITON_CACHE_DIR": f"{HOME}/.cache/triton",
}


def _owned_flag(arg: str) -> str:
    """The owned flag that the argument sets in any spelling, "" if it sets none."""
    if owned.is_owned_flag(arg):
        return arg.split("=", 1)[0]
    if arg.startswith("--"):
        return _owned_long(arg[2:])
    return _owned_short(arg[1:]) if arg.startswith("-") else ""


def _owned_long(text: str) -> str:
    """`kv-transfer-config.kv_role=x`, `no-enable-server-load-tracking`, `tensor-par`"""
    stem = text.split("=", 1)[0].split(".", 1)[0].replace("_", "-").removeprefix("no-")
    if len(stem) >= _SHORTEST_ABBREVIATION or stem in owned.FLAGS:
        return next((f"--{flag}" for flag in owned.FLAGS if flag.startswith(stem)), "")
    return ""


def _owned_short(text: str) -> str:
    """`t` (argparse completes it to `-tp`), `n2` (the value of a one-letter flag may follow at once); `O3` is none."""
    stem = text.split("=", 1)[0]
    if not stem.isalnum() or not stem[0].isalpha():
        return ""
    glued = next((flag for flag in owned.SHORT_FLAGS if len(flag) == 1 and stem[1:].isdigit() and stem[0] == flag), "")
    completed = next((flag for flag in owned.SHORT_FLAGS if flag.startswith(stem)), "")
    return f"-{glued or completed}" if glued or completed else ""


_SHORTEST_ABBREVIATION: Final = 2
"""Characters; a single one is ambiguous to every engine's parser and refused by it."""
