"""Several nodes as one instance: coming together, and what each one's death does to the others.

Who dies is a real process; the others live in the test's own loop and note what they would have exited with.
"""

import asyncio
import functools
import json
import signal
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest

from sluice_sim.cli import parse
from sluice_sim.config import Config, Group
from sluice_sim.group import Follower, GroupError, Leader
from tests.unit.sim_engine.harness import Client, InLoop, Spawned, eventually, in_flight, is_up, running, said, spawned

ENDLESS: dict[str, Any] = {"max_tokens": 20_000, "ignore_eos": True}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def vllm_rank(rank: int, size: int, port: int) -> list[str]:
    flags = ["-tp", str(size), "--nnodes", str(size), "--node-rank", str(rank), "--master-port", str(port)]
    flags += ["--death-exit-seconds", "0.3"]
    return [*flags, "--headless"] if rank else flags


def sglang_rank(rank: int, size: int, port: int) -> list[str]:
    where = ["--nnodes", str(size), "--node-rank", str(rank), "--dist-init-addr", f"127.0.0.1:{port}"]
    return ["--flavor", "sglang", "--tp", str(size), "--death-exit-seconds", "0.3", *where]


@asynccontextmanager
async def group(size: int, *flags: str, sglang: bool = False) -> AsyncIterator[list[InLoop]]:
    """All ranks, the leader first, once they serve and follow."""
    rank_flags, port = (sglang_rank if sglang else vllm_rank), free_port()
    async with AsyncExitStack() as stack:
        members = [
            await stack.enter_async_context(running(*rank_flags(rank, size, port), *flags, wait=False))
            for rank in range(size)
        ]
        await together(members)
        yield members


async def together(members: list[InLoop]) -> None:
    """Wait until they serve and follow."""
    for member in members:
        sim = member.process.sim
        await eventually(functools.partial(is_up, sim), "ready")
        member.port = sim.port or 0


@asynccontextmanager
async def with_victim(
    size: int, victim: int, *flags: str, sglang: bool = False
) -> AsyncIterator[tuple[list[InLoop], Spawned]]:
    """A whole group of which one rank is a real process; the others in order of rank."""
    rank_flags, port = (sglang_rank if sglang else vllm_rank), free_port()
    async with AsyncExitStack() as stack:
        members = [
            await stack.enter_async_context(running(*rank_flags(rank, size, port), *flags, wait=False))
            for rank in range(size)
            if rank != victim
        ]
        until = "serving" if victim == 0 else "following"
        dying = await stack.enter_async_context(spawned(*rank_flags(victim, size, port), *flags, until=until))
        await together(members)
        yield members, dying


async def status_of(engine: Client, path: str) -> int:
    return (await engine.get(path))[0]


@pytest.mark.parametrize("sglang", [False, True])
async def test_leader_is_ready_only_when_all_ranks_joined_and_loaded(sglang: bool) -> None:
    rank_flags, port = (sglang_rank if sglang else vllm_rank), free_port()
    never = {"SIM_FAULTS": json.dumps([{"name": "neverReady"}])}
    async with (
        running(*rank_flags(1, 3, port), wait=False) as first,  # dials a leader that is not there yet
        running(*rank_flags(0, 3, port), wait=False) as leader,
    ):
        sim = leader.process.sim
        await eventually(lambda: first.process.membership is not None and sim.phase == "loading", "both started")
        async with running(*rank_flags(2, 3, port), env=never, wait=False) as second:
            await eventually(lambda: sim.joined == [1, 2], "all are there")
            await eventually(lambda: first.process.sim.phase == "following", "one has loaded")
            assert (await leader.sim("state"))["phase"] == "loading"
            async with second.session.delete(second.fault_url + "/sim/faults"):
                pass
            await eventually(lambda: sim.phase == "serving" and sim.port, "leader serves")
            assert (await leader.sim("state"))["group"] == {"rank": 0, "nodes": 3, "joined": [1, 2]}
            leader.port = sim.port or 0
            assert (await leader.complete())[0] == 200


async def test_group_says_what_one_engine_says() -> None:
    async with group(2) as (leader, _), running() as single:
        for prompt in ("hello", "x" * 500):
            assert said((await leader.complete(prompt))[1]) == said((await single.complete(prompt))[1])


def place_of(rank: int, port: int) -> tuple[Config, Group]:
    """A node of three that does not wait long."""
    config = parse(["serve", "m", *vllm_rank(rank, 3, port), "--distributed-timeout-seconds", "0.2"], {})
    assert config.group is not None
    return config, config.group


