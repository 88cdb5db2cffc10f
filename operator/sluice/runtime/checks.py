"""What must hold before the operator may work: our kinds are served, their schema is new enough, we have the rights.

A missing right found here is one clear sentence in the log and in `/readyz`; found later it would be a failing watch
(which ends the process) or a refused action in the middle of a pass.
"""

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from sluice.api import names
from sluice.api.kinds import KINDS, SCHEMA_VERSION
from sluice.runtime import kinds
from sluice.runtime.errors import Forbidden, NotFound
from sluice.runtime.kinds import Kind
from sluice.runtime.kube import Client

log = logging.getLogger(__name__)

_CHILDREN: Final = (
    kinds.SERVICE,
    kinds.CONFIG_MAP,
    kinds.DEPLOYMENT,
    kinds.POD_DISRUPTION_BUDGET,
    kinds.NETWORK_POLICY,
)


@dataclass(frozen=True, slots=True)
class Right:
    """One permission that the operator needs."""

    verb: str
    kind: Kind
    subresource: str = ""

    def __str__(self) -> str:
        return f"{self.verb} {self.kind.resource}{'/' + self.subresource if self.subresource else ''}"


def needed_rights() -> tuple[Right, ...]:
    """Everything the runtime does, but what `Kind.optional` may lack."""
    reads = [Right(verb, kind) for kind in kinds.WATCHED if not kind.optional for verb in ("get", "list", "watch")]
    writes = [Right(verb, kind) for kind in _CHILDREN for verb in ("create", "patch", "delete")]
    return (
        *reads,
        *writes,
        *(Right(verb, kinds.POD) for verb in ("create", "patch", "delete")),
        *(Right(verb, kinds.CONTROLLER_REVISION) for verb in ("create", "delete")),
        Right("patch", kinds.POD, "status"),
        Right("patch", kinds.INFERENCE_SERVICE, "status"),
    )


@dataclass(frozen=True, slots=True)
class Findings:
    problems: tuple[str, ...]
    """Sentences; empty: work may begin."""
    watchable: tuple[Kind, ...]
    """Kinds to list and watch; optional ones that are not served or not readable are missing."""


async def check(client: Client, namespaces: Sequence[str] = ()) -> Findings:
    """Ask the API server. Raises: KubeError if it does not answer."""
    problems = await _schema_problems(client)
    missing = await _missing(client, needed_rights(), tuple(namespaces) or ("",))
    if missing:
        problems.append(f"missing permissions: {'; '.join(missing)} (ClusterRole or Role of the operator)")
    watchable = [kind for kind in kinds.WATCHED if not kind.optional or await _is_readable(client, kind)]
    return Findings(tuple(problems), tuple(watchable))


async def _schema_problems(client: Client) -> list[str]:
    served = await client.api_resources(names.GROUP, names.VERSION)
    problems = []
    for kind in KINDS:
        if kind.plural not in served:
            if kind.kind == names.SERVICE_KIND:
                problems.append(f"{kind.crd_name} ({names.VERSION}) is not served: install the CRDs of this release")
            continue
        try:
            crd = await client.get(kinds.CRD, "", kind.crd_name)
        except (Forbidden, NotFound):
            log.info("the schema version of %s is not readable and not checked", kind.crd_name)
            continue
        found = (crd["metadata"].get("annotations") or {}).get(names.ANNOTATION_SCHEMA_VERSION, "none")
        if not found.isdigit() or int(found) < SCHEMA_VERSION:
            problems.append(
                f"{kind.crd_name} has schema version {found}, this operator needs {SCHEMA_VERSION}: "
                "upgrade the CRDs before the operator"
            )
    return problems


async def _missing(client: Client, rights: Sequence[Right], namespaces: Sequence[str]) -> list[str]:
    async def ask(right: Right, namespace: str) -> str:
        if await client.is_allowed(right.verb, right.kind, namespace, right.subresource):
            return ""
        return f"{right} in {namespace}" if namespace else str(right)

    answers = await asyncio.gather(*(ask(right, namespace) for namespace in namespaces for right in rights))
    return [answer for answer in answers if answer]


async def _is_readable(client: Client, kind: Kind) -> bool:
    if kind.plural not in await client.api_resources(kind.group, kind.version):
        log.warning("%s is not served by this cluster: services that need it say so", kind.resource)
        return False
    for verb in ("list", "watch"):
        if not await client.is_allowed(verb, kind):
            log.warning("not allowed to %s %s: services that need it say so", verb, kind.resource)
            return False
    return True
