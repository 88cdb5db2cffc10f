"""Names, units and bars of all figures, and the recorder that writes them.

Names are stable: a later change adds figures and never renames one.
"""

import json
import os
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, slots=True)
class Bar:
    unit: str
    text: str
    holds: Callable[[float], bool]


def at_most(bound: float, unit: str) -> Bar:
    return Bar(unit, f"<= {bound:g}", lambda value: value <= bound)


def below(bound: float, unit: str) -> Bar:
    return Bar(unit, f"< {bound:g}", lambda value: value < bound)


def exactly(wanted: float, unit: str) -> Bar:
    return Bar(unit, f"= {wanted:g}", lambda value: value == wanted)


BARS: dict[str, Bar] = {
    "demo.first_token_s": at_most(90, "s"),
    "demo.cold_s": at_most(1200, "s"),
    "test.cold_s": at_most(2700, "s"),
    "test.warm_s": at_most(1200, "s"),
    "replace.p50_ms": at_most(15, "ms"),
    "replace.p99_ms": at_most(100, "ms"),
    "converge.200x4_s": at_most(10, "s"),
    "converge.duplicate_pods": exactly(0, "pods"),
    "converge.vs_bare_create": at_most(2.0, "ratio"),
    "replace.bare_p50_ms": Bar("ms", "recorded", lambda _: True),
    "converge.1000x4_s": Bar("s", "recorded", lambda _: True),
    "converge.1000_vs_200_per_service": at_most(1.3, "ratio"),
    "operator.rss_mb_4000_pods": at_most(300, "MB"),
    "idle.writes": exactly(0, "writes"),
    "crash.duplicate_pods": exactly(0, "pods"),
    "crash.not_converged": exactly(0, "kills"),
    "restart.pods_rolled": exactly(0, "pods"),
    "outage.failed_requests": exactly(0, "requests"),
    "outage.recovered": exactly(1, "bool"),
    "crd.max_bytes": below(100_000, "bytes"),
    "sizing.values_failed": exactly(0, "values"),
    "sizing.plan_ms": below(1000, "ms"),
    "layouts.impossible_refused": Bar("kinds", ">= 30", lambda value: value >= 30),
    "layouts.impossible_accepted": exactly(0, "kinds"),
    "lifecycle.hang_idle.unrouted_s": at_most(15, "s"),
    "lifecycle.hang_idle.restarts_after_thaw": exactly(0, "restarts"),
    "lifecycle.hang_busy.unrouted_s": at_most(20, "s"),  # hangTimeoutSeconds of the row (15) + 5
    "lifecycle.saturation.unroutes": exactly(0, "unroutes"),
    "lifecycle.saturation.restarts": exactly(0, "restarts"),
    "lifecycle.engine_kill9.unrouted_s": at_most(3, "s"),
    "lifecycle.engine_kill9.lost_beyond_own": exactly(0, "requests"),
    "lifecycle.router_kill9.lost_beyond_own": exactly(0, "requests"),
    "lifecycle.node_lost.unrouted_s": at_most(10, "s"),
    "lifecycle.node_lost.replaced_s": at_most(5, "s"),
    "lifecycle.deadline.reported_cut": exactly(1, "requests"),
    "lifecycle.deadline.gone_s": Bar("s", "recorded", lambda _: True),
    "layouts.flags_refused": exactly(0, "lists"),
    "sizing.memory_error_pct": at_most(2, "%"),
    "real.ready_s": Bar("s", "recorded", lambda _: True),
    "real.lost": exactly(0, "requests"),
    "real.core_killed.unrouted_s": Bar("s", "recorded", lambda _: True),
    "real.core_killed.serves_again_s": Bar("s", "recorded", lambda _: True),
}


LOSSLESS = ("rollout", "scale_in", "delete_pod", "evict", "node_drain", "router_rolling", "suspend", "quiet")
COMPANIONS = ("operator_kill", "operator_upgrade")
BARS |= {f"lifecycle.{row}.failed": exactly(0, "requests") for row in (*LOSSLESS, *COMPANIONS)}
BARS |= {f"lifecycle.{row}.sent": Bar("requests", ">= 2000", lambda value: value >= 2000) for row in LOSSLESS}
BARS |= {f"lifecycle.{row}.sent": Bar("requests", ">= 16000", lambda value: value >= 16000) for row in COMPANIONS}
BARS |= {f"lifecycle.{row}.resent": Bar("requests", "recorded", lambda _: True) for row in LOSSLESS}
for _row in ("bad_image", "crash_first_request", "hang_at_load"):
    BARS |= {
        f"lifecycle.{_row}.failed": exactly(0, "requests"),
        f"lifecycle.{_row}.pod_creations": at_most(6, "pods"),
    }


def revision() -> str:
    """Commit of the checkout, with `+` when it has changes; "unknown" outside a repository."""
    run = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    dirty = subprocess.run(["git", "status", "--porcelain"], cwd=ROOT, capture_output=True, text=True, check=False)
    return (run.stdout.strip() or "unknown") + ("+" if dirty.stdout.strip() else "")


class Recorder:
    """Collects the figures of one group and writes them, one JSON line each."""

    def __init__(self, group: str) -> None:
        self.group = group
        self.lines: list[dict[str, object]] = []

    def record(self, name: str, value: float) -> None:
        """Record one figure.

        Raises:
            KeyError: the name has no bar in `BARS`.
        """
        bar = BARS[name]
        line: dict[str, object] = {
            "name": name,
            "value": round(value, 3),
            "unit": bar.unit,
            "bar": bar.text,
            "ok": bar.holds(value),
            "revision": revision(),
            "cores": os.cpu_count(),
        }
        self.lines.append(line)
        verdict = "ok" if line["ok"] else "MISSED"
        print(f"  {name:36} {value:12.3f} {bar.unit:9} bar {bar.text:12} {verdict}", flush=True)

    def write(self) -> Path:
        path = ROOT / "build" / "bench" / f"{self.group}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps(line) + "\n" for line in self.lines))
        return path
