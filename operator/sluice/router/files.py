"""The volume that sidecar and smg share (an emptyDir, `/run/r`): it outlives restarts of both containers.

| file | written by | read by |
|---|---|---|
| `admin-key` | the sidecar, once | launcher (hands it to smg), sidecar |
| `workers.json` | the sidecar | smg, which follows changes at once |
| `wanted.json` | the sidecar | the sidecar after its own restart |

Files are replaced as a whole (temporary file and rename): smg keeps its last good list when it meets a broken
one (measured), but a reader must never see half a list.
"""

import logging
import os
import secrets
from pathlib import Path

from pydantic import Field, ValidationError

from sluice.api.router import WorkerList
from sluice.api.wire import Wire
from sluice.router.launcher import KEY_FILE, MANIFEST_FILE
from sluice.router.worklist import Entry, parse, render

log = logging.getLogger(__name__)

WANTED_FILE = "wanted.json"


class HeldList(Wire):
    """The wanted list and when it came from the operator."""

    wanted: WorkerList
    received_at: float = Field(allow_inf_nan=False)
    """Seconds since the epoch."""


class RunDir:
    """The shared directory."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def admin_key(self) -> str:
        """smg's admin key: made once per pod and kept, because a running smg knows it from its start.

        Raises:
            OSError: the volume can't be written; the sidecar is useless then.
        """
        path = self._path / KEY_FILE
        if path.exists() and (key := path.read_text().strip()):
            return key
        key = secrets.token_urlsafe(32)
        self._replace(path, key, mode=0o600)
        return key

    def load_wanted(self) -> HeldList | None:
        """The list held before a restart; a broken file counts as none."""
        try:
            return HeldList.model_validate_json((self._path / WANTED_FILE).read_text())
        except FileNotFoundError:
            return None
        except (OSError, ValidationError) as error:
            log.warning("%s is unreadable, waiting for a new list: %s", self._path / WANTED_FILE, error)
            return None

    def save_wanted(self, held: HeldList) -> None:
        """
        Raises:
            OSError: the volume can't be written.
        """
        self._replace(self._path / WANTED_FILE, held.model_dump_json(by_alias=True))

    def load_manifest(self) -> tuple[Entry, ...] | None:
        """What smg was told last; None if it was never told anything."""
        try:
            return parse((self._path / MANIFEST_FILE).read_text())
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            log.warning("%s is unreadable, writing it anew: %s", self._path / MANIFEST_FILE, error)
            return None

    def save_manifest(self, entries: tuple[Entry, ...]) -> None:
        """
        Raises:
            OSError: the volume can't be written.
        """
        self._replace(self._path / MANIFEST_FILE, render(entries))

    def _replace(self, path: Path, text: str, *, mode: int = 0o644) -> None:
        temporary = path.with_suffix(".tmp")
        temporary.unlink(missing_ok=True)
        with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "w") as file:  # noqa: PTH123 (mode)
            file.write(text)
        temporary.replace(path)
