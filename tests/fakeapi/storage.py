"""What etcd and the watch cache are to the fake: objects, one rising resourceVersion, history, watches.

Invariants: stored objects are never changed in place, so whoever holds one may keep it; every write gets the next
integer resourceVersion, over all kinds; a watch sees each event once, in order, as seen through its selector (an
object that leaves the selection is DELETED for that watch).
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from tests.fakeapi.errors import JsonObject, expired
from tests.fakeapi.resources import Resource
from tests.fakeapi.selectors import Predicate

Key = tuple[str, str]
"""(namespace, name); the namespace is "" for cluster-scoped objects."""


@dataclass(frozen=True, slots=True)
class Change:
    """One committed write."""

    rv: int
    resource: Resource
    old: JsonObject | None
    new: JsonObject | None
    """None for a deletion; `old` then carries the resourceVersion of the deletion."""


@dataclass(frozen=True, slots=True)
class WatchEvent:
    type: str
    """ADDED, MODIFIED, DELETED, BOOKMARK or ERROR."""
    object: JsonObject


@dataclass(eq=False, slots=True)
class Watch:
    """One client's view of the changes of one resource; `take()` hands out what has come in."""

    resource: Resource
    namespace: str
    selected: Predicate
    notify: Callable[[], None] = lambda: None
    """Called after something came in (by the writer, with the cluster locked)."""
    closed: bool = False
    _pending: deque[WatchEvent] = field(default_factory=deque)

    def offer(self, change: Change) -> None:
        if change.resource.key != self.resource.key:
            return
        sample = change.new or change.old
        assert sample is not None
        if self.namespace and sample["metadata"].get("namespace") != self.namespace:
            return
        event = self._seen_as(change)
        if event:
            self._pending.append(event)
            self.notify()

    def _seen_as(self, change: Change) -> WatchEvent | None:
        was = change.old is not None and self.selected(change.old)
        if change.new is None:
            assert change.old is not None
            return WatchEvent("DELETED", change.old) if was else None
        if self.selected(change.new):
            return WatchEvent("MODIFIED" if was else "ADDED", change.new)
        return WatchEvent("DELETED", change.new) if was else None

    def put(self, event: WatchEvent) -> None:
        self._pending.append(event)
        self.notify()

    def take(self) -> list[WatchEvent]:
        events = list(self._pending)
        self._pending.clear()
        return events


class Storage:
    def __init__(self, *, history: int = 10_000) -> None:
        self._objects: dict[tuple[str, str], dict[Key, JsonObject]] = {}
        self._history: deque[Change] = deque(maxlen=history)
        self._watches: list[Watch] = []
        self._compacted_rv = 0
        self.rv = 0

    def next_rv(self) -> int:
        self.rv += 1
        return self.rv

    def get(self, resource: Resource, key: Key) -> JsonObject | None:
        return self._objects.get(resource.key, {}).get(key)

    def all(self, resource: Resource, namespace: str = "") -> Iterator[JsonObject]:
        """Objects in the order of namespace and name, as etcd lists them."""
        table = self._objects.get(resource.key, {})
        return (table[key] for key in sorted(table) if not namespace or key[0] == namespace)

    def everything(self) -> Iterator[tuple[tuple[str, str], JsonObject]]:
        """All objects of all resources, with the resource's key; safe against changes on the way."""
        return iter([(key, obj) for key, table in self._objects.items() for obj in table.values()])

    def put(self, resource: Resource, key: Key, new: JsonObject) -> None:
        """Store an object whose metadata.resourceVersion is already `self.rv`."""
        table = self._objects.setdefault(resource.key, {})
        old = table.get(key)
        table[key] = new
        self._record(Change(self.rv, resource, old, new))

    def remove(self, resource: Resource, key: Key) -> JsonObject:
        old = self._objects[resource.key].pop(key)
        rv = self.next_rv()
        last = {**old, "metadata": {**old["metadata"], "resourceVersion": str(rv)}}
        self._record(Change(rv, resource, last, None))
        return last

    def _record(self, change: Change) -> None:
        if self._history.maxlen == len(self._history):
            self._compacted_rv = self._history[0].rv
        self._history.append(change)
        for watch in list(self._watches):
            watch.offer(change)

    def compact(self) -> None:
        """Forget the history: a watch from any earlier resourceVersion is answered by 410."""
        self._history.clear()
        self._compacted_rv = self.rv

    def open(self, watch: Watch, from_rv: int | None) -> None:
        """Start a watch after `from_rv`; None starts with ADDED for what exists.

        Raises:
            ApiError: 410, the history no longer reaches back to `from_rv`.
        """
        if from_rv is None:
            for obj in self.all(watch.resource, watch.namespace):
                if watch.selected(obj):
                    watch.put(WatchEvent("ADDED", obj))
        else:
            if from_rv < self._compacted_rv:
                raise expired(f"too old resource version: {from_rv} ({self._compacted_rv})")
            for change in self._history:
                if change.rv > from_rv:
                    watch.offer(change)
        self._watches.append(watch)

    def close(self, watch: Watch) -> None:
        watch.closed = True
        if watch in self._watches:
            self._watches.remove(watch)

    def watches(self, resource: Resource | None = None) -> Iterable[Watch]:
        return [w for w in self._watches if resource is None or w.resource.key == resource.key]
