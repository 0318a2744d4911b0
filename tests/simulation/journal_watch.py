"""What a crash of the controllers would find in the journal, compared with what they do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from simulation.disk import SimulatedDisk

from areal_sc.controller.ledger.journal import Segment, read_segment
from areal_sc.controller.ledger.ledger import Ledger, replay
from areal_sc.metadata import BatchMetadata
from areal_sc.weights.published import WeightsReference
from areal_sc.workers.calls import RunGroup


class JournalWatch:
    """Checks each act against the table in `journal`: is what it follows from on the disk?

    Args:
        folder: of the journal.
    """

    def __init__(self, disk: SimulatedDisk, folder: Path) -> None:
        self._disk = disk
        self._folder = folder
        self._path = folder
        self._content = b""
        self._num_replayed = 0
        self._ledger = Ledger()

    @property
    def durable(self) -> Ledger:
        """The ledger that the newest segment on the disk gives."""
        paths = [path for path in self._disk.durable if path.parent == self._folder]
        path = max(paths, default=self._folder)
        content = self._disk.durable.get(path, b"")
        if (path, content) != (self._path, self._content):
            segment = self._read(path, content)
            if path != self._path:
                self._ledger, self._num_replayed = Ledger.restore(segment.state), 0
            replay(self._ledger, segment.records[self._num_replayed :])
            self._path, self._content = path, content
            self._num_replayed = len(segment.records)
        return self._ledger

    def before_call(self, args: Any) -> None:
        """The controllers are about to send this."""
        if isinstance(args, RunGroup) and args.group_id >= 0:
            group = self.durable.get(args.group_id)
            recorded = None if group is None else group.attempt
            assert recorded == args.attempt, (
                f"attempt {args.attempt} of group {args.group_id} is sent, recorded: {recorded}"
            )
        elif isinstance(args, WeightsReference):
            self.check_announced(args.version)

    def check_announced(self, version: int) -> None:
        """Somebody hears of a version."""
        durable = self.durable.version
        assert version <= durable, f"version {version} is announced, the disk knows {durable}"

    def check_batch(self, batch: BatchMetadata) -> None:
        """The script is given a batch."""
        kept = {step.step: step.groups for step in self.durable.snapshot().kept}
        groups = kept.get(batch.global_step, ())
        assert [group.group_id for group in groups] == list(batch.group_ids), (
            f"batch {batch.global_step} is given before its record"
        )

    def check_end(self, ledger: Ledger) -> None:
        """The journal was closed: it tells exactly what the ledger knows."""
        assert self.durable.snapshot() == ledger.snapshot()

    def _read(self, path: Path, content: bytes) -> Segment:
        segment = read_segment(content, path)
        assert segment.num_bytes == len(content), "a part of a record counts as durable"
        return segment
