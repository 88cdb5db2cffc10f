"""What we know of the cluster: watched objects, indexed by owner, healed by LIST, ahead of the watch by our own writes.

Why not kopf's indices: 4,000 pods cost them 68 CPU seconds at start. Why not expectation counters: every write's
response goes through `apply`, so the next pass sees it before the watch tells.

Invariants
- Entries are immutable. Pods and nodes are frozen facts; other kinds are dicts without `managedFields` (children also
  without `status`, which no plan looks at), read-only.
- An older version never replaces a newer one of the same UID (resourceVersions of one resource are comparable
  integers), and an object known to be gone does not come back.
- A LIST heals in both directions, but never takes away what is newer than the LIST (a LIST from the API server's cache
  may be older than the watch).
- A child belongs to the InferenceService that is its controlling owner by UID; labels alone make nobody's object ours.
  Router pods are owned by a ReplicaSet, so for them the label counts.
"""

import logging
import math
import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

from sluice.api import names
from sluice.api.conditions import ConditionType, Reason
from sluice.plan.facts import node_facts, pod_facts
from sluice.plan.snapshot import NodeFacts, PodFacts
from sluice.runtime import kinds
from sluice.runtime.kinds import Kind
from sluice.runtime.queue import Key

log = logging.getLogger(__name__)

MAX_TOMBSTONES: Final = 20_000
"""Oldest are dropped; one is needed only as long as a late event or an old LIST may still name the object."""
GONE: Final = math.inf
"""Version of the tombstone of an object that the API server itself said is gone: its UID never returns."""
_INTERN_UP_TO: Final = 64
_USER_KINDS: Final = (names.SERVICE_KIND, names.PROFILE_KIND)


@dataclass(frozen=True, slots=True)
class Entry:
    kind: str
    namespace: str
    name: str
    uid: str
    version: float
    """resourceVersion as a number; 0 if it was not numeric."""
    owner: str
    """UID of the InferenceService it belongs to; "" for kinds without one."""
    value: Any
    """PodFacts, NodeFacts or the dict."""


@dataclass(frozen=True, slots=True)
class View:
    """Everything stored about one InferenceService."""

    service: Mapping[str, Any]
    pods: tuple[PodFacts, ...]
    children: Mapping[tuple[str, str], Mapping[str, Any]]
    profiles: Mapping[str, Mapping[str, Any]]
    nodes: Mapping[str, NodeFacts]
    profiles_known: bool
    nodes_known: bool


