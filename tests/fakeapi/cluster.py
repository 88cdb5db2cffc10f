"""`FakeCluster`: the API server's behaviour in memory, synchronous and deterministic.

What a client can observe is modelled after kube-apiserver 1.36 and proven by the contract suite, which runs on both;
a difference is a bug here. Time is a parameter, UIDs are a counter, nothing happens by itself: garbage collection,
kubelets and controllers are separate steps (`collector`, `tests.played`), so that a test decides their order.

Objects that come out are the stored ones: treat them as frozen. All verbs hold one lock, so the HTTP server's thread
and a test may work on the same cluster. The module is long because every verb goes through the same few steps (look
up, isolate, admit, own, commit, log) and they are read best in one place; the steps' rules are in `admission`,
`ownership` and `storage`.
"""

import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

from tests.fakeapi import admission, disruption, errors, listkeys, ownership, patching, selectors
from tests.fakeapi.errors import ApiError, JsonObject
from tests.fakeapi.ownership import Ownership
from tests.fakeapi.resources import Registry, Resource
from tests.fakeapi.storage import Storage, Watch

MERGE_PATCH = "application/merge-patch+json"
JSON_PATCH = "application/json-patch+json"
STRATEGIC_PATCH = "application/strategic-merge-patch+json"
APPLY_PATCH = "application/apply-patch+yaml"

NAMESPACES = ("default", "kube-system", "sluice-system")


@dataclass(frozen=True, slots=True)
class Options:
    """Query options of a write."""

    manager: str = "test"
    dry_run: bool = False
    strict: bool = False
    """`fieldValidation=Strict`: unknown fields are refused instead of pruned."""
    force: bool = False
    """Apply only: take fields that other managers hold."""


@dataclass(frozen=True, slots=True)
class Write:
    """One line of the audit log."""

    verb: str
    plural: str
    subresource: str
    namespace: str
    name: str
    manager: str
    changed: bool
    """False: the request changed nothing (same content, dry run)."""
    rv: int


@dataclass(frozen=True, slots=True)
class Page:
    items: list[JsonObject]
    rv: int
    next_token: str = ""
    remaining: int = 0


@dataclass(slots=True)
class _Meta:
    """What the API server keeps beside an object."""

    owners: tuple[Ownership, ...] = ()


