"""The shipped engines have all that workers ask of one."""

from __future__ import annotations

from areal_sc.engines.base import EndsWithServer, FollowingEngine, GenerationEngine, TrainEngine
from areal_sc.engines.fsdp.engine import FSDPEngine
from areal_sc.engines.local.engine import LocalEngine
from areal_sc.engines.servers.engine import ServerEngine


def members(*protocols: type) -> set[str]:
    return {name for it in protocols for name in vars(it) if not name.startswith("_")}


def test_no_engine_lacks_what_a_worker_asks_for() -> None:
    assert members(TrainEngine) <= set(dir(FSDPEngine))
    asked = members(GenerationEngine, FollowingEngine)
    assert {"generate", "update_weights", "join_group"} <= asked <= set(dir(LocalEngine))
    assert asked - {"is_cuda"} <= set(dir(ServerEngine))  # that is an attribute of each one
    assert isinstance(ServerEngine, EndsWithServer)
    assert not isinstance(LocalEngine, EndsWithServer)
