"""Opens the sandbox that the settings name. No torch."""

from __future__ import annotations

import asyncio
import os
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from areal_sc.config.sandbox_settings import Isolation, SandboxConfig
from areal_sc.errors import SandboxError
from areal_sc.system.cgroups import num_cores
from areal_sc.system.sandbox.local import LocalSandbox
from areal_sc.system.sandbox.program import Sandbox
from areal_sc.user_code import named

_ENVIRONMENT: Final = ("PATH", "LANG")
"""Variables of a worker that a model's programs get."""


def open_sandbox(settings: SandboxConfig) -> Sandbox:
    """The sandbox of these settings; the first program starts it.

    Raises:
        ConfigError: `runner` names nothing.
        SandboxError: `isolation` is none: what a model wrote is not run without any.
    """
    if settings.runner:
        expected = "module:name of a class or function that makes a sandbox of this section"
        sandbox: Sandbox = named(settings.runner, f"rollout.sandbox.runner: expected {expected}")(
            settings
        )
        return sandbox
    if settings.isolation == Isolation.none:
        raise SandboxError(
            "rollout.sandbox.isolation is none, and code that a model wrote is not run without "
            "isolation; expected auto, or a sandbox of your own in rollout.sandbox.runner"
        )
    environment = {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ}
    return LocalSandbox(
        num_cores(),
        settings.isolation,
        environment=environment,
        read=settings.read,
    )


def check_sandbox(settings: SandboxConfig) -> None:
    """Tries the layers of this machine; a sandbox of the user's own is not asked.

    Raises: ConfigError: as `open_sandbox`. SandboxError: what a model wrote would not be run.
    """
    with ThreadPoolExecutor(1) as thread:  # a notebook's has a loop that runs
        thread.submit(asyncio.run, _tried(settings)).result()


async def describe_sandbox(settings: SandboxConfig) -> str:
    """What code that a model wrote would run in, for people; a layer of ours is tried.

    Raises: ConfigError: as `open_sandbox`.
    """
    try:
        return await _tried(settings)
    except SandboxError as error:
        return f"nothing, so it is refused: {error}"


async def _tried(settings: SandboxConfig) -> str:
    sandbox = open_sandbox(settings)
    if not isinstance(sandbox, LocalSandbox):
        return settings.runner
    try:
        return await sandbox.layer()
    finally:
        await sandbox.close()
