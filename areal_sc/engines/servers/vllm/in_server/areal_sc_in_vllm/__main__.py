"""The main program: vLLM's own HTTP server, with the arguments of the command line.

It is no module of vLLM's, as processes that a server starts import its main module again.
"""

from __future__ import annotations

import importlib.util
import sys

NOT_INSTALLED = 66  # as in the launcher

if __name__ == "__main__":
    if importlib.util.find_spec("vllm") is None:
        sys.exit(NOT_INSTALLED)
    from vllm.entrypoints.launchers.api_server.entry import main

    main()
