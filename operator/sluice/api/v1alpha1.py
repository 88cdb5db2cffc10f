"""Models of `serving.sluice.dev/v1alpha1`: what a user may write, with bounds, defaults and documentation.

`crdgen.py` turns these into `crds/*.yaml`; attribute docstrings become field descriptions (one or two sentences
with unit and default). A field stands here only when its function works: nothing is accepted and ignored.
The models are strict (`extra="forbid"`) for the CLI and tests; the operator parses with `parse_lenient`.
"""

from enum import StrEnum
from typing import Any

from pydantic import BaseModel, ConfigDict, Field
from pydantic.alias_generators import to_camel


class ApiModel(BaseModel):
    model_config = ConfigDict(
        alias_generator=to_camel,
        populate_by_name=True,
        extra="forbid",
        frozen=True,
        use_attribute_docstrings=True,
    )


class EngineType(StrEnum):
    VLLM = "vLLM"
    SIMULATED = "Simulated"


class PoolRole(StrEnum):
    UNIFIED = "Unified"


class RoutingPolicy(StrEnum):
    CACHE_AWARE = "CacheAware"
    LEAST_REQUESTS = "LeastRequests"
    POWER_OF_TWO = "PowerOfTwo"
    ROUND_ROBIN = "RoundRobin"


class EnvVar(ApiModel):
    name: str = Field(min_length=1, max_length=128)
    value: str = Field("", max_length=4096)


class Model(ApiModel):
    uri: str = Field(min_length=1, max_length=1024)
    """Where the weights are: `pvc://<claim>/<path>` for vLLM; the simulated engine reads none and takes any URI."""
    name: str | None = Field(None, min_length=1, max_length=128)
    """Model name that clients send; default: the name of the object."""


class Engine(ApiModel):
    type: EngineType = EngineType.VLLM
    """`vLLM` or `Simulated` (answers like an engine, needs no accelerator); default `vLLM`."""
    image: str | None = Field(None, min_length=1, max_length=512)
    """Engine image; default: from the operator's configuration, kept for the life of the revision."""
    args: list[str] = Field(default=[], max_length=64)
    """Arguments appended to the engine's command line; those that the operator owns are refused."""
    env: list[EnvVar] = Field(default=[], max_length=64)
    """Environment variables of the engine container."""


class PoolEngine(ApiModel):
    args: list[str] = Field(default=[], max_length=64)
    """Arguments of this pool, appended to the service's."""
    env: list[EnvVar] = Field(default=[], max_length=64)
    """Variables of this pool; they win over the service's of the same name."""


class ProfileReference(ApiModel):
    name: str = Field(min_length=1, max_length=253)


class Accelerator(ApiModel):
    profile_ref: ProfileReference | None = None
    """An AcceleratorProfile; exclusive with `resourceName`."""
    resource_name: str | None = Field(None, min_length=1, max_length=317)
    """Extended resource to ask for, for example `nvidia.com/gpu`; exclusive with `profileRef`."""


class Parallelism(ApiModel):
    tensor: int = Field(1, ge=1, le=64)
    """Tensor-parallel size: accelerators per instance, all in one pod; default 1."""


class Pool(ApiModel):
    name: str = Field("default", min_length=1, max_length=20)
    role: PoolRole = PoolRole.UNIFIED
    replicas: int = Field(1, ge=0, le=1000)
    """Instances of this pool; default 1."""
    parallelism: Parallelism = Parallelism()
    accelerator: Accelerator | None = None
    """Accelerator of this pool; default: the service's."""
    engine: PoolEngine = PoolEngine()
    pod_template: dict[str, Any] | None = None
    """Bounded override of the engine pod: `metadata.labels`, `metadata.annotations`, and of `spec`: nodeSelector,
    tolerations, affinity, priorityClassName, schedulerName, runtimeClassName, resources (of the engine container)."""


class Routing(ApiModel):
    policy: RoutingPolicy = RoutingPolicy.CACHE_AWARE
    """How requests are spread: CacheAware (prefix affinity, load cap), LeastRequests, PowerOfTwo or RoundRobin."""
    replicas: int = Field(2, ge=1, le=16)
    """Router pods; default 2."""


class Health(ApiModel):
    self_test_period_seconds: int = Field(10, ge=1, le=3600)
    self_test_timeout_seconds: int = Field(3, ge=1, le=600)
    hang_timeout_seconds: int = Field(60, ge=5, le=3600)
    startup_timeout_seconds: int = Field(3600, ge=10, le=86400)


class Drain(ApiModel):
    timeout_seconds: int = Field(600, ge=0, le=86400)
    """How long an instance that leaves may finish its requests; default 600."""


class Rollout(ApiModel):
    max_surge: int = Field(1, ge=0, le=100)
    """Instances above `replicas` while a new revision comes up; default 1."""
    max_unavailable: int | None = Field(None, ge=0, le=100)
    """Instances that may be missing during a rollout; unset counts as 0."""
    paused: bool = False
    """True: no instance is created on, or drained for, a new revision."""


class InferenceServiceSpec(ApiModel):
    model: Model
    engine: Engine = Engine()
    accelerator: Accelerator | None = None
    pools: list[Pool] = Field(default=[Pool()], min_length=1, max_length=8)
    routing: Routing = Routing()
    health: Health = Health()
    drain: Drain = Drain()
    rollout: Rollout = Rollout()
    suspend: bool = False
    """True: drain all instances and keep the object."""


class AcceleratorProfileSpec(ApiModel):
    resource_name: str = Field(min_length=1, max_length=317)
    """Extended resource that a pod asks for, one per tensor-parallel rank."""
    default: bool = False
    """True: used by services that name no accelerator (not by the simulated engine)."""
    node_selector: dict[str, str] = Field(default={}, max_length=16)
    tolerations: list[dict[str, Any]] = Field(default=[], max_length=16)
