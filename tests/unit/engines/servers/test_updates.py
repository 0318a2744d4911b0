"""A weight update that a server refuses, or that is broken off."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from areal_sc.config.schema import RolloutConfig
from areal_sc.engines.servers.server import ServerLife
from areal_sc.engines.servers.sglang.handle import SGLangEngine
from areal_sc.engines.servers.weights import UpdateTimes, VersionWeights, update_server
from areal_sc.errors import ArealError, EngineFailed, ModelError, PeerLost


class Watch:
    """Notes what becomes of the server."""

    is_updating = False

    def __init__(self) -> None:
        self.reasons: list[str] = []

    def set_updating(self, is_updating: bool) -> None:
        self.is_updating = is_updating

    def fail(self, reason: str) -> None:
        self.reasons.append(reason)


class Client:
    """A server that does as it is told."""

    adapter = "an adapter, which needs no pause"

    async def set_version(self, version: int) -> None:
        self.version = version

    async def served_weights(self) -> tuple[int, str]:
        return self.version, ""


class Weights(VersionWeights):
    """Weights that a server refuses, before or while it loads them.

    Attributes:
        is_loading: set when the load begins, which waits then.
    """

    version = 3

    def __init__(self, refusal: Exception | None = None) -> None:
        self.refusal = refusal
        self.is_loading = asyncio.Event()
        self.loaded: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def load_beside(self, server: Any) -> None:
        if self.refusal is not None:
            raise self.refusal

    async def load(self, server: Any, times: UpdateTimes) -> None:
        self.is_loading.set()
        await self.loaded


@pytest.fixture
def server(tmp_path: Path, tiny_model_folder: Path) -> Any:
    """It serves."""
    handle = SGLangEngine(RolloutConfig(path=str(tiny_model_folder)))
    server: Any = ServerLife(handle, tmp_path, "rollout-0", is_cuda=False)
    server._client, server._watch = Client(), Watch()
    server.open()
    return server


def update(server: Any, weights: Weights) -> Any:
    config = RolloutConfig(path="model")
    return update_server(server, weights, UpdateTimes(), config, stays_paused=False)


async def test_the_server_goes_on_with_the_new_weights(server: Any) -> None:
    weights = Weights()
    task = asyncio.create_task(update(server, weights))
    await weights.is_loading.wait()
    assert server._watch.is_updating
    assert not server.places.is_open
    weights.loaded.set_result(None)
    await task
    assert (server.version, server.places.is_open, server._watch.reasons) == (3, True, [])


@pytest.mark.parametrize(
    ("refusal", "raised", "message"),
    [
        (EngineFailed("rank 9 is too large"), ModelError, "version 3 is refused: rank 9"),
        (ModelError("it computes without them"), ModelError, "it computes without them"),
        (PeerLost("no connection"), PeerLost, "no connection"),  # it may be repeated
    ],
)
async def test_what_a_server_refuses_beforehand_changes_nothing(
    server: Any, refusal: ArealError, raised: type[Exception], message: str
) -> None:
    with pytest.raises(raised, match=message):
        await update(server, Weights(refusal))
    assert server.places.is_open
    assert not server._watch.reasons


@contextmanager
def raises(error: BaseException | None) -> Iterator[None]:
    match error:
        case None:
            with pytest.raises(asyncio.CancelledError):
                yield
        case ArealError():  # its worker ends with it
            with pytest.raises(EngineFailed, match="update to version 3 failed: gone"):
                yield
        case _:
            with pytest.raises(type(error)):
                yield


@pytest.mark.parametrize("error", [None, RuntimeError("a defect"), PeerLost("gone")])
async def test_a_server_whose_update_is_broken_off_is_lost(
    server: Any, error: BaseException | None
) -> None:
    """None: it is cancelled."""
    weights = Weights()
    task = asyncio.create_task(update(server, weights))
    await weights.is_loading.wait()
    if error is None:
        task.cancel()
    else:
        weights.loaded.set_exception(error)
    with raises(error):
        await task
    said = str(error) if error else "CancelledError"
    assert server._watch.reasons == [f"its weight update to version 3 failed: {said}"]
    assert not server._watch.is_updating
    assert not server.places.is_open
