"""`pause RUN_DIR`: has a run stand still, with all that it holds, until `resume`."""

from __future__ import annotations

import argparse
import sys
from typing import Final

from areal_sc.commands.arguments import add_run_dir
from areal_sc.commands.wishing import EXIT_CODES, check_lives, checked_folder, wait_until_heard
from areal_sc.errors import CommandError
from areal_sc.run.wishes import PauseWish, told_pause, write_wish

COMMAND: Final = dict(
    help="have a run stand still until `resume`",
    description="Pauses a run. No episode begins any more; those that run end, as does the step in "
    "progress; then nothing is computed, and GPUs are idle, but keep their memory. A pause "
    "holds for later starts of the script, too. Returns when the script has heard it; `status` "
    "says when the run stands still.",
    epilog=EXIT_CODES,
)

add_arguments = add_run_dir


def run(arguments: argparse.Namespace) -> None:
    """Raises: CommandError: this is not the folder of a run that goes on, or it is paused already.
    RunFolderError: it cannot be written. WaitTimeout: the script has not heard it in time."""
    folder = checked_folder(arguments)
    found = check_lives(folder)
    if found.status is not None and found.status.wishes and (before := found.status.wishes.pause):
        raise CommandError(f"the run is {told_pause(before, folder.path)}")
    write_wish(folder.pause_path, PauseWish.of_now())
    # or that of somebody else, who pauses it at the same time
    found = wait_until_heard(folder, lambda wishes: wishes.pause is not None)
    sys.stdout.write(f"{found.state}: {found.text}\n")
