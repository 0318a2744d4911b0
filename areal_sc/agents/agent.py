"""What an agent is, and what can be said of one before it runs. No torch."""

from __future__ import annotations

import importlib.util
import inspect
import json
import subprocess
from collections.abc import Callable, Mapping
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Any, Final

from areal_sc.agents import served
from areal_sc.errors import ConfigError, WorkflowError
from areal_sc.rewards.base import name_of
from areal_sc.sources.reference import (
    ObjectReference,
    Referable,
    is_always_importable,
    reference_of,
)

AgentFunction = Callable[..., Any]
"""agent(row: dict) -> reward, or agent(row, session) -> reward; sync or async.

The reward is a number; or several, by the id of an answer, or by the model that calls named.
"""

_TRY_TIMEOUT_S: Final = 120.0
_EXPECTED: Final = (
    "expected a function of a row, agent(row) or agent(row, session), or its name: "
    "`module:name` or `file.py:name`"
)


class NamedAgent(Referable):
    """An agent that the script has not imported.

    Args:
        target: `module:name`, or `/a/file.py:name`.
        search_path: folder that must be on `sys.path` to import it; None: each interpreter has it.
    """

    def __init__(self, target: str, search_path: Path | None) -> None:
        self.target = target
        self.search_path = search_path
        self.__qualname__ = target.rpartition("/")[2]  # as messages call it

    @classmethod
    def find(cls, name: str) -> NamedAgent:
        """The agent of a name, which is that of a file or can be imported here.

        Raises: WorkflowError: there is no such module.
        """
        location, _, function = name.rpartition(":")
        if not location or not function:
            raise WorkflowError(f"agent {name!r}: {_EXPECTED}")
        if location.endswith(".py"):
            file = Path(location).absolute()
            if not file.is_file():
                raise WorkflowError(f"agent {name!r}: there is no file {file}")
            return cls(f"{file}:{function}", file.parent)
        spec = _found(location)
        if spec is None or spec.origin is None:
            raise WorkflowError(f"agent {name!r}: there is no module {location}; {_EXPECTED}")
        root = Path(spec.origin).resolve()
        for _ in range(len(location.split(".")) + bool(spec.submodule_search_locations)):
            root = root.parent
        return cls(name, None if is_always_importable(root) else root)

    def reference(self) -> ObjectReference:
        """To the function itself."""
        folder = None if self.search_path is None else str(self.search_path)
        return ObjectReference(self.target, search_path=folder)


def _found(module: str) -> ModuleSpec | None:
    """Where a module is; its packages are not imported."""
    first, *further = module.split(".")
    try:
        spec = importlib.util.find_spec(first)
    except (ImportError, ValueError):
        return None
    name = first
    for part in further:
        if spec is None or spec.submodule_search_locations is None:
            return None
        name = f"{name}.{part}"
        spec = PathFinder.find_spec(name, spec.submodule_search_locations)
    return spec


def check_agent(agent: Any) -> None:
    """Raises: WorkflowError: it cannot be called with a row, or a row and a session."""
    if isinstance(agent, NamedAgent):
        return
    if not callable(agent):
        raise WorkflowError(f"agent: {_EXPECTED}; got {agent!r:.200}")
    further = {"session": None} if served.takes_session(agent) else {}
    try:
        inspect.signature(agent).bind({}, **further)
    except TypeError as error:
        raise WorkflowError(f"agent {name_of(agent)} {error}: {_EXPECTED}") from None


def reference_for(agent: Any, python: str) -> ObjectReference:
    """A reference by which another interpreter finds an agent.

    Raises: WorkflowError: it cannot.
    """
    reference = agent.reference() if isinstance(agent, NamedAgent) else reference_of(agent)
    if reference.args is not None:
        raise WorkflowError(
            f"agent {name_of(agent)}: agents.python={python} imports functions alone, and this is "
            "an object: write a function that makes it"
        )
    return reference


def check_in_interpreter(agent: Any, python: str) -> None:
    """Imports an agent by the interpreter that will run it.

    Raises: ConfigError: there is no such interpreter, or it is too old. WorkflowError: it cannot
        import the agent, whose file needs areal_sc, say.
    """
    version = _run(python, "-c", "import sys; print(*sys.version_info[:2])")
    if version.returncode or tuple(map(int, version.stdout.split())) < (3, 9):
        raise ConfigError(
            f"agents.python: expected a Python of version 3.9 or later, got {python!r}: "
            f"{(version.stderr or version.stdout).strip()[-500:]}"
        )
    reference = reference_for(agent, python)
    tried = _run(python, served.__file__, "--try", json.dumps(reference.to_wire()))
    if tried.returncode:
        raise WorkflowError(
            f"agent {name_of(agent)} cannot be imported by agents.python={python}, which has no "
            f"areal_sc: {tried.stderr.strip()[-500:]}"
        )


def _run(*command: str) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            command, capture_output=True, text=True, timeout=_TRY_TIMEOUT_S, check=False
        )
    except OSError as error:
        raise ConfigError(
            f"agents.python: {command[0]!r} cannot be run: {error.strerror}"
        ) from None
    except subprocess.TimeoutExpired as error:
        raise WorkflowError(
            f"{' '.join(command[:3])}: took longer than {error.timeout:g} s"
        ) from None


def as_json(row: Mapping[str, Any], who: str) -> str:
    """A row for what is not Python, or another Python.

    Raises: WorkflowError: it has what JSON has not.
    """
    try:
        return json.dumps(row)
    except (TypeError, ValueError) as error:
        raise WorkflowError(
            f"{who} gets its row as JSON, which cannot be: {error}; use None, bools, numbers, "
            "text, lists and dicts of these"
        ) from None
