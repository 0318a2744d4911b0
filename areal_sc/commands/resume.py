"""`resume RUN_DIR`: lets a run go on that was paused."""

from __future__ import annotations

import argparse
import sys
from typing import Final

from areal_sc.commands.arguments import add_run_dir
from areal_sc.commands.wishing import EXIT_CODES, checked_folder, wait_until_heard
from areal_sc.errors import CommandError
from areal_sc.run.run_owner import Owner
from areal_sc.run.run_status import RunStatus, RunWishes, take_back, told_pause
from areal_sc.run.verdict import State, verdict

COMMAND: Final = dict(
    help="let a paused run go on",
    description="Lets a run go on that was paused. Where its script has ended meanwhile, the next "
    "start of it is not paused.",
    epilog=EXIT_CODES,
)

add_arguments = add_run_dir


def run(arguments: argparse.Namespace) -> None:
    """Raises: CommandError: this is not the folder of a run, it is not paused, or another `pause`
    has followed. RunFolderError: it cannot be written. WaitTimeout: the script has not heard it in
    time."""
    folder = checked_folder(arguments)
    found = verdict(folder)
    # where another `resume` has just done it, this one waits with it
    if not take_back(folder.pause_path) and found.state is not State.paused:
        raise CommandError(f"the run in {folder.path} is not paused: {found.text}")
    if not found.has_script:
        sys.stdout.write("no script has the run now: its next start is not paused\n")
        return
    owner = Owner.read(folder.path)
    if folder.is_taken and owner is not None and owner.go_on():
        sys.stdout.write(f"process {owner.pid} was stopped by a signal, and goes on now\n")
    last = found.status.written if found.status is not None else None

    def is_heard(now: RunWishes, status: RunStatus) -> bool:
        if now.pause is not None:
            raise CommandError(f"the run is {told_pause(now.pause, folder.path)}")
        # what it wrote before says nothing: it may be stopped
        return status.written != last and status.wishes.pause is None

    wait_until_heard(folder, is_heard)
    sys.stdout.write("the run goes on\n")
