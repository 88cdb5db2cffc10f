"""Rules of the project's Dockerfiles that a build does not check."""

import re

import pytest

from e2e.bed import base
from e2e.bed.images import DOCKERFILES, INPUTS, REPOSITORY

EACH = pytest.mark.parametrize("name", DOCKERFILES)


def text_of(name: str) -> str:
    return (REPOSITORY / DOCKERFILES[name]).read_text()


@EACH
def test_no_frontend_is_pulled(name: str) -> None:
    assert not re.search(r"^#\s*(syntax|escape)\s*=", text_of(name), re.MULTILINE)


@EACH
def test_every_stage_stands_on_the_base_that_can_be_replaced(name: str) -> None:
    text = text_of(name)
    assert f"ARG BASE={base.NAME}\n" in text
    assert set(re.findall(r"^FROM (\S+)", text, re.MULTILINE)) == {"${BASE}"}


@EACH
def test_no_setting_of_pip_and_no_credential_is_kept_in_the_image(name: str) -> None:
    kept = re.findall(r"^(?:ENV|ARG)\s+(.*)$", text_of(name), re.MULTILINE)
    assert not [line for line in kept if re.search(r"PIP_|TOKEN|PASSWORD|SECRET|PROXY", line, re.IGNORECASE)]


@EACH
def test_dependencies_are_installed_by_hash_before_the_source_is_copied(name: str) -> None:
    text = text_of(name)
    assert "--require-hashes" in text
    assert text.index("--require-hashes") < text.index("COPY operator")


@EACH
def test_it_runs_without_shell_and_without_root(name: str) -> None:
    last_stage = text_of(name).rpartition("\nFROM ")[2]
    assert "\nUSER 65532:65532\n" in last_stage
    assert re.search(r'^ENTRYPOINT \["/', last_stage, re.MULTILINE)
    assert "\nRUN " not in last_stage


def test_everything_a_build_may_see_is_part_of_its_identity() -> None:
    lines = (REPOSITORY / ".dockerignore").read_text().splitlines()
    let_through = {line.removeprefix("!") for line in lines if line.startswith("!")}
    assert let_through <= set(INPUTS)
