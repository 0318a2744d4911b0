"""The count of a run's histories of weights, in its folder.

A history, or lineage, begins whenever weights come from elsewhere than training: from the model
that a run starts from, or from a snapshot. (lineage, policy version) names a policy.
"""

from __future__ import annotations

from typing import Final

from areal_sc.errors import RunFolderError
from areal_sc.run.run_files import RunFiles, WrittenFolder

LINEAGE: Final = ".lineage"

_OWNER_ONLY: Final = 0o700


def begin_lineage(folder: WrittenFolder) -> int:
    """Number of a new one, never given before in this folder.

    Raises: RunFolderError: the folder cannot be written to, or its count is damaged.
    """
    folder.check_term()  # else one that was moved away would be made anew
    lineage = newest_lineage(folder) + 1
    try:
        folder.path.mkdir(parents=True, exist_ok=True, mode=_OWNER_ONLY)
    except OSError as error:
        raise RunFolderError(f"run folder {folder.path}: {error.strerror}") from error
    folder.write_atomic(LINEAGE, f"{lineage}\n".encode())
    return lineage


def newest_lineage(folder: RunFiles | WrittenFolder) -> int:
    """The number that `begin_lineage` gave last; 0: none.

    Raises: RunFolderError: the count is damaged.
    """
    path = folder.path / LINEAGE
    try:
        return int(path.read_text()) if path.exists() else 0
    except (OSError, ValueError) as error:
        raise RunFolderError(
            f"{path} is damaged ({error}): write a number above all earlier ones into it, 9999 say"
        ) from error


def check_lineage(folder: RunFiles, begun: int) -> None:
    """Checks the count against a lineage that is known to have begun.

    Raises: RunFolderError: the count is damaged, and would give that number again.
    """
    newest = newest_lineage(folder)
    if newest < begun:
        raise RunFolderError(
            f"{folder.path / LINEAGE} is damaged: it holds {newest}, but lineage {begun} was "
            f"begun; write {begun} into it"
        )
