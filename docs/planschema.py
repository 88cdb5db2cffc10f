"""JSON schema of `kubectl sluice plan -o json`, made from the models: `python -m docs.planschema [--check]`."""

import argparse
import json
import sys
from pathlib import Path
from typing import Final

from sluice.sizing.report import json_schema

TARGET: Final = Path(__file__).with_name("plan.schema.json")


def render() -> str:
    return json.dumps(json_schema(), indent=2, ensure_ascii=False) + "\n"


def main() -> int:
    """Write the file, or with `--check` say whether it differs (exit code 1)."""
    parser = argparse.ArgumentParser(prog="python -m docs.planschema", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; fail if the file differs")
    if not parser.parse_args().check:
        TARGET.write_text(render())
        return 0
    if not TARGET.exists() or TARGET.read_text() != render():
        print(f"{TARGET}: differs from the models; run `make generate`", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
