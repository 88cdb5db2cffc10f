"""The kopf adapter: what must be set for kopf to be an event source and nothing more."""

import kopf
import pytest
from kubernetes.aio.client import Configuration

from sluice import kopfapp
from sluice.runtime import kinds
from sluice.runtime.kube import connect_with


@pytest.mark.parametrize("kind", kinds.WATCHED, ids=lambda kind: kind.name)
def test_label_filter_is_the_api_server_s(kind: kinds.Kind) -> None:
    """A key that kopf does not understand matches nothing, silently; then every pod of the cluster would come."""
    settings = kopfapp.make_settings(kinds.WATCHED, namespaced=False)
    resource = kopf.Resource(group=kind.group, version=kind.version, plural=kind.plural)
    assert settings.watching.label_selectors.collect(resource) == ([kind.selector] if kind.selector else [])


def test_kopf_keeps_nothing_and_writes_nothing() -> None:
    settings = kopfapp.make_settings(kinds.WATCHED, namespaced=False)
    body = kopf.Body({"metadata": {"name": "x"}, "spec": {"a": 1}})
    storage = settings.persistence.diffbase_storage
    assert storage.build(body=body) == {}
    assert storage.fetch(body=body) is None
    assert not settings.posting.enabled
    assert settings.peering.standalone
    assert settings.persistence.finalizer.startswith("kopf.serving.sluice.dev/")


@pytest.mark.parametrize("namespaced", [False, True])
def test_namespaced_mode_needs_no_rights_on_crds(namespaced: bool) -> None:
    assert kopfapp.make_settings(kinds.WATCHED, namespaced=namespaced).scanning.disabled is namespaced


async def test_session_closed_by_kopf_leaves_the_connection_pool_open() -> None:
    async with connect_with(Configuration(host="http://127.0.0.1:1")) as client:
        first = kopfapp.new_session(client)
        await first.close()
        second = kopfapp.new_session(client)
        assert not client.connector.closed
        await second.close()
