"""What a service declares, pool by pool: the inputs of a revision, and nothing that our builders make of them.

A revision's identity comes from here alone (S011, S096): the user's spec and the content of the accelerator profile
that it names. Left out on purpose are replicas, rollout and suspend (they change no pod) and routing (it changes the
router only). Health and drain times are in, because they are written into the pod.

Values equal to the schema's default are left out of what is hashed and stored, so that a field added by a later
version changes no revision of an object that does not use it.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from sluice.api import names
from sluice.api.base import ApiModel
from sluice.api.conditions import Reason
from sluice.api.v1alpha1 import (
    AcceleratorProfileSpec,
    Drain,
    Engine,
    EngineType,
    Health,
    InferenceServiceSpec,
    Model,
    Parallelism,
    Pool,
    PoolEngine,
    PoolRole,
    SpecError,
    parse_lenient,
    parse_profile_lenient,
)
from sluice.plan.snapshot import ServiceSnapshot

MAX_INSTANCES: Final = 900
"""Of one service; leaves room for surges below the longest list that a router's sidecar takes (`MAX_WORKERS`)."""


_NOT_IN_PODS: Final = {name: Health.model_fields[name].default for name in ("max_restarts", "restart_window_seconds")}
"""The restart budget is the operator's alone: a changed one rolls nothing."""


@dataclass(frozen=True, slots=True)
class Refused:
    """Something declared that can't be carried out; a human has to change it."""

    message: str
    """Field, what is wrong, what to do."""
    reason: Reason = Reason.INVALID_SPEC


class DeclaredAccelerator(ApiModel):
    """The content of the profile, or the resource that the user named; the profile's name does not count."""

    resource_name: str
    node_selector: dict[str, str] = {}
    tolerations: list[dict[str, Any]] = []


class PoolDeclaration(ApiModel):
    """All declared inputs of one pool's pods; stored in its ControllerRevision."""

    role: PoolRole = PoolRole.UNIFIED
    model: Model
    """With `name` always set."""
    engine: Engine = Engine()
    pool_engine: PoolEngine = PoolEngine()
    parallelism: Parallelism = Parallelism()
    accelerator: DeclaredAccelerator | None = None
    pod_template: dict[str, Any] | None = None
    health: Health = Health()
    drain: Drain = Drain()

    @property
    def served_model(self) -> str:
        return self.model.name or ""

    def canonical(self) -> dict[str, Any]:
        """As stored and hashed: API spelling, defaults left out."""
        return self.model_dump(mode="json", by_alias=True, exclude_defaults=True)


@dataclass(frozen=True, slots=True)
class DesiredPool:
    name: str
    replicas: int
    """Instances wanted now: 0 while the service is suspended."""
    declaration: PoolDeclaration | None
    """None: its inputs can't be resolved (`refusals` says why); what runs is kept and repaired as it is."""


@dataclass(frozen=True, slots=True)
class Desired:
    """The spec, parsed."""

    spec: InferenceServiceSpec
    pools: tuple[DesiredPool, ...]
    refusals: tuple[Refused, ...]


def declare(snapshot: ServiceSnapshot) -> Desired | Refused:
    """The service's pools as declared; `Refused` when the spec as a whole can't be read (nothing is done then)."""
    try:
        spec = parse_lenient(snapshot.service.get("spec") or {})
    except SpecError as error:
        return Refused(str(error))
    seen = [pool.name for pool in spec.pools]
    double = sorted({name for name in seen if seen.count(name) > 1})
    if double:
        return Refused(f"spec.pools: the name {double[0]!r} stands there more than once; pool names are unique")
    total = sum(pool.replicas for pool in spec.pools)
    if total > MAX_INSTANCES:
        return Refused(
            f"spec.pools: {total} instances in all; the routers of one service hold at most {MAX_INSTANCES}: "
            "lower replicas, or split the service"
        )
    refusals: list[Refused] = []
    pools = []
    for number, pool in enumerate(spec.pools):
        accelerator = _accelerator(snapshot, spec, pool, f"spec.pools[{number}]")
        declaration = None
        if isinstance(accelerator, Refused):
            refusals.append(accelerator)
        else:
            declaration = _declaration(snapshot.name, spec, pool, accelerator)
        pools.append(DesiredPool(pool.name, 0 if spec.suspend else pool.replicas, declaration))
    return Desired(spec, tuple(pools), tuple(refusals))


