"""The engine pod of one instance: the engine's container, the agent beside it, and how both stop.

One drain budget (`spec.drain.timeoutSeconds`, D) gives every number: the agent's preStop wait is D, the engine may
take 30 s after SIGTERM, and the kubelet's grace is D + 60. All probes go to the agent, never to the engine's own
`/health`, which stays 200 on a dead engine core (engines lie; measured).
"""

from typing import Any, Final

from sluice.api import names
from sluice.api.agent import AgentConfig
from sluice.plan.engines import ADAPTERS
from sluice.plan.engines.adapter import HOME, Launch, engine_port
from sluice.plan.engines.weights import WEIGHTS_PATH
from sluice.plan.metadata import child_metadata, stamped
from sluice.plan.quarantine import ANYWHERE, Placement, place
from sluice.plan.revisions import Revision
from sluice.plan.snapshot import ServiceSnapshot
from sluice.plan.template import engine_resources, overlay

GRACE_MARGIN_S: Final = 60
"""Seconds of grace beyond the drain: the engine's own shutdown (30 s) and its teardown (8-15 s, measured)."""
OWN_USER: Final = 65532
"""User of the containers made from our own images."""
DRAIN_HEADER: Final = "X-Sluice-Drain"
_STARTUP_PERIOD_S: Final = 2

RESTRICTED: Final = {
    "allowPrivilegeEscalation": False,
    "capabilities": {"drop": ["ALL"]},
    "runAsNonRoot": True,
    "seccompProfile": {"type": "RuntimeDefault"},
}
"""Pod Security Standard `restricted`, for every container of ours."""


def pod_name(snapshot: ServiceSnapshot, revision: Revision, index: int, epoch: int) -> str:
    """Pure function of owner, pool, revision, index and epoch: a repeated create meets its own earlier pod (D8).

    The revision counts in the hash only, so that names stay readable.
    """
    return names.child_name(snapshot.name, f"{snapshot.uid}/{revision.id}", revision.pool, f"{index}-{epoch}")


def build_pod(
    snapshot: ServiceSnapshot, revision: Revision, index: int, epoch: int, where: Placement = ANYWHERE
) -> dict[str, Any]:
    """The pod of instance `index`, built for the `epoch`-th time, on `revision`; `where` is wiring, no part of it."""
    declaration = revision.declaration
    name = pod_name(snapshot, revision, index, epoch)
    launch = ADAPTERS[declaration.engine.type].launch(declaration, revision.resolved.default_args)
    labels = {
        names.LABEL_POOL: revision.pool,
        names.LABEL_ROLE: str(declaration.role),
        names.LABEL_REVISION: revision.id,
        names.LABEL_EPOCH: str(epoch),
        names.LABEL_INDEX: str(index),
        names.LABEL_INSTANCE: name,
        names.LABEL_RANK: "0",
    }
    spec: dict[str, Any] = {
        "restartPolicy": "Always",
        "enableServiceLinks": False,  # a Service named vllm would inject VLLM_PORT (S007)
        "automountServiceAccountToken": False,
        "terminationGracePeriodSeconds": declaration.drain.timeout_seconds + GRACE_MARGIN_S,
        "readinessGates": [{"conditionType": names.READINESS_GATE}],
        "securityContext": {"fsGroup": launch.user, **_user(launch.user)},
        "initContainers": [_agent(snapshot, revision, name)],
        "containers": [_engine(snapshot, revision, name, launch)],
        "volumes": _volumes(launch),
    }
    if declaration.accelerator and declaration.accelerator.node_selector:
        spec["nodeSelector"] = dict(declaration.accelerator.node_selector)
    if declaration.accelerator and declaration.accelerator.tolerations:
        spec["tolerations"] = list(declaration.accelerator.tolerations)
    metadata = child_metadata(snapshot, name, names.COMPONENT_ENGINE, labels)
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}
    return stamped(place(overlay(pod, declaration.pod_template), where))


def drain_token(snapshot: ServiceSnapshot, instance: str) -> str:
    """What `/drain` asks for, so that another pod can't drain this one; deterministic, so a rebuild needs no store."""
    return names.short_hash("drain", snapshot.uid, instance, length=32)


def agent_config(snapshot: ServiceSnapshot, revision: Revision, name: str) -> AgentConfig:
    declaration = revision.declaration
    publishes = ADAPTERS[declaration.engine.type].publishes(declaration)
    health = declaration.health
    return AgentConfig(
        instance=name,
        engine=declaration.engine.type,
        engine_port=engine_port(declaration),
        served_model=declaration.served_model,
        metrics_path=publishes.metrics_path,
        load_path=publishes.load_path,
        load_fields=list(publishes.load_fields) or None,
        version_path=publishes.version_path,
        signals={signal: list(sources) for signal, sources in publishes.signals.items()},
        self_test_period_s=health.self_test_period_seconds,
        self_test_timeout_s=health.self_test_timeout_seconds,
        hang_timeout_s=health.hang_timeout_seconds,
        startup_timeout_s=health.startup_timeout_seconds,
        drain_timeout_s=declaration.drain.timeout_seconds,
        drain_token=drain_token(snapshot, name),
    )


