"""Our CustomResourceDefinitions, from the files that are shipped."""

from functools import cache
from pathlib import Path

import yaml

from tests.fakeapi.cluster import FakeCluster
from tests.fakeapi.errors import JsonObject

FOLDER = Path(__file__).parents[2] / "crds"


@cache
def shipped() -> tuple[JsonObject, ...]:
    """Raises: FileNotFoundError, the generator was not run (`make generate`)."""
    files = sorted(FOLDER.glob("*.yaml"))
    if not files:
        raise FileNotFoundError(f"no CRDs in {FOLDER}: run `make generate`")
    return tuple(yaml.safe_load(file.read_text()) for file in files)


def install(cluster: FakeCluster) -> FakeCluster:
    """Serve our kinds."""
    for crd in shipped():
        cluster.install_crd(crd)
    cluster.audit.clear()
    return cluster
