"""On the path of an agent, whatever has started it: its workers are those of `beating_agent`."""

from __future__ import annotations

import functools
import sys
from pathlib import Path

if "areal_sc.nodes.agent" in sys.orig_argv:
    sys.path.insert(0, str(Path(__file__).parents[2]))

    from areal_sc.system import fork_server

    MODULE = "integration.beating_agent"
    server = functools.partial(fork_server.ForkServer, f"{MODULE}:run_worker", (MODULE,))
    fork_server.ForkServer = lambda target, preload: server()  # type: ignore[assignment,misc]