async def test_followers_that_do_not_come_are_named() -> None:
    async with Leader(*place_of(0, 0), on_lost=lambda _: None) as leader:
        with pytest.raises(GroupError, match=r"ranks \[1, 2\] did not join within 0.2 s"):
            await leader.joining()


async def test_leader_that_does_not_come_is_named() -> None:
    port = free_port()
    with pytest.raises(GroupError, match=f"no welcome from 127.0.0.1:{port} within 0.2 s"):
        await Follower(*place_of(1, port)).join()


async def test_process_whose_group_does_not_come_together_exits_1() -> None:
    flags = vllm_rank(1, 2, free_port())
    async with spawned(*flags, "--distributed-timeout-seconds", "0.2", until="exit") as follower:
        assert await follower.exit_code() == 1


async def test_rank_of_another_model_or_one_that_is_there_already_is_not_let_in() -> None:
    port = free_port()
    async with (
        running(*vllm_rank(0, 3, port), wait=False) as leader,
        running(*vllm_rank(1, 3, port), wait=False) as first,
        running(*vllm_rank(2, 3, port), model="other", wait=False) as other,
    ):
        await eventually(lambda: first.process.membership, "it dials")
        async with running(*vllm_rank(1, 3, port), wait=False) as again, running(*vllm_rank(2, 3, port)):
            await eventually(lambda: leader.process.sim.phase == "serving", "the right ones came together")
            assert other.process.sim.phase == "loading"
            assert sorted([first.process.sim.phase, again.process.sim.phase]) == ["following", "loading"]


async def test_death_of_an_idle_groups_follower_shows_at_the_next_request_only() -> None:
    async with with_victim(3, 2) as ((leader, first), victim):
        victim.process.kill()
        await eventually(lambda: leader.process.sim.joined == [1], "leader knows")
        assert await status_of(leader, "/health") == 200
        assert (await leader.complete())[0] == 500
        assert await status_of(leader, "/health") == 503
        await eventually(lambda: leader.exit_codes == [1], "leader exits")
        assert first.exit_codes == []


async def test_follower_outlives_its_leader_until_sigterm() -> None:
    async with with_victim(2, 0) as ([follower], victim):
        victim.process.kill()
        await victim.exit_code()
        assert follower.process.sim.phase == "following"
        assert follower.exit_codes == []
        follower.process.terminate()
        await eventually(lambda: follower.process.sim.phase == "stopped", "it ends")


async def test_death_of_a_follower_under_load_breaks_the_streams() -> None:
    async with with_victim(2, 1, "--speed", "1") as ([leader], victim):
        stream = asyncio.create_task(leader.stream(**ENDLESS))
        await in_flight(leader)
        victim.sigterm()  # a single rank is not evicted in peace
        assert await victim.exit_code() == 0
        events, _ = await stream
        assert events[-1]["error"]["code"] == 500
        assert await status_of(leader, "/health") == 503
        await eventually(lambda: leader.exit_codes == [1], "leader exits")


async def test_death_of_a_follower_that_still_loads_ends_the_leader() -> None:
    port = free_port()
    never = {"SIM_FAULTS": json.dumps([{"name": "neverReady"}])}
    async with running(*vllm_rank(0, 2, port), wait=False) as leader:
        async with running(*vllm_rank(1, 2, port), env=never, wait=False):
            await eventually(lambda: leader.process.sim.joined == [1], "both are there")
        await eventually(lambda: leader.exit_codes == [1], "leader exits")


async def test_follower_that_is_stopped_or_hangs_holds_up_the_whole_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sluice_sim.group._STALL_S", 0.4)
    port = free_port()
    async with (
        running(*vllm_rank(0, 2, port), wait=False) as leader,
        spawned(*vllm_rank(1, 2, port), until="following") as follower,
    ):
        sim = leader.process.sim
        await eventually(lambda: sim.phase == "serving" and sim.port, "leader serves")
        leader.port = sim.port or 0
        follower.process.send_signal(signal.SIGSTOP)
        await eventually(lambda: sim.is_stalled, "leader waits")
        request = asyncio.create_task(leader.complete())
        await eventually(lambda: sim.engine.in_flight == 1, "request accepted")
        assert await status_of(leader, "/health") == 200
        follower.process.send_signal(signal.SIGCONT)
        assert (await request)[0] == 200
        await follower.faults({"name": "hang"})
        await eventually(lambda: sim.is_stalled, "leader waits")


