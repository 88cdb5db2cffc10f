"""A plan as an InferenceService to apply. Pure.

Only fields that the kind has are written. Whatever an option said instead of the object is written too, or a comment
says that it is not: an applied object must be the one that was planned. A layout over several nodes can't be said by
this version's API (an instance is one pod), so the best of those that can is taken, and a comment says so.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import yaml

from sluice.api import names
from sluice.api.v1alpha1 import MAX_ACCELERATORS, EngineType, Parallelism, SpecError, parse_lenient
from sluice.cli.catalogue import is_profile
from sluice.cli.errors import CliError
from sluice.cli.text import clean
from sluice.sizing.report import LayoutReport, Plan

Object = Mapping[str, Any]

CLAIM: Final = "models"
"""Name of the claim in an object made for a directory of this machine."""
MAX_REPLICAS: Final = 1000
"""Of one pool, as the CRD has it."""
CONTEXT_FLAGS: Final[Mapping[EngineType, str]] = {
    EngineType.VLLM: "--max-model-len",
    EngineType.SIMULATED: "--max-model-len",
    EngineType.SGLANG: "--context-length",
}
"""The engine's own argument for its longest request; a Custom engine has one that we don't know."""
SERVER_FIELDS: Final = (
    "creationTimestamp",
    "deletionGracePeriodSeconds",
    "deletionTimestamp",
    "generation",
    "managedFields",
    "resourceVersion",
    "selfLink",
    "uid",
)
"""Of `metadata`: the API server sets them, and refuses an object to create or apply that has some of them."""
LAST_APPLIED: Final = "kubectl.kubernetes.io/last-applied-configuration"


class NotExpressibleError(CliError):
    """No layout that fits, or no number of instances, is one that the API has words for."""

    exit_code = 3


@dataclass(frozen=True, slots=True)
class Planned:
    """What was planned for: the engine, and options that go before the object's fields."""

    engine: EngineType
    address: str = ""
    """What the user called the model; "": the object's own."""
    revision: str | None = None
    max_model_len: int | None = None
    """Tokens; None: no option said so."""
    is_accelerator_told: bool = False
    """By `--accelerator`; the plan knows its name."""
    kv_bytes_per_token: int | None = None


def service_for(plan: Plan, service: Object | None, pool: str, planned: Planned) -> str:
    """YAML text. `service`: the user's own object; of it the pool's layout and size change, and what options said.

    Raises:
        NotExpressibleError: every layout that fits needs several nodes, or the load needs more instances than a pool
            can have.
    """
    layout = _expressible(plan)
    comments = [f"Planned for {clean(plan.accelerator.name)}: {', '.join(_why(plan, layout))}."]
    if service is None:
        made, said = _new(plan, planned)
    else:
        made, said = _changed(plan, service, pool, planned)
    if planned.kv_bytes_per_token is not None:
        said.append(f"The KV cache was taken to have {planned.kv_bytes_per_token} bytes per token, as you said.")
    made["spec"] = _with_pool(made["spec"], pool, _pool_fields(plan, layout, pool))
    try:
        parse_lenient(made["spec"])
    except SpecError as error:
        raise NotExpressibleError(f"the plan gives no usable object: {error}") from error
    head = "".join(f"# {clean(line)}\n" for line in [*comments, *said])
    return head + str(yaml.safe_dump(made, sort_keys=False, allow_unicode=True))


# Layout and size.


def is_expressible(layout: LayoutReport) -> bool:
    """One pod per instance, as the API has it."""
    return layout.pods_per_instance == 1 and layout.gpus_per_instance <= MAX_ACCELERATORS


def _expressible(plan: Plan) -> LayoutReport:
    chosen = plan.chosen_layout
    if chosen is not None and (is_expressible(chosen) or (plan.chosen and plan.chosen.is_wanted)):
        return chosen
    fitting = [x for x in plan.layouts if x.feasible == "True" and is_expressible(x)]
    if not fitting:
        pods = chosen.pods_per_instance if chosen else 0
        raise NotExpressibleError(
            f"the layout that fits takes {pods} nodes per instance, and an InferenceService of this version has one "
            "pod per instance: use an accelerator with more memory, or see the table (-o table)"
        )
    return fitting[0]


def _why(plan: Plan, layout: LayoutReport) -> list[str]:
    chosen = plan.chosen
    is_other = chosen is not None and chosen.parallelism != layout.parallelism
    words = ["the best layout takes several nodes, this is the best of one node"] if is_other else []
    if is_other and chosen is not None and chosen.instances:
        words.append("its replicas for the load are not counted")
    if any(p.role != "Unified" for p in plan.pools):
        words.append("prefill and decode pools would need fewer GPUs, but this version has Unified ones only")
    return [*words, f"{layout.gpus_per_instance} GPUs per instance"]


def _pool_fields(plan: Plan, layout: LayoutReport, pool: str) -> dict[str, Any]:
    values = layout.parallelism.model_dump(by_alias=True)
    defaults = Parallelism().model_dump(by_alias=True)
    # `tensor` is always said: it is what the plan is about
    parallelism = {k: v for k, v in values.items() if k in defaults and (v != defaults[k] or k == "tensor")}
    replicas = plan.chosen.instances if plan.chosen and plan.chosen.parallelism == layout.parallelism else None
    if replicas and replicas > MAX_REPLICAS:
        raise NotExpressibleError(
            f"pool {pool}: replicas: the load needs {replicas} instances, and a pool has at most {MAX_REPLICAS}: plan "
            "for a part of the load and share it over several services, or use a faster accelerator"
        )
    return {"parallelism": parallelism} | ({"replicas": replicas} if replicas else {})


