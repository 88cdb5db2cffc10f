"""An engine that has no adapter: the user gives command, port and metric names, Sluice all that holds for any engine.

Weights, accelerators, probes, self-test, routing and drain are as for every other type. What Sluice can't know is
unknown: without names for `running` and `waiting` nobody can say that the engine is idle, so a drain takes its whole
time; without a progress counter a late answer of a busy engine looks like a hang.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from sluice.api.agent import MetricKind, MetricSource, Signal
from sluice.api.config import OperatorConfig
from sluice.api.v1alpha1 import CustomEngine
from sluice.plan.declared import PoolDeclaration, Refused
from sluice.plan.engines.adapter import (
    AT_HOME,
    COMPILE_CACHES,
    OFFLINE,
    POD_IP,
    Launch,
    Publishes,
    check_env,
    merged_env,
    user_args,
)
from sluice.plan.engines.weights import check_model, claimed, launch_with_weights

_GAUGES: Final = (Signal.RUNNING, Signal.WAITING, Signal.KV_UTILIZATION)


@dataclass(frozen=True, slots=True)
class CustomAdapter:
    def default_image(self, config: OperatorConfig) -> str:
        """None: the type is refused without an image before anybody asks."""
        del config
        return ""

    def default_args(self, config: OperatorConfig) -> tuple[str, ...]:
        del config
        return ()

    def check(self, declaration: PoolDeclaration) -> Iterator[Refused]:
        """Arguments are not looked at: address, name and layout are in the user's own command."""
        if declaration.engine.custom is None:
            yield Refused("spec.engine.custom: engine type Custom needs custom.command; write the command line there")
        if not declaration.engine.image:
            yield Refused("spec.engine.image: engine type Custom has no default image; name one")
        yield from check_model(declaration)
        yield from check_env(declaration.engine.env, "spec.engine.env")
        yield from check_env(declaration.pool_engine.env, "spec.pools[].engine.env")

    def launch(self, declaration: PoolDeclaration, default_args: Sequence[str]) -> Launch:
        _, path = claimed(declaration)
        return launch_with_weights(
            declaration,
            command=tuple(_custom(declaration).command),
            args=(*default_args, *user_args(declaration)),
            env=merged_env({**OFFLINE, **AT_HOME, **COMPILE_CACHES}, declaration, (POD_IP, *_told(declaration, path))),
        )

    def publishes(self, declaration: PoolDeclaration) -> Publishes:
        custom = _custom(declaration)
        named: dict[str, str] = custom.metrics.model_dump(by_alias=True, exclude_none=True)
        return Publishes(
            signals={Signal(signal): (_source(Signal(signal), name),) for signal, name in named.items()},
            metrics_path=custom.metrics_path,
        )


def _custom(declaration: PoolDeclaration) -> CustomEngine:
    """What the user says of the engine; the declaration has passed `check`.

    Raises:
        ValueError: it says nothing (a bug: it was not checked).
    """
    if declaration.engine.custom is None:
        raise ValueError("not checked before: engine type Custom without custom")
    return declaration.engine.custom


def _told(declaration: PoolDeclaration, path: str) -> tuple[Mapping[str, Any], ...]:
    """What a command may refer to as `$(NAME)`, so that model and layout are written once, in the spec."""
    layout = declaration.parallelism
    told = {
        "SLUICE_MODEL_PATH": path,
        "SLUICE_MODEL_NAME": declaration.served_model,
        "SLUICE_PORT": _custom(declaration).port,
        "SLUICE_TENSOR": layout.tensor,
        "SLUICE_PIPELINE": layout.pipeline,
        "SLUICE_DATA": layout.data,
        # as a size, which is how servers ask for it: 1 is none
        "SLUICE_EXPERT": layout.tensor * layout.data if layout.expert else 1,
    }
    return tuple({"name": name, "value": str(value)} for name, value in told.items())


def _source(signal: Signal, name: str) -> MetricSource:
    return MetricSource(
        name=name,
        kind=MetricKind.GAUGE if signal in _GAUGES else MetricKind.COUNTER,
        reduce="mean" if signal is Signal.KV_UTILIZATION else "sum",
    )
