"""What the hand-written pages say that code can contradict: links, targets, reasons, figures."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from sluice.api.conditions import ConditionType, Reason
from sluice.api.v1alpha1 import Drain
from sluice.plan import drain, pods, router
from sluice.plan.engines.adapter import SHUTDOWN_TIMEOUT_S
from sluice.router import launcher

ROOT = Path(__file__).parents[3]
PAGES = sorted([*ROOT.glob("docs/**/*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"])
OPERATIONS = (ROOT / "docs" / "operations.md").read_text()
pages = pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))


def _anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pages
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#\s]*(?:#[^)\s]*)?)\)", page.read_text()):
        if target.startswith("http"):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), f"{page}: {target}"
        assert not anchor or anchor in _anchors(file), f"{page}: {target}"


@pages
def test_named_files_exist(page: Path) -> None:
    """Paths in backticks that begin with a directory of the repository."""
    tops = "|".join(sorted(p.name for p in ROOT.iterdir() if p.is_dir() and not p.name.startswith(".")))
    text = page.read_text()
    for path in re.findall(rf"`((?:{tops})/[\w./-]+)`", text):
        if path.startswith("build/"):
            continue
        inside = [path, f"operator/sluice/{path}"]
        assert any((ROOT / p).exists() for p in inside), f"{page}: {path}"


@pages
def test_named_make_targets_exist(page: Path) -> None:
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^([a-z0-9%-]+):", makefile, re.MULTILINE))
    for target in re.findall(r"`make ([a-z0-9-]+)", page.read_text()):
        assert target in targets or (target.startswith("bench-") and "bench-%" in targets), f"{page}: make {target}"


def test_reasons_of_the_troubleshooting_table_exist() -> None:
    known = {str(word) for word in (*Reason, *ConditionType)}
    section = OPERATIONS.partition("## Troubleshooting")[2].partition("\n## ")[0]
    first_cells = [line.split("|")[1] for line in section.splitlines() if line.startswith("| ")]
    named = {word for cell in first_cells for word in re.findall(r"`([A-Z][A-Za-z]+)`", cell)}
    assert named, "the table names reasons"
    assert named <= known


def _figures() -> Iterator[str]:
    """Phrases with a number that follows from the code."""
    default = Drain().timeout_seconds
    smg = launcher.parse(["--policy", "CacheAware", "--drain-seconds", str(default)])
    yield f"here D (default {default})"
    yield f"of engine pods | D + {pods.GRACE_MARGIN_S} | {default + pods.GRACE_MARGIN_S} |"
    yield f"of router pods | D + {router.GRACE_MARGIN_S} | {default + router.GRACE_MARGIN_S} |"
    yield f"deleted with so much grace, and cut requests are told by the Event `{Reason.REQUESTS_CUT}` | "
    yield f"`{Reason.REQUESTS_CUT}` | {drain.PRESTOP_MARGIN_S:.0f} |"
    yield f"(`--shutdown-timeout`) | {SHUTDOWN_TIMEOUT_S} |"
    yield f"may take {smg.request_timeout_seconds:,} s"
    yield f"takes {smg.max_concurrent_requests:,} at once and queues {smg.queue_size} more"
    yield f"503 after {smg.queue_timeout_seconds} s"


@pytest.mark.parametrize("phrase", [*_figures()])
def test_figures_of_operations_are_those_of_the_code(phrase: str) -> None:
    assert phrase in " ".join(OPERATIONS.split())
