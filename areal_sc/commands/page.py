"""`page RUN_DIR ...`: runs in a browser, also while they go on."""

from __future__ import annotations

import argparse
import asyncio
import ipaddress
import secrets
import signal
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from areal_sc.commands.arguments import number
from areal_sc.errors import CommandError
from areal_sc.page.access import Access, names_of_machine
from areal_sc.page.export import exported
from areal_sc.page.followed_run import FollowedRun
from areal_sc.page.server import PageServer
from areal_sc.system.durable import os_errors_as

COMMAND: Final = dict(
    help="show runs in a browser: is it learning, what bounds it, what became of each prompt",
    description="Serves a page that shows runs in a browser, until Ctrl-C: their numbers, "
    "what the model writes, what became of each prompt, and who works. Without --control it only "
    "reads their folders; the runs may go on meanwhile, or have died. It asks no other host for "
    "anything.",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    parser.add_argument(
        "run_dirs", metavar="RUN_DIR", type=Path, nargs="+", help="folders of runs, side by side"
    )
    parser.add_argument(
        "--port",
        type=number("a number from 0 to 65535", 0, 65535),
        default=0,
        metavar="N",
        help="where to listen; default: any free one",
    )
    parser.add_argument(
        "--bind",
        default="127.0.0.1",
        metavar="ADDRESS",
        help="of this machine, to be reached from others; what is sent is not encrypted. Default: "
        "only this machine reaches it, and others by `ssh -L`",
    )
    parser.add_argument(
        "--export",
        type=Path,
        metavar="FILE.html",
        help="write the page to one file, which any browser shows, and serve nothing",
    )
    parser.add_argument(
        "--control",
        action="store_true",
        help="whoever has the key may also pause, resume, scale and stop the runs",
    )


def run(arguments: argparse.Namespace) -> None:
    """Raises: CommandError: there is no such run, or the address or the file cannot be had."""
    if arguments.control and arguments.export is not None:
        raise CommandError(
            "--control: a file asks no run for anything; leave out one of --control and --export"
        )
    runs = named_runs(arguments.run_dirs)
    if arguments.export is None:
        asyncio.run(_serve(runs, arguments.bind, arguments.port, arguments.control))
        return
    with os_errors_as(CommandError, f"{arguments.export} cannot be written"):
        arguments.export.write_bytes(exported(runs))
    sys.stdout.write(f"{arguments.export}: {arguments.export.stat().st_size:,} bytes\n")


def named_runs(paths: Sequence[Path]) -> list[FollowedRun]:
    """The runs by the names of their folders; where two are the same, with those above.

    Raises: CommandError: one is not the folder of a run, or given twice.
    """
    whole = [path.expanduser().absolute() for path in paths]
    for path in whole:
        if whole.count(path) > 1:
            raise CommandError(f"{path} is given twice")
    names = [path.name for path in whole]
    return [
        FollowedRun(path, str(path) if names.count(path.name) > 1 else path.name) for path in whole
    ]


async def _serve(runs: Sequence[FollowedRun], bind: str, port: int, can_control: bool) -> None:
    key = secrets.token_urlsafe(18)
    server = PageServer(runs, Access(key, names_of_machine(bind)), can_control=can_control)
    ended = asyncio.Event()
    for signum in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(signum, ended.set)
    try:
        port = await server.start(bind, port)
    except (OSError, OverflowError) as error:
        await server.close()
        raise CommandError(
            f"cannot listen at {bind}, port {port}: {error}; choose another --port (0: any free "
            "one), or another --bind"
        ) from error
    what = runs[0].name if len(runs) == 1 else f"{len(runs)} runs"
    sys.stdout.write(f"{what}: http://{_host(bind)}:{port}/?key={key}\n")
    if _is_loopback(bind):
        sys.stdout.write(
            f"from another machine: ssh -L {port}:127.0.0.1:{port} {socket.gethostname()}, then "
            "the same address; Ctrl-C ends it\n"
        )
    else:
        sys.stdout.write(
            "whoever can read this network sees what is sent, the key as well; Ctrl-C ends it\n"
        )
    sys.stdout.flush()
    await ended.wait()
    await server.close()


def _host(bind: str) -> str:
    """The name that a browser asks for."""
    if bind in ("0.0.0.0", "::"):
        return socket.gethostname()
    return f"[{bind}]" if ":" in bind else bind


def _is_loopback(bind: str) -> bool:
    try:
        return ipaddress.ip_address(bind).is_loopback
    except ValueError:
        return bind == "localhost"
