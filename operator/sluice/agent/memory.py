"""Keeps the agent's state over its own restarts, so that a restarted agent neither unroutes nor forgets a drain.

One JSON file in an emptyDir, replaced as a whole after every round (1 KiB; no fsync: it has to outlive the process, not
the node). The times in it are of the node's monotonic clock, so a file from before a reboot is worthless and dropped.
"""

import json
import logging
from dataclasses import asdict
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from sluice.agent.facts import EngineState

log = logging.getLogger(__name__)

_STATE = TypeAdapter(EngineState)
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class Memory:
    """The state file of one instance."""

    def __init__(self, path: Path, instance: str, boot_id: str) -> None:
        self._path = path
        self._key = {"instance": instance, "boot": boot_id}

    def load(self) -> EngineState | None:
        """The last state, or None if there is none that means anything here."""
        try:
            data = json.loads(self._path.read_text())
            if not isinstance(data, dict) or {k: data.get(k) for k in self._key} != self._key:
                return None
            return _STATE.validate_python(data["state"])
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, ValidationError) as error:
            log.warning("state file %s is unreadable, starting afresh: %s", self._path, error)
            return None

    def save(self, state: EngineState) -> None:
        """Replace the file; a full or read-only disk is logged, not fatal: the engine still has to be watched."""
        temporary = self._path.with_suffix(".tmp")
        try:
            temporary.write_text(json.dumps({**self._key, "state": asdict(state)}))
            temporary.replace(self._path)
        except OSError as error:
            log.warning("cannot write the state file %s: %s", self._path, error)
