"""On the path of a script: its agents are forks, see `agent_forks`."""

from __future__ import annotations

import os
import sys
from importlib import util
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Any


class _Finder:
    """Finds the module that starts agents, and has it fork them when it has been imported."""

    @staticmethod
    def find_spec(name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if name != "areal_sc.schedulers.agent_process":
            return None
        found = PathFinder.find_spec(name, path, target)
        assert found
        assert found.loader
        execute: Any = found.loader.exec_module

        def execute_and_fork(module: Any) -> None:
            execute(module)
            forks = util.spec_from_file_location(
                "agent_forks", Path(__file__).parents[1] / "agent_forks.py"
            )
            assert forks
            assert forks.loader
            agent_forks: Any = util.module_from_spec(forks)
            forks.loader.exec_module(agent_forks)
            agent_forks.fork_agents(module, lambda: os.environ[agent_forks.ADDRESS])

        found.loader.exec_module = execute_and_fork  # type: ignore[method-assign]
        return found


if "AREAL_SC_TEST_AGENT_FORKS" in os.environ:
    sys.meta_path.insert(0, _Finder)  # type: ignore[arg-type]
