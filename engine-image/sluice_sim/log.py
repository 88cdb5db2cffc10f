"""One JSON object per line on stdout: the few events of a process that a reader of pod logs wants."""

import json
import sys
from typing import Any


def log_event(event: str, **fields: Any) -> None:
    sys.stdout.write(json.dumps({"event": event, **fields}) + "\n")
    sys.stdout.flush()
