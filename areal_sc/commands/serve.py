"""`serve --config FILE.yaml`: trains and samples a model for clients of the Tinker API."""

from __future__ import annotations

import argparse
import asyncio
import re
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from areal_sc.config.fields import setting
from areal_sc.config.schema import GRPOConfig
from areal_sc.errors import CommandError
from areal_sc.preflight.load import load_config

PLACES: Final = 8
"""Adapters that are trained together, where the settings name no number above 1."""


@dataclass
class ServeConfig(GRPOConfig):
    """Settings of a run whose steps are those that clients ask for."""

    total_steps: int = setting(1_000_000, "is not read", ge=1)


COMMAND: Final = dict(
    help="train and sample a model for clients of the Tinker API",
    usage="python -m areal_sc serve --config FILE.yaml [options] [key=value ...]",
    description="Starts the trainer and the generators of the settings, and answers the official "
    "client of the Tinker API, `tinker`. RUN_DIR/serving/keys/TENANT holds the "
    "key that a tenant's clients need. Ctrl-C ends it. docs/serve.md says what is served.",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    parser.add_argument("overrides", metavar="key=value", nargs="*", help="replaces one setting")
    parser.add_argument("--config", metavar="FILE.yaml", required=True, help="settings of a run")
    parser.add_argument("--port", type=int, default=8321, metavar="N", help="default: 8321")
    parser.add_argument(
        "--host", default="127.0.0.1", metavar="H", help="to listen at; default: 127.0.0.1"
    )
    parser.add_argument(
        "--certificate",
        type=Path,
        metavar="FILE.pem",
        help="certificates and private key, for TLS, which other machines need",
    )
    parser.add_argument(
        "--tenants",
        type=_names,
        default=["default"],
        metavar="A,B",
        help="names of those who have a key each; default: default",
    )


def _names(given: str) -> list[str]:
    names = given.split(",")
    if not all(re.fullmatch(r"[A-Za-z0-9_-]{1,64}", name) for name in names):
        raise argparse.ArgumentTypeError("expected names of letters, digits, '_', '-'")
    return names


def run(arguments: argparse.Namespace) -> None:
    """Raises: CommandError: the package `tinker` is missing, or the port is taken. ConfigError,
    ModelError, WorkerError: what a run raises."""
    if find_spec("tinker") is None:
        raise CommandError("serve needs the package tinker: pip install 'areal-sc[serve]'")
    from areal_sc.serving.serve import serve

    its = arguments
    words = ["--config", its.config, *its.overrides]
    config = load_config(words, ServeConfig)
    if config.actor.lora.rank and config.actor.lora.places == 1:  # which is no model of a client's
        config = load_config([*words, f"actor.lora.places={PLACES}"], ServeConfig)
    asyncio.run(serve(config, its.host, its.port, its.tenants, its.certificate, sys.stdout))
