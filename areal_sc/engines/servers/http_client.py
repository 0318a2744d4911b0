"""HTTP to one server, with pooled connections and typed errors.

Every answer is checked: what comes back is what was asked for, or one of

    PeerLost       no connection, or it ended before the answer: nothing is known of the request
    RpcTimeout     no answer in time
    ServerBusy     the server takes no request now (it starts, ends, or its queue is full)
    EngineFailed   the server refused; the message is its own
    ConfigError    the API key is wrong
    ProtocolError  the answer is none that such a server gives
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import aiohttp

from areal_sc.errors import (
    ConfigError,
    EngineFailed,
    PeerLost,
    ProtocolError,
    RpcTimeout,
    ServerBusy,
)

MAX_ANSWER_BYTES = 256 << 20
_CONNECT_TIMEOUT_S = 10.0
_KEEP_ALIVE_S = 3.0  # shorter than the 5 s after which servers close an idle connection
_MAX_REASON_CHARACTERS = 1000

_UNAUTHORIZED = (401, 403)
_BUSY = (429, 503)


class HttpClient:
    """Must be made on a running event loop, and closed on it.

    Args:
        url: `http://host:port`.
        api_key: sent with every request; empty sends none.
        key_setting: that names the key, for messages.
    """

    def __init__(self, url: str, api_key: str, key_setting: str) -> None:
        self.url = url.rstrip("/")
        self._key_setting = key_setting
        self._session = aiohttp.ClientSession(
            headers={"Authorization": f"Bearer {api_key}"} if api_key else None,
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_ALIVE_S),
            trust_env=False,
        )

    async def close(self) -> None:
        await self._session.close()

    async def request(
        self, method: str, path: str, body: Mapping[str, Any] | None, timeout_s: float | None
    ) -> dict[str, Any]:
        """The answer to a request that the server has accepted; {} when it has no content."""
        status, content = await self.send(method, path, body, timeout_s)
        if status in _BUSY:
            raise ServerBusy(f"{self.url}{path} takes no request now (HTTP {status})")
        if status in _UNAUTHORIZED:
            raise ConfigError(
                f"{self.url}{path} refused the API key (HTTP {status}): put the server's key "
                f"into an environment variable and name it in {self._key_setting}"
            )
        try:
            answer = json.loads(content) if content else {}
        except ValueError as error:
            if status == 200:
                raise ProtocolError(f"{self.url}{path} did not answer with JSON") from error
            answer = content[:_MAX_REASON_CHARACTERS].decode(errors="replace")
        if status != 200:
            raise EngineFailed(f"{self.url}{path} refused (HTTP {status}): {reason_of(answer)}")
        if not isinstance(answer, dict):
            raise ProtocolError(
                f"{self.url}{path} answered with a {type(answer).__name__}, expected an object"
            )
        return answer

    async def send(
        self, method: str, path: str, body: Mapping[str, Any] | None, timeout_s: float | None
    ) -> tuple[int, bytes]:
        """HTTP status and content, whatever they are."""
        timeout = aiohttp.ClientTimeout(total=timeout_s, sock_connect=_CONNECT_TIMEOUT_S)
        if self._session.closed:
            raise PeerLost(f"{self.url} was given up")
        try:
            async with self._session.request(
                method, self.url + path, json=body, timeout=timeout
            ) as response:
                content = bytearray()
                async for chunk in response.content.iter_any():
                    content += chunk
                    if len(content) > MAX_ANSWER_BYTES:
                        raise ProtocolError(
                            f"{self.url}{path} answered with over {MAX_ANSWER_BYTES} bytes"
                        )
                return response.status, bytes(content)
        except aiohttp.ConnectionTimeoutError as error:
            raise PeerLost(
                f"no answer from {self.url}{path}: not connected within {_CONNECT_TIMEOUT_S:g} s"
            ) from error
        except TimeoutError as error:
            raise RpcTimeout(f"{self.url}{path} did not answer within {timeout_s:g} s") from error
        except (aiohttp.ClientError, OSError) as error:
            reason = str(error) or type(error).__name__
            raise PeerLost(f"no answer from {self.url}{path}: {reason}") from error


def reason_of(answer: Any) -> str:
    """The message in an answer, in whichever of the usual forms."""
    if isinstance(answer, dict):
        error = answer.get("error")
        answer = answer.get("message") or (
            error.get("message") if isinstance(error, dict) else error
        )
    return str(answer)[:_MAX_REASON_CHARACTERS]
