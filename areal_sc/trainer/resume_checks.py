"""What a run is about to go on from: checked against each other, before any worker is started.

Each file says by itself when it is damaged, but not when it lost its end at a place where it could
have ended. The journal must have come at least as far as the newest snapshot, since a publication
is on the disk before its snapshot begins; and no lineage may get a number for a second time.
"""

from __future__ import annotations

from areal_sc.controller.journal import newest_policy
from areal_sc.disk import Disk
from areal_sc.errors import RunFolderError
from areal_sc.run_folder import RunFolder
from areal_sc.trainer.checkpoints import newest_ledger
from areal_sc.trainer.metrics_log import History


def check_resumed(folder: RunFolder) -> list[str]:
    """Checks what a run goes on from.

    Returns: warnings, about what is only for the reader.
    Raises: RunFolderError: a file is damaged, or does not fit the others.
    """
    warnings = []
    ledger, written = newest_ledger(folder), newest_policy(folder.ledger, Disk())
    if written is not None:
        folder.check_lineage(written[0])
    if ledger is None:  # no snapshot can be read: loading them ends the run
        return []
    folder.check_lineage(ledger.lineage)
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
