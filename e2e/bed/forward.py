"""TCP ports of this machine's loopback that lead into a bed's network.

A listening socket stays in the network it was made in, while connections are made from the network of the calling
thread: so one thread inside the bed's network serves sockets that were made outside. No host route, rule or link is
needed. Meant for control traffic (kubectl, the demo); tests with load enter the network instead.
"""

from __future__ import annotations

import asyncio
import socket
import threading

from e2e.bed.namespaces import Machine

_BUFFER = 1 << 16
_LOOPBACK = "127.0.0.1"


async def _copy(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
    """Until the end of the stream; then pass the end on, so half-closed connections work."""
    while data := await source.read(_BUFFER):
        target.write(data)
        await target.drain()
    if target.can_write_eof():
        target.write_eof()


class Forwarder:
    """Forwards ports until ``close``."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._loop = asyncio.new_event_loop()
        self._tasks: set[asyncio.Task[None]] = set()  # the loop itself holds them weakly
        started = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(started,), name="bed-forwarder", daemon=True)
        self._thread.start()
        started.wait()

    def _run(self, started: threading.Event) -> None:
        with self._machine.in_network():
            asyncio.set_event_loop(self._loop)
            self._loop.call_soon(started.set)
            self._loop.run_forever()
            pending = asyncio.all_tasks(self._loop)
            for task in pending:
                task.cancel()
            self._loop.run_until_complete(asyncio.gather(*pending, return_exceptions=True))
            self._loop.run_until_complete(self._loop.shutdown_default_executor())
            self._loop.close()

    def open(self, host: str, port: int, local_port: int = 0) -> int:
        """Listen on this loopback port (0: any free one) and lead to ``host:port`` inside; the local port."""
        listener = socket.create_server((_LOOPBACK, local_port))

        async def serve() -> None:
            await asyncio.start_server(lambda reader, writer: self._join(host, port, reader, writer), sock=listener)

        asyncio.run_coroutine_threadsafe(serve(), self._loop).result()
        number: int = listener.getsockname()[1]
        return number

    async def _join(self, host: str, port: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers = [writer]
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            inner_reader, inner_writer = await asyncio.open_connection(host, port)
            writers.append(inner_writer)
            async with asyncio.TaskGroup() as both:
                both.create_task(_copy(reader, inner_writer))
                both.create_task(_copy(inner_reader, writer))
        except* OSError:
            # Either end is away: closing the other is how a client learns it.
            pass
        finally:
            for each in writers:
                each.close()
            self._tasks.discard(task)

    def close(self) -> None:
        """Close all ports and connections."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
