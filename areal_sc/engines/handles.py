"""Torch-free stand-ins for engines: what a user's script names, and a worker turns into the engine.

This is the only place that knows which engines there are. Another one is a folder with a handle
(see `handle_base`), and a line here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from areal_sc.config.loading.plain import from_plain
from areal_sc.config.parallel_settings import TrainEngineKind
from areal_sc.config.schema import (
    ActorConfig,
    GRPOConfig,
    RolloutConfig,
    RolloutEngine,
    further_model,
)
from areal_sc.engines.fsdp.handle import FSDPPPOActor, FSDPSFTActor
from areal_sc.engines.handle_base import GeneratorHandle, TrainHandle
from areal_sc.engines.local.handle import LocalGenerator
from areal_sc.engines.megatron.handle import MegatronPPOActor
from areal_sc.engines.servers.sglang.handle import SGLangEngine
from areal_sc.engines.servers.vllm.handle import VLLMEngine
from areal_sc.errors import ConfigError

__all__ = [
    "LEFT_FILES",
    "FSDPPPOActor",
    "FSDPSFTActor",
    "LocalGenerator",
    "MegatronPPOActor",
    "SGLangEngine",
    "VLLMEngine",
    "handle_from_plain",
    "make_actor",
    "make_generator",
    "make_model",
]

_TRAINERS = MappingProxyType(
    {
        TrainEngineKind.fsdp: FSDPPPOActor,
        TrainEngineKind.megatron: MegatronPPOActor,
    }
)

_GENERATORS = MappingProxyType(
    {
        RolloutEngine.local: LocalGenerator,
        RolloutEngine.sglang: SGLangEngine,
        RolloutEngine.vllm: VLLMEngine,
    }
)

LEFT_FILES = tuple({kind.left_files for kind in _GENERATORS.values() if kind.left_files})
"""Patterns of the names of files that killed servers leave in shared memory."""

_HANDLES: Mapping[str, Any] = MappingProxyType(
    {
        handle.__name__: handle
        for handle in (*_TRAINERS.values(), FSDPSFTActor, *_GENERATORS.values())
    }
)


def make_actor(config: ActorConfig, *, is_frozen: bool = False) -> TrainHandle:
    """The training engine that `actor.engine` names.

    Args:
        is_frozen: of a model that only computes, as a reference does; as `actor.is_frozen`.
    """
    config = replace(config, is_frozen=is_frozen or config.is_frozen)
    return _TRAINERS[TrainEngineKind(config.engine)](config)


def make_model(config: GRPOConfig, role: str) -> TrainHandle:
    """The training engine of a model beside the policy: of section `reference`, say.

    Raises: ConfigError: the section names no model.
    """
    return make_actor(further_model(config, role))


def make_generator(config: RolloutConfig) -> GeneratorHandle:
    """The generation engine that `rollout.engine` names."""
    return _GENERATORS[RolloutEngine(config.engine)](config)


def handle_from_plain(name: str, plain: Mapping[str, Any]) -> TrainHandle | GeneratorHandle:
    """The handle of this name; the names that a worker accepts are these and no others.

    Args:
        name: class name of a handle, e.g. `FSDPPPOActor`.
        plain: its section of the settings, as `to_plain` gives it.
    Raises: ConfigError: there is no such handle.
    """
    if name not in _HANDLES:
        raise ConfigError(f"no engine handle is called {name!r}; there are {', '.join(_HANDLES)}")
    handle_class = _HANDLES[name]
    handle: TrainHandle | GeneratorHandle = handle_class(
        config=from_plain(handle_class.config_class, plain)
    )
    return handle
