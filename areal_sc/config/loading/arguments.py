"""The command line of a script: `python script.py --config x.yaml key=value ...`.

`--config` may be left out where `key=value` gives all that is required.
"""

from __future__ import annotations

import argparse
import shutil
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from areal_sc.config.loading.settings_help import settings_help
from areal_sc.errors import EXIT_CODES, ConfigError

_EXAMPLES = """
examples:
  run it:
    {prog} --config x.yaml
    {prog} --config x.yaml total_steps=10 seed=1
    {prog} run_dir=x total_steps=9 actor.path=MODEL
  show every setting, or what would be started:
    {prog} --config x.yaml --print-config
    {prog} --config x.yaml --dry-run
    {prog} --config x.yaml --dry-run --gpus 8 --gpu-memory 80
"""
_MIN_WIDTH = 40
_RULES = """\
A YAML may build on others of its folder by a list at its top, `defaults: [base]`; what it sets
itself wins, and key=value wins over both. A key that the YAML's free-form `task` section does not
have yet is added by +task.key=value. Relative paths, in the YAML too, are relative to the current
directory.
"""


class _Parser(argparse.ArgumentParser):
    """Flags are shown by argparse; examples and settings follow as wide as the terminal."""

    schema: type[Any]

    def format_help(self) -> str:
        width = max(_MIN_WIDTH, shutil.get_terminal_size().columns - 2)
        rules = textwrap.fill(_RULES, width)
        settings = settings_help(self.schema, width)
        examples = _EXAMPLES.format(prog=self.prog)
        codes = "\n".join(f"  {code:<4} {text}" for code, text in EXIT_CODES.items())
        return (
            f"{super().format_help()}{examples}\n{rules}\n\nexit codes:\n{codes}\n\n"
            f"settings:\n{settings}"
        )

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"command line: {message}; {self.prog} --help shows what is possible")


def parse_arguments(argv: Sequence[str], schema: type[Any]) -> argparse.Namespace:
    """Splits a command line, without the program's name, into its parts.

    Args:
        schema: the dataclass of the settings, which `--help` shows.
    Returns: `config`: path of the YAML, or None; `overrides`: `key=value` in hydra's grammar, those
        that flags stand for included, last; `print_config`: show that, and end; `gpus`,
        `gpu_memory`, `host_memory`: of the machine to plan for, None: this one.
    Raises:
        ConfigError: an unknown flag, or a value that is not `key=value`.
        SystemExit: `--help`, after it has been shown.
    """
    parser = _Parser(
        usage="%(prog)s [flags] [key=value ...]",
        allow_abbrev=False,
    )
    parser.schema = schema
    parser.add_argument("--config", metavar="FILE.yaml", type=Path, help="the settings of the run")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="replaces one setting")
    parser.add_argument("--print-config", action="store_true", help="show every setting and end")
    for flag, override, help_text in (
        ("--overwrite", "overwrite=true", "empty the run folder first"),
        ("--resume", "resume=must", "go on with the run in run_dir, or fail if there is none"),
        (
            "--dry-run",
            "dry_run=true",
            "show what would be started, try prompts, reward and loss on one row, and end",
        ),
    ):
        parser.add_argument(
            flag,
            dest="flag_overrides",
            action="append_const",
            const=override,
            help=f"{help_text} ({override})",
        )
    for flag, kind, help_text in (
        ("--gpus", int, "with --dry-run: plan for a machine with so many GPUs, and end"),
        ("--gpu-memory", float, "with --gpus: GiB of each (default: unknown)"),
        ("--host-memory", float, "with --gpus: GiB of the machine (default: unknown)"),
    ):
        parser.add_argument(flag, type=kind, metavar="N", help=help_text)
    parsed = parser.parse_intermixed_args(list(argv))
    is_dry = "dry_run=true" in (parsed.flag_overrides or ()) or "dry_run=true" in parsed.overrides
    if parsed.gpus is not None and (parsed.gpus < 0 or not is_dry):
        parser.error("--gpus: expected a number of at least 0, with --dry-run")
    if parsed.gpus is None and (parsed.gpu_memory or parsed.host_memory):
        parser.error("--gpu-memory and --host-memory: expected with --gpus")
    for override in parsed.overrides:
        if "=" not in override and not override.startswith("~"):
            hint = f"; did you mean --config {override}?" if override.endswith(".yaml") else ""
            raise ConfigError(f"command line: expected key=value, got {override!r}{hint}")
    parsed.overrides += parsed.flag_overrides or ()
    parsed.config = parsed.config and parsed.config.expanduser()
    return parsed
