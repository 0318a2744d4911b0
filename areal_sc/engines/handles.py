"""Torch-free stand-ins for engines: what a user's script names, and a worker turns into the engine.

This is the only place that knows which engines there are. Another one is a folder with a handle
(see `handle_base`), and a line here; one of a user's own is a handle that the settings name by its
import path.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

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
from areal_sc.user_code import named

__all__ = [
    "HANDLES",
    "LEFT_FILES",
    "FSDPPPOActor",
    "FSDPSFTActor",
    "LocalGenerator",
    "MegatronPPOActor",
    "SGLangEngine",
    "VLLMEngine",
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

HANDLES: Mapping[str, Any] = MappingProxyType(
    {
        handle.__name__: handle
        for handle in (*_TRAINERS.values(), FSDPSFTActor, *_GENERATORS.values())
    }
)


def make_actor(config: ActorConfig, *, is_frozen: bool = False) -> TrainHandle:
    """The training engine that `actor.engine` names.

    Args:
        is_frozen: of a model that only computes, as a reference does; as `actor.is_frozen`.
    Raises: ConfigError: there is none of that name.
    """
    config = replace(config, is_frozen=is_frozen or config.is_frozen)
    found: type[TrainHandle] = _named(config.engine, _TRAINERS, TrainHandle, "actor.engine")
    return found(config)


def make_model(config: GRPOConfig, role: str) -> TrainHandle:
    """The training engine of a model beside the policy: of section `reference`, say.

    Raises: ConfigError: the section names no model.
    """
    return make_actor(further_model(config, role))


def make_generator(config: RolloutConfig) -> GeneratorHandle:
    """The generation engine that `rollout.engine` names.

    Raises: ConfigError: there is none of that name.
    """
    kind: type[GeneratorHandle] = _named(
        config.engine, _GENERATORS, GeneratorHandle, "rollout.engine"
    )
    return kind(config)


def _named(name: str, built_in: Mapping[Any, type], base: type, key: str) -> Any:
    if name in built_in:
        return built_in[name]
    expected = f"{key}: expected {', '.join(built_in)}, or package.module:Handle"
    found = named(name, expected)
    if not (isinstance(found, type) and issubclass(found, base)):
        raise ConfigError(f"{expected}, a class derived from {base.__name__}; got {name!r}")
    return found
