"""Models of `serving.sluice.dev/v1alpha1`: what a user may write, with bounds, defaults and documentation.

`crdgen.py` turns these into `crds/*.yaml`; attribute docstrings become field descriptions (one or two sentences
with unit and default). A field stands here only when its function works: nothing is accepted and ignored.
The models are strict (`extra="forbid"`) for the CLI and tests; the operator parses with `parse_lenient`.

Every list, string and map has a bound (the API server refuses rules over unbounded ones), every rule a message
that names the fix. What needs other objects to judge is no rule: it becomes a condition.
"""

from collections.abc import Mapping
from enum import StrEnum
from typing import Annotated, Any

from pydantic import ConfigDict, Field, StringConstraints, ValidationError

from sluice.api import owned
from sluice.api.base import ApiModel
from sluice.api.markers import (
    DNS_LABEL,
    DNS_SUBDOMAIN,
    NO_CONTROL,
    LabelValue,
    Quantity,
    ResourceName,
    atomic,
    cel,
    explained,
    list_map,
    rules,
)
from sluice.api.podtemplate import PodTemplateObject, TolerationObject
from sluice.api.status import InferenceServiceStatus


class EngineType(StrEnum):
    VLLM = "vLLM"
    SGLANG = "SGLang"
    SIMULATED = "Simulated"
    CUSTOM = "Custom"


class PoolRole(StrEnum):
    UNIFIED = "Unified"


class RoutingPolicy(StrEnum):
    CACHE_AWARE = "CacheAware"
    LEAST_REQUESTS = "LeastRequests"
    POWER_OF_TWO = "PowerOfTwo"
    ROUND_ROBIN = "RoundRobin"


_NO_OWNED_ENV = rules(
    cel(
        f"self.all(e, !e.name.matches('{owned.ENV_PATTERN}'))",
        f"{', '.join(owned.ENV)} and names that start with {owned.ENV_PREFIX} are set or ruled out by the operator; "
        "remove them",
    )
)
_NO_OWNED_FLAGS = rules(
    cel(
        f"self.all(a, !a.matches('{owned.FLAG_PATTERN}'))",
        "the operator sets the engine's address, model, served name, parallel sizes, keys and drain time itself; "
        "remove flags such as --host, --port, --model, --served-model-name, --tensor-parallel-size, --api-key, "
        "--config (use spec.model, spec.pools[].parallelism and spec.drain)",
    )
)


_VARIABLE = r"^[A-Za-z_][A-Za-z0-9_]*$"
_URI = r"^[a-z][a-z0-9+.-]{0,15}://[!-\[\]-~]+$"
_MODEL_NAME = r"^[A-Za-z0-9][A-Za-z0-9._:/@+-]*$"
_METRIC = r"^[a-zA-Z_:][a-zA-Z0-9_:]*$"
_PATH = r"^/[!-~]*$"
_IMAGE = r"^[a-zA-Z0-9][a-zA-Z0-9._:/-]*(@sha256:[a-f0-9]{64})?$"


class EnvVar(ApiModel):
    """One environment variable."""

    name: str = Field(
        min_length=1,
        max_length=128,
        pattern=_VARIABLE,
        json_schema_extra=explained(
            _VARIABLE, "a variable's name is letters, digits and '_', not starting with a digit"
        ),
    )
    """Letters, digits and `_`, not starting with a digit."""
    value: str = Field("", max_length=4096)
    """Plain text; default empty."""


EnvList = Annotated[list[EnvVar], Field(max_length=64, json_schema_extra=list_map("name") | _NO_OWNED_ENV)]
Argument = Annotated[str, StringConstraints(min_length=1, max_length=1024, pattern=NO_CONTROL)]
ArgumentList = Annotated[list[Argument], Field(max_length=64, json_schema_extra=atomic() | _NO_OWNED_FLAGS)]
PoolArgument = Annotated[Argument, Field(json_schema_extra={"maxLength": 512})]
PoolArgumentList = Annotated[list[PoolArgument], Field(max_length=32, json_schema_extra=atomic() | _NO_OWNED_FLAGS)]
"""Half as many and half as long: the API server multiplies the cost of a rule (length of the pattern x length of the
text) by the number of pools that a service can have, and refuses a CRD above its limit. Read are longer ones too: an
object may be older than the limit."""
CommandList = Annotated[list[Argument], Field(min_length=1, max_length=64, json_schema_extra=atomic())]


