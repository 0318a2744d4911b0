"""Real SGLang servers for a benchmark, under ServerEngine; none outlives it."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from areal_sc.config.schema import RolloutConfig
from areal_sc.engines.servers.engine import ServerEngine
from areal_sc.engines.servers.sglang.client import SGLangClient
from areal_sc.engines.servers.sglang.handle import SGLangEngine
from areal_sc.engines.servers.tensors import SharedBuckets

REPOSITORY = Path(__file__).parents[1]
PYTHON = REPOSITORY / ".venv-sglang" / "bin" / "python"


@dataclass(frozen=True)
class ServerSide:
    """What a benchmark sees of a server beside the engine.

    Attributes:
        key: to be shown with every request.
        pid: of its HTTP process, which leads its session.
        client: the one that the engine uses.
    """

    url: str
    key: str
    pid: int
    client: SGLangClient


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds `--sglang-python FILE`."""
    parser.add_argument(
        "--sglang-python",
        type=Path,
        default=PYTHON,
        metavar="FILE",
        help="interpreter that has SGLang (default: what tests/sglang_server/install.sh makes)",
    )


def check_python(parser: argparse.ArgumentParser, python: Path) -> None:
    """Ends the program with a message when the interpreter is not there."""
    if not python.is_file():
        parser.error(f"no SGLang at {python}: tests/sglang_server/install.sh installs it")


@asynccontextmanager
async def serving(config: RolloutConfig) -> AsyncIterator[ServerEngine]:
    """The engine with its servers started; they end with the block."""
    with tempfile.TemporaryDirectory(prefix="areal-sc-sglang-") as logs:
        engine = ServerEngine(SGLangEngine(config), log_folder=Path(logs), name="rollout-0")
        await engine.start()
        try:
            yield engine
        finally:
            await engine.close()


def servers_of(engine: ServerEngine) -> list[ServerSide]:
    """The running servers, in their order."""
    found = []
    for replica in engine.replicas:
        assert replica.server is not None
        server = replica.server
        found.append(ServerSide(server.url, server.api_key, server.pid, replica.client))
    return found


def buckets_of(engine: ServerEngine) -> SharedBuckets:
    """Through which tensors come into the servers."""
    return engine._buckets
