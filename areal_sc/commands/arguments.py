"""Arguments that several commands take."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from areal_sc.run.run_folder import RunFolder, check_is_run


def add_run_dir(parser: argparse.ArgumentParser) -> None:
    """Adds the folder of a run, the first word."""
    parser.add_argument("run_dir", metavar="RUN_DIR", type=Path, help="folder of the run")


def run_folder(arguments: argparse.Namespace) -> RunFolder:
    """Raises: CommandError: it is not the folder of a run, or may not be read."""
    folder = RunFolder(arguments.run_dir)
    check_is_run(folder)
    return folder


def number(expected: str, least: int, most: int | None = None) -> Callable[[str], int]:
    """The `type` of an argument that is a whole number of at least `least`, at most `most`."""

    def parse(text: str) -> int:
        if not text.isdecimal() or int(text) < least or (most is not None and int(text) > most):
            raise argparse.ArgumentTypeError(f"expected {expected}, got {text!r}")
        return int(text)

    return parse