class Model(ApiModel):
    """Which model is served, and under which name."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            cel(
                "!self.uri.contains('/../') && !self.uri.endsWith('/..')",
                "a model URI must not contain '..' as a path segment; write the path without it",
                ".uri",
            ),
            cel(
                "!self.uri.startsWith('pvc://') || "
                "self.uri.matches('^pvc://[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?(/[^/]+)*/?$')",
                "a pvc:// URI is pvc://<claim>/<path>: the name of a PersistentVolumeClaim of this namespace, then "
                "the directory of the model inside it",
                ".uri",
            ),
        )
    )

    uri: str = Field(
        min_length=5,
        max_length=1024,
        pattern=_URI,
        json_schema_extra=explained(
            _URI,
            "a model URI is <scheme>://<path> in printable ASCII without spaces and backslashes, for example "
            "pvc://models/qwen3-8b",
        ),
    )
    """Where the weights are: `pvc://<claim>/<path>` for vLLM, SGLang and Custom; the simulated engine reads none and
    takes any URI.
    Printable ASCII without spaces and backslashes."""
    name: str | None = Field(
        None,
        min_length=1,
        max_length=128,
        pattern=_MODEL_NAME,
        json_schema_extra=explained(
            _MODEL_NAME,
            "a model name starts with a letter or digit, followed by letters, digits and any of . _ : / @ + -",
        ),
    )
    """Model name that clients send; default: the name of the object."""


MetricName = Annotated[
    str,
    Field(
        min_length=1,
        max_length=128,
        pattern=_METRIC,
        json_schema_extra=explained(
            _METRIC, "a metric's name is letters, digits, '_' and ':', not starting with a digit, without labels"
        ),
    ),
]


class CustomMetrics(ApiModel):
    """Names of the engine's Prometheus samples. Without one the signal is unknown, which is never taken for zero."""

    running: MetricName | None = None
    """Requests that are being worked on (gauge). Without `running` and `waiting` a drain can't see the last request
    end and takes its whole time."""
    waiting: MetricName | None = None
    """Requests in the queue (gauge)."""
    kv_utilization: MetricName | None = None
    """Share of the KV cache in use, 0 to 1 (gauge)."""
    generation_tokens: MetricName | None = None
    """Tokens generated so far (counter)."""
    prompt_tokens: MetricName | None = None
    """Prompt tokens worked through so far (counter)."""
    iterations: MetricName | None = None
    """Anything that grows with every step of the engine (counter). It tells a busy engine from a hung one."""


class CustomEngine(ApiModel):
    """An engine that Sluice has no adapter for; it has to speak the OpenAI API (`/v1/models`, `/v1/completions`)."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            cel("self.port != 9900", "port 9900 is the agent's; let the engine listen on another one", ".port")
        )
    )

    command: CommandList
    """The whole command line. `$(SLUICE_MODEL_PATH)`, `$(SLUICE_MODEL_NAME)`, `$(SLUICE_PORT)`, `$(SLUICE_TENSOR)`,
    `$(SLUICE_PIPELINE)`, `$(SLUICE_DATA)`, `$(SLUICE_EXPERT)` and `$(POD_IP)` stand for what the spec says."""
    port: int = Field(8000, ge=1024, le=65535)
    """Port of the OpenAI API, on all addresses of the pod; default 8000."""
    metrics_path: str = Field(
        "/metrics",
        min_length=1,
        max_length=256,
        pattern=_PATH,
        json_schema_extra=explained(_PATH, "a path starts with '/', in printable ASCII without spaces"),
    )
    """Path of the Prometheus page on the same port; default `/metrics`."""
    metrics: CustomMetrics = CustomMetrics()
    """Names of the engine's Prometheus samples; a signal without one is unknown."""


