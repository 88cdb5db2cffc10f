"""The contract suite on a real API server: the same test functions as for the fake."""

from collections.abc import AsyncIterator

import pytest

from e2e.bed.api_only import ApiOnly
from tests.api.support import own_namespace
from tests.fakeapi.contract import Contract
from tests.fakeapi.test_contract_client import *  # noqa: F403  # pytest collects what is imported
from tests.fakeapi.test_contract_store import *  # noqa: F403


@pytest.fixture
async def contract(api_bed: ApiOnly) -> AsyncIterator[Contract]:
    async with own_namespace(api_bed) as made:
        yield made