def _pools(spec: Object, pool: str) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """(copies of all pools, the one of that name among them)."""
    pools = [dict(p) for p in spec.get("pools") or [{"name": pool}]]
    return pools, next(p for p in pools if (p.get("name") or "default") == pool)


def _with_pool(spec: Object, pool: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    pools, own = _pools(spec, pool)
    own.update(fields)
    return {**spec, "pools": pools}


# The user's object.


def _changed(plan: Plan, service: Object, pool: str, planned: Planned) -> tuple[dict[str, Any], list[str]]:
    """(object without what the server wrote, with what options said; what they said that it can't say)."""
    made = {k: v for k, v in service.items() if k != "status"}
    if isinstance(made.get("metadata"), dict):
        made["metadata"] = _own_metadata(made["metadata"])
    spec: dict[str, Any] = dict(made["spec"])
    comments = list(_model_comments(planned))
    if planned.is_accelerator_told and is_profile(plan.accelerator.name):
        spec = _with_accelerator(spec, pool, plan.accelerator.name)
    elif planned.is_accelerator_told:
        comments.append(
            f"Planned for any accelerator with {plan.accelerator.name} of memory (--accelerator); the object's own "
            "accelerator is kept: set spec.accelerator.profileRef to a profile of such accelerators."
        )
    if planned.max_model_len is not None:
        flag = CONTEXT_FLAGS.get(planned.engine)
        if flag is None:
            comments.append(f"Planned for {planned.max_model_len} tokens (--max-model-len): tell the engine so.")
        else:
            spec = _with_argument(spec, pool, flag, planned.max_model_len)
    return {**made, "spec": spec}, comments


def _own_metadata(metadata: Object) -> dict[str, Any]:
    """Without what the server and `kubectl apply` wrote into it."""
    own = {k: v for k, v in metadata.items() if k not in SERVER_FIELDS}
    annotations = own.get("annotations")
    if isinstance(annotations, dict) and LAST_APPLIED in annotations:
        own["annotations"] = {k: v for k, v in annotations.items() if k != LAST_APPLIED}
        if not own["annotations"]:
            del own["annotations"]
    return own


def _model_comments(planned: Planned) -> Iterator[str]:
    if planned.address:
        yield f"The model's facts are those of {planned.address}; spec.model.uri is kept."
    if planned.revision:
        yield f"They are of revision {planned.revision}."


def _with_accelerator(spec: Object, pool: str, profile: str) -> dict[str, Any]:
    """Of the whole service, unless the pool has one of its own or the service other pools."""
    wanted = {"profileRef": {"name": profile}}
    pools, own = _pools(spec, pool)
    if (own.get("accelerator") or spec.get("accelerator")) == wanted:
        return dict(spec)
    if len(pools) == 1 and not own.get("accelerator"):
        return {**spec, "accelerator": wanted}
    return _with_pool(spec, pool, {"accelerator": wanted})


def _with_argument(spec: Object, pool: str, flag: str, value: int) -> dict[str, Any]:
    """In the pool's arguments, which come after the service's and so win over them."""
    _, own = _pools(spec, pool)
    engine = own.get("engine") or {}
    args = [*_without(engine.get("args") or [], flag), f"{flag}={value}"]
    return _with_pool(spec, pool, {"engine": {**engine, "args": args}})


def _without(args: Sequence[str], flag: str) -> Iterator[str]:
    """The arguments but for this one, written `--flag=value` or `--flag value`."""
    is_value = False
    for arg in args:
        name, equals, _ = arg.partition("=")
        is_flag = arg.startswith("--")
        if is_flag and name.replace("_", "-") == flag:
            is_value = not equals
            continue
        if is_flag or not is_value:
            yield arg
        is_value = False


# A new object.


def _new(plan: Plan, planned: Planned) -> tuple[dict[str, Any], list[str]]:
    """(object, what the user has to look at)."""
    address = planned.address
    base = re.sub(r"[^a-z0-9]+", "-", address.rstrip("/").rpartition("/")[2].lower().removesuffix(".json")).strip("-")
    name = re.sub(r"^[^a-z]+", "", base)[:50].strip("-") or "model"
    uri, comments = address, []
    if not address.startswith(("hf://", "pvc://")):
        uri = f"pvc://{CLAIM}/{name}"
        comments.append("Set spec.model.uri to the claim and path where the model's files are.")
    elif address.startswith("hf://"):
        revision = f" of revision {planned.revision}" if planned.revision else ""
        comments.append(
            f"Engines of this version read pvc:// only: set spec.model.uri to a claim with these files{revision}."
        )
    engine: dict[str, Any] = {"type": str(planned.engine)}
    if plan.context is not None:
        engine["args"] = [f"{CONTEXT_FLAGS[planned.engine]}={plan.context}"]
    spec: dict[str, Any] = {"model": {"uri": uri}, "engine": engine}
    if is_profile(plan.accelerator.name):
        spec["accelerator"] = {"profileRef": {"name": plan.accelerator.name}}
    else:
        comments.append(
            f"Set spec.accelerator.profileRef to a profile of accelerators with {plan.accelerator.name} of memory; "
            "without it the default profile is taken."
        )
    return {
        "apiVersion": names.API_VERSION,
        "kind": names.SERVICE_KIND,
        "metadata": {"name": name},
        "spec": spec,
    }, comments