class Engine(ApiModel):
    """The inference engine of all pools."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            cel(
                "(self.type == 'Custom') == has(self.custom)",
                "engine type Custom needs custom.command, and no other type takes custom",
                ".custom",
            ),
            cel(
                "self.type != 'Custom' || has(self.image)",
                "engine type Custom has no default image; name one",
                ".image",
            ),
        )
    )

    type: EngineType = EngineType.VLLM
    """`vLLM`, `SGLang`, `Simulated` (answers like an engine, needs no accelerator) or `Custom` (any server of the
    OpenAI API, by its command line); default `vLLM`."""
    image: str | None = Field(
        None,
        min_length=1,
        max_length=512,
        pattern=_IMAGE,
        json_schema_extra=explained(
            _IMAGE, "an image is written host/path:tag or host/path@sha256:<64 hexadecimal digits>, without spaces"
        ),
    )
    """Engine image; default: from the operator's configuration, kept for the life of the revision. Required with type
    `Custom`."""
    args: ArgumentList = []
    """Arguments appended to the engine's command line; those that the operator owns are refused."""
    env: EnvList = []
    """Environment variables of the engine container."""
    custom: CustomEngine | None = None
    """How an engine of type `Custom` is started and watched; required with that type and only there."""


class PoolEngine(ApiModel):
    """What a pool adds to the service's engine."""

    args: PoolArgumentList = []
    """Arguments of this pool, appended to the service's."""
    env: EnvList = []
    """Variables of this pool; they win over the service's of the same name."""


class ProfileReference(ApiModel):
    name: str = Field(min_length=1, max_length=253, pattern=DNS_SUBDOMAIN)
    """Name of an AcceleratorProfile (cluster-scoped)."""


class Accelerator(ApiModel):
    """What an instance asks the scheduler for: tensor x pipeline x data of it."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            cel(
                "has(self.profileRef) != has(self.resourceName)",
                "set exactly one of profileRef and resourceName",
            )
        )
    )

    profile_ref: ProfileReference | None = None
    """An AcceleratorProfile; exclusive with `resourceName`."""
    resource_name: ResourceName | None = None
    """Extended resource to ask for, for example `nvidia.com/gpu`; exclusive with `profileRef`."""


MAX_ACCELERATORS = 64
"""Of one instance, which is one pod in this release; no node has more."""


class Parallelism(ApiModel):
    """How one instance is spread over accelerators: it takes tensor x pipeline x data of them, all in one pod."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            cel(
                f"self.tensor * self.pipeline * self.data <= {MAX_ACCELERATORS}",
                f"tensor x pipeline x data is at most {MAX_ACCELERATORS}: an instance is one pod in this release; "
                "lower one of them, or raise replicas",
            ),
            cel(
                "self.data == 1 || self.expert",
                "data above 1 needs expert: true, because it is for mixture-of-experts models; copies of a dense "
                "model are instances: raise replicas instead",
                ".data",
            ),
            cel(
                "!self.expert || self.tensor * self.data > 1",
                "expert: true spreads the experts over tensor x data accelerators, which is 1 here: raise data or "
                "tensor, or leave expert out",
                ".expert",
            ),
        )
    )

    tensor: int = Field(1, ge=1, le=MAX_ACCELERATORS)
    """Tensor-parallel size: accelerators that share each layer; default 1."""
    pipeline: int = Field(1, ge=1, le=MAX_ACCELERATORS)
    """Pipeline-parallel size: groups of layers, each on its own accelerators; default 1."""
    data: int = Field(1, ge=1, le=MAX_ACCELERATORS)
    """Data-parallel size of the attention layers of a mixture-of-experts model: engine cores with their own requests
    and KV cache in one instance; default 1. Needs `expert`."""
    expert: bool = False
    """True: experts are spread over the tensor x data accelerators, instead of each being cut; default false."""

    @property
    def accelerators(self) -> int:
        """Of one instance."""
        return self.tensor * self.pipeline * self.data


class Pool(ApiModel):
    """A set of equal instances."""

    name: str = Field(
        "default",
        min_length=1,
        max_length=20,
        pattern=DNS_LABEL,
        json_schema_extra=explained(
            DNS_LABEL, "a pool's name is lower-case letters, digits and '-', not at its ends; at most 20 characters"
        ),
    )
    """Unique in the service, a DNS label of at most 20 characters; default `default`."""
    role: PoolRole = PoolRole.UNIFIED
    """`Unified`: instances do prefill and decode; default and only role of this release."""
    replicas: int = Field(1, ge=0, le=1000)
    """Instances of this pool; default 1."""
    parallelism: Parallelism = Parallelism()
    """How one instance is spread over accelerators: it takes tensor x pipeline x data of them, all in one pod."""
    accelerator: Accelerator | None = None
    """Accelerator of this pool; default: the service's."""
    engine: PoolEngine = PoolEngine()
    """What this pool adds to the service's engine."""
    pod_template: PodTemplateObject | None = None
    """Bounded override of the engine pod: `metadata.labels`, `metadata.annotations`, and of `spec`: nodeSelector,
    tolerations, affinity, priorityClassName, schedulerName, runtimeClassName, resources (of the engine container)."""


