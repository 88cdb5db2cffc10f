"""The agent's state over its own restarts."""

from pathlib import Path

from sluice.agent.memory import Memory
from sluice.agent.verdict import start_drain
from sluice.api.agent import EnginePhase
from tests.unit.agent.timeline import Timeline


def test_restarted_agent_knows_its_engine_run_and_its_drain(tmp_path: Path) -> None:
    state = start_drain(Timeline().serving().state, 5.0)
    memory = Memory(tmp_path / "agent.json", "chat-0", "boot-1")
    memory.save(state)
    assert Memory(tmp_path / "agent.json", "chat-0", "boot-1").load() == state


def test_resumed_engine_is_ready_at_once_and_the_same_run() -> None:
    line = Timeline().serving()
    again = Timeline(state=line.state, now=line.now + 20)
    again.tokens = line.tokens
    state = again.play(1)
    assert (state.phase, state.engine_id) == (EnginePhase.READY, line.state.engine_id)


def test_file_of_another_boot_or_instance_or_of_garbage_is_dropped(tmp_path: Path) -> None:
    path = tmp_path / "agent.json"
    Memory(path, "chat-0", "boot-1").save(Timeline().serving().state)
    assert Memory(path, "chat-0", "boot-2").load() is None
    assert Memory(path, "chat-1", "boot-1").load() is None
    path.write_text('{"instance": "chat-0", "boot": "boot-1", "state": {"seq": "x"}}')
    assert Memory(path, "chat-0", "boot-1").load() is None
    path.write_text("{")
    assert Memory(path, "chat-0", "boot-1").load() is None


def test_directory_that_cannot_be_written_does_not_stop_the_watch(tmp_path: Path) -> None:
    Memory(tmp_path / "absent" / "agent.json", "chat-0", "boot-1").save(Timeline().state)
