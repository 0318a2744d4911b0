"""`resume RUN_DIR`: lets a run go on that was paused."""

from __future__ import annotations

import argparse
import sys
from typing import Final

from areal_sc.commands.arguments import add_run_dir
from areal_sc.commands.wishing import EXIT_CODES, checked_folder, wait_until_heard
from areal_sc.errors import CommandError
from areal_sc.run.verdict import verdict
from areal_sc.run.wishes import take_back

COMMAND: Final = dict(
    help="let a paused run go on",
    description="Lets a run go on that was paused. Where its script has ended meanwhile, the next "
    "start of it is not paused.",
    epilog=EXIT_CODES,
)

add_arguments = add_run_dir


def run(arguments: argparse.Namespace) -> None:
    """Raises: CommandError: this is not the folder of a run, or it is not paused. RunFolderError:
    it cannot be written. WaitTimeout: the script has not heard it in time."""
    folder = checked_folder(arguments)
    found = verdict(folder)
    if not take_back(folder.pause_path):
        raise CommandError(f"the run in {folder.path} is not paused: {found.text}")
    if not found.has_script:
        sys.stdout.write("no script has the run now: its next start is not paused\n")
        return
    wait_until_heard(folder, lambda wishes: wishes.pause is None)
    sys.stdout.write("the run goes on\n")
