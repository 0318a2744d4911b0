"""What a worker asks of an engine beyond the two or three members that each has."""

from __future__ import annotations

import pytest

from areal_sc.engines.base import (
    CountsRequests,
    FollowsWeights,
    JoinsWeightGroup,
    ManyRanks,
    PublishesParts,
    PublishesWhole,
    RunsBesideWorker,
    SavesState,
    able,
)
from areal_sc.errors import ConfigError


class Smallest:
    """An engine with the face alone."""

    def initialize(self) -> None: ...
    def forward(self) -> None: ...
    def update(self) -> None: ...


def test_an_engine_without_an_ability_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="Smallest is no SavesState: An engine that writes"):
        able(Smallest(), SavesState)


def test_the_shipped_engines_have_all_abilities() -> None:
    from areal_sc.engines.fsdp.engine import FSDPEngine
    from areal_sc.engines.local.engine import LocalEngine
    from areal_sc.engines.servers.engine import ServerEngine

    for ability in (ManyRanks, PublishesParts, PublishesWhole, SavesState):
        members = {name for name in vars(ability) if not name.startswith("_")}
        assert members <= set(dir(FSDPEngine)), ability
    for ability in (RunsBesideWorker, CountsRequests, FollowsWeights, JoinsWeightGroup):
        members = {name for name in vars(ability) if not name.startswith("_")}
        members -= {"is_cuda"}  # an attribute of each server engine
        assert members <= set(dir(LocalEngine)), ability
        assert members <= set(dir(ServerEngine)), ability