async def test_stale_follower_keeps_a_restarted_leader_from_serving() -> None:
    port = free_port()
    async with running(*vllm_rank(1, 2, port), wait=False) as follower:
        async with running(*vllm_rank(0, 2, port)):
            await together([follower])
        async with running(*vllm_rank(0, 2, port), wait=False) as new:
            membership = new.process.membership
            assert membership is not None
            await eventually(lambda: membership.port, "it waits for the others")
            assert (await new.sim("state"))["group"]["joined"] == []
            assert (new.process.sim.phase, follower.process.sim.phase) == ("loading", "following")


async def test_sglang_ranks_end_each_other() -> None:
    async with with_victim(3, 2, sglang=True) as ((leader, first), victim):
        victim.process.kill()
        await eventually(lambda: leader.exit_codes == first.exit_codes == [131], "all ranks exit")


async def test_killed_sglang_leader_ends_its_followers() -> None:
    async with with_victim(2, 0, sglang=True) as ([follower], victim):
        victim.process.kill()
        await eventually(lambda: follower.exit_codes == [131], "follower exits")


async def test_sglang_follower_says_it_is_well_and_ignores_sigterm() -> None:
    async with group(2, sglang=True) as (_, follower):
        assert await status_of(follower, "/health") == 200
        follower.process.terminate()
        assert await status_of(follower, "/health") == 200
        assert follower.process.sim.phase == "following"


async def test_follower_death_put_on_the_leader_ends_the_last_rank() -> None:
    async with with_victim(3, 2) as ((leader, first), victim):
        assert (await leader.faults({"name": "followerDeath"}))[0] == 200
        assert await victim.exit_code() == 137
        assert first.exit_codes == []


async def test_follower_death_names_rank_and_code() -> None:
    async with group(3) as (leader, first, second):
        assert (await leader.faults({"name": "followerDeath", "args": {"rank": 1, "code": 9}}))[0] == 200
        await eventually(lambda: first.exit_codes == [9], "rank 1 exits")
        assert (leader.exit_codes, second.exit_codes) == ([], [])


async def test_same_faults_on_all_ranks_end_the_one_that_is_meant() -> None:
    """As with one pod template for the whole group."""
    faults = [
        {"name": "followerDeath", "args": {"rank": 1, "code": 3}},
        {"name": "leaderDeath", "args": {"code": 4}, "when": {"afterSeconds": 0.2}},
    ]
    async with group(3) as (leader, first, second):
        for member in (second, first):
            assert (await member.faults(*faults))[0] == 200
        assert (await leader.faults(faults[1]))[0] == 200
        await eventually(lambda: leader.exit_codes == [4], "leader exits")
        assert (first.exit_codes, second.exit_codes) == ([3], [])


async def test_group_faults_are_refused_where_they_can_have_no_effect() -> None:
    async with running() as engine:
        for name in ("followerDeath", "leaderDeath"):
            status, body = await engine.faults({"name": name})
            assert (status, "start it with --nnodes" in body["error"]) == (400, True)
    async with group(2) as (leader, _):
        status, body = await leader.faults({"name": "followerDeath", "args": {"rank": 2}})
        assert (status, "rank 2 is not within the 2 nodes" in body["error"]) == (400, True)


def test_data_parallel_nodes_are_a_group_too() -> None:
    flags = ["--data-parallel-size", "8", "--data-parallel-size-local", "2", "--data-parallel-address", "leader"]
    flags += [
        "--data-parallel-rpc-port",
        "13345",
        "--enable-expert-parallel",
        "--all2all-backend",
        "deepep_low_latency",
    ]
    leader = parse(["serve", "m", *flags], {}).group
    follower = parse(["serve", "m", *flags, "--headless", "--data-parallel-start-rank", "6"], {}).group
    assert leader is not None
    assert follower is not None
    assert (leader.size, leader.rank, leader.host, leader.port) == (4, 0, "leader", 13345)
    assert (follower.size, follower.rank) == (4, 3)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--nnodes", "2", "--node-rank", "2", "-tp", "2", "--headless"], "rank 2 is not within the 2 nodes"),
        (["--nnodes", "2", "--node-rank", "1", "-tp", "2"], "--headless is for ranks above 0"),
        (["--headless"], "--headless is for ranks above 0"),
        (["--nnodes", "2", "-tp", "3"], "can't be spread evenly over --nnodes 2"),
        (["--data-parallel-start-rank", "1"], "needs --data-parallel-size-local"),
        (["--data-parallel-size", "4", "--data-parallel-size-local", "3"], "must be multiples"),
        (["--nnodes", "2", "-tp", "2", "-dp", "2", "-dpl", "1"], "not together with --nnodes"),
    ],
)
def test_ranks_that_contradict_each_other_are_refused(
    argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parse(["serve", "m", *argv], {})
    assert message in capsys.readouterr().err
