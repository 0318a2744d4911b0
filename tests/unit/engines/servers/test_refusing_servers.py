"""Servers that answer a request with an error, well or dying; and those that others restart."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from areal_sc.config.schema import RolloutConfig, WeightUpdateConfig, WeightUpdateMethod
from areal_sc.config.server_settings import ServersConfig
from areal_sc.engines.servers import server as module
from areal_sc.engines.servers.server import ServerLife
from areal_sc.engines.servers.sglang.handle import SGLangEngine
from areal_sc.errors import EngineFailed, PeerLost, RpcTimeout


def serving(folder: Path, model: Path, client: Any, **settings: Any) -> tuple[Any, list[str]]:
    """A server that is open, and what its watch is told."""
    handle = SGLangEngine(RolloutConfig(path=str(model), **settings))
    server: Any = ServerLife(handle, folder, "rollout-0", is_cuda=False)
    told = list[str]()
    server._client = client
    server._watch = SimpleNamespace(
        suspect=lambda: told.append("suspected"), fail=told.append, is_updating=False
    )
    server.open()
    return server, told


@pytest.mark.parametrize(
    ("probe", "raised"),
    [
        (None, EngineFailed),  # it is the request's own fault
        (EngineFailed("HTTP 500"), PeerLost),  # the process that computes is gone
        (RpcTimeout("no answer"), PeerLost),
        (PeerLost("not connected"), PeerLost),
    ],
)
async def test_a_request_is_lost_with_a_server_whose_engine_is_gone(
    tmp_path: Path, tiny_model_folder: Path, probe: Exception | None, raised: type[Exception]
) -> None:
    async def refuse() -> None:
        raise EngineFailed("refused (HTTP 500): None")

    async def answer(*, timeout_s: float) -> None:
        if probe is not None:
            raise probe

    client = SimpleNamespace(answer=refuse, probe=answer)
    server, told = serving(tmp_path, tiny_model_folder, client)
    with pytest.raises(raised):
        async with server.asking() as client:
            await client.answer()
    is_lost = raised is PeerLost
    assert told == (["suspected"] if is_lost else [])
    assert server.places.is_open is not is_lost
    await server._trust()
    assert server.places.is_open


@pytest.mark.parametrize(
    ("told", "folder", "is_lost"),
    [
        (7, "", False),  # only the connection was lost
        (0, "model", True),  # it has started again
        (None, "", True),
    ],
)
async def test_a_server_of_others_goes_on_if_it_has_kept_its_weights(
    tmp_path: Path, tiny_model_folder: Path, told: int | None, folder: str, is_lost: bool
) -> None:
    async def served_weights() -> tuple[int | None, str]:
        return told, folder

    update = WeightUpdateConfig(method=WeightUpdateMethod.disk)
    servers = ServersConfig(urls=["http://there:1"])
    client = SimpleNamespace(served_weights=served_weights)
    server, reasons = serving(
        tmp_path, tiny_model_folder, client, servers=servers, weight_update=update
    )
    server.version = 7
    server._doubt()
    assert not server.places.is_open
    server._watch.is_updating = True
    await server._trust()  # its version may change at this moment
    assert not server.places.is_open
    server._watch.is_updating = False
    await server._trust()
    assert server.places.is_open is not is_lost
    assert bool(reasons) is is_lost


@pytest.mark.parametrize(("life", "is_waited_for"), [(0, False), (1, True)])
async def test_a_worker_that_starts_again_waits_for_a_server_of_others(
    tmp_path: Path,
    tiny_model_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    life: int,
    is_waited_for: bool,
) -> None:
    """In its first life the URL is likely to be wrong."""
    monkeypatch.setattr(module, "_RECONNECT_POLL_S", 0.0)
    num_asked = 0

    async def resume() -> None:
        nonlocal num_asked
        num_asked += 1
        if num_asked < 3:
            raise PeerLost("refused")

    client: Any = SimpleNamespace(resume=resume)
    config = RolloutConfig(
        path=str(tiny_model_folder), servers=ServersConfig(urls=["http://there:1"])
    )
    handle = SGLangEngine(config).in_life(0, life)
    server = ServerLife(handle, tmp_path, "rollout-0", is_cuda=False)
    if is_waited_for:
        await server._resume_soon(client)
        assert num_asked == 3
    else:
        with pytest.raises(PeerLost):
            await server._resume_soon(client)
