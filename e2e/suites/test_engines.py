"""Engines by their command line (type Custom): weights from a claim, a port of their own, their own metric names."""

from pathlib import Path
from typing import Any

import pytest

from e2e.bed.local import LocalBed
from e2e.chaos.observe import a_spec, is_ready, names_of
from e2e.product import Product, Service, bound_claim, fetch, until

PORT = 8123
METRICS = {
    "vllm": {
        "running": "vllm:num_requests_running",
        "waiting": "vllm:num_requests_waiting",
        "generationTokens": "vllm:generation_tokens_total",
    },
    "sglang": {
        "running": "sglang:num_running_reqs",
        "waiting": "sglang:num_queue_reqs",
        "iterations": "sglang:realtime_tokens_total",
    },
}


@pytest.fixture
def claim(bed: LocalBed, namespace: str, tmp_path: Path) -> str:
    """A bound claim on a directory of this machine; its volume goes with the bed."""
    (tmp_path / "model").mkdir()
    tmp_path.chmod(0o755)
    return f"pvc://{bound_claim(bed, namespace, tmp_path)}/model"


def a_custom_spec(claim: str, flavor: str) -> dict[str, Any]:
    named = {
        "vllm": ["--served-model-name=$(SLUICE_MODEL_NAME)", "--port=$(SLUICE_PORT)", "--host=0.0.0.0"],
        "sglang": ["--served-model-name=$(SLUICE_MODEL_NAME)", "--port=$(SLUICE_PORT)", "--host=0.0.0.0"],
    }[flavor]
    model = ["$(SLUICE_MODEL_PATH)"] if flavor == "vllm" else ["--model-path=$(SLUICE_MODEL_PATH)", "--enable-metrics"]
    custom = {
        "command": ["sluice-sim", "serve", *model, f"--flavor={flavor}", *named],
        "port": PORT,
        "metrics": METRICS[flavor],
    }
    return {
        **a_spec(2),
        "model": {"uri": claim},
        "engine": {"type": "Custom", "image": "sluice-engine:0.1.0", "custom": custom},
    }


@pytest.mark.parametrize("flavor", METRICS)
def test_an_engine_by_its_command_line_serves_and_is_drained(
    product: Product, namespace: str, claim: str, flavor: str
) -> None:
    service = Service.create(product.bed, namespace, flavor, a_custom_spec(claim, flavor))
    service.wait_settled(180)
    with service.traffic() as traffic:
        traffic.wait_for(20)
        (victim, *_others) = service.pods()
        assert flavor in fetch(product.bed, f"http://{victim['status']['podIP']}:{PORT}/metrics")
        service.delete_pod(victim)
        until("replaced", lambda: victim["metadata"]["name"] not in names_of(service.pods()), 120)
        service.wait_settled(180)
        traffic.wait_for(60)
    assert traffic.lost == 0, traffic.result
    assert all(is_ready(pod) for pod in service.pods())
