"""`export RUN_DIR [FOLDER]`: writes the model of a run that was stopped, from a snapshot."""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path
from typing import Final

from areal_sc.commands.arguments import add_run_dir, run_folder
from areal_sc.commands.plan import config_of
from areal_sc.config.schema import ActorConfig, ModelHead
from areal_sc.errors import CommandError, ModelError, RunFolderError
from areal_sc.hub import local_model
from areal_sc.run.run_begin import RunBegin, content_of
from areal_sc.run.run_folder import RunFolder
from areal_sc.run.run_owner import Owner
from areal_sc.sizing.model_folder import check_replaceable

COMMAND: Final = dict(
    help="write the model of a run that was stopped",
    description="Writes the model of a run's newest snapshot, with its tokenizer, as a folder "
    "that transformers, SGLang and vLLM load. A finished run has its model already. The run "
    "may go on meanwhile, if FOLDER is not in RUN_DIR.",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    add_run_dir(parser)
    parser.add_argument(
        "folder",
        metavar="FOLDER",
        type=Path,
        nargs="?",
        help="where to write it, in place of a model that is there; default: RUN_DIR/model",
    )
    parser.add_argument("--step", type=int, metavar="N", help="from the snapshot of step N")
    parser.add_argument(
        "--adapter",
        action="store_true",
        help="the adapter alone, in peft's format; default: merged",
    )


def run(arguments: argparse.Namespace) -> None:
    """Raises: CommandError: there is no such snapshot, or FOLDER cannot be written now. ModelError:
    the run's first model is gone. CheckpointError: see `export_snapshot`.
    """
    from areal_sc.engines.snapshot_model import export_snapshot

    folder = run_folder(arguments)
    step, snapshot = _chosen_snapshot(folder, arguments.step)
    own = folder.path / "model"
    if arguments.folder is None and folder.summary_path.exists():
        raise CommandError(f"the run is finished, and its model is in {own}; name another FOLDER")
    actor = config_of(folder).actor
    if arguments.adapter and not (actor.has_adapter and actor.head is ModelHead.lm):
        raise CommandError(
            f"--adapter: the run in {folder.path} has trained no adapter, or one with a value head"
        )
    source, target = _first_model(folder, actor), check_replaceable(arguments.folder or own)
    if source.resolve().is_relative_to(target.resolve()):
        raise CommandError(f"the run goes on from the model in {source}: name another FOLDER")
    with folder:
        if target.resolve().is_relative_to(folder.path.resolve()):
            try:
                folder.hold(Owner.read(folder.path))
            except RunFolderError as error:
                raise CommandError(
                    f"{target} cannot be written now: name a FOLDER that is not the run's ({error})"
                ) from error
        actor = replace(actor, path=str(source))
        export_snapshot(actor, snapshot / "engine", target, adapter_alone=arguments.adapter)
    sys.stdout.write(f"{'adapter' if arguments.adapter else 'model'} of step {step}: {target}\n")


def _chosen_snapshot(folder: RunFolder, step: int | None) -> tuple[int, Path]:
    """Number and folder of the snapshot of a step; None: of the newest."""
    snapshots = {int(path.name.rpartition("-")[2]): path for path in folder.snapshots()}
    if not snapshots:
        raise CommandError(
            f"there is no snapshot in {folder.checkpoints}, and so no model: the run has come to "
            "none yet, or was started with checkpoint.every_steps=0"
        )
    step = max(snapshots) if step is None else step
    if step not in snapshots:
        raise CommandError(f"there is no snapshot of step {step}, only of {[*snapshots]}")
    return step, snapshots[step]


def _first_model(folder: RunFolder, actor: ActorConfig) -> Path:
    """The model that the run began with; warns if it is not the same any more."""
    begin, name = RunBegin(folder.begun_path), f"model {actor.path}"
    if begin.noted(name) is None:  # it is one of the hub, or an older areal_sc began the run
        return local_model(actor.path)
    path = Path(actor.path)
    if not path.is_dir():
        raise ModelError(
            f"actor.path={path} of the run, which has the tokenizer, is no folder, seen from "
            f"{Path.cwd()}: go to where the run was started, or put it back"
        )
    begin.compare({name: content_of(path)})
    return path
