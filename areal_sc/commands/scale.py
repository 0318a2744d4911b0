"""`scale RUN_DIR rollout=N`: changes the number of rollout workers while a run goes on."""

from __future__ import annotations

import argparse
import sys
from typing import Final

from areal_sc.commands.arguments import add_run_dir
from areal_sc.commands.wishing import EXIT_CODES, check_lives, checked_folder, wait_until_heard
from areal_sc.errors import CommandError
from areal_sc.nodes.spec import ROLLOUT_ROLE
from areal_sc.run.run_status import (
    RunStatus,
    RunWishes,
    ScaleAnswer,
    ScaleWish,
    drop_scale,
    write_wish,
)

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
    """Raises: CommandError: this is not the folder of a run that goes on, there cannot be so many,
    or another command has asked for another number since. RunFolderError: it cannot be written.
    WaitTimeout: the script has not answered in time."""
    folder = checked_folder(arguments)
    status = check_lives(folder).status
    if status is not None and status.roles and ROLLOUT_ROLE not in status.roles:
        raise CommandError(f"the run in {folder.path} has no rollout workers")
    wish, before = ScaleWish.of_now(arguments.num_workers), _answer_in(status)

    def is_answered(now: RunWishes, status: RunStatus) -> bool:
        answer = _answer_in(status)
        if answer is not None and answer.id == wish.id:
            if answer.refusal:
                raise CommandError(f"refused: {answer.refusal}")
            return True
        newer = now.scale or (answer if answer != before else None)
        if newer is not None and newer != wish:
            raise CommandError(
                f"another command has asked for {newer.num_workers} rollout workers since: that "
                f"counts, and not {wish.num_workers}"
            )
        return False

    write_wish(folder.scale_path, wish)
    try:
        wait_until_heard(folder, is_answered)
    except CommandError:  # the script has ended; a later start is not to follow the wish
        drop_scale(folder, wish)
        raise
    sys.stdout.write(
        f"rollout workers are {wish.num_workers} from now on; `status` shows how they come and go\n"
    )


def _answer_in(status: RunStatus | None) -> ScaleAnswer | None:
    return None if status is None else status.wishes.scale


def _num_workers(text: str) -> int:
    role, _, number = text.partition("=")
    if role != ROLLOUT_ROLE or not number.isdecimal() or int(number) < 1:
        raise argparse.ArgumentTypeError(
            f"expected {ROLLOUT_ROLE}=N with a number of workers from 1, got {text!r}"
        )
    return int(number)
