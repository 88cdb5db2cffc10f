"""Helm for the render tests: the one that the local bed uses, built once per machine."""

from collections.abc import Callable
from functools import cache, partial

import pytest

from manifests.render import Object, objects, pinned_helm, template

Render = Callable[..., list[Object]]


@pytest.fixture(scope="session")
def helm() -> str:
    return pinned_helm()


@pytest.fixture(scope="session")
def render(helm: str) -> Render:
    """`render("--set", "replicas=3")` -> objects; keyword arguments as of `manifests.render.template`.

    The same arguments run Helm once per session: a chart has no other input (one test proves it).
    """
    text = cache(partial(template, helm))

    def rendered(*arguments: str, **where: str) -> list[Object]:
        return objects(text(*arguments, **where))

    return rendered