def _agent(snapshot: ServiceSnapshot, revision: Revision, name: str) -> dict[str, Any]:
    """A native sidecar: up before the engine, gone after it, so preStop can wait in it."""
    config = agent_config(snapshot, revision, name).model_dump_json(by_alias=True, exclude_none=True)
    return {
        "name": names.CONTAINER_AGENT,
        "image": revision.resolved.agent_image,
        "imagePullPolicy": revision.resolved.pull_policy,
        "restartPolicy": "Always",
        "command": ["sluice-agent"],
        "env": [{"name": "SLUICE_AGENT_CONFIG", "value": config}],
        "ports": [{"name": "agent", "containerPort": names.PORT_AGENT, "protocol": "TCP"}],
        "livenessProbe": http_probe("/healthz", names.PORT_AGENT, period=5, timeout=3, failures=6),
        "resources": {"requests": {"cpu": "20m", "memory": "64Mi"}, "limits": {"memory": "256Mi"}},
        "securityContext": {**RESTRICTED, **_user(OWN_USER), "readOnlyRootFilesystem": True},
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": [{"name": "agent-run", "mountPath": "/run/sluice"}],
    }


def _engine(snapshot: ServiceSnapshot, revision: Revision, name: str, launch: Launch) -> dict[str, Any]:
    startup = -(-revision.declaration.health.startup_timeout_seconds // _STARTUP_PERIOD_S)
    header = {"name": DRAIN_HEADER, "value": drain_token(snapshot, name)}
    mounts: list[dict[str, Any]] = [{"name": "tmp", "mountPath": "/tmp"}, {"name": "home", "mountPath": HOME}]
    if launch.shm_gib:
        mounts.append({"name": "shm", "mountPath": "/dev/shm"})
    if launch.claim:
        mounts.append({"name": "weights", "mountPath": WEIGHTS_PATH, "readOnly": True})
    container = {
        "name": names.CONTAINER_ENGINE,
        "image": revision.resolved.engine_image,
        "imagePullPolicy": revision.resolved.pull_policy,
        "command": list(launch.command),
        "args": list(launch.args),
        "env": [dict(entry) for entry in launch.env],
        "ports": [{"name": "http", "containerPort": engine_port(revision.declaration), "protocol": "TCP"}],
        "startupProbe": http_probe("/startup", names.PORT_AGENT, period=_STARTUP_PERIOD_S, timeout=2, failures=startup),
        "readinessProbe": http_probe("/ready", names.PORT_AGENT, period=2, timeout=2, failures=1),
        # Fails only from 10 s after Hung; a restart must not wait in preStop for an engine that answers nothing.
        # A minute of patience, because an agent that is away fails it too: its container comes back only after the
        # kubelet's restart back-off, 10 s from its second crash on and 20 s from the third, and a healthy engine
        # outlasts that.
        "livenessProbe": {
            **http_probe("/alive", names.PORT_AGENT, period=5, timeout=3, failures=12),
            "terminationGracePeriodSeconds": 30,
        },
        "lifecycle": {"preStop": {"httpGet": {"path": "/drain", "port": names.PORT_AGENT, "httpHeaders": [header]}}},
        "resources": engine_resources(revision.declaration, launch.requests),
        "securityContext": {**RESTRICTED, "readOnlyRootFilesystem": launch.read_only_root},
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": mounts,
    }
    return {key: value for key, value in container.items() if value not in ([], {})}


def _volumes(launch: Launch) -> list[dict[str, Any]]:
    volumes: list[dict[str, Any]] = [
        {"name": "agent-run", "emptyDir": {"medium": "Memory", "sizeLimit": "4Mi"}},
        {"name": "tmp", "emptyDir": {}},
        {"name": "home", "emptyDir": {}},
    ]
    if launch.shm_gib:
        volumes.append({"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": f"{launch.shm_gib}Gi"}})
    if launch.claim:
        volumes.append({"name": "weights", "persistentVolumeClaim": {"claimName": launch.claim, "readOnly": True}})
    return volumes


def _user(user: int) -> dict[str, Any]:
    return {"runAsNonRoot": True, "runAsUser": user, "runAsGroup": user}


def http_probe(path: str, port: int, *, period: int, timeout: int, failures: int) -> dict[str, Any]:
    """A probe in normal form; `period` and `timeout` in seconds."""
    return {
        "httpGet": {"path": path, "port": port},
        "periodSeconds": period,
        "timeoutSeconds": timeout,
        "failureThreshold": failures,
    }