class Routing(ApiModel):
    """The router in front of all pools."""

    policy: RoutingPolicy = RoutingPolicy.CACHE_AWARE
    """How requests are spread: CacheAware (prefix affinity, load cap), LeastRequests, PowerOfTwo or RoundRobin;
    default CacheAware."""
    replicas: int = Field(2, ge=1, le=16)
    """Router pods; default 2."""


class Health(ApiModel):
    """When an instance counts as dead. A busy one that makes progress never does."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            cel(
                "self.selfTestTimeoutSeconds < self.hangTimeoutSeconds",
                "selfTestTimeoutSeconds must be less than hangTimeoutSeconds: an instance is Suspect before it is Hung",
                ".selfTestTimeoutSeconds",
            )
        )
    )

    self_test_period_seconds: int = Field(10, ge=1, le=3600)
    """Seconds between two real one-token inferences; default 10."""
    self_test_timeout_seconds: int = Field(3, ge=1, le=600)
    """Seconds after which an unanswered self-test of an idle instance takes it out of routing; default 3."""
    hang_timeout_seconds: int = Field(60, ge=5, le=3600)
    """Seconds without an answered self-test and without any token progress after which an instance is Hung;
    default 60."""
    startup_timeout_seconds: int = Field(3600, ge=10, le=86400)
    """Seconds that an instance may take from its start to its first answered self-test; default 3600."""
    max_restarts: int = Field(3, ge=0, le=100)
    """Restarts of an engine's container within `restartWindowSeconds` that are left to the kubelet; an instance that
    needs more is replaced, preferably on another node. Default 3."""
    restart_window_seconds: int = Field(1800, ge=60, le=86400)
    """Seconds over which restarts are counted; default 1800."""


class Drain(ApiModel):
    """How instances leave."""

    timeout_seconds: int = Field(600, ge=0, le=86400)
    """Seconds that an instance that leaves may take to finish its requests; default 600."""


class OnFailure(StrEnum):
    ROLLBACK = "Rollback"
    HOLD = "Hold"


class UpgradePolicy(StrEnum):
    ON_NEW_REVISION = "OnNewRevision"
    ROLLING = "Rolling"
    MANUAL = "Manual"


class Rollout(ApiModel):
    """How a changed spec reaches the instances: new ones serve before old ones leave."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            cel(
                "self.maxSurge > 0 || (has(self.maxUnavailable) && self.maxUnavailable > 0)",
                "maxSurge 0 needs maxUnavailable of at least 1: a rollout with neither can't move",
                ".maxSurge",
            )
        )
    )

    max_surge: int = Field(1, ge=0, le=100)
    """Instances above `replicas` while a new revision comes up; default 1."""
    max_unavailable: int | None = Field(None, ge=0, le=100)
    """Instances that may be missing during a rollout. Unset: 0 while a surge finds a place, else one is drained before
    its replacement starts. An explicit 0 is obeyed: without room for a surge the rollout waits and says so."""
    progress_deadline_seconds: int = Field(3600, ge=10, le=604800)
    """Seconds without any progress after which a rollout has failed; default 3600."""
    on_failure: OnFailure = OnFailure.ROLLBACK
    """When a rollout fails (deadline, restarts used up, image not pullable): `Rollback` to the last revision that
    served in full, or `Hold` what is there. Default Rollback. A changed spec or annotation `retry-at` is a new try."""
    paused: bool = False
    """True: no instance is created on, or drained for, a new revision."""
    upgrade_policy: UpgradePolicy = UpgradePolicy.ON_NEW_REVISION
    """What changed defaults of the operator (images, arguments) do. `OnNewRevision`: the next changed spec takes them
    in. `Rolling`: they are rolled out. `Manual`: the old ones are kept, also by a changed spec, until this policy or
    `spec.engine.image` changes. Default OnNewRevision; `status.drift` counts instances that differ from today's."""


