"""The paths of the script's machine that a reference names, and the same reference elsewhere."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from copy import deepcopy
from typing import Any

from areal_sc.sources.reference import is_of_kind, references_in, values_in
from areal_sc.user_code import is_library


def code_folders(wire: dict[str, Any]) -> set[str]:
    """Folders that are on `sys.path` when the targets are imported.

    Args:
        wire: a reference in its wire form.
    """
    return {it["search_path"] for it in references_in(wire) if it["search_path"] is not None}


def script_files(wire: dict[str, Any]) -> set[str]:
    """Targets that are files."""
    return {file for it in references_in(wire) if (file := _file_of(it))}


def code_files(wire: dict[str, Any]) -> set[str]:
    """Files of the user's code that define the targets, and that lie beside them and are imported.

    In the process that named them.
    """
    folders = tuple(os.path.join(folder, "") for folder in code_folders(wire))
    files = {getattr(module, "__file__", None) or "" for module in list(sys.modules.values())}
    beside = {file for file in files if file.startswith(folders) and not is_library(file)}
    return script_files(wire) | beside


def data_paths(wire: dict[str, Any]) -> set[str]:
    """Arguments that are paths; and scripts without `.py`, which are no code of their folder."""
    scripts = {file for file in script_files(wire) if not file.endswith(".py")}
    return scripts | {it["path"] for it in _paths_in(wire)}


def named_files(wire: dict[str, Any]) -> set[str]:
    """Files and folders that there are, and that an argument names as a path or as a text."""
    texts = {value for value in values_in(wire) if isinstance(value, str)}
    found = {text for text in texts if os.path.isfile(text) or os.path.isdir(text)}
    return {path for path in found if os.access(path, os.R_OK)}


def moved(wire: dict[str, Any], place: Callable[[str], str]) -> dict[str, Any]:
    """The reference with other paths.

    Args:
        place: from a path of the script's machine to one of this machine.
    """
    wire = deepcopy(wire)
    for reference in references_in(wire):
        if reference["search_path"] is not None:
            reference["search_path"] = place(reference["search_path"])
        if file := _file_of(reference):
            reference["target"] = place(file) + reference["target"].removeprefix(file)
    for path in _paths_in(wire):
        path["path"] = place(path["path"])
    return wire


def _file_of(reference: dict[str, Any]) -> str:
    location: str = reference["target"].rpartition(":")[0]
    return location if location.startswith("/") else ""  # a script may have any name


def _paths_in(wire: dict[str, Any]) -> list[dict[str, Any]]:
    return [value for value in values_in(wire) if is_of_kind(value, "path")]
