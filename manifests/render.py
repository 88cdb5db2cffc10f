"""The chart as plain manifests: `python -m manifests.render [--check] [--helm PROGRAM]` from the repository's root.

The chart's accelerator profiles are made here from those of the planner, so that there is one catalogue.

`manifests/base` is for people who use kustomize instead of Helm. It is the chart's own output in a normal form (sorted,
without comments and without what only Helm knows), so the two can't drift apart.
"""

import argparse
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

from e2e.bed import build

Object = dict[str, Any]

ROOT = Path(__file__).resolve().parents[1]
TARGET = ROOT / "manifests" / "base" / "operator.yaml"
PROFILES = ROOT / "operator" / "sluice" / "sizing" / "profiles"
CATALOGUE = ROOT / "charts" / "sluice" / "templates" / "acceleratorprofiles.yaml"
NAMESPACE = "sluice-system"
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # ten times faster where PyYAML has libyaml
HELM_LABELS = ("helm.sh/chart", "app.kubernetes.io/managed-by", "app.kubernetes.io/instance")
HEADER = "# The chart's output; made by `python -m manifests.render`, do not edit.\n"


def pinned_helm() -> str:
    """Path of the Helm that everybody renders with, so that everybody gets the same bytes."""
    build.build(("helm",), say=lambda line: print(line, file=sys.stderr))
    return str(build.program("helm"))


def template(helm: str, *arguments: str, release: str = "sluice", chart: str = "sluice") -> str:
    """What `helm template` prints; CalledProcessError with Helm's words in `stderr` when it refuses."""
    command = [helm, "template", release, str(ROOT / "charts" / chart), "--namespace", NAMESPACE, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout


def objects(text: str) -> list[Object]:
    return [document for document in yaml.load_all(text, Loader=_LOADER) if document]


def normal_form(found: list[Object]) -> list[Object]:
    """In a fixed order, less the labels that say that Helm is in charge (kustomize users own these objects)."""

    def plain(obj: Object) -> Object:
        labels = {k: v for k, v in obj["metadata"].get("labels", {}).items() if k not in HELM_LABELS}
        return {**obj, "metadata": {**obj["metadata"], "labels": labels}}

    return sorted(map(plain, found), key=lambda o: (o["kind"], o["metadata"].get("namespace", ""), _name(o)))


def _name(obj: Object) -> str:
    return str(obj["metadata"]["name"])


class _Dumper(yaml.SafeDumper):
    """Texts of several lines stay readable."""


def _text(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style="|" if "\n" in value else None)


_Dumper.add_representer(str, _text)


def base(helm: str) -> str:
    """Content of `manifests/base/operator.yaml`."""
    documents = normal_form(objects(template(helm)))
    return HEADER + yaml.dump_all(documents, Dumper=_Dumper, sort_keys=True, width=118, explicit_start=True)


def catalogue() -> str:
    """Content of the chart's template with the accelerator profiles."""
    lines = [
        "{{- /* Made by `python -m manifests.render` from operator/sluice/sizing/profiles, do not edit. */}}",
        "{{- if .Values.acceleratorProfiles.catalogue }}",
    ]
    for path in sorted(PROFILES.glob("*.yaml")):
        text = path.read_text().rstrip("\n")
        name = f"  name: {path.stem}"
        labels = '  labels:\n    {{- include "sluice.labels" . | nindent 4 }}'
        lines += ["---", text.replace(f"metadata:\n{name}\n", f"metadata:\n{name}\n{labels}\n")]
    return "\n".join([*lines, "{{- end }}"]) + "\n"


def _settle(path: Path, made: str, *, check: bool) -> bool:
    """Write the file, or say that it differs; True: it is right now."""
    if check and not (path.exists() and path.read_text() == made):
        print(f"{path}: not what its sources say; run `make generate`", file=sys.stderr)
        return False
    if not check:
        path.write_text(made)
    return True


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m manifests.render", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; fail if a file differs")
    parser.add_argument("--helm", help="default: the pinned Helm of the local bed, built at the first use")
    options = parser.parse_args()
    # In this order: the second is rendered with the first.
    is_right = _settle(CATALOGUE, catalogue(), check=options.check)
    return 0 if _settle(TARGET, base(options.helm or pinned_helm()), check=options.check) and is_right else 1


if __name__ == "__main__":
    sys.exit(main())
