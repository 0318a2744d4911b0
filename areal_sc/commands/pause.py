"""`pause RUN_DIR`: has a run stand still, with all that it holds, until `resume`."""

from __future__ import annotations

import argparse
import sys
from typing import Final

from areal_sc.commands.arguments import add_run_dir
from areal_sc.commands.wishing import EXIT_CODES, check_lives, checked_folder, wait_until_heard
from areal_sc.errors import CommandError
from areal_sc.run.run_status import PauseWish, RunStatus, RunWishes, told_pause, write_wish

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
    """Raises: CommandError: this is not the folder of a run that goes on, it is paused already, or
    a `resume` has taken the pause back. RunFolderError: it cannot be written. WaitTimeout: the
    script has not heard it in time."""
    folder = checked_folder(arguments)
    before = _heard_pause(check_lives(folder).status)
    if before is not None and folder.pause_path.exists():
        raise CommandError(f"the run is {told_pause(before, folder.path)}")

    def is_heard(now: RunWishes, status: RunStatus) -> bool:
        if not folder.pause_path.exists():
            raise CommandError("a `resume` has taken the pause back: the run is not paused")
        # or that of somebody else, who pauses it at the same time
        return _heard_pause(status) not in (None, before)

    write_wish(folder.pause_path, PauseWish.of_now())
    found = wait_until_heard(folder, is_heard)
    sys.stdout.write(f"{found.state}: {found.text}\n")


def _heard_pause(status: RunStatus | None) -> PauseWish | None:
    return None if status is None else status.wishes.pause
