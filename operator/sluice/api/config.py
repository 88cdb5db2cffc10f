"""The operator's own configuration: one YAML file from the chart's ConfigMap, read at start."""

from pathlib import Path

import yaml
from pydantic import BaseModel, ConfigDict, Field
from pydantic.alias_generators import to_camel

from sluice.api import names


class _Config(BaseModel):
    model_config = ConfigDict(
        alias_generator=to_camel,
        populate_by_name=True,
        frozen=True,
        extra="forbid",
        use_attribute_docstrings=True,
    )


class Images(_Config):
    """Defaults; what a revision once resolved stays with it (a new operator rolls nothing)."""

    vllm: str = "vllm/vllm-openai:v0.32.0"
    """Engine of type `vLLM`, where `spec.engine.image` is not set."""
    sglang: str = "lmsysorg/sglang:v0.5.23"
    """The same for type `SGLang`."""
    engine: str = "sluice-engine:0.1.0"
    """Agent, router sidecar and simulated engine."""
    router: str = "sluice-router:0.1.0"
    """smg, in router pods."""
    pull_policy: str = "IfNotPresent"
    """Of all containers of engine and router pods: `Always`, `IfNotPresent` or `Never`."""


class EngineDefaults(_Config):
    """Arguments that every new revision of the engine type gets before the user's own."""

    vllm_args: tuple[str, ...] = ()
    """For type `vLLM`, before the user's own; of new revisions."""
    sglang_args: tuple[str, ...] = ()
    """The same for type `SGLang`."""
    simulated_args: tuple[str, ...] = ()
    """The same for type `Simulated`."""


class Limits(_Config):
    creations_per_service_and_minute: int = Field(120, ge=1)
    """Circuit breaker: more than this many pod creations for one service in a minute pause it, with an Event."""
    parallel_upgrades: int = Field(5, ge=1)
    """Services that roll out changed defaults (`upgradePolicy: Rolling`) wait while so many others are rolling."""


class OperatorConfig(_Config):
    images: Images = Images()
    engine_defaults: EngineDefaults = EngineDefaults()
    limits: Limits = Limits()
    namespaces: tuple[str, ...] = ()
    """Namespaces to serve; empty: all."""
    lease_namespace: str = names.SYSTEM_NAMESPACE
    """Namespace of the operator: its Lease is there, and NetworkPolicies let it in from there."""
    router_token_file: Path = Path("/var/run/secrets/sluice/router/token")
    """The operator's projected token with the audience `sluice-router`."""
    operator_subject: str = f"system:serviceaccount:{names.SYSTEM_NAMESPACE}:{names.OPERATOR_SERVICE_ACCOUNT}"
    """The only subject whose token a router's sidecar accepts."""
    workers: int = Field(8, ge=1, le=64)
    """Services looked at at the same time."""
    log_level: str = "INFO"
    """As Python spells it: `DEBUG`, `INFO`, `WARNING`, `ERROR`."""


def load(path: Path) -> OperatorConfig:
    """Read the file; an empty one means all defaults.

    Raises:
        OSError: the file can't be read.
        ValueError: not YAML, or a field is unknown or out of range (the message names it).
    """
    try:
        data = yaml.safe_load(path.read_text()) or {}
    except yaml.YAMLError as error:
        raise ValueError(f"{path}: not YAML: {error}") from error
    return OperatorConfig.model_validate(data)
