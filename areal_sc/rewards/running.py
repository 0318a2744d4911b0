"""What rewards and workflows call to run code: the worker's sandbox, again where that fails.

No torch.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Final

from areal_sc.errors import SandboxError
from areal_sc.system.sandbox.program import Ended, Limits, Program, Sandbox

log = logging.getLogger(__name__)

_PAUSES_S: Final = (0.5, 2.0, 8.0)
"""Pauses before a program is given again to a sandbox that has failed."""


class CodeRunner:
    """A `RunCode`; its sandbox is closed by who has opened it."""

    def __init__(self, sandbox: Sandbox) -> None:
        self._sandbox = sandbox

    async def __call__(
        self, code: str | Program, stdin: str = "", limits: Limits | None = None
    ) -> Ended:
        """Raises: SandboxError: it could not be run in several tries."""
        if isinstance(code, str):
            code = Program(source=code, stdin=stdin.encode(errors="surrogatepass"))
        for pause_s in _PAUSES_S:
            try:
                return await self._sandbox.run(code, limits or Limits())
            except SandboxError as error:
                log.warning("the sandbox failed, again in %g s: %s", pause_s, error)
                await asyncio.sleep(pause_s)
        return await self._sandbox.run(code, limits or Limits())
