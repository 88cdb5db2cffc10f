"""What the operator tells a router's sidecar and what the sidecar answers.

`PUT /workers` carries the whole wanted list (`WorkerList`); `GET /workers` answers `RouterState`. The sidecar may
take workers away on its own (another engine run, suspect, hung or draining), it never adds one.
"""

from enum import StrEnum

from pydantic import Field

from sluice.api import names
from sluice.api.wire import Wire

MAX_WORKERS = 1024
UNREACHABLE = "Unreachable"
"""First word of `RoutedWorker.reason` when neither agent nor engine of a withheld worker can be reached."""


class Worker(Wire):
    """One instance as the router should see it."""

    id: str
    """Instance name; unique in the list."""
    url: str
    """Base address of the engine, `http://<pod IP>:<port>`."""
    role: str = "Unified"
    agent_url: str
    """Base address of the agent, `http://<pod IP>:9900`."""
    engine_id: str
    """The engine run that passed its self-test; another one at the same address is left out until it is verified."""
    model: str
    """Served model name."""


class WorkerList(Wire):
    generation: str
    """Digest of the list; equal lists have equal generations, so a repeated PUT changes nothing."""
    open: bool = True
    """False: the router's pod is not ready and leaves the Service."""
    workers: list[Worker] = Field(default=[], max_length=MAX_WORKERS)


class WorkerStatus(StrEnum):
    """smg's own words, plus `withheld` for a wanted worker that the sidecar keeps out."""

    PENDING = "pending"
    READY = "ready"
    NOT_READY = "not_ready"
    FAILED = "failed"
    DRAINING = "draining"
    WITHHELD = "withheld"
    ABSENT = "absent"


class RoutedWorker(Wire):
    id: str
    url: str
    engine_id: str | None = None
    """Null for a worker that the router has and nobody wants (a ghost)."""
    status: WorkerStatus
    reason: str = ""


class RouterState(Wire):
    """Answer of `GET /workers`: what was wanted and what smg really has, read back from smg just now."""

    generation: str | None = None
    """Generation of the list held; null before the first list."""
    open: bool = True
    smg_reachable: bool
    """False: `workers` says nothing about what smg routes to."""
    workers: list[RoutedWorker] = []
    wanted: WorkerList | None = None
    """The list held, for a sibling's start."""
    wanted_at: float | None = None
    """When the list held came from the operator (seconds since the epoch): of two siblings' lists the newer counts."""


class SidecarConfig(Wire):
    """Passed as JSON in the environment variable `SLUICE_ROUTER_CONFIG` of the sidecar's container."""

    service: str
    """`<namespace>/<name>` of the InferenceService, for logs and metrics."""
    operator_subject: str
    """The only subject whose token may PUT a list."""
    audience: str = names.ROUTER_TOKEN_AUDIENCE
    sibling_host: str | None = None
    """Name of the headless Service of all router pods of the service; null: no sibling is asked for its list."""
    keys_file: str = "/etc/sluice/keys/jwks.json"
    """JSON Web Key Set with the cluster's public signing keys; re-read when it changes."""
    run_dir: str = "/run/r"
    """Directory shared with smg's container; outlives container restarts."""
    host: str = "0.0.0.0"
    port: int = names.PORT_SIDECAR
    smg_url: str = f"http://127.0.0.1:{names.PORT_ROUTER}"
    smg_health_url: str = f"http://127.0.0.1:{names.PORT_ROUTER_HEALTH}"