def digest(declaration: PoolDeclaration) -> str:
    """Identity of a revision: 10 hexadecimal characters over the canonical form."""
    return names.short_hash(json.dumps(declaration.canonical(), sort_keys=True, separators=(",", ":")), length=10)


def _declaration(
    service: str, spec: InferenceServiceSpec, pool: Pool, accelerator: DeclaredAccelerator | None
) -> PoolDeclaration:
    return PoolDeclaration(
        role=pool.role,
        model=Model.model_construct(uri=spec.model.uri, name=spec.model.name or service),
        engine=spec.engine,
        pool_engine=pool.engine,
        parallelism=pool.parallelism,
        accelerator=accelerator,
        pod_template=pool.pod_template,
        health=spec.health.model_copy(update=_NOT_IN_PODS),
        drain=spec.drain,
    )


def _accelerator(
    snapshot: ServiceSnapshot, spec: InferenceServiceSpec, pool: Pool, path: str
) -> DeclaredAccelerator | Refused | None:
    """What the pool asks for: its own, else the service's, else (not for Simulated) the default profile."""
    named, where = (pool.accelerator, path) if pool.accelerator else (spec.accelerator, "spec")
    if named and named.resource_name:
        return DeclaredAccelerator(resource_name=named.resource_name)
    if named and named.profile_ref:
        profile = _profile(snapshot, named.profile_ref.name, f"{where}.accelerator.profileRef.name")
        return _fitting(profile, pool, path)
    if spec.engine.type is EngineType.SIMULATED:
        return None
    if not snapshot.profiles_known:
        return Refused(
            "spec.accelerator: AcceleratorProfiles can't be read, so it is unknown whether there is a default one; "
            "install the CRD or let the operator list acceleratorprofiles.serving.sluice.dev, or set "
            "spec.accelerator.resourceName",
            Reason.PROFILE_NOT_FOUND,
        )
    defaults = sorted(name for name, obj in snapshot.profiles.items() if (obj.get("spec") or {}).get("default") is True)
    if len(defaults) > 1:
        return Refused(
            f"spec.accelerator: AcceleratorProfiles {', '.join(defaults[:5])} are all marked as default; "
            "leave `default: true` in one of them, or name a profile here",
            Reason.PROFILE_NOT_FOUND,
        )
    if not defaults:
        return None
    return _fitting(_profile(snapshot, defaults[0], "the default AcceleratorProfile"), pool, path)


def _profile(snapshot: ServiceSnapshot, name: str, where: str) -> AcceleratorProfileSpec | Refused:
    obj: Mapping[str, Any] | None = snapshot.profiles.get(name)
    if obj is None:
        why = "there is none of this name" if snapshot.profiles_known else "AcceleratorProfiles can't be read"
        return Refused(
            f"{where}: AcceleratorProfile {name!r}: {why}; create it, or name another one", Reason.PROFILE_NOT_FOUND
        )
    try:
        return parse_profile_lenient(obj.get("spec") or {})
    except SpecError as error:
        return Refused(f"{where}: AcceleratorProfile {name!r} can't be used: {error}", Reason.PROFILE_NOT_FOUND)


def _fitting(profile: AcceleratorProfileSpec | Refused, pool: Pool, path: str) -> DeclaredAccelerator | Refused:
    """What the profile stands for, if a node that it describes has enough for one instance.

    A profile without figures of its hardware says nothing about that. The figures are no part of the declaration:
    they change no pod.
    """
    if isinstance(profile, Refused):
        return profile
    layout, hardware = pool.parallelism, profile.hardware
    if hardware is not None and layout.accelerators > hardware.gpus_per_node:
        return Refused(
            f"{path}.parallelism: tensor {layout.tensor} x pipeline {layout.pipeline} x data {layout.data} = "
            f"{layout.accelerators} accelerators in one pod, and a node of the profile has {hardware.gpus_per_node} "
            "(hardware.gpusPerNode): lower one of the sizes, or name a profile with larger nodes"
        )
    return DeclaredAccelerator(
        resource_name=profile.resource_name, node_selector=profile.node_selector, tolerations=profile.tolerations
    )
