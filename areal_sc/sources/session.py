"""What a notebook or Python's own prompt defines, as a file that workers can load. No torch.

A session has no file that a worker could import. cloudpickle writes its functions and classes by
value, with the globals that they use, as these are when training begins. Imports stay imports.

    reference   "session_<SHA-256 of the file>:0"      the first of the definitions in that file
    file        <run folder>/sources/.session_<SHA-256>   a line of JSON, then the pickle

A pickle runs code when it is loaded. So a file is for its owner alone, lies in the run's own
folder, and is loaded from there only, after its hash is verified. Nothing that a socket brings is
loaded, and no node is sent such a file (its name begins with a dot).
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import cloudpickle

from areal_sc.errors import RunFolderError, WorkflowError
from areal_sc.system.durable import os_errors_as, replace_file

SESSION: Final = "__main__"
"""Module name of what has no file."""

_OWNER_ONLY: Final = 0o600
_LOCATION: Final = re.compile(r"session_([0-9a-f]{64})")

_loaded: dict[str, list[Any]] = {}
"""Definitions by location; one class of a session is one class in a process."""


def is_of_session(obj: Any, found: Any) -> bool:
    """Whether a function or class has no file: it is a session's, here or where it came from.

    Args:
        found: what its name means in its module.
    """
    if obj.__module__ != SESSION:
        return False
    has_file = getattr(sys.modules.get(SESSION), "__file__", None) is not None
    return not has_file or (bool(_loaded) and found is not obj)


def write_session(folder: Path, definitions: Sequence[Any]) -> str:
    """Writes functions and classes of the session to a file.

    Args:
        folder: `sources` of the run.
    Returns: the location that references to them begin with.
    Raises: WorkflowError: one uses what cannot be copied. RunFolderError: the file
        cannot be written.
    """
    try:
        pickled = cloudpickle.dumps(list(definitions))
    except Exception as error:  # objects say in many ways that they are none to be copied
        raise WorkflowError(_what_to_do(definitions, error)) from error
    folders = [os.path.abspath(path) for path in sys.path]
    header = {"python": sys.implementation.cache_tag, "folders": folders}
    content = json.dumps(header).encode() + b"\n" + pickled
    location = f"session_{hashlib.sha256(content).hexdigest()}"
    path = folder / f".{location}"
    with os_errors_as(RunFolderError, f"cannot write {path}"):
        folder.mkdir(exist_ok=True)  # not a run folder that was moved away
        with replace_file(path, mode=_OWNER_ONLY) as file:
            file.write(content)
    _loaded[location] = list(definitions)  # loaded here, a class would replace its own methods
    return location


def is_location(location: str) -> bool:
    """Whether a reference leads to a session's file."""
    return _LOCATION.fullmatch(location) is not None


def load_session(folder: Path | None, location: str) -> list[Any]:
    """The definitions in a file of the session; each file is loaded once a process.

    Args:
        folder: `sources` of the run.
    Raises: WorkflowError: the file is not on this node, is damaged, or is another Python's.
    """
    if location in _loaded:
        return _loaded[location]
    what = f"what the notebook or interactive session defines cannot be loaded on {os.uname()[1]}"
    to_file = "put it into a file, `rewards.py` say, and import it from there"
    try:
        content = b"" if folder is None else (folder / f".{location}").read_bytes()
    except FileNotFoundError:
        content = b""
    if not content:
        raise WorkflowError(f"{what}, which does not share the run folder: {to_file}")
    if f"session_{hashlib.sha256(content).hexdigest()}" != location:
        raise WorkflowError(f"{what}: {folder}/.{location} is damaged: its SHA-256 is wrong")
    header, _, pickled = content.partition(b"\n")
    told = json.loads(header)
    if told["python"] != sys.implementation.cache_tag:
        raise WorkflowError(
            f"{what}: it was written by {told['python']}, and workers there run "
            f"{sys.implementation.cache_tag}: {to_file}"
        )
    sys.path[:0] = [path for path in told["folders"] if path not in sys.path]
    _loaded[location] = cloudpickle.loads(pickled)
    return _loaded[location]


def _what_to_do(definitions: Sequence[Any], error: Exception) -> str:
    names = ", ".join(it.__qualname__ for it in definitions)
    return (
        f"{names} cannot be sent to workers from an interactive session ({error}): make what it "
        "uses inside of it, or put it into a file of the current folder, `rewards.py` say (a "
        "notebook cell whose first line is `%%writefile rewards.py` writes it), and `from rewards "
        f"import {definitions[0].__qualname__.partition('.')[0]}`"
    )
