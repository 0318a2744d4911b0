"""Torch-free stand-ins for engines: what a user's script names, and a worker turns into the engine.

A handle holds the settings and the name of the class that runs in the workers. Building it, and
nothing else, imports that class, so that a script which only steers never loads torch.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar

from areal_sc.config.plain import from_plain
from areal_sc.config.schema import ActorConfig, RolloutConfig, RolloutEngine
from areal_sc.errors import ConfigError

if TYPE_CHECKING:
    from areal_sc.engines.fsdp.engine import FSDPEngine
    from areal_sc.engines.local.engine import LocalEngine
    from areal_sc.engines.sglang.engine import SGLangServerEngine


@dataclass(frozen=True)
class FSDPPPOActor:
    """A policy trained with PPO by `FSDPEngine`."""

    config: ActorConfig
    config_class: ClassVar[type[ActorConfig]] = ActorConfig
    worker_class: ClassVar[str] = "areal_sc.engines.fsdp.engine:FSDPEngine"

    def build(self) -> FSDPEngine:
        """The engine of one rank, not yet initialised. Imports torch."""
        return _load(self.worker_class)(self.config)  # type: ignore[no-any-return]


@dataclass(frozen=True)
class FSDPSFTActor:
    """A policy trained on given completions by `FSDPEngine`."""

    config: ActorConfig
    config_class: ClassVar[type[ActorConfig]] = ActorConfig
    worker_class: ClassVar[str] = "areal_sc.engines.fsdp.engine:FSDPEngine"

    def build(self) -> FSDPEngine:
        """The engine of one rank, not yet initialised. Imports torch."""
        return _load(self.worker_class)(self.config)  # type: ignore[no-any-return]


@dataclass(frozen=True)
class LocalGenerator:
    """Generation by the embedded `LocalEngine`."""

    config: RolloutConfig
    config_class: ClassVar[type[RolloutConfig]] = RolloutConfig
    worker_class: ClassVar[str] = "areal_sc.engines.local.engine:LocalEngine"

    def build(self) -> LocalEngine:
        """The engine, not yet started. Imports torch."""
        return _load(self.worker_class)(self.config)  # type: ignore[no-any-return]


@dataclass(frozen=True)
class SGLangEngine:
    """Generation by SGLang servers, which a worker starts or connects to: `config.sglang`."""

    config: RolloutConfig
    config_class: ClassVar[type[RolloutConfig]] = RolloutConfig
    worker_class: ClassVar[str] = "areal_sc.engines.sglang.engine:SGLangServerEngine"

    def build(self, log_folder: Path = Path("logs"), name: str = "rollout") -> SGLangServerEngine:
        """The engine, not yet started. Imports torch.

        Args:
            log_folder: where the servers' logs go.
            name: begins the names of the logs.
        """
        engine: SGLangServerEngine = _load(self.worker_class)(
            self.config, log_folder=log_folder, name=name
        )
        return engine


Handle = FSDPPPOActor | FSDPSFTActor | LocalGenerator | SGLangEngine

_HANDLES: MappingProxyType[str, Any] = MappingProxyType(
    {
        handle.__name__: handle
        for handle in (FSDPPPOActor, FSDPSFTActor, LocalGenerator, SGLangEngine)
    }
)


def make_generator(config: RolloutConfig) -> LocalGenerator | SGLangEngine:
    """The generation engine that `rollout.engine` names."""
    if config.engine == RolloutEngine.sglang:
        return SGLangEngine(config)
    return LocalGenerator(config)


def handle_from_plain(name: str, plain: Mapping[str, Any]) -> Handle:
    """The handle of this name; the names that a worker accepts are these and no others.

    Args:
        name: class name of a handle, e.g. `FSDPPPOActor`.
        plain: its section of the settings, as `to_plain` gives it.
    Raises: ConfigError: there is no such handle.
    """
    if name not in _HANDLES:
        raise ConfigError(f"no engine handle is called {name!r}; there are {', '.join(_HANDLES)}")
    handle_class = _HANDLES[name]
    handle: Handle = handle_class(config=from_plain(handle_class.config_class, plain))
    return handle


def _load(worker_class: str) -> Any:
    module, _, name = worker_class.partition(":")
    return getattr(importlib.import_module(module), name)
