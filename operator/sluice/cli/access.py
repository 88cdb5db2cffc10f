"""The caller's cluster: kubeconfig, context and namespace as kubectl finds them, and what is read from there.

Errors of the cluster become three classes here: `UnreachableError` (nobody answers, or does not let us in),
`RefusedError` (an answer that says no) and `MissingError` (no such object). Each text names the object and what to do.
"""

import asyncio
import os
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import yaml
from kubernetes.aio import config as kube_config
from pydantic import ValidationError

from sluice import __version__
from sluice.api import names
from sluice.api.agent import AgentState
from sluice.cli.errors import CliError
from sluice.runtime import kinds, kube
from sluice.runtime.errors import Expired, Forbidden, KubeError, NotFound, Throttled, Unauthorized, Unavailable
from sluice.runtime.kinds import Kind

Object = dict[str, Any]

CALLER: Final = kube.Caller(f"kubectl-sluice/{__version__}", "kubectl-sluice")
POD_NAMESPACE_FILE: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
AGENTS_S: Final = 2.0
"""Longest that all agents together are waited for."""
MAX_AGENTS: Final = 64
"""Instances asked through the API server; more would be a burden on it, and nobody reads as many rows."""
ENGINES: Final = f"{kinds.OURS},{names.LABEL_COMPONENT}={names.COMPONENT_ENGINE}"
EVENT: Final = Kind("Event", "", "v1", "events")
"""Events by their core name: what the built-in role `view` lets people read."""


class RefusedError(CliError):
    """The API server, or this command, says no."""


class MissingError(CliError):
    """No such object."""


class UnreachableError(CliError):
    """No configuration, no connection, no answer, or no valid credentials."""

    exit_code = 3


@dataclass(frozen=True, slots=True)
class Place:
    """Where to look."""

    kubeconfig: Path | None
    """One or several files joined as in $KUBECONFIG; None: the pod's own ServiceAccount."""
    context: str | None
    namespace: str


def find_place(
    kubeconfig: str | None, context: str | None, namespace: str | None, environment: Mapping[str, str]
) -> Place:
    """`--kubeconfig`, else $KUBECONFIG, else ~/.kube/config, else the pod that this runs in.

    Raises:
        UnreachableError: there is no configuration, it can't be read, or it lacks the context.
    """
    home = Path(environment.get("HOME") or str(Path.home()))
    given = kubeconfig or environment.get("KUBECONFIG") or str(home / ".kube" / "config")
    files = [Path(part).expanduser() for part in given.split(os.pathsep) if part]
    if not any(file.exists() for file in files):
        if kubeconfig is None and "KUBERNETES_SERVICE_HOST" in environment:
            return Place(None, None, namespace or _own_namespace())
        raise UnreachableError(f"no kubeconfig at {given}: name one with --kubeconfig or $KUBECONFIG")
    try:
        contexts, active = kube_config.list_kube_config_contexts(given)  # type: ignore[no-untyped-call]  # kubernetes.aio is untyped
    except (kube_config.ConfigException, OSError, yaml.YAMLError, KeyError, TypeError, AttributeError) as error:
        raise UnreachableError(f"kubeconfig {given} can't be used: {error}") from error
    wanted = context or active["name"]
    found = next((entry for entry in contexts if entry.get("name") == wanted), None)
    if found is None:
        known = ", ".join(sorted(str(entry.get("name")) for entry in contexts)) or "none"
        raise UnreachableError(f"kubeconfig {given} has no context {wanted!r}; it has: {known}")
    own = (found.get("context") or {}).get("namespace")
    return Place(Path(given), context, namespace or str(own or "default"))


def _own_namespace() -> str:
    try:
        return POD_NAMESPACE_FILE.read_text().strip() or "default"
    except OSError:
        return "default"