class Store:
    """Single-threaded; all methods are synchronous and cheap."""

    def __init__(self) -> None:
        self._entries: dict[str, dict[str, Entry]] = {kind.name: {} for kind in kinds.WATCHED}
        self._by_owner: dict[str, dict[str, Entry]] = {}
        self._service_uids: dict[tuple[str, str], str] = {}
        self._profiles: Mapping[str, Mapping[str, Any]] = MappingProxyType({})
        self._nodes: dict[str, NodeFacts] = {}
        self._not_ready: set[str] = set()
        self._tombstones: dict[str, float] = {}
        self._absent: set[str] = set()
        self._rolling: set[str] = set()
        """UIDs of services whose status says that a rollout is under way."""
        self._warned_of_versions = False
        self.healed: Counter[str] = Counter()
        """Kind to changes that only a LIST told us of."""

    # Reading

    def view(self, key: Key) -> View | None:
        """All about the InferenceService of this key; None if it is gone. O(its children)."""
        service = self._entries[names.SERVICE_KIND].get(self._service_uids.get(key[1:], ""))
        if service is None:
            return None
        pods: list[PodFacts] = []
        children: dict[tuple[str, str], Mapping[str, Any]] = {}
        for entry in self._by_owner.get(service.uid, {}).values():
            if entry.namespace != service.namespace:
                continue  # labels and owner references can be forged; no child lives in another namespace
            if isinstance(entry.value, PodFacts):
                pods.append(entry.value)
            else:
                children[entry.kind, entry.name] = entry.value
        pods.sort(key=lambda pod: (pod.created_at, pod.name))
        nodes = {} if self._is_cut_off() else {p.node: self._nodes[p.node] for p in pods if p.node in self._nodes}
        profiles_known = names.PROFILE_KIND not in self._absent
        nodes_known = bool(self._nodes) and kinds.NODE.name not in self._absent
        return View(service.value, tuple(pods), children, self._profiles, nodes, profiles_known, nodes_known)

    def find(self, kind: Kind, namespace: str, name: str, owner: str) -> Entry | None:
        """The child of this owner at this name."""
        for entry in self._by_owner.get(owner, {}).values():
            if entry.kind == kind.name and entry.name == name and entry.namespace == namespace:
                return entry
        return None

    def version(self, kind: Kind, uid: str) -> float | None:
        """resourceVersion of the stored object as a number; None if it is not known."""
        entry = self._entries[kind.name].get(uid)
        return entry.version if entry else None

    def services(self) -> list[Key]:
        """Keys of all InferenceServices."""
        return [(names.SERVICE_KIND, *pair) for pair in self._service_uids]

    def rolling(self, *, without: str) -> int:
        """InferenceServices with a rollout under way, the one with this UID left out."""
        return len(self._rolling) - (without in self._rolling)

    def count(self, kind: Kind) -> int:
        return len(self._entries[kind.name])

    # Writing

    def apply(self, event: str | None, obj: Mapping[str, Any]) -> set[Key]:
        """Take in a watch event (`ADDED`, `MODIFIED`, `DELETED`; None: found by a first LIST) or a write's response.

        Returns the keys whose view changed; empty for what is old, known, or nobody's.
        """
        meta = obj["metadata"]
        uid, version = meta["uid"], self._version(meta)
        stored = self._entries[obj["kind"]].get(uid)
        tombstone = self._tombstones.get(uid, -1.0)
        if tombstone == GONE or 0 < version <= max(stored.version if stored else -1.0, tombstone):
            return set()
        if event == "DELETED":
            self._bury(uid, version)
            return self._remove(stored) if stored else set()
        return self._put(_entry(obj, version), stored)

    def found(self, obj: Mapping[str, Any]) -> set[Key]:
        """Take in what a GET has just shown. A watch also says DELETED of an object that only left its selector (a
        changed label), so its tombstone proves nothing against a GET."""
        uid = obj["metadata"]["uid"]
        if self._tombstones.get(uid, GONE) != GONE:
            del self._tombstones[uid]
        return self.apply("MODIFIED", obj)

    def forget(self, kind: Kind, uid: str) -> set[Key]:
        """The API server said that the object with this UID is gone (404, another UID, a `Status` on delete)."""
        self._bury(uid, GONE)
        stored = self._entries[kind.name].get(uid)
        return self._remove(stored) if stored else set()

    def replace(
        self, kind: Kind, items: Iterable[Mapping[str, Any]], list_version: str, namespace: str = ""
    ) -> set[Key]:
        """Heal from a whole LIST of one kind (of one namespace, if given); returns the keys whose view changed."""
        listed: set[str] = set()
        changed = self.merge(kind, items, listed)
        return changed | self.prune(kind, listed, list_version, namespace)

    def merge(self, kind: Kind, page: Iterable[Mapping[str, Any]], listed: set[str]) -> set[Key]:
        """Take in one page of a LIST; adds its UIDs to `listed`."""
        changed: set[Key] = set()
        for item in page:
            listed.add(item["metadata"]["uid"])
            keys = self.apply(None, item)
            changed |= keys
            self.healed[kind.name] += bool(keys)
        return changed

    def prune(self, kind: Kind, listed: set[str], list_version: str, namespace: str = "") -> set[Key]:
        """After the last page: drop what the LIST lacks, unless it is newer than the LIST."""
        changed: set[Key] = set()
        newest = float(list_version) if list_version.isdigit() else 0.0
        for entry in list(self._entries[kind.name].values()):
            if entry.uid in listed or entry.version > newest or (namespace and entry.namespace != namespace):
                continue
            self._bury(entry.uid, max(entry.version, newest))
            changed |= self._remove(entry)
            self.healed[kind.name] += 1
        if kind.name in self._absent:
            self._absent.discard(kind.name)
            changed.update(self.services())
        return changed

    def mark_absent(self, kind: Kind) -> set[Key]:
        """The kind is not served or not readable: its absence proves nothing. Entries stay as last known."""
        if kind.name in self._absent:
            return set()
        self._absent.add(kind.name)
        return set(self.services())

    def _is_cut_off(self) -> bool:
        """So many nodes are not ready that the fault is more likely between them and the control plane than in them.

        The rule of Kubernetes' own node controller, which stops evicting then: all nodes, or at least 55 % and more
        than two. Nodes then prove nothing, or a partition would delete every instance that still serves.
        """
        lost = len(self._not_ready)
        return lost > 0 and (lost == len(self._nodes) or (lost > 2 and lost >= 0.55 * len(self._nodes)))

    # Inside

    def _put(self, entry: Entry, old: Entry | None) -> set[Key]:
        keys = self._keys_of(entry) | (self._keys_of(old) if old and old.owner != entry.owner else set())
        unchanged = old is not None and old.owner == entry.owner and _is_same(entry, old)
        self._entries[entry.kind][entry.uid] = entry
        if old is not None and old.owner and old.owner != entry.owner:
            self._unindex(old)
        if entry.owner:
            self._by_owner.setdefault(entry.owner, {})[entry.uid] = entry
        if entry.kind == names.SERVICE_KIND:
            self._service_uids[entry.namespace, entry.name] = entry.uid
            (self._rolling.add if _is_rolling(entry.value) else self._rolling.discard)(entry.uid)
        elif entry.kind == names.PROFILE_KIND:
            self._profiles = MappingProxyType({**self._profiles, entry.name: entry.value})
        elif entry.kind == kinds.NODE.name:
            self._nodes[entry.name] = entry.value
            (self._not_ready.discard if entry.value.ready is True else self._not_ready.add)(entry.name)
        return set() if unchanged else keys

    def _remove(self, entry: Entry) -> set[Key]:
        keys = self._keys_of(entry)
        del self._entries[entry.kind][entry.uid]
        self._unindex(entry)
        if entry.kind == names.SERVICE_KIND:
            if self._service_uids.get((entry.namespace, entry.name)) == entry.uid:
                del self._service_uids[entry.namespace, entry.name]
            self._rolling.discard(entry.uid)
        elif entry.kind == names.PROFILE_KIND:
            self._profiles = MappingProxyType({k: v for k, v in self._profiles.items() if k != entry.name})
        elif entry.kind == kinds.NODE.name:
            self._nodes.pop(entry.name, None)
            self._not_ready.discard(entry.name)
        return keys

    def _unindex(self, entry: Entry) -> None:
        siblings = self._by_owner.get(entry.owner)
        if siblings is not None:
            siblings.pop(entry.uid, None)
            if not siblings:
                del self._by_owner[entry.owner]

    def _keys_of(self, entry: Entry) -> set[Key]:
        """Services whose view has this entry."""
        if entry.kind == names.SERVICE_KIND:
            return {(names.SERVICE_KIND, entry.namespace, entry.name)}
        if entry.kind == names.PROFILE_KIND:
            return set(self.services())
        if entry.kind == kinds.NODE.name:
            pods = self._entries[kinds.POD.name].values()
            owners = {pod.owner for pod in pods if pod.value.node == entry.name}
        else:
            owners = {entry.owner}
        services = (self._entries[names.SERVICE_KIND].get(owner) for owner in owners)
        return {(names.SERVICE_KIND, service.namespace, service.name) for service in services if service}

    def _bury(self, uid: str, version: float) -> None:
        self._tombstones.pop(uid, None)
        self._tombstones[uid] = version
        if len(self._tombstones) > MAX_TOMBSTONES:
            del self._tombstones[next(iter(self._tombstones))]

    def _version(self, meta: Mapping[str, Any]) -> float:
        text = meta.get("resourceVersion", "")
        if text.isascii() and text.isdigit():
            return float(int(text))
        if not self._warned_of_versions:
            self._warned_of_versions = True
            log.warning("resourceVersion %r is not a number: old and new versions can't be told apart", text)
        return 0.0


