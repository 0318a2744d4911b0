"""The HTTP interface of one SGLang server, with pooled connections and typed errors.

Every answer is checked: what comes back is what was asked for, or one of

    PeerLost       no connection, or it ended before the answer: nothing is known of the request
    RpcTimeout     no answer in time
    ServerBusy     the server takes no request now (it starts, ends, or its queue is full)
    EngineFailed   the server refused; the message is its own
    ConfigError    the API key is wrong
    ProtocolError  the answer is none that SGLang gives
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Literal

import aiohttp

from areal_sc.errors import (
    ConfigError,
    EngineFailed,
    PeerLost,
    ProtocolError,
    RpcTimeout,
    ServerBusy,
)

PauseMode = Literal["retract", "abort"]
"""What becomes of running requests: held, KV dropped | answered at once with what there is."""

MAX_ANSWER_BYTES = 256 << 20
_CONNECT_TIMEOUT_S = 10.0
_KEEP_ALIVE_S = 3.0  # shorter than the 5 s after which the server closes an idle connection
_MAX_REASON_CHARACTERS = 1000

_UNAUTHORIZED = (401, 403)
_BUSY = (429, 503)
_METHOD_NOT_ALLOWED = 405


class SGLangClient:
    """Must be made on a running event loop, and closed on it.

    Args:
        url: `http://host:port`.
        api_key: sent with every request; empty sends none.
        control_timeout_s: for answers that do not wait for tokens or weights.
    """

    def __init__(self, url: str, api_key: str = "", *, control_timeout_s: float = 60.0) -> None:
        self.url = url.rstrip("/")
        self._control_timeout_s = control_timeout_s
        self._session = aiohttp.ClientSession(
            headers={"Authorization": f"Bearer {api_key}"} if api_key else None,
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_ALIVE_S),
            trust_env=False,
        )

    async def close(self) -> None:
        await self._session.close()

    async def server_info(self, *, timeout_s: float | None = None) -> dict[str, Any]:
        """The server's arguments and limits. Its scheduler answers this, also while paused."""
        return await self._get("/server_info", timeout_s)

    async def model_info(self) -> dict[str, Any]:
        return await self._get("/model_info", None)

    async def check_health(self, *, timeout_s: float) -> None:
        """Returns when the server has generated a token. While paused it does not."""
        await self._request("GET", "/health", None, timeout_s)

    async def has_route(self, path: str) -> bool:
        """Whether the server knows a path that takes POST, without calling it."""
        status, _ = await self._send("GET", path, None, self._control_timeout_s)
        return status == _METHOD_NOT_ALLOWED

    async def generate(
        self, body: Mapping[str, Any], *, timeout_s: float | None = None
    ) -> dict[str, Any]:
        """One completion; waits as long as it takes unless `timeout_s` is given."""
        return await self._request("POST", "/generate", body, timeout_s)

    async def abort(self, request_id: str) -> None:
        """Ends a request, which is answered with what it has; no error when there is none."""
        await self._post("/abort_request", {"rid": request_id})

    async def pause(self, mode: PauseMode) -> None:
        """Returns when the scheduler will not begin another step."""
        await self._post("/pause_generation", {"mode": mode})

    async def resume(self) -> None:
        await self._post("/continue_generation", {})

    async def set_version(self, version: int) -> None:
        """Names the weights that the server has; requests go on."""
        # by default it would abort them
        body = {"new_version": str(version), "abort_all_requests": False}
        await self._update("/update_weight_version", body, self._control_timeout_s)

    async def load_from_disk(self, folder: str, *, timeout_s: float) -> None:
        """Replaces the weights by those of a folder on the server's disk, and drops the cache."""
        body = {"model_path": folder, "load_format": "auto", "flush_cache": True}
        await self._update("/update_weights_from_disk", body, timeout_s)

    async def begin_update(self) -> None:
        await self._update("/begin_weight_update", {}, self._control_timeout_s)

    async def end_update(self, *, timeout_s: float) -> None:
        await self._update("/end_weight_update", {}, timeout_s)

    async def load_tensors(
        self, pickles: list[str], *, drops_cache: bool, timeout_s: float
    ) -> None:
        """Loads one bucket of weights.

        Args:
            pickles: one for each rank, base64.
            drops_cache: as the last bucket has to.
        """
        body = {
            "serialized_named_tensors": pickles,
            "load_format": "flattened_bucket",
            "flush_cache": drops_cache,
        }
        await self._update("/update_weights_from_tensor", body, timeout_s)

    async def join_group(self, group: Mapping[str, Any], *, timeout_s: float) -> None:
        """Becomes ranks of a process group; returns when all of the group's ranks are there."""
        await self._update("/init_weights_update_group", group, timeout_s)

    async def leave_group(self, name: str, *, timeout_s: float) -> None:
        await self._update("/destroy_weights_update_group", {"group_name": name}, timeout_s)

    async def receive_broadcast(self, bucket: Mapping[str, Any], *, timeout_s: float) -> None:
        """Takes part in one broadcast of a group, and loads what it brought.

        Args:
            bucket: `group_name`; `names`, `dtypes` and `shapes` in the order of the bytes; and
                `flush_cache`, which the last one has to ask for.
        """
        body = {"load_format": "flattened_bucket", **bucket}
        await self._update("/update_weights_from_distributed", body, timeout_s)

    async def _get(self, path: str, timeout_s: float | None) -> dict[str, Any]:
        return await self._request("GET", path, None, timeout_s or self._control_timeout_s)

    async def _post(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        return await self._request("POST", path, body, self._control_timeout_s)

    async def _update(self, path: str, body: Mapping[str, Any], timeout_s: float) -> None:
        answer = await self._request("POST", path, body, timeout_s)
        if answer.get("success") is not True:
            raise EngineFailed(f"{self.url}{path} did not succeed: {_reason(answer)}")

    async def _request(
        self, method: str, path: str, body: Mapping[str, Any] | None, timeout_s: float | None
    ) -> dict[str, Any]:
        """The answer to a request that the server has accepted; {} when it has no content."""
        status, content = await self._send(method, path, body, timeout_s)
        if status in _BUSY:
            raise ServerBusy(f"{self.url}{path} takes no request now (HTTP {status})")
        if status in _UNAUTHORIZED:
            raise ConfigError(
                f"{self.url}{path} refused the API key (HTTP {status}): put the server's key "
                "into an environment variable and name it in sglang.api_key_env"
            )
        try:
            answer = json.loads(content) if content else {}
        except ValueError as error:
            if status != 200:
                answer = content[:_MAX_REASON_CHARACTERS].decode(errors="replace")
            else:
                raise ProtocolError(f"{self.url}{path} did not answer with JSON") from error
        if status != 200:
            raise EngineFailed(f"{self.url}{path} refused (HTTP {status}): {_reason(answer)}")
        if not isinstance(answer, dict):
            raise ProtocolError(
                f"{self.url}{path} answered with a {type(answer).__name__}, expected an object"
            )
        return answer

    async def _send(
        self, method: str, path: str, body: Mapping[str, Any] | None, timeout_s: float | None
    ) -> tuple[int, bytes]:
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


def _reason(answer: Any) -> str:
    """The message in an answer; SGLang has three forms of it."""
    if isinstance(answer, dict):
        error = answer.get("error")
        answer = answer.get("message") or (
            error.get("message") if isinstance(error, dict) else error
        )
    return str(answer)[:_MAX_REASON_CHARACTERS]
