"""Files that a user names: paths that may be none, YAML that may be none, and the objects in it.

Whatever stands in such a file or path is somebody's mistake at worst, never a bug of ours: it ends in a `UsageError`.
"""

import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from sluice.api import names
from sluice.cli.errors import UsageError

Object = Mapping[str, Any]


def is_file(path: Path) -> bool:
    """False also for names that no file can have: too long, with a NUL, not encodable."""
    try:
        return path.is_file()
    except (OSError, ValueError):
        return False


def is_directory(path: Path) -> bool:
    """The same for directories."""
    try:
        return path.is_dir()
    except (OSError, ValueError):
        return False


def read_documents(name: str) -> list[Object]:
    """The objects of a YAML file (`-`: standard input), those of a `List` one by one; what is no object is left out.

    Raises:
        UsageError: it can't be read, or is no YAML.
    """
    try:
        text = sys.stdin.read() if name == "-" else Path(name).read_text()
        return [item for document in yaml.safe_load_all(text) for item in _items(document)]
    except (OSError, yaml.YAMLError) as error:
        raise UsageError(f"{name}: can't be read as YAML ({error})") from error
    except RecursionError as error:
        raise UsageError(f"{name}: can't be read as YAML (nested too deeply)") from error
    except (ValueError, AttributeError, LookupError, ArithmeticError) as error:
        # PyYAML lets errors of its conversions through: 2024-13-45, !!timestamp x, !!bool x, an int of 5000 digits;
        # UnicodeDecodeError and a NUL in the name are ValueErrors too
        raise UsageError(f"{name}: can't be read as YAML (a value that is none: {error})") from error


def _items(document: object) -> Iterator[Object]:
    """`kubectl get -o yaml` of several objects writes one `List`."""
    if not isinstance(document, dict):
        return
    items = document.get("items")
    if document.get("kind") == "List" and isinstance(items, list):
        yield from (item for item in items if isinstance(item, dict))
    else:
        yield document


def of_kind(documents: Sequence[Object], kind: str) -> list[Object]:
    """Those of our API; other projects have kinds of the same name (KServe's InferenceService)."""
    return [d for d in documents if d.get("apiVersion") == names.API_VERSION and d.get("kind") == kind]
