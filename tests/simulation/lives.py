"""Lives of units for tests that have no fleet."""

from __future__ import annotations

from areal_sc.fleet.worker_life import Life, LifeState
from areal_sc.system.deaths import Deaths


def serving_life() -> Life:
    """One that does its work."""
    return Life("unit", Deaths(3), LifeState.serving, has_served=True)
