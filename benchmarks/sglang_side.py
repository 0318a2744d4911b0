"""A real SGLang server for a benchmark, under ServerEngine; it does not outlive it."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from areal_sc.config.schema import RolloutConfig
from areal_sc.engines.servers.engine import ServerEngine
from areal_sc.engines.servers.sglang.handle import SGLangEngine

REPOSITORY = Path(__file__).parents[1]
PYTHON = REPOSITORY / ".venv-sglang" / "bin" / "python"


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
    """The engine with its server started; it ends with the block."""
    with tempfile.TemporaryDirectory(prefix="areal-sc-sglang-") as logs:
        engine = ServerEngine(SGLangEngine(config), log_folder=Path(logs), name="rollout-0")
        await engine.start()
        try:
            yield engine
        finally:
            await engine.close()
