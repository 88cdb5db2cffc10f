"""Fixtures of the real-engine lane: one local bed of one node, and one vLLM service of two instances for all tests.

One node, because each node of a bed unpacks the image (3 GB) into memory.
"""

from __future__ import annotations

import functools
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from e2e.bed import owner
from e2e.bed.errors import BedError
from e2e.bed.local import LocalBed
from e2e.bench.figures import Recorder
from e2e.product import Product, Service, bound_claim
from e2e.real import install
from e2e.real.image import put_image
from e2e.suites.conftest import pytest_runtest_makereport

__all__ = ["pytest_runtest_makereport"]  # keeps logs and objects of a failed test

NAMESPACE = "real"
SETTLED_S = 400
"""Two engines that start on two busy cores: 60-150 s."""


@pytest.fixture(scope="session")
def figures() -> Iterator[Recorder]:
    """`build/bench/real.jsonl`: what the lane measures."""
    recorder = Recorder("real")
    yield recorder
    recorder.write()


@pytest.fixture(scope="session")
def bed() -> Iterator[LocalBed]:
    say = functools.partial(print, flush=True)
    try:
        owner.prepare(say)
        found = LocalBed(name=os.environ.get("SLUICE_BED_NAME", "real"), nodes=1, say=say)
    except BedError as error:
        pytest.exit(f"the cluster can't be had: {error}", returncode=3)
    with found:
        yield found


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a tiny Llama, made by the engine's own libraries."""
    install.install(functools.partial(print, flush=True))
    directory = tmp_path_factory.mktemp("weights")
    directory.chmod(0o755)
    script = Path(__file__).with_name("tiny_model.py")
    (directory / "tiny").mkdir()
    subprocess.run([str(install.python()), "-P", str(script), str(directory / "tiny")], check=True)
    return directory / "tiny"


@pytest.fixture(scope="session")
def service(bed: LocalBed, model: Path, figures: Recorder) -> Service:
    """Two Ready instances of vLLM behind a router."""
    image = put_image(bed.images, functools.partial(print, flush=True))
    product = Product.install(bed)
    bed.add_namespace(NAMESPACE)
    claim = bound_claim(bed, NAMESPACE, model.parent)
    started = time.monotonic()
    made = Service.create(product.bed, NAMESPACE, "tiny", a_vllm_spec(image, f"pvc://{claim}/{model.name}"))
    made.wait_settled(SETTLED_S)
    figures.record("real.ready_s", time.monotonic() - started)
    return made


def a_vllm_spec(image: str, uri: str) -> dict[str, object]:
    """vLLM on CPU: a GiB of KV cache and one thread per instance, nothing compiled."""
    env = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
    return {
        "model": {"uri": uri},
        "engine": {
            "type": "vLLM",
            "image": image,
            "args": ["--enforce-eager", "--max-model-len=16384"],
            "env": [{"name": name, "value": value} for name, value in env.items()],
        },
        "pools": [{"name": "default", "replicas": 2}],
        "health": {"selfTestPeriodSeconds": 5, "hangTimeoutSeconds": 30},
        "drain": {"timeoutSeconds": 120},
    }