class Access:
    """Reads and the two writes, with errors for people."""

    def __init__(self, client: kube.Client, place: Place) -> None:
        self._client = client
        self.place = place

    async def service(self, namespace: str, name: str) -> Object:
        """Raises: MissingError, RefusedError, UnreachableError."""
        try:
            return await self._client.get(kinds.INFERENCE_SERVICE, namespace, name)
        except NotFound as error:
            served = await self._is_served()
            raise MissingError(_not_found(namespace, name) if served else _NOT_INSTALLED) from error
        except KubeError as error:
            raise explain_error(error, self._client.server) from error

    async def services(self, namespace: str) -> list[Object]:
        """All of a namespace, "" for all. Raises: MissingError (no Sluice there), RefusedError, UnreachableError."""
        try:
            found = (await self._client.list(kinds.INFERENCE_SERVICE, namespace)).items
        except NotFound as error:
            raise MissingError(_NOT_INSTALLED) from error
        except KubeError as error:
            raise explain_error(error, self._client.server) from error
        return sorted(found, key=lambda s: (s["metadata"]["namespace"], s["metadata"]["name"]))

    async def engine_pods(self, namespace: str, *, service_uid: str = "", node: str = "") -> list[Object]:
        """Pods labelled as engines, of one service or on one node. Raises: RefusedError, UnreachableError."""
        selector = f"{ENGINES},{names.LABEL_SERVICE_UID}={service_uid}" if service_uid else ENGINES
        fields = f"spec.nodeName={node}" if node else ""
        try:
            return (await self._client.list(kinds.POD, namespace, selector=selector, field_selector=fields)).items
        except KubeError as error:
            raise explain_error(error, self._client.server) from error

    async def pod(self, namespace: str, name: str) -> Object | None:
        """None if there is none. Raises: RefusedError, UnreachableError."""
        return await self._get(kinds.POD, namespace, name)

    async def node(self, name: str) -> Object | None:
        """None if there is none. Raises: RefusedError, UnreachableError."""
        return await self._get(kinds.NODE, "", name)

    async def events(self, service: Object) -> list[Object] | None:
        """Events about the service; None if the caller may not read them. Raises: RefusedError, UnreachableError."""
        meta = service["metadata"]
        selector = f"involvedObject.uid={meta['uid']}"
        try:
            return (await self._client.list(EVENT, meta["namespace"], field_selector=selector)).items
        except Forbidden:
            return None
        except KubeError as error:
            raise explain_error(error, self._client.server) from error

    async def agents(self, pods: Iterable[Object]) -> tuple[dict[str, AgentState], str]:
        """(pod UID to its agent's word, why some did not answer).

        Asked through the API server, which needs `get pods/proxy` and a network that lets it reach pods; most callers
        have neither, so nothing depends on the answer.
        """
        running = [p for p in pods if (p.get("status") or {}).get("phase") == "Running"][:MAX_AGENTS]
        said = await asyncio.gather(*(self._ask_agent(pod) for pod in running))
        states = {
            pod["metadata"]["uid"]: word
            for pod, word in zip(running, said, strict=True)
            if isinstance(word, AgentState)
        }
        return states, next((word for word in said if isinstance(word, str)), "")

    async def _ask_agent(self, pod: Object) -> AgentState | str:
        meta = pod["metadata"]
        try:
            async with asyncio.timeout(AGENTS_S):
                answer = await self._client.ask_pod(meta["namespace"], meta["name"], names.PORT_AGENT, "state")
            return AgentState.model_validate(answer)
        except Forbidden:
            return "you lack the right `get pods/proxy`"
        except (TimeoutError, ValidationError, KubeError):
            return "the API server does not reach the agents"

    async def annotate_pod(self, pod: Object, name: str, value: str | None) -> None:
        """Set an annotation, or remove it. Raises: MissingError (the pod is gone), RefusedError, UnreachableError."""
        meta = pod["metadata"]
        patch = {"metadata": {"annotations": {name: value}}}
        try:
            await self._client.patch(kinds.POD, meta["namespace"], meta["name"], patch, uid=meta["uid"])
        except KubeError as error:
            raise explain_error(error, self._client.server) from error

    async def cordon(self, node: Object) -> None:
        """Raises: MissingError, RefusedError, UnreachableError."""
        meta = node["metadata"]
        try:
            await self._client.patch(kinds.NODE, "", meta["name"], {"spec": {"unschedulable": True}}, uid=meta["uid"])
        except KubeError as error:
            raise explain_error(error, self._client.server) from error

    async def _get(self, kind: Kind, namespace: str, name: str) -> Object | None:
        try:
            return await self._client.get(kind, namespace, name)
        except NotFound:
            return None
        except KubeError as error:
            raise explain_error(error, self._client.server) from error

    async def _is_served(self) -> bool:
        try:
            return names.SERVICE_PLURAL in await self._client.api_resources(names.GROUP, names.VERSION)
        except KubeError as error:
            raise explain_error(error, self._client.server) from error


@asynccontextmanager
async def connect(place: Place) -> AsyncIterator[Access]:
    """Raises: UnreachableError, the credentials can't be loaded."""
    async with AsyncExitStack() as stack:
        try:
            client = await stack.enter_async_context(kube.connect(place.kubeconfig, place.context, caller=CALLER))
        except (kube_config.ConfigException, OSError, yaml.YAMLError, KeyError, TypeError) as error:
            where = place.kubeconfig or "the pod's ServiceAccount"
            raise UnreachableError(f"{where} can't be used: {error}") from error
        yield Access(client, place)


_NOT_INSTALLED: Final = (
    f"the cluster does not serve {names.SERVICE_PLURAL}.{names.GROUP}: install Sluice (charts sluice-crds and sluice), "
    "or choose another cluster with --context"
)


def _not_found(namespace: str, name: str) -> str:
    return f"InferenceService {name} not found in namespace {namespace}; list them with: kubectl sluice status -A"


def explain_error(error: KubeError, server: str) -> CliError:
    """The API server's answer, or the lack of one, as a line for people."""
    what = f"{error.verb} {error.resource}" + (f" {error.name}" if error.name else "")
    match error:
        case Unauthorized():
            return UnreachableError(f"{server} does not know you (401): log in again; {what} was refused")
        case Throttled() | Expired():
            return RefusedError(f"{what}: the API server is too busy ({error.message}); try again")
        case Unavailable() if error.status == 0:
            return UnreachableError(f"can't reach {server}: {error.message}; check the network and --context")
        case Unavailable():
            return UnreachableError(f"{server} failed on {what} ({error.status} {error.reason}): {error.message}")
        case Forbidden():
            return RefusedError(f"you may not {what}: {error.message}; docs/cli.md lists the rights each command needs")
        case NotFound():
            return MissingError(f"{error.resource} {error.name} is gone")
    return RefusedError(f"{what}: {error.message}")
