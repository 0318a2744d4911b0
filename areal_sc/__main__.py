"""`python -m areal_sc COMMAND ...`; the commands are in `areal_sc/commands/`."""

from __future__ import annotations

import argparse
import sys
from typing import NoReturn

from areal_sc.commands import ledger, new, samples
from areal_sc.trainer.failure import run_script


class _Parser(argparse.ArgumentParser):
    """Shows its whole help when words are wrong."""

    def error(self, message: str) -> NoReturn:
        self.print_help(sys.stderr)
        self.exit(2, f"\nerror: {message}\n")


def main(argv: list[str]) -> None:
    """Runs the command that the arguments name; without any it shows help."""
    parser = _Parser(
        prog="python -m areal_sc",
        description="Asynchronous reinforcement learning of language models.",
        epilog="A training run is a script of your own: `new` writes the first one.",
    )
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", dest="command")
    for command in (new, samples, ledger):
        command.add_to(commands)
    parsed = parser.parse_args(argv)
    if parsed.command is None:
        parser.print_help()
    else:
        parsed.run(parsed)


if __name__ == "__main__":
    sys.exit(run_script(main))
