"""Shared pieces of the API level: a namespace per test, the operator's client, CRDs, the operator as a process."""

import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from e2e.bed.api_only import ApiOnly
from sluice.runtime import kinds, kube
from sluice.runtime.errors import AlreadyExists
from tests.fakeapi import crds
from tests.fakeapi.contract import NAMESPACE, Contract


async def install_crds(client: kube.Client) -> None:
    """Create our CRDs if they aren't there and wait until they are served.

    Raises:
        TimeoutError: not served within 30 s.
    """
    for crd in crds.shipped():
        try:
            await client.create(kinds.CRD, crd)
        except AlreadyExists:
            continue
    contract = Contract(client, "default", is_real=True)
    for plural in ("inferenceservices", "acceleratorprofiles"):

        async def is_served(plural: str = plural) -> bool:
            return plural in await client.api_resources("serving.sluice.dev", "v1alpha1")

        await contract.until(f"{plural} are served", is_served)


@asynccontextmanager
async def own_namespace(bed: ApiOnly) -> AsyncIterator[Contract]:
    """A client and a namespace of the test's own; the namespace is deleted without waiting."""
    async with kube.connect(bed.kubeconfig) as client:
        await install_crds(client)
        name = f"t-{uuid.uuid4().hex[:10]}"
        body = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}}
        made = await client.create(NAMESPACE, body)
        contract = Contract(client, name, is_real=True)
        yield contract
        await client.delete(NAMESPACE, "", name, uid=made["metadata"]["uid"])
