"""Group `layouts`: the sizing model against its acceptance values, and how long a plan takes. Needs no cluster."""

import json
import statistics
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from pathlib import Path

from e2e.bench.figures import ROOT, Recorder

TESTS = ROOT / "tests" / "unit" / "sizing"
RUNS = 5
DEEPSEEK_V3 = {
    "model_type": "deepseek_v3",
    "architectures": ["DeepseekV3ForCausalLM"],
    "num_hidden_layers": 61,
    "hidden_size": 7168,
    "vocab_size": 129280,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 3,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "num_nextn_predict_layers": 1,
    "max_position_embeddings": 163840,
    "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
}
LOAD = ("--rps", "4", "--input", "4096", "--output", "512", "--ttft-ms", "8000", "--tpot-ms", "60")


def run() -> None:
    """Record the group."""
    figures = Recorder("layouts")
    figures.record("sizing.values_failed", _failed(TESTS / "test_acceptance.py", "test_value")[1])
    passed, failed = _failed(TESTS / "test_impossible.py", "test_is_refused_with_numbers_and_the_nearest_fit")
    figures.record("layouts.impossible_refused", passed)
    figures.record("layouts.impossible_accepted", failed)
    figures.record("sizing.plan_ms", _plan_ms())
    figures.write()


def _failed(path: Path, test: str) -> tuple[int, int]:
    """(passed, failed) of the rows of a table test.

    Raises:
        RuntimeError: the file could not be run, or has no such rows; a figure of 0 must not come from that.
    """
    with tempfile.TemporaryDirectory(prefix="sluice-bench-") as workdir:
        report = Path(workdir) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}", str(path)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        if not report.exists():
            raise RuntimeError(f"{path} could not be run:\n{(done.stdout + done.stderr)[-3000:]}")
        rows = [case for case in ET.parse(report).iter("testcase") if case.get("name", "").startswith(f"{test}[")]
    if not rows:
        raise RuntimeError(f"{path} has no rows of {test}:\n{done.stdout[-3000:]}")
    failed = sum(1 for row in rows if row.find("failure") is not None or row.find("error") is not None)
    return len(rows) - failed, failed


def _plan_ms() -> float:
    """Median of whole processes, with a load and goals, so that every layout is searched."""
    program = Path(sys.executable).with_name("kubectl-sluice")
    times = []
    with tempfile.TemporaryDirectory(prefix="sluice-bench-") as workdir:
        config = Path(workdir) / "config.json"
        config.write_text(json.dumps(DEEPSEEK_V3))
        command = [str(program), "plan", "--config", str(config), "--accelerator", "h100-80g", "-o", "json", *LOAD]
        for _ in range(RUNS):
            start = time.monotonic()
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            times.append((time.monotonic() - start) * 1e3)
            if done.returncode != 0 or json.loads(done.stdout)["chosen"] is None:
                raise RuntimeError(f"plan ended with {done.returncode}: {done.stderr[-2000:]}")
    return statistics.median(times)
