"""A plan as an InferenceService to apply. Pure.

Only fields that the kind has are written. A layout over several nodes can't be said by this version's API (an instance
is one pod), so the best of those that can is taken, and a comment says so.
"""

import re
from collections.abc import Mapping
from typing import Any, Final

import yaml

from sluice.api import names
from sluice.api.v1alpha1 import MAX_ACCELERATORS, Parallelism, SpecError, parse_lenient
from sluice.cli.errors import CliError
from sluice.cli.text import clean
from sluice.sizing.report import LayoutReport, Plan

Object = Mapping[str, Any]

CLAIM: Final = "models"
"""Name of the claim in an object made for a directory of this machine."""


class NotExpressibleError(CliError):
    """No layout that fits is one that the API has words for."""

    exit_code = 3


def service_for(plan: Plan, service: Object | None, pool: str, address: str) -> str:
    """YAML text. `service`: the user's own object, of which only the pool's layout and size change.

    Raises:
        NotExpressibleError: every layout that fits needs several nodes.
    """
    layout = _expressible(plan)
    comments = [f"Planned for {clean(plan.accelerator.name)}: {', '.join(_why(plan, layout))}."]
    if service is None:
        made, said = _new(plan, address)
        comments += said
    else:
        made = dict(service)
    made["spec"] = _with_pool(made["spec"], pool, _pool_fields(plan, layout))
    try:
        parse_lenient(made["spec"])
    except SpecError as error:
        raise CliError(f"the plan gives no usable object: {error}") from error
    head = "".join(f"# {line}\n" for line in comments)
    return head + str(yaml.safe_dump(made, sort_keys=False, allow_unicode=True))


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
    if any(p.role != "Unified" for p in plan.pools):
        words.append("prefill and decode pools would need fewer GPUs, but this version has Unified ones only")
    return [*words, f"{layout.gpus_per_instance} GPUs per instance"]


def _pool_fields(plan: Plan, layout: LayoutReport) -> dict[str, Any]:
    values = layout.parallelism.model_dump(by_alias=True)
    defaults = Parallelism().model_dump(by_alias=True)
    # `tensor` is always said: it is what the plan is about
    parallelism = {k: v for k, v in values.items() if k in defaults and (v != defaults[k] or k == "tensor")}
    replicas = plan.chosen.instances if plan.chosen and plan.chosen.parallelism == layout.parallelism else None
    return {"parallelism": parallelism} | ({"replicas": replicas} if replicas else {})


def _with_pool(spec: Object, pool: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    pools = [dict(p) for p in spec.get("pools") or [{"name": pool}]]
    for entry in pools:
        if entry.get("name", "default") == pool:
            entry.update(fields)
    return {**spec, "pools": pools}


def _new(plan: Plan, address: str) -> tuple[dict[str, Any], list[str]]:
    """(object, what the user has to look at)."""
    base = re.sub(r"[^a-z0-9]+", "-", address.rstrip("/").rpartition("/")[2].lower().removesuffix(".json")).strip("-")
    name = re.sub(r"^[^a-z]+", "", base)[:50].strip("-") or "model"
    uri, comments = address, []
    if not address.startswith(("hf://", "pvc://")):
        uri = f"pvc://{CLAIM}/{name}"
        comments.append("Set spec.model.uri to the claim and path where the model's files are.")
    elif address.startswith("hf://"):
        comments.append("Engines of this version read pvc:// only: set spec.model.uri to a claim with these files.")
    spec: dict[str, Any] = {"model": {"uri": uri}}
    if plan.context is not None:
        spec["engine"] = {"args": [f"--max-model-len={plan.context}"]}
    if not re.match(r"\d", plan.accelerator.name):
        spec["accelerator"] = {"profileRef": {"name": plan.accelerator.name}}
    return {
        "apiVersion": names.API_VERSION,
        "kind": names.SERVICE_KIND,
        "metadata": {"name": name},
        "spec": spec,
    }, comments
