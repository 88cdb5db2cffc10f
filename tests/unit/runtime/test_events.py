"""Events: told once, counted when repeated, bounded."""

import asyncio

from sluice.plan.snapshot import Event
from sluice.runtime.errors import Forbidden
from sluice.runtime.events import Recorder
from tests.unit.runtime.builders import FakeClock, Object, a_service
from tests.unit.runtime.memory_api import MemoryApi, failing


class Desk:
    """A recorder whose writes go to memory when `flush` says so."""

    def __init__(self) -> None:
        self.api, self.clock = MemoryApi(), FakeClock()
        self.recorder = Recorder(self.api, reporter="op-1", clock=self.clock)

    def say(self, note: str, *, reason: str = "Loading", instance: str = "", uid: str = "") -> None:
        self.recorder.record(a_service(uid=uid), Event(reason, note, instance=instance))

    async def flush(self) -> list[Object]:
        """Write all that waits; the Events on the API server, oldest first."""
        while not self.recorder._queue.empty():
            async with asyncio.timeout(1):
                await self.recorder.write_next()
        return list(self.api.objects.values())


async def test_event_names_object_reason_and_note() -> None:
    desk = Desk()
    desk.recorder.record(a_service(), Event("QuotaExceeded", "no room", warning=True, instance="svc-0"))
    [event] = await desk.flush()
    assert (event["reason"], event["note"], event["type"]) == ("QuotaExceeded", "no room", "Warning")
    assert event["regarding"]["name"] == "svc"
    assert event["related"]["name"] == "svc-0"
    assert event["metadata"]["namespace"] == "t"


async def test_repeat_with_other_numbers_is_the_same_event_counted_at_most_once_a_minute() -> None:
    desk = Desk()
    for i in range(50):
        desk.say(f"{i} of 50 loaded in {i}.5 s")
        desk.clock.advance(3)
    events = await desk.flush()
    assert len(events) == 1
    assert events[0]["series"]["count"] == 50
    patches = [call for call in desk.api.writes() if call[0].startswith("patch")]
    assert len(patches) == 1  # two counts were due; what waits is written once, with the newest count


async def test_other_reason_instance_or_text_is_another_event() -> None:
    desk = Desk()
    desk.say("loading")
    desk.say("loading", reason="Verifying")
    desk.say("loading", instance="svc-1")
    desk.say("loading slowly")
    assert len(await desk.flush()) == 4


async def test_repeat_after_ten_quiet_minutes_is_told_anew() -> None:
    desk = Desk()
    desk.say("loading")
    desk.clock.advance(601)
    desk.say("loading")
    assert len(await desk.flush()) == 2


async def test_broken_object_writes_25_events_then_one_in_five_minutes_and_harms_no_other() -> None:
    desk = Desk()
    for i in range(40):
        desk.say("x" * (i + 1))
    desk.say("y", uid="other")
    assert len(await desk.flush()) == 26
    assert desk.recorder.dropped == 15
    desk.clock.advance(300)
    desk.say("z")
    assert len(await desk.flush()) == 27


async def test_refused_event_is_dropped_and_counted() -> None:
    desk = Desk()
    desk.api.fail = failing(Forbidden, "create")
    desk.say("loading")
    assert await desk.flush() == []
    assert desk.recorder.dropped == 1


async def test_series_whose_event_expired_starts_a_new_event() -> None:
    desk = Desk()
    desk.say("loading")
    await desk.flush()
    desk.api.objects.clear()
    desk.clock.advance(61)
    desk.say("loading")
    await desk.flush()
    desk.say("loading")
    assert len(await desk.flush()) == 1


async def test_long_name_and_note_are_cut() -> None:
    desk = Desk()
    desk.recorder.record(a_service("s" * 253), Event("Loading", "n" * 5000))
    [event] = await desk.flush()
    assert len(event["metadata"]["name"]) <= 253
    assert len(event["note"]) == 1024
