"""A cluster that the user names: reached through its context only, the user's own kubeconfig stays as it is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from e2e.bed.cluster import Cap
from e2e.bed.errors import BedError
from e2e.bed.existing import Existing
from e2e.bed.local import LocalBed

pytestmark = pytest.mark.needs(Cap.DAEMONS)


@pytest.fixture
def kubeconfig(local_bed: LocalBed, tmp_path: Path) -> Path:
    """The local bed under the name ``wanted``, and a current context that leads nowhere."""
    document = json.loads(local_bed.kubeconfig.read_text())
    document["clusters"].append({"name": "nowhere", "cluster": {"server": "https://127.0.0.1:1"}})
    wanted = {**document["contexts"][0], "name": "wanted"}
    document["contexts"] = [wanted, {"name": "current", "context": {"cluster": "nowhere", "user": "admin"}}]
    document["current-context"] = "current"
    path = tmp_path / "kubeconfig"
    path.write_text(json.dumps(document))
    return path


def test_named_context_is_used_and_the_current_one_left_alone(local_bed: LocalBed, kubeconfig: Path) -> None:
    before = kubeconfig.read_bytes()
    with Existing("wanted", kubeconfig) as cluster:
        assert cluster.nodes == local_bed.nodes
        assert cluster.version == local_bed.version
        copy = cluster.kubeconfig
        assert "nowhere" not in copy.read_text()
    assert kubeconfig.read_bytes() == before
    assert not copy.exists()


@pytest.mark.parametrize(
    ("context", "message"),
    [("", "needs CONTEXT=<name>"), ("other", "other"), ("current", "127.0.0.1:1")],
    ids=["none given", "unknown", "does not answer"],
)
def test_context_that_will_not_do_is_an_error(kubeconfig: Path, context: str, message: str) -> None:
    with pytest.raises(BedError, match=message):
        Existing(context, kubeconfig)