@dataclass(eq=False, slots=True)
class FakeCluster:
    clock: Callable[[], float] = time.time
    """Seconds since the epoch."""
    track_owners: bool = True
    """False leaves out managedFields and with them conflicts and removal by apply (the simulation needs neither)."""
    registry: Registry = field(default_factory=Registry)
    storage: Storage = field(default_factory=Storage)
    audit: list[Write] = field(default_factory=list)
    forbidden: set[tuple[str, str]] = field(default_factory=set)
    """(verb, plural) that the client may not do; `*` is any verb."""
    lock: threading.RLock = field(default_factory=threading.RLock)
    _meta: dict[str, _Meta] = field(default_factory=dict)
    _pages: dict[str, tuple[int, list[JsonObject]]] = field(default_factory=dict)
    _serial: int = 0

    def __post_init__(self) -> None:
        self.storage.rv = 1  # etcd's first revision; no object ever carries it
        for name in NAMESPACES:
            self.create(self.resource("", "namespaces"), "", {"metadata": {"name": name}})
        self.audit.clear()

    # Kinds

    def resource(self, group: str, plural: str) -> Resource:
        """Raises: ApiError 404, the kind is not served."""
        found = self.registry.find(group, plural)
        if found is None:
            raise errors.path_not_found()
        return found

    def install_crd(self, crd: JsonObject) -> Resource:
        """Create a CustomResourceDefinition and serve its kind at once."""
        self.create(self.resource("apiextensions.k8s.io", "customresourcedefinitions"), "", crd)
        return self.resource(crd["spec"]["group"], crd["spec"]["names"]["plural"])

    # Reading

    def get(self, resource: Resource, namespace: str, name: str) -> JsonObject:
        with self.lock:
            self._authorize("get", resource)
            found = self.storage.get(resource, (namespace, name))
            if found is None:
                raise errors.not_found(resource.plural, resource.group, name)
            return found

    def list_page(
        self,
        resource: Resource,
        namespace: str = "",
        *,
        labels: str = "",
        fields: str = "",
        limit: int = 0,
        token: str = "",
    ) -> Page:
        """One page. Raises: ApiError 410, the continue token was expired by `expire_tokens`."""
        with self.lock:
            self._authorize("list", resource)
            if token:
                if token not in self._pages:
                    raise errors.expired("The provided continue parameter is too old")
                rv, rest = self._pages.pop(token)
            else:
                picked, wanted = selectors.label_selector(labels), selectors.field_selector(fields)
                rv = self.storage.rv
                rest = [o for o in self.storage.all(resource, namespace) if picked(o) and wanted(o)]
            if not limit or len(rest) <= limit:
                return Page(rest, rv)
            self._serial += 1
            following = f"page-{self._serial}"
            self._pages[following] = (rv, rest[limit:])
            return Page(rest[:limit], rv, following, len(rest) - limit)

    def expire_tokens(self) -> None:
        self._pages.clear()

    def watch(
        self,
        resource: Resource,
        namespace: str = "",
        *,
        labels: str = "",
        fields: str = "",
        from_rv: int | None = None,
        notify: Callable[[], None] = lambda: None,
    ) -> Watch:
        """Raises: ApiError 410, `from_rv` is older than the history kept."""
        with self.lock:
            self._authorize("watch", resource)
            picked, wanted = selectors.label_selector(labels), selectors.field_selector(fields)
            watch = Watch(resource, namespace, lambda obj: picked(obj) and wanted(obj), notify)
            self.storage.open(watch, from_rv)
            return watch

    # Writing

    def create(self, resource: Resource, namespace: str, body: JsonObject, options: Options = Options()) -> JsonObject:
        """Raises: ApiError 409 AlreadyExists, 404 (namespace), 403 (terminating namespace), 422."""
        with self.lock:
            self._authorize("create", resource)
            if resource.kind == "SelfSubjectAccessReview":
                return self._access_review(body)
            metadata = dict(body.get("metadata") or {})
            if not metadata.get("name") and metadata.get("generateName"):
                self._serial += 1
                metadata["name"] = f"{metadata.pop('generateName')}{self._serial:05x}"
            if not metadata.get("name"):
                raise errors.invalid(resource.kind, "", [("metadata.name", "Required value: name is required")])
            body = patching.copy_json({**body, "metadata": metadata})
            if resource.subresources & {"status"}:
                body.pop("status", None)
            if self.storage.get(resource, (namespace, metadata["name"])) is not None:
                raise errors.already_exists(resource.plural, resource.group, metadata["name"])
            return self._insert("create", resource, namespace, body, options)

    def update(
        self,
        resource: Resource,
        namespace: str,
        name: str,
        body: JsonObject,
        *,
        subresource: str = "",
        options: Options = Options(),
    ) -> JsonObject:
        """PUT. Raises: ApiError 404, 409 (resourceVersion or UID differ), 422."""
        with self.lock:
            self._authorize("update", resource)
            old = self._existing(resource, namespace, name)
            uid = (body.get("metadata") or {}).get("uid")
            if uid and uid != old["metadata"]["uid"]:
                raise errors.conflict(resource.plural, name, "Precondition failed: UID in precondition differs")
            return self._replace("update", resource, old, patching.copy_json(body), subresource, options)

    def patch(
        self,
        resource: Resource,
        namespace: str,
        name: str,
        body: Any,
        *,
        patch_type: str = MERGE_PATCH,
        subresource: str = "",
        options: Options = Options(),
    ) -> JsonObject:
        """Raises: ApiError 404, 409 (resourceVersion), 422 (another UID, failed test), 415, 500 (apply: schema)."""
        with self.lock:
            self._authorize("patch", resource)
            if patch_type == APPLY_PATCH:
                return self._apply(resource, namespace, name, body, subresource, options)
            old = self._existing(resource, namespace, name)
            keys = self._keys(resource)
            match patch_type:
                case "application/merge-patch+json":
                    new = patching.merge_patch(old, body)
                case "application/json-patch+json":
                    new = patching.json_patch(old, body)
                case "application/strategic-merge-patch+json" if not resource.is_custom:
                    new = patching.strategic_merge(old, body, keys)
                case _:
                    raise ApiError(415, "UnsupportedMediaType", f"the body of the request was in an unknown format - "
                                   f"accepted media types do not include {patch_type}")  # fmt: skip
            if new["metadata"].get("uid") != old["metadata"]["uid"]:
                raise errors.invalid(resource.kind, name, [("metadata.uid", "Invalid value: field is immutable")])
            return self._replace("patch", resource, old, new, subresource, options)

    def delete(
        self,
        resource: Resource,
        namespace: str,
        name: str,
        body: JsonObject | None = None,
        options: Options = Options(),
    ) -> tuple[JsonObject, bool]:
        """(object, whether it is gone already). Raises: ApiError 404, 409 (preconditions)."""
        with self.lock:
            self._authorize("delete", resource)
            old = self._existing(resource, namespace, name)
            wanted = body or {}
            admission.check_preconditions(resource, old, wanted.get("preconditions") or {})
            if options.dry_run:
                return old, True
            grace = admission.grace_s(resource, old, wanted.get("gracePeriodSeconds"))
            finalizers = admission.finalizers_for(old, wanted.get("propagationPolicy"))
            if not finalizers and not grace:
                last = self._remove(resource, old)
                self._log("delete", resource, "", old, options, changed=True)
                return last, True
            metadata = {**old["metadata"], "finalizers": finalizers}
            if not finalizers:
                metadata.pop("finalizers")
            before = old["metadata"].get("deletionGracePeriodSeconds")
            if "deletionTimestamp" not in metadata or (before or 0) > grace:
                metadata["deletionTimestamp"] = _rfc3339(self.clock() + grace)
                metadata["deletionGracePeriodSeconds"] = grace
            changed = metadata != old["metadata"]
            if changed and resource.has_generation:
                metadata["generation"] = old["metadata"].get("generation", 0) + 1
            new = self._store(resource, {**old, "metadata": metadata}) if changed else old
            self._log("delete", resource, "", new, options, changed=changed)
            return new, False

    def evict(self, namespace: str, name: str, body: JsonObject, options: Options = Options()) -> None:
        """Raises: ApiError 429 (a PodDisruptionBudget allows none), 404, 409."""
        with self.lock:
            pods, budgets = self.resource("", "pods"), self.resource("policy", "poddisruptionbudgets")
            pod = self._existing(pods, namespace, name)
            disruption.check(pod, self.storage.all(pods, namespace), self.storage.all(budgets, namespace))
            condition = {"type": "DisruptionTarget", "status": "True", "reason": "EvictionByEvictionAPI"}
            server = replace(options, manager="apiserver")
            status = {"status": {"conditions": [condition]}}
            self.patch(pods, namespace, name, status, patch_type=STRATEGIC_PATCH, subresource="status", options=server)
            self.delete(pods, namespace, name, body.get("deleteOptions"), options)

    # For tests

    def writes(self, *, since: int = 0, manager: str | None = None, changed: bool = True) -> list[Write]:
        """Audit entries from position `since` on (`len(cluster.audit)` marks one); only real changes by default."""
        entries = self.audit[since:]
        return [w for w in entries if (w.changed or not changed) and manager in (None, w.manager)]

    def objects(self, plural: str, group: str = "", namespace: str = "") -> list[JsonObject]:
        with self.lock:
            return list(self.storage.all(self.resource(group, plural), namespace))

    # Inside

    def _authorize(self, verb: str, resource: Resource) -> None:
        if (verb, resource.plural) in self.forbidden or ("*", resource.plural) in self.forbidden:
            what = f"{resource.plural}.{resource.group}" if resource.group else resource.plural
            message = f'{what} is forbidden: User "test" cannot {verb} resource "{resource.plural}"'
            raise ApiError(403, "Forbidden", message, details={"kind": resource.plural})

    def _access_review(self, body: JsonObject) -> JsonObject:
        wanted = body["spec"]["resourceAttributes"]
        denied = {(wanted["verb"], wanted["resource"]), ("*", wanted["resource"])} & self.forbidden
        return {**body, "metadata": {}, "status": {"allowed": not denied}}

    def _existing(self, resource: Resource, namespace: str, name: str) -> JsonObject:
        found = self.storage.get(resource, (namespace, name))
        if found is None:
            raise errors.not_found(resource.plural, resource.group, name)
        return found

    def _keys(self, resource: Resource) -> listkeys.KeyFinder:
        return listkeys.for_schema(resource.schema) if resource.schema else listkeys.for_built_in

    def _insert(
        self, verb: str, resource: Resource, namespace: str, body: JsonObject, options: Options, subresource: str = ""
    ) -> JsonObject:
        self._check_namespace(resource, namespace)
        self._serial += 1
        metadata = {k: v for k, v in body["metadata"].items() if k not in (*admission.SERVER_FIELDS, "managedFields")}
        metadata |= {"uid": f"00000000-0000-4000-8000-{self._serial:012d}", "creationTimestamp": self._now()}
        metadata.pop("resourceVersion", None)
        if resource.namespaced:
            metadata["namespace"] = namespace
        if resource.has_generation:
            metadata["generation"] = 1
        new = {"apiVersion": resource.api_version, "kind": resource.kind, **body, "metadata": metadata}
        new = admission.admit(resource, None, new, strict=options.strict, serial=self._serial)
        if options.dry_run:
            self._log(verb, resource, subresource, new, options, changed=False)
            return new
        if self.track_owners and verb != "apply":
            self._own_update(resource, {}, new, "", options)
        stored = self._store(resource, new)
        if resource.kind == "CustomResourceDefinition":
            self.registry.add_crd(stored)
        self._log(verb, resource, subresource, stored, options, changed=True)
        return stored

    def _check_namespace(self, resource: Resource, namespace: str) -> None:
        if not resource.namespaced:
            return
        home = self.storage.get(self.resource("", "namespaces"), ("", namespace))
        if home is None:
            raise errors.not_found("namespaces", "", namespace)
        if "deletionTimestamp" in home["metadata"]:
            message = f"unable to create new content in namespace {namespace} because it is being terminated"
            raise ApiError(403, "Forbidden", message, details={"causes": [{"reason": "NamespaceTerminating"}]})

    def _replace(
        self,
        verb: str,
        resource: Resource,
        old: JsonObject,
        new: JsonObject,
        subresource: str,
        options: Options,
        *,
        owners_changed: bool = False,
    ) -> JsonObject:
        rv = new["metadata"].get("resourceVersion")
        if rv and rv != old["metadata"]["resourceVersion"]:
            why = "the object has been modified; please apply your changes to the latest version and try again"
            raise errors.conflict(resource.plural, old["metadata"]["name"], why)
        new = admission.isolate(resource, old, new, subresource)
        new = admission.admit(resource, old, new, strict=options.strict, serial=self._serial)
        if new == old and not owners_changed:
            self._log(verb, resource, subresource, old, options, changed=False)
            return old
        if resource.has_generation and admission.spec_part(new) != admission.spec_part(old):
            new["metadata"]["generation"] = old["metadata"].get("generation", 0) + 1
        if options.dry_run:
            self._log(verb, resource, subresource, new, options, changed=False)
            return new
        if self.track_owners and verb != "apply":
            self._own_update(resource, old, new, subresource, options)
        return self._commit(verb, resource, old, new, subresource, options)

    def _commit(
        self, verb: str, resource: Resource, old: JsonObject, new: JsonObject, subresource: str, options: Options
    ) -> JsonObject:
        metadata = new["metadata"]
        done = "deletionTimestamp" in metadata and not metadata.get("finalizers")
        waiting = resource.kind == "Pod" and metadata.get("deletionGracePeriodSeconds")
        stored = self._store(resource, new)
        if done and not waiting and old["metadata"].get("finalizers"):
            stored = self._remove(resource, stored)
        if resource.kind == "CustomResourceDefinition":
            self.registry.add_crd(stored)
        self._log(verb, resource, subresource, stored, options, changed=True)
        return stored

    def _apply(
        self, resource: Resource, namespace: str, name: str, body: JsonObject, subresource: str, options: Options
    ) -> JsonObject:
        old = self.storage.get(resource, (namespace, name))
        metadata = body.get("metadata") or {}
        if resource.schema:
            admission.check_declared(resource, body)
        if old is None:
            if subresource:
                raise errors.not_found(resource.plural, resource.group, name)
            if metadata.get("uid"):
                why = f"uid mismatch: the provided object specified uid {metadata['uid']}, and no existing object"
                raise errors.conflict(resource.plural, name, why)
        elif metadata.get("uid", old["metadata"]["uid"]) != old["metadata"]["uid"] and not (
            subresource == "status" and resource.is_custom
        ):
            raise errors.invalid(resource.kind, name, [("metadata.uid", "Invalid value: field is immutable")])
        intent = ownership.owned_content(body)
        if subresource == "status":
            intent = {"status": intent["status"]} if "status" in intent else {}
        elif "status" in resource.subresources:
            intent.pop("status", None)
        record = self._meta.get(old["metadata"]["uid"]) if old else None
        applied = ownership.apply_intent(
            ownership.owned_content(old) if old else {},
            intent,
            record.owners if record else (),
            manager=options.manager,
            subresource=subresource,
            force=options.force,
            keys=self._keys(resource),
            now=self._now(),
        )
        own_metadata = applied.content.pop("metadata", {})
        if old is None:
            new_meta = {"name": name, **own_metadata}
            options = replace(options, strict=False)
            created = {"apiVersion": resource.api_version, "kind": resource.kind, "metadata": new_meta}
            stored = self._insert("apply", resource, namespace, {**created, **applied.content}, options, subresource)
        else:
            kept = {k: v for k, v in old["metadata"].items() if k in ownership.SYSTEM_METADATA}
            rv = {"resourceVersion": metadata["resourceVersion"]} if metadata.get("resourceVersion") else {}
            new = {"apiVersion": old["apiVersion"], "kind": old["kind"], **applied.content}
            new["metadata"] = {**kept, **own_metadata, **rv}
            owners_changed = record is None or ownership.without_times(record.owners) != ownership.without_times(
                applied.owners
            )
            owners_changed &= self.track_owners
            options = replace(options, strict=False)
            stored = self._replace("apply", resource, old, new, subresource, options, owners_changed=owners_changed)
        if not options.dry_run and self.track_owners:
            self._meta.setdefault(stored["metadata"]["uid"], _Meta()).owners = applied.owners
        return self.with_managed_fields(stored)

    def _own_update(
        self, resource: Resource, old: JsonObject, new: JsonObject, subresource: str, options: Options
    ) -> None:
        record = self._meta.setdefault(new["metadata"]["uid"], _Meta())
        record.owners = ownership.after_update(
            ownership.owned_content(old) if old else {},
            ownership.owned_content(new),
            record.owners,
            manager=options.manager,
            subresource=subresource,
            keys=self._keys(resource),
            now=self._now(),
        )

    def with_managed_fields(self, obj: JsonObject) -> JsonObject:
        """The object as it goes over the wire; made on the way out, because most reads in tests don't want it."""
        record = self._meta.get(obj["metadata"].get("uid", ""))
        if record is None or not record.owners:
            return obj
        fields = ownership.managed_fields(record.owners, obj["apiVersion"])
        return {**obj, "metadata": {**obj["metadata"], "managedFields": fields}}

    def _store(self, resource: Resource, new: JsonObject) -> JsonObject:
        rv = self.storage.next_rv()
        new = {**new, "metadata": {**new["metadata"], "resourceVersion": str(rv)}}
        new["metadata"].pop("managedFields", None)
        self.storage.put(resource, (new["metadata"].get("namespace", ""), new["metadata"]["name"]), new)
        return new

    def _remove(self, resource: Resource, old: JsonObject) -> JsonObject:
        self._meta.pop(old["metadata"]["uid"], None)
        if resource.kind == "CustomResourceDefinition":
            self.registry.remove(old["spec"]["group"], old["spec"]["names"]["plural"])
        return self.storage.remove(resource, (old["metadata"].get("namespace", ""), old["metadata"]["name"]))

    def _log(
        self, verb: str, resource: Resource, subresource: str, obj: JsonObject, options: Options, *, changed: bool
    ) -> None:
        meta = obj["metadata"]
        self.audit.append(
            Write(verb, resource.plural, subresource, meta.get("namespace", ""), meta["name"], options.manager,
                  changed, self.storage.rv)
        )  # fmt: skip

    def _now(self) -> str:
        return _rfc3339(self.clock())


def _rfc3339(seconds: float) -> str:
    return datetime.fromtimestamp(int(seconds), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def owned_by(obj: JsonObject, uids: Iterable[str]) -> bool:
    """Whether one of the object's owner references has one of the UIDs."""
    wanted = set(uids)
    return any(ref["uid"] in wanted for ref in obj["metadata"].get("ownerReferences") or [])
