"""Composition: one snapshot in, one `Plan` out."""

from dataclasses import dataclass

from sluice.plan.actions import Action
from sluice.plan.snapshot import Event


@dataclass(frozen=True, slots=True)
class Plan:
    """The next step. `status` is made afterwards by `plan.status.compute_status(snapshot, plan, results, now)`."""

    actions: tuple[Action, ...] = ()
    events: tuple[Event, ...] = ()
    requeue_after_s: float | None = None
    """When to look again though nothing changed (deadlines); null: only on events and the periodic resync."""
