"""Starts smg with the arguments this project relies on, then becomes smg (exec).

Stands alone on purpose: standard library only, no import of this package, because smg's image has nothing else of ours.

It waits for the admin key that the sidecar writes into the shared volume (`<run-dir>/admin-key`): so the key is in
no pod spec. It does not wait for the worker manifest: smg follows a file that appears later (measured: ready 0.4 s
after it appears), and its liveness port then answers also in a pod that has no list yet. SIGTERM while waiting ends it.

Arguments are those of the contract tests (`e2e/suites/test_smg_contract.py`); what hurts in smg's defaults: worker
probes every 60 s, load poll every 10 s, a circuit breaker that stays open for 60 s.
"""

import argparse
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

KEY_FILE = "admin-key"
MANIFEST_FILE = "workers.json"
POLICIES = {
    "CacheAware": "cache_aware",
    "LeastRequests": "least_load",
    "PowerOfTwo": "power_of_two",
    "RoundRobin": "round_robin",
}
"""Our names of `spec.routing.policy` to smg's."""
WAIT_STEP_S = 0.05
LOG_EVERY_S = 10.0


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="launcher.py", description="Start smg in a router's pod.")
    parser.add_argument("--policy", required=True, choices=sorted(POLICIES))
    parser.add_argument("--backend", default="vllm", choices=("vllm", "sglang"), help="whose endpoints are read")
    parser.add_argument("--drain-seconds", required=True, type=int, help="streams may finish this long after SIGTERM")
    parser.add_argument("--request-timeout-seconds", type=int, default=1800)
    parser.add_argument("--max-concurrent-requests", type=int, default=4096, help="beyond it requests queue")
    parser.add_argument("--queue-size", type=int, default=256, help="beyond it: 429")
    parser.add_argument("--queue-timeout-seconds", type=int, default=30, help="beyond it: 503")
    parser.add_argument("--run-dir", type=Path, default=Path("/run/r"), help="volume shared with the sidecar")
    parser.add_argument("--host", default="0.0.0.0")
    parser.add_argument("--port", type=int, default=30000)
    parser.add_argument("--health-port", type=int, default=30001)
    parser.add_argument("--metrics-host", default="0.0.0.0")
    parser.add_argument("--metrics-port", type=int, default=29000)
    return parser.parse_args(argv)


def build_command(options: argparse.Namespace, key: str) -> list[str]:
    """smg's command line; run with this interpreter, because an image may not have smg's script on its PATH."""
    pairs: dict[str, object] = {
        "--host": options.host,
        "--port": options.port,
        "--backend": options.backend,
        "--policy": POLICIES[options.policy],
        "--discovery-provider": "file",
        "--discovery-file": options.run_dir / MANIFEST_FILE,
        "--discovery-check-interval-secs": 5,
        "--worker-startup-check-interval": 1,
        "--health-check-interval-secs": 2,
        "--health-check-timeout-secs": 2,
        "--health-failure-threshold": 2,
        "--health-success-threshold": 1,
        "--load-monitor-interval": 2,
        "--cb-failure-threshold": 3,
        "--cb-timeout-duration-secs": 5,
        "--health-check-port": options.health_port,
        "--prometheus-host": options.metrics_host,
        "--prometheus-port": options.metrics_port,
        "--shutdown-grace-period-secs": options.drain_seconds,
        "--request-timeout-secs": options.request_timeout_seconds,
        "--max-concurrent-requests": options.max_concurrent_requests,
        "--queue-size": options.queue_size,
        "--queue-timeout-secs": options.queue_timeout_seconds,
        "--control-plane-api-keys": f"sidecar:sidecar:admin:{key}",
    }
    return [sys.executable, "-m", "smg", "launch", *(str(part) for pair in pairs.items() for part in pair)]


def wait_for_key(path: Path) -> str:
    """The admin key, as soon as the sidecar has written it; says every 10 s what it waits for."""
    said_at = time.monotonic()
    while True:
        try:
            key = path.read_text().strip()
        except FileNotFoundError:
            key = ""
        if key:
            return key
        if time.monotonic() - said_at >= LOG_EVERY_S:
            said_at = time.monotonic()
            print(f"launcher: waiting for {path}: the sidecar container writes it at its start", file=sys.stderr)
        time.sleep(WAIT_STEP_S)


def _stop(number: int, _: FrameType | None) -> None:
    """As process 1 of a container nothing ends us by default."""
    sys.exit(128 + number)


def main(argv: Sequence[str]) -> None:
    options = parse(argv)
    signal.signal(signal.SIGTERM, _stop)
    command = build_command(options, wait_for_key(options.run_dir / KEY_FILE))
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.execv(command[0], command)


if __name__ == "__main__":
    main(sys.argv[1:])
