"""Which way to an instance is tried."""

import asyncio

from sluice.router.agents import AgentWatch
from sluice.router.worklist import DataPath


async def test_an_agents_address_that_comes_back_with_another_engine_port_is_tried_there() -> None:
    """A reused pod address after a rollout that changed the port, in one list."""
    engine = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0)
    new = f"http://127.0.0.1:{engine.sockets[0].getsockname()[1]}"
    nobody, silent_agent = "http://127.0.0.1:2", "http://127.0.0.1:1"
    news = asyncio.Event()
    watch = AgentWatch(news.set)
    try:
        watch.follow({silent_agent: nobody})
        watch.follow({silent_agent: new})
        await asyncio.wait_for(news.wait(), 5)
        assert watch.paths[silent_agent] is DataPath.CONNECTS
    finally:
        await watch.close()
        engine.close()
