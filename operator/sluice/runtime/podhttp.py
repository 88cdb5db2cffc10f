"""HTTP to pods of ours: agents and router sidecars.

What answers at a pod's address is not trusted: only the IP from the pod's own status, no redirects, no proxies, a cap
on the bytes read, and a schema check by the caller. Link-local, multicast and unspecified addresses are never asked
(a cloud's metadata service lives at a link-local one); a loopback address only if the pod's status says so, as on a
test bed.
"""

import ipaddress
from typing import Final

import aiohttp

CONNECT_TIMEOUT_S: Final = 2.0


class PodUnreachable(Exception):  # noqa: N818 - reads better in `except PodUnreachable`
    """No usable answer; the text says from where and why."""


class Rejected(PodUnreachable):
    """An HTTP status other than 200; `status` tells which."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class PodHttp:
    """One shared session; `close` it at the end."""

    def __init__(self) -> None:
        connector = aiohttp.TCPConnector(limit=0, use_dns_cache=False, keepalive_timeout=10)
        self._session = aiohttp.ClientSession(
            connector=connector, trust_env=False, cookie_jar=aiohttp.DummyCookieJar(), auto_decompress=False
        )

    async def close(self) -> None:
        await self._session.close()

    async def call(
        self,
        method: str,
        url: str,
        *,
        timeout_s: float,
        max_bytes: int,
        headers: dict[str, str] | None = None,
        body: bytes | None = None,
    ) -> bytes:
        """The body of a 200 answer.

        Raises:
            PodUnreachable: no connection, no answer in time, or an answer over `max_bytes`.
            Rejected: another status (redirects included).
        """
        timeout = aiohttp.ClientTimeout(total=timeout_s, sock_connect=CONNECT_TIMEOUT_S)
        try:
            async with self._session.request(
                method, url, headers=headers, data=body, timeout=timeout, allow_redirects=False
            ) as response:
                data = await response.content.read(max_bytes + 1)
                while len(data) <= max_bytes and not response.content.at_eof():
                    data += await response.content.read(max_bytes + 1 - len(data))
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise PodUnreachable(f"{method} {url}: {str(error) or type(error).__name__}") from error
        if len(data) > max_bytes:
            raise PodUnreachable(f"{method} {url}: the answer is over {max_bytes} bytes")
        if response.status != 200:
            text = data[:200].decode(errors="replace")
            raise Rejected(f"{method} {url}: HTTP {response.status}: {text}", response.status)
        return data


def pod_url(ip: str, port: int, path: str) -> str:
    """URL on a pod.

    Raises:
        PodUnreachable: `ip` is no address that a pod may have.
    """
    try:
        address = ipaddress.ip_address(ip)
    except ValueError as error:
        raise PodUnreachable(f"{ip!r} is not an IP address") from error
    if address.is_link_local or address.is_multicast or address.is_unspecified:
        raise PodUnreachable(f"{ip} is not an address of a pod")
    host = f"[{ip}]" if address.version == 6 else ip
    return f"http://{host}:{port}{path}"
