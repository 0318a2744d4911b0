"""`python -m areal_sc COMMAND ...`; the commands are in `areal_sc/commands/`."""

from __future__ import annotations

import argparse
import errno
import os
import sys
from importlib import import_module
from typing import Final, NoReturn

from areal_sc.errors import CommandError
from areal_sc.trainer.failure import run_script

COMMANDS: Final = (
    *("new", "status", "page", "samples", "curve", "evaluate", "export", "plan", "ledger"),
    *("pause", "resume", "scale", "stop", "serve"),
)


class _CommandParser(argparse.ArgumentParser):
    """Shows its whole help when words are wrong."""

    def error(self, message: str) -> NoReturn:
        self.print_help(sys.stderr)
        self.exit(2, f"\nerror: {message}\n")


def main(argv: list[str]) -> None:
    """Runs the command that the arguments name; without any it shows help."""
    parser = _CommandParser(
        prog="python -m areal_sc",
        description="Asynchronous reinforcement learning of language models.",
        epilog="A training run is a script of your own: `new` writes the first one.",
    )
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", dest="command")
    # one that is named is imported alone, so that it answers quickly
    for name in argv[:1] if argv and argv[0] in COMMANDS else COMMANDS:
        command = import_module(f"areal_sc.commands.{name}")
        added = commands.add_parser(name, **command.COMMAND)
        command.add_arguments(added)
        added.set_defaults(run=command.run)
    parsed, others = parser.parse_known_args(argv)
    takes_settings = hasattr(parsed, "overrides")
    unknown = [word for word in others if not takes_settings or word[0] == "-" or "=" not in word]
    if unknown:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    if others:  # key=value may stand between flags
        parsed.overrides += others
    if parsed.command is None:
        parser.print_help()
        return
    if sys.stdout is None:  # closed before (`>&-`)
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    try:
        parsed.run(parsed)
        sys.stdout.flush()
    except (
        BrokenPipeError
    ):  # who read it, such as `head`, has enough; the interpreter flushes again
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        raise CommandError(f"the answer cannot be written: {error.strerror}") from error


if __name__ == "__main__":
    sys.exit(run_script(main))
