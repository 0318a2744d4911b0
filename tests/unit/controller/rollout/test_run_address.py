"""What the process of the run's address is told of workers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from areal_sc.agents.routes import AgentsAt, Routes
from areal_sc.config.agent_settings import AgentsConfig
from areal_sc.controller.rollout.run_address import RunAddress
from areal_sc.errors import WorkerLost
from areal_sc.fleet.worker_life import UnitLeft, UnitLost, UnitServes


@pytest.mark.parametrize("is_back", [False, True])
def test_a_worker_is_gone_once_it_does_not_belong_to_the_run(is_back: bool) -> None:
    states = [SimpleNamespace(name=f"rollout/{number}") for number in range(2)]
    config = SimpleNamespace(agents=AgentsConfig())
    workers: Any = SimpleNamespace(
        config=config, background=None, set=SimpleNamespace(states=states)
    )
    scheduler: Any = SimpleNamespace(config=SimpleNamespace(run_dir="unused"))
    address = RunAddress(scheduler, workers)
    assert address._routes == Routes({}, ["rollout/0", "rollout/1"])  # another start knows no more
    at = address._at = {f"rollout/{number}": AgentsAt("a", "http://a") for number in range(2)}
    first = {"rollout/0": at["rollout/0"]}
    address.note_event(UnitLost("rollout/1", WorkerLost("dead"), is_news=True))
    assert address._routes == Routes(first, ["rollout/1"])
    if is_back:
        address.note_event(UnitServes("rollout/1"))
        address._at["rollout/1"] = AgentsAt("b", "http://b")
    address._changed.clear()
    address.note_event(UnitLeft("rollout/1"))
    assert address._changed.is_set()  # whether or not it did its work: the process is told
    states.pop()
    assert address._routes == Routes(first, [])