class InferenceServiceSpec(ApiModel):
    """What should be served, and how."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            cel(
                "self.engine.type == 'Simulated' || self.model.uri.startsWith('pvc://')",
                "engines take models from a PersistentVolumeClaim only in this release: write pvc://<claim>/<path> "
                "(the Simulated engine reads none and takes any URI)",
                ".model.uri",
            ),
        )
    )

    model: Model
    """Which model is served, and under which name."""
    engine: Engine = Engine()
    """The inference engine of all pools."""
    accelerator: Accelerator | None = None
    """Accelerator of all pools; default: the AcceleratorProfile marked as default, if there is one."""
    pools: list[Pool] = Field(default=[Pool()], min_length=1, max_length=8, json_schema_extra=list_map("name"))
    """Sets of equal instances; default: one pool `default` with one instance."""
    routing: Routing = Routing()
    """The router in front of all pools."""
    health: Health = Health()
    """When an instance counts as dead."""
    drain: Drain = Drain()
    """How instances leave."""
    rollout: Rollout = Rollout()
    """How a changed spec reaches the instances."""
    suspend: bool = False
    """True: drain all instances and keep the object; default false."""


class InferenceService(ApiModel):
    """A large language model served by self-healing engine instances behind one OpenAI-compatible address."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            cel(
                "self.metadata.name.size() <= 63 && self.metadata.name.matches('^[a-z]([-a-z0-9]*[a-z0-9])?$')",
                "the service gets a Kubernetes Service of the same name, so metadata.name must be at most 63 "
                "characters: lower-case letters, digits and '-', starting with a letter and not ending with '-'",
                ".metadata.name",
            )
        )
    )

    spec: InferenceServiceSpec
    """What should be served, and how."""
    status: InferenceServiceStatus = InferenceServiceStatus()
    """What the operator last saw."""


class AcceleratorCalibration(ApiModel):
    """How close an accelerator comes to its data sheet. Defaults: fitted to H100 measurements (docs/sizing.md)."""

    decode_efficiency_percent: int = Field(75, ge=1, le=100)
    """Percent of the memory bandwidth at which weights are read in a decode step; default 75."""
    kv_efficiency_percent: int = Field(80, ge=1, le=100)
    """Percent of the memory bandwidth at which the KV cache is read; default 80."""
    prefill_efficiency_percent: int = Field(70, ge=1, le=100)
    """Percent of the arithmetic peak reached in prefill; default 70."""
    decode_collective_percent: int = Field(50, ge=1, le=100)
    """Percent of the link's bandwidth reached by the small messages of a decode step; default 50."""
    prefill_collective_percent: int = Field(70, ge=1, le=100)
    """Percent of the link's bandwidth reached by the large messages of a prefill; default 70."""
    decode_hop_nanoseconds: int = Field(1200, ge=0, le=1_000_000)
    """Latency of one step of a ring inside the link domain in decode, in nanoseconds; default 1200."""
    prefill_hop_nanoseconds: int = Field(2000, ge=0, le=1_000_000)
    """The same in prefill; default 2000."""
    net_hop_nanoseconds: int = Field(5000, ge=0, le=10_000_000)
    """Latency of one hop between nodes, in nanoseconds; default 5000."""
    collective_floor_nanoseconds: int = Field(5000, ge=0, le=10_000_000)
    """Shortest latency of any collective operation, in nanoseconds; default 5000."""
    step_microseconds: int = Field(300, ge=0, le=1_000_000)
    """Fixed part of a decode step, in microseconds; default 300."""
    sequence_nanoseconds: int = Field(5000, ge=0, le=10_000_000)
    """What each sequence of the batch adds to a decode step, in nanoseconds; default 5000."""
    prefill_microseconds: int = Field(2000, ge=0, le=10_000_000)
    """Fixed part of a prefill, in microseconds; default 2000."""
    expert_skew_percent: int = Field(130, ge=100, le=10_000)
    """Load of the busiest expert-parallel rank in percent of the mean; default 130."""


