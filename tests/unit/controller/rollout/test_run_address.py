"""What the process of the run's address is told of workers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from areal_sc.config.agent_settings import AgentsConfig
from areal_sc.controller.rollout.run_address import RunAddress
from areal_sc.fleet.worker_life import UnitLeft, UnitServes


def test_a_worker_is_not_lost_that_has_the_name_of_one_that_left() -> None:
    config = SimpleNamespace(agents=AgentsConfig())
    workers: Any = SimpleNamespace(config=config, background=None)
    scheduler: Any = SimpleNamespace(config=SimpleNamespace(run_dir="unused"))
    address = RunAddress(scheduler, workers)
    address.note_event(UnitLeft("rollout/1"))
    assert address._lost.keys() == {"rollout/1"}
    address.note_event(UnitServes("rollout/1"))
    assert not address._lost
