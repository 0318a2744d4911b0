"""The main program of a server: SGLang's own, which forgets an adapter when it is told to.

SGLang waits until no request uses the adapter, and never counts off those that were aborted while
they were queued (0.5.11 to 0.5.21): the call does not return, and no adapter is loaded any more.
Here the caller knows that all requests of an old adapter were answered.
"""

from __future__ import annotations

import importlib.util
import runpy
import sys
from typing import Any

NOT_INSTALLED = 66  # as in the launcher


async def wait_for_nobody(registry: Any, lora_id: str) -> None:
    """In place of `LoRARegistry.wait_for_unload`."""
    registry._counters.pop(lora_id, None)


if __name__ == "__main__":
    if importlib.util.find_spec("sglang") is None:
        sys.exit(NOT_INSTALLED)
    if "--enable-lora" in sys.argv:
        from sglang.srt.lora.lora_registry import LoRARegistry

        LoRARegistry.wait_for_unload = wait_for_nobody
    runpy.run_module("sglang.launch_server", run_name="__main__", alter_sys=True)