class AcceleratorHardware(ApiModel):
    """Figures of one accelerator and its node, for planning; GB are 10^9 bytes, rates are per second."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            cel(
                "self.linkDomain == 1 || has(self.linkGBs)",
                "linkDomain above 1 needs linkGBs, the rate of the link that joins so many accelerators",
                ".linkDomain",
            )
        )
    )

    memory: Quantity
    """Memory that a program can use (0.4 to 1.6 % less than the label), for example 79.22Gi."""
    memory_bandwidth_gbs: int | None = Field(None, alias="memoryBandwidthGBs", ge=1, le=1_000_000)
    """Bandwidth of the memory in GB per second; without it no times are estimated."""
    bf16_tflops: int | None = Field(None, alias="bf16TFLOPS", ge=1, le=1_000_000)
    """Dense BF16 arithmetic in TFLOPS; without it no times are estimated."""
    fp8_tflops: int | None = Field(None, alias="fp8TFLOPS", ge=1, le=1_000_000)
    """Dense FP8 arithmetic in TFLOPS; absent: the accelerator has none."""
    link_gbs: int | None = Field(None, alias="linkGBs", ge=1, le=1_000_000)
    """Link to the other accelerators (NVLink, xGMI, else PCIe) in GB per second and direction."""
    link_domain: int = Field(1, ge=1, le=1024)
    """Accelerators joined by the fast link; default 1: none, they talk over PCIe."""
    gpus_per_node: int = Field(8, alias="gpusPerNode", ge=1, le=64)
    """Accelerators in one node; default 8."""
    nic_gbs: int | None = Field(None, alias="nicGBs", ge=1, le=100_000)
    """Network between nodes in GB per second and accelerator; without it no times across nodes are estimated."""
    host_link_gbs: int | None = Field(None, alias="hostLinkGBs", ge=1, le=100_000)
    """Link between an accelerator and the host's memory in GB per second (usable part)."""
    disk_gbs: int | None = Field(None, alias="diskGBs", ge=1, le=100_000)
    """Reading from the node's disk in GB per second."""
    price_per_hour_cents: int | None = Field(None, ge=0, le=100_000_000)
    """Price of one accelerator for one hour, in hundredths of your currency; without it no costs are shown."""
    calibration: AcceleratorCalibration | None = None
    """Measured efficiencies; absent: those of the H100 are taken and marked as a default."""


class AcceleratorProfileSpec(ApiModel):
    """A kind of accelerator, described once by the administrator."""

    resource_name: ResourceName
    """Extended resource that a pod asks for, one per tensor-parallel rank."""
    default: bool = False
    """True: used by services that name no accelerator (not by the simulated engine); default false."""
    node_selector: dict[str, LabelValue] = Field(default={}, max_length=16)
    """Labels that a node with this accelerator has."""
    tolerations: list[TolerationObject] = Field(default=[], max_length=16, json_schema_extra=atomic())
    """Taints of the nodes with this accelerator, as in a pod's `spec.tolerations`."""
    hardware: AcceleratorHardware | None = None
    """Figures for planning (memory, bandwidth, arithmetic, links); they change no pod. Absent: nothing is estimated."""


class AcceleratorProfile(ApiModel):
    """A kind of accelerator that services refer to by name; written by the cluster's administrator."""

    spec: AcceleratorProfileSpec
    """Resource, nodes and taints of the accelerator."""


class SpecError(ValueError):
    """A spec that can't be used; the text names each field by its path, what is wrong, and what was found."""


def parse_lenient(spec: Mapping[str, Any]) -> InferenceServiceSpec:
    """The spec as the API has it, defaults filled in; fields that this version does not know are ignored.

    Unknown fields come from a newer CRD: they must not stop an older operator.

    Raises:
        SpecError: a field is missing, of the wrong type or out of bounds.
    """
    try:
        return InferenceServiceSpec.model_validate(spec, extra="ignore", context={"lenient": True})
    except ValidationError as error:
        raise SpecError(_explain("spec", error)) from error


def parse_profile_lenient(spec: Mapping[str, Any]) -> AcceleratorProfileSpec:
    """The same for an AcceleratorProfile.

    Raises:
        SpecError: a field is missing, of the wrong type or out of bounds.
    """
    try:
        return AcceleratorProfileSpec.model_validate(spec, extra="ignore")
    except ValidationError as error:
        raise SpecError(_explain("spec", error)) from error


def _explain(root: str, error: ValidationError) -> str:
    """`spec.pools[0].replicas: Input should be … (found 'x')`, at most five of them."""
    said = []
    for one in error.errors(include_url=False)[:5]:
        path = root + "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in one["loc"])
        found = "" if one["type"] == "missing" else f" (found {str(one['input'])[:80]!r})"
        said.append(f"{path}: {one['msg']}{found}")
    more = error.error_count() - len(said)
    return "; ".join(said) + (f"; and {more} more" if more > 0 else "")
