"""The folder that a command is given."""

from __future__ import annotations

import os
from pathlib import Path

from areal_sc.errors import CommandError
from areal_sc.run.run_folder import RunFolder


def check_is_folder(path: Path) -> None:
    """Raises: CommandError: there is none, or it may not be read."""
    if not path.is_dir():
        raise CommandError(f"there is no folder {path}; expected that of a run (`run_dir`)")
    if not os.access(path, os.R_OK | os.X_OK):
        raise CommandError(f"{path} may not be read by you; whoever owns it can")


def check_is_run(folder: RunFolder) -> None:
    """Raises: CommandError: it is not the folder of a run, or may not be read."""
    check_is_folder(folder.path)
    if folder.marker() is None:
        raise CommandError(f"{folder.path} is not the folder of a run: it has no sound run.json")
