"""What a run is about to go on from: checked against each other, before any worker is started.

Each file says by itself when it is damaged, but not when it lost its end at a place where it could
have ended. The journal must have come at least as far as the newest snapshot, since a publication
is on the disk before its snapshot begins; and no lineage may get a number for a second time.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from areal_sc.algorithms.named_loss import loss_of
from areal_sc.config.further_models import further_models
from areal_sc.config.schema import GRPOConfig
from areal_sc.controller.ledger.journal import ledger_on_disk
from areal_sc.engines.handle_base import TrainHandle
from areal_sc.errors import CheckpointError, RunFolderError
from areal_sc.records.metrics_log import History
from areal_sc.run.run_begin import RunBegin, content_of
from areal_sc.run.run_folder import RunFolder
from areal_sc.run.run_lineage import check_lineage
from areal_sc.system.disk import Disk
from areal_sc.trainer.snapshots import newest_ledger, readable_states


def describe_resume(folder: RunFolder, actor: TrainHandle) -> Iterator[str]:
    """What a run would go on from, and what of it is damaged; reads all of it, writes nothing.

    Raises: RunFolderError: see `check_resumed`. CheckpointError: no snapshot can be read.
    """
    yield from check_resumed(folder)
    for path, state in readable_states(folder):
        try:
            if isinstance(state, CheckpointError):
                raise state
            for engine in (path / "engine", *path.glob("engine-*")):
                actor.check_snapshot(engine)
        except CheckpointError as error:
            yield f"snapshot {path} cannot be read ({error}); it would go back to the one before"
            continue
        ledger = state.training
        yield f"it would go on after step {ledger.version}, of lineage {ledger.lineage}: {path}"
        written = ledger_on_disk(folder.ledger, Disk())
        if written is not None and written.version > ledger.version:
            yield (
                f"the journal knows version {written.version} of lineage {written.lineage}: steps "
                f"after {ledger.version} would be trained anew"
            )
        return
    raise CheckpointError(f"no snapshot in {folder.checkpoints} can be read")


def compare_with_begin(folder: RunFolder, config: GRPOConfig) -> None:
    """Warns where models, script or loss are not those that the run began with.

    The first start notes what they are. Raises: RunFolderError: they cannot be read, or noted.
    """
    begin = RunBegin(folder.begun_path)
    paths = [config.actor.path, *(model.path for model in further_models(config).values())]
    found = {f"model {path}": Path(path) for path in (*paths, config.rollout.path)}
    if config.actor.has_adapter and config.actor.lora.path:
        found[f"adapter {config.actor.lora.path}"] = Path(config.actor.lora.path)
    script = Path(getattr(sys.modules["__main__"], "__file__", None) or "").resolve()
    if script.is_file() and begin.noted(f"code {script}") is None:  # else the sources compare it
        found[f"script {script}"] = script
    loss = config.actor.ppo.loss.partition(":")[0].split(".")
    if folder_of_loss := loss_of(config.actor.ppo).search_path():
        found[f"loss {config.actor.ppo.loss}"] = Path(folder_of_loss, *loss).with_suffix(".py")
    begin.compare({name: content_of(path) for name, path in found.items() if path.exists()})


def check_resumed(folder: RunFolder) -> list[str]:
    """Checks what a run goes on from.

    Returns: warnings, about what is only for the reader.
    Raises: RunFolderError: a file is damaged, or does not fit the others.
    """
    warnings = []
    ledger, on_disk = newest_ledger(folder), ledger_on_disk(folder.ledger, Disk())
    written = None if on_disk is None else (on_disk.lineage, on_disk.version)
    if written is not None:
        check_lineage(folder, written[0])
    if ledger is None:  # no snapshot can be read: loading them ends the run
        return []
    check_lineage(folder, ledger.lineage)
    if written is None:
        warnings.append(
            f"there is no journal in {folder.ledger}: the account of the run begins with its "
            f"newest snapshot, of step {ledger.version}"
        )
    elif written < (ledger.lineage, ledger.version):
        raise RunFolderError(
            f"the journal in {folder.ledger} lost its end: it ends with lineage {written[0]}, "
            f"version {written[1]}, and the newest snapshot is of lineage {ledger.lineage}, "
            f"version {ledger.version}. Nothing goes on from it. Move the folder away to start "
            "from that snapshot, with an account that begins there"
        )
    steps = {metrics.step for metrics in History.read(folder.metrics_path).steps}
    missing = sorted(set(range(1, ledger.version + 1)) - steps)
    if missing:
        warnings.append(
            f"{folder.metrics_path} lacks {len(missing)} of the {ledger.version} steps before "
            f"the newest snapshot, from step {missing[0]} on: the summary will lack them"
        )
    return warnings
