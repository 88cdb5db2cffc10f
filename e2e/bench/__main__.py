"""Run groups of measurements: `python -m e2e.bench [group…]` (`--help` lists them); without one: all."""

import argparse
import asyncio
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from e2e.bed.api_only import ApiOnly
from e2e.bench import demo, lifecycle, outage, reconcile, sizing, steady
from e2e.bench.figures import ROOT, Recorder
from e2e.product import install_crds

CRDS = ROOT / "crds"
FAKE_NODES = 10


def _on_api(measure: Callable[[ApiOnly, Path], object], *, audit: bool = False) -> None:
    """Give the measurement a fresh API-level bed with our CRDs and fake nodes, and a directory.

    `audit`: with the API server's audit log, which costs it time; for groups that count writes.
    """
    with ApiOnly(audit=audit) as bed, tempfile.TemporaryDirectory(prefix="sluice-bench-") as workdir:
        install_crds(bed.api, CRDS)
        bed.fake_nodes(FAKE_NODES)
        try:
            measure(bed, Path(workdir))
        except BaseException:
            log = Path(workdir) / "operator.log"
            if log.exists():
                print("".join(log.read_text(errors="replace").splitlines(keepends=True)[-40:]), file=sys.stderr)
            raise


def _crd() -> None:
    figures = Recorder("crd")
    figures.record("crd.max_bytes", max(path.stat().st_size for path in CRDS.glob("*.yaml")))
    figures.write()


GROUPS: dict[str, Callable[[], None]] = {
    "crd": _crd,
    "reconcile": lambda: _on_api(lambda bed, workdir: asyncio.run(reconcile.run(bed, workdir))),
    "restart": lambda: _on_api(lambda bed, workdir: asyncio.run(steady.restart(bed, workdir)), audit=True),
    "crash": lambda: _on_api(lambda bed, workdir: asyncio.run(steady.crash(bed, workdir))),
    "idle": lambda: _on_api(lambda bed, workdir: asyncio.run(steady.idle(bed, workdir)), audit=True),
    "outage": outage.run,
    "lifecycle": lifecycle.run,
    "demo": demo.run,
    "layouts": sizing.run,
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m e2e.bench", description=__doc__)
    parser.add_argument("groups", nargs="*", choices=[*GROUPS, []], metavar="group", help=", ".join(GROUPS))
    for group in parser.parse_args().groups or list(GROUPS):
        print(f"==> {group}", flush=True)
        GROUPS[group]()


if __name__ == "__main__":
    main()
