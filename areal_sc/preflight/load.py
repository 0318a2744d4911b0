"""From a command line to a configuration that has been composed and checked."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from areal_sc.config.arguments import parse_arguments
from areal_sc.config.loader import compose_config, config_text
from areal_sc.config.machine import count_cuda_devices
from areal_sc.config.schema import GRPOConfig, Resume
from areal_sc.errors import ModelError
from areal_sc.preflight.checks import check_config, check_models, fetch_models
from areal_sc.preflight.plan import plan
from areal_sc.run_folder import Opening, RunFolder

T = TypeVar("T")

_logger = logging.getLogger(__name__)


def load_config(
    argv: Sequence[str],
    schema: type[T],
    *,
    makes_model: bool = False,
    count_devices: Callable[[], int] = count_cuda_devices,
) -> T:
    """Composes, checks and returns the configuration that a command line names.

    Args:
        argv: `--config x.yaml key=value ...`, without the program's name.
        schema: `GRPOConfig`, or a dataclass that derives from it.
        makes_model: the script itself makes the model at `actor.path`, if it is not there yet.
        count_devices: number of CUDA devices of this machine; asked only when it matters.
    Returns: an instance of `schema` in which every `${...}` is replaced by its value.
    Raises:
        ConfigError: anything that is wrong with the command line, the files or the settings.
        RunFolderError: `--dry-run`, and the run folder is in no state for a run.
        ModelError: the hub does not give the model; or `--dry-run`, and there is none.
        SystemExit: `--help`, `--print-config` or `--dry-run`, after it has been shown.
    """
    arguments = parse_arguments(argv, schema)
    config = compose_config(arguments.config, arguments.overrides, schema)
    if arguments.print_config:
        sys.stdout.write(config_text(config))
        raise SystemExit(0)
    if isinstance(config, GRPOConfig):
        warnings = check_config(config, count_devices)
        if not makes_model and fetch_models(config):
            warnings = check_config(config, count_devices)  # by what is known of the model now
        for warning in warnings:
            _logger.warning("%s", warning)
        if arguments.dry_run:
            sys.stdout.write("\n".join(_dry_run(config, makes_model=makes_model)) + "\n")
            raise SystemExit(0)
    return config


def _dry_run(config: GRPOConfig, *, makes_model: bool) -> Iterator[str]:
    """What the run would start, and where; refused in the order in which the run would be."""
    folder = RunFolder(config.run_dir)
    opening = folder.preview(
        config_text=config_text(config), resume=config.resume.value, overwrite=config.overwrite
    )
    try:
        check_models(config)
    except ModelError:
        if not makes_model:
            raise
        yield f"model {config.actor.path}: not there yet, the script makes it"
    yield from plan(config).lines()
    yield f"run folder {folder.path}: would {opening.value}"
    if opening is Opening.resume and config.resume is Resume.must:
        yield "  a loop without a `Run` would refuse --resume"
    elif opening is Opening.resume:
        yield "  a loop without a `Run` would start again from nothing"
