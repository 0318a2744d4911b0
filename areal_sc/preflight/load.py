"""From a command line, or what a script, REPL or notebook gives, to a checked configuration."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn, TypeAlias, TypeVar, overload

from areal_sc.config.loading.arguments import parse_arguments
from areal_sc.config.loading.loader import compose_config, config_text, typed
from areal_sc.config.schema import GRPOConfig
from areal_sc.errors import ConfigError
from areal_sc.hub import local_model
from areal_sc.log import shown_before
from areal_sc.preflight.checks import fetch_models
from areal_sc.preflight.plan import settle_placement
from areal_sc.preflight.sizes import complete_config
from areal_sc.sizing.machine import Machine, count_cuda_devices, this_machine
from areal_sc.sizing.model_folder import check_model_folder
from areal_sc.system.process import is_in_worker, refuse_in_worker
from areal_sc.system.telling import tolerate_other_encodings

T = TypeVar("T")
C = TypeVar("C", bound=GRPOConfig)

SettingsSource: TypeAlias = str | os.PathLike[str] | Sequence[str] | Mapping[str, Any] | None

_logger = logging.getLogger(__name__)


@overload
def load_config(
    source: SettingsSource = ...,
    *overrides: str,
    makes_model: bool = ...,
    generates: bool = ...,
    count_devices: Callable[[], int] = ...,
) -> GRPOConfig: ...


@overload
def load_config(
    source: SettingsSource,
    schema: type[T],
    *overrides: str,
    makes_model: bool = ...,
    generates: bool = ...,
    count_devices: Callable[[], int] = ...,
) -> T: ...


@overload
def load_config(
    source: C,
    *,
    makes_model: bool = ...,
    generates: bool = ...,
    count_devices: Callable[[], int] = ...,
) -> C: ...


def load_config(
    source: SettingsSource | GRPOConfig = None,
    schema: Any = GRPOConfig,
    *overrides: str,
    makes_model: bool = False,
    generates: bool = True,
    count_devices: Callable[[], int] = count_cuda_devices,
) -> Any:
    """Composes, checks and returns the configuration of a run.

        load_config()                                         the script's own command line
        load_config(argv, Config)                             `--config x.yaml key=value ...`
        load_config("x.yaml", "seed=1")                       a YAML file
        load_config({"run_dir": "r", "actor.path": "m"})      nested mappings, keys with dots, both
        load_config(GRPOConfig(run_dir="r", total_steps=9))   checks what was built in Python

    Args:
        source: one of these.
        schema: `GRPOConfig`, or a dataclass that derives from it; it may be left out.
        overrides: `key=value`, or a flag such as `--overwrite`; they win over `source`.
        makes_model: the script itself makes the model at `actor.path`, if it is not there yet.
        generates: False: it trains on rows of a data set alone, as `SFTTrainer` does: settings of
            generation are not looked at.
        count_devices: number of CUDA devices of this machine; asked only when it matters.
    Returns: an instance of `schema` in which every `${...}` is replaced by its value. With
        `--dry-run` the plan was shown, and the run folder is one that goes with this process: the
        script goes on to its task, and ends where it would wait for workers (`controller.dry_run`).
    Raises:
        ConfigError: anything that is wrong with the command line, the files or the settings.
        RunFolderError: `--dry-run`, and the run folder is in no state for a run.
        ModelError: the hub does not give the model; or `--dry-run`, and there is none.
        SystemExit: `--help` or `--print-config`, after it has been shown.
    """
    if isinstance(schema, str):
        schema, overrides = GRPOConfig, (schema, *overrides)
    argv = list(overrides)
    values: Mapping[str, Any] | None = None
    match source:
        case None:
            refuse_in_worker("load_config()")
            argv = [*_command_line(), *argv]
        case GRPOConfig():
            if argv:
                raise ConfigError(
                    f"override {argv[0]}: expected none beside a whole configuration; use "
                    "dataclasses.replace(config, ...), or give a mapping in its place"
                )
            schema = type(source)
        case Mapping():
            values = source
        case str() | os.PathLike():
            argv = ["--config", os.fspath(source), *argv]
        case _:
            argv = [*source, *argv]
    tolerate_other_encodings()  # `--help` shows more than ASCII
    arguments = parse_arguments(argv, schema)
    if isinstance(source, GRPOConfig):
        config = typed(source)
    else:
        config = compose_config(arguments.config, arguments.overrides, schema, values)
    if arguments.print_config:
        sys.stdout.write(config_text(config))
        raise SystemExit(0)
    if not isinstance(config, GRPOConfig):
        return config
    machine = _other_machine(arguments)
    if machine is not None:
        count_devices = lambda: machine.num_cuda_devices  # noqa: E731
    _check(config, machine, count_devices, makes_model=makes_model, generates=generates)
    if not config.dry_run:
        return config
    # reads run folders, which needs more modules than a script waits for
    from areal_sc.preflight.dry_run import dry_run, without_traces

    if is_in_worker():
        return without_traces(config)
    lines = dry_run(config, makes_model=makes_model, generates=generates)
    sys.stdout.write("\n".join(lines) + "\n")
    sys.stdout.flush()
    return without_traces(config)


def _check(
    config: GRPOConfig,
    other: Machine | None,
    count_devices: Callable[[], int],
    *,
    makes_model: bool,
    generates: bool,
) -> None:
    """Completes the settings by what is known of the model and the machine, and tells of doubts.

    Args:
        other: a machine that the run is only planned for: the plan is shown, and the process ends.
    """
    warnings = complete_config(config, count_devices, generates=generates)
    if other is not None:
        _show_plan(config, other, warnings, generates=generates)
    if not makes_model and fetch_models(config):  # now more is known of the model
        warnings = complete_config(config, count_devices, generates=generates)
    if generates:
        settle_placement(config, this_machine)
    for warning in warnings:
        _logger.warning("%s", warning)
    shown_before.update(warnings)


def _other_machine(arguments: argparse.Namespace) -> Machine | None:
    """The machine that flags describe; None: this one."""
    if arguments.gpus is None:
        return None
    host, gpu = (
        None if gib is None else int(gib * (1 << 30))
        for gib in (arguments.host_memory, arguments.gpu_memory)
    )
    return Machine(host, (gpu,) * arguments.gpus)


def _show_plan(
    config: GRPOConfig, machine: Machine, warnings: Sequence[str], *, generates: bool
) -> NoReturn:
    """Shows what would be started on a machine that is not there, and ends the process.

    Raises: ConfigError: it does not fit. ModelError: there is no `config.json`.
    """
    from areal_sc.preflight.dry_run import placed_lines

    folder = local_model(config.actor.path)
    check_model_folder(folder, needs_weights=False)
    for warning in warnings:
        _logger.warning("%s", warning)
    sys.stdout.write("\n".join(placed_lines(config, machine, generates=generates)) + "\n")
    raise SystemExit(0)


def _command_line() -> list[str]:
    """The script's arguments. Raises: ConfigError: there is no script."""
    if not hasattr(sys.modules["__main__"], "__file__"):
        raise ConfigError(
            "load_config() takes the command line of a script, and this is an interactive "
            'session; give it settings: load_config("x.yaml", "key=value"), or '
            'load_config({"run_dir": ..., "total_steps": ..., "actor.path": ...})'
        )
    return sys.argv[1:]