def _entry(obj: Mapping[str, Any], version: float) -> Entry:
    meta = obj["metadata"]
    kind = obj["kind"]
    owner = ""
    value: Any
    if kind == kinds.POD.name:
        value = pod_facts(obj)
        owner = _pod_owner(value)
    elif kind == kinds.NODE.name:
        value = node_facts(obj)
    else:
        value = slim(obj)
        if kind not in _USER_KINDS:
            owner = controlling_service(meta)
            value.pop("status", None)
    return Entry(kind, sys.intern(meta.get("namespace", "")), meta["name"], meta["uid"], version, owner, value)


def _is_same(new: Entry, old: Entry) -> bool:
    """A node's heartbeat or a child's new status is nothing that a plan looks at."""
    if isinstance(new.value, NodeFacts):
        return bool(new.value == old.value)
    if isinstance(new.value, PodFacts) or new.kind in _USER_KINDS:
        return False
    return _without_version(new.value) == _without_version(old.value)


def _is_rolling(service: Mapping[str, Any]) -> bool:
    conditions = (service.get("status") or {}).get("conditions") or []
    return any(
        c.get("type") == ConditionType.ROLLOUT_COMPLETE and c.get("reason") == Reason.ROLLING_OUT for c in conditions
    )


def _without_version(obj: Mapping[str, Any]) -> dict[str, Any]:
    return {**obj, "metadata": {k: v for k, v in obj["metadata"].items() if k != "resourceVersion"}}


def controlling_service(meta: Mapping[str, Any]) -> str:
    """UID of the controlling InferenceService, "" without one."""
    for owner in meta.get("ownerReferences") or ():
        if owner.get("controller") and owner.get("kind") == names.SERVICE_KIND:
            return str(owner.get("uid", ""))
    return ""


def _pod_owner(pod: PodFacts) -> str:
    if pod.component == names.COMPONENT_ROUTER:
        return pod.service_uid
    return pod.service_uid if pod.owner_uid == pod.service_uid else ""


def slim(obj: Mapping[str, Any]) -> dict[str, Any]:
    """A copy without `managedFields`, with equal keys and short strings shared: half the memory at 1,000 services."""
    meta = {key: value for key, value in obj["metadata"].items() if key != "managedFields"}
    return _shared_map({**obj, "metadata": meta})


def _shared_map(value: Mapping[str, Any]) -> dict[str, Any]:
    """Leaves are handled in the loop: a call for each would double the time, and this runs for every child's event."""
    copy = {}
    for key, item in value.items():
        kind = type(item)
        if kind is str:
            item = sys.intern(item) if len(item) <= _INTERN_UP_TO else item
        elif kind is dict:
            item = _shared_map(item)
        elif kind is list:
            item = _shared_list(item)
        copy[sys.intern(key)] = item
    return copy


def _shared_list(value: list[Any]) -> list[Any]:
    return [
        _shared_map(item) if type(item) is dict else _shared_list(item) if type(item) is list else item
        for item in value
    ]
