"""What `pause`, `resume` and `scale` do alike: they check whom they ask, and wait for an answer."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Final

from areal_sc.commands.arguments import run_folder
from areal_sc.errors import CommandError, WaitTimeout
from areal_sc.run.run_folder import FORMAT_VERSION, RunFolder
from areal_sc.run.run_status import RunStatus, RunWishes
from areal_sc.run.verdict import Verdict, verdict

TIMEOUT_S: Final = 60.0
POLL_S: Final = 0.1

EXIT_CODES: Final = (
    "Exit code 0: the script has heard it; 2: this is not the folder of a run, no run goes on in "
    "it, it is refused, or another command has changed it since; 9: the script has not heard it in "
    "time, and may yet."
)


def checked_folder(arguments: argparse.Namespace) -> RunFolder:
    """Raises: CommandError: it is not the folder of a run, or that of another areal_sc."""
    folder = run_folder(arguments)
    marker = folder.marker()
    if marker is not None and marker.format_version != FORMAT_VERSION:
        raise CommandError(
            f"{folder.path}: expected format {FORMAT_VERSION}, got {marker.format_version}: "
            "another version of areal_sc made the run; use that one"
        )
    return folder


def check_lives(folder: RunFolder) -> Verdict:
    """Raises: CommandError: no script has the run."""
    found = verdict(folder)
    if not found.has_script:
        raise CommandError(f"no run goes on in {folder.path}: {found.text}")
    return found


def wait_until_heard(
    folder: RunFolder, is_heard: Callable[[RunWishes, RunStatus], bool]
) -> Verdict:
    """How the run is once its script has heard a wish.

    Args:
        is_heard: gets what is wished now, and what the script has said after that was read. It
            raises CommandError where another command has changed the wish, which nobody will hear.
    Raises: CommandError: as that, or the script has ended before. WaitTimeout: it has not heard it
        in time.
    """
    give_up_s = time.monotonic() + TIMEOUT_S
    while True:
        now = RunWishes().renewed(folder, lambda problem: None)  # the script tells of problems
        found = check_lives(folder)
        if found.status is not None and is_heard(now, found.status):
            return found
        if time.monotonic() > give_up_s:
            raise WaitTimeout(
                f"the script in {folder.path} has not answered within {TIMEOUT_S:g} s ({found.text}"
                f"); it acts as soon as it hears it: `python -m areal_sc status {folder.path}`"
            )
        time.sleep(POLL_S)
