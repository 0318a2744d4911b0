"""What rewards and workflows call to run code: the worker's sandbox, again where that fails.

No torch.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Final

from areal_sc.config.sandbox_settings import SandboxConfig
from areal_sc.errors import SandboxError
from areal_sc.system.sandbox.opening import open_sandbox
from areal_sc.system.sandbox.program import Ended, Limits, Program, Sandbox

log = logging.getLogger(__name__)

_PAUSES_S: Final = (0.5, 2.0, 8.0)
"""Pauses before a program is given again to a sandbox that has failed."""


class CodeRunner:
    """A `RunCode`, whose sandbox the first call opens."""

    def __init__(self, settings: SandboxConfig) -> None:
        self._settings = settings
        self._sandbox: Sandbox | None = None

    async def __call__(
        self, code: str | Program, stdin: str = "", limits: Limits | None = None
    ) -> Ended:
        """Raises: SandboxError: it could not be run in several tries."""
        sandbox = self._sandbox = self._sandbox or open_sandbox(self._settings)
        if isinstance(code, str):
            source = code.encode(errors="replace").decode() or "\n"  # models sample half a pair
            code = Program(source=source, stdin=stdin.encode(errors="surrogatepass"))
        for pause_s in _PAUSES_S:
            try:
                return await sandbox.run(code, limits or Limits())
            except SandboxError as error:
                log.warning("the sandbox failed, again in %g s: %s", pause_s, error)
                await asyncio.sleep(pause_s)
        return await sandbox.run(code, limits or Limits())

    async def close(self) -> None:
        """Ends all that runs. Bounded."""
        if self._sandbox is not None:
            await self._sandbox.close()
