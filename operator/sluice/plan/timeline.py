"""How long each part of an instance's start took, from what scheduler, kubelet and agent say.

All are seconds since the pod's creation, which the API gives in whole seconds; a part that nobody told is left out.
"""

from dataclasses import dataclass

from sluice.api import names
from sluice.api.conditions import Reason
from sluice.plan.health import Instance
from sluice.plan.snapshot import Event


@dataclass(frozen=True, slots=True)
class Timeline:
    """Moments of a start in seconds since the epoch; None: not yet, or unknown."""

    created_at: float
    scheduled_at: float | None
    started_at: float | None
    """The engine's container runs: scheduled, and its images are there."""
    loaded_at: float | None
    """The engine lists its model."""
    verified_at: float | None
    """The first real inference was answered."""

    @property
    def text(self) -> str:
        """`scheduled 0.1, started 2.0, loaded 8.0, verified 10.1`, in seconds; "" while nothing is known."""
        parts = (
            ("scheduled", self.scheduled_at),
            ("started", self.started_at),
            ("loaded", self.loaded_at),
            ("verified", self.verified_at),
        )
        return ", ".join(f"{name} {self.after(moment):.1f}" for name, moment in parts if moment is not None)

    def after(self, moment: float) -> float:
        """Seconds from the creation; never negative, although clocks of nodes differ."""
        return max(0.0, moment - self.created_at)


def timeline(instance: Instance) -> Timeline:
    pod, state = instance.pod, instance.state
    engine = pod.container(names.CONTAINER_ENGINE)
    return Timeline(
        created_at=pod.created_at,
        scheduled_at=pod.scheduled_at,
        started_at=engine.started_at if engine else None,
        loaded_at=state.loaded_at if state else None,
        verified_at=state.verified_at if state else None,
    )


def first_serving(instance: Instance, now: float) -> Event | None:
    """Told in the pass that opens the instance's gate for the first time."""
    if not instance.is_serving or instance.pod.gate or instance.pod.gate_was_set:
        return None
    start = timeline(instance)
    parts = ", ".join(part for part in (start.text, f"routed {start.after(now):.1f}") if part)
    note = f"Instance {instance.name} serves after {start.after(now):.1f} s: {parts}"
    return Event(str(Reason.INSTANCE_SERVING), note, instance=instance.name, action="Start")
