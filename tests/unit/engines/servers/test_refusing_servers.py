"""Servers that answer a request with an error: well, or dying."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from areal_sc.config.schema import RolloutConfig
from areal_sc.engines.servers.dispatch import Dispatcher
from areal_sc.engines.servers.replica import Replica, ReplicaSettings
from areal_sc.engines.servers.sglang.handle import SGLangEngine
from areal_sc.errors import EngineFailed, PeerLost, RpcTimeout


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
    config = RolloutConfig(path=str(tiny_model_folder))
    settings = ReplicaSettings(SGLangEngine(config), tmp_path, "rollout-0", is_cuda=False)
    replica, suspicions = Replica(0, settings, Dispatcher([])), list[str]()

    async def generate(*_: object) -> None:
        raise EngineFailed("refused (HTTP 500): None")

    async def answer(*, timeout_s: float) -> None:
        if probe is not None:
            raise probe

    client: Any = SimpleNamespace(generate=generate, probe=answer)
    watch: Any = SimpleNamespace(suspect=lambda: suspicions.append("suspected"))
    replica._client, replica._watch, replica.is_open = client, watch, True
    request: Any = None
    with pytest.raises(raised):
        await replica.generate(request, "id", None)
    is_lost = raised is PeerLost
    assert suspicions == (["suspected"] if is_lost else [])
    assert replica.is_open is not is_lost
