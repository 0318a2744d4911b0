"""`scale RUN_DIR rollout=N`: changes the number of rollout workers while a run goes on."""

from __future__ import annotations

import argparse
import sys
from typing import Final

from areal_sc.commands.arguments import add_run_dir
from areal_sc.commands.wishing import EXIT_CODES, check_lives, checked_folder, wait_until_heard
from areal_sc.errors import CommandError
from areal_sc.nodes.spec import ROLLOUT_ROLE
from areal_sc.run.wishes import ScaleWish, drop_scale, write_wish

COMMAND: Final = dict(
    help="change the number of rollout workers of a run",
    description="Changes the number of rollout workers while a run goes on, as "
    "`rollout.scale(n)` does in a script: further ones start beside training; those that are too "
    "many end when all of their work is done with. Returns when that is certain, or refused.",
    epilog=EXIT_CODES,
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    add_run_dir(parser)
    parser.add_argument(
        "num_workers", metavar="rollout=N", type=_num_workers, help="how many there shall be"
    )


def run(arguments: argparse.Namespace) -> None:
    """Raises: CommandError: this is not the folder of a run that goes on, or there cannot be so
    many. RunFolderError: it cannot be written. WaitTimeout: the script has not answered in time."""
    folder = checked_folder(arguments)
    status = check_lives(folder).status
    if status is not None and status.roles and ROLLOUT_ROLE not in status.roles:
        raise CommandError(f"the run in {folder.path} has no rollout workers")
    wish = ScaleWish.of_now(arguments.num_workers)
    write_wish(folder.scale_path, wish)
    try:
        found = wait_until_heard(
            folder, lambda wishes: wishes.scale is not None and wishes.scale.id == wish.id
        )
    except CommandError:  # the script has ended; a later start is not to follow the wish
        drop_scale(folder, wish)
        raise
    assert found.status is not None
    assert found.status.wishes is not None
    assert found.status.wishes.scale is not None
    if refusal := found.status.wishes.scale.refusal:
        raise CommandError(f"refused: {refusal}")
    sys.stdout.write(
        f"rollout workers are {wish.num_workers} from now on; `status` shows how they come and go\n"
    )


def _num_workers(text: str) -> int:
    role, _, number = text.partition("=")
    if role != ROLLOUT_ROLE or not number.isdecimal() or int(number) < 1:
        raise argparse.ArgumentTypeError(
            f"expected {ROLLOUT_ROLE}=N with a number of workers from 1, got {text!r}"
        )
    return int(number)
