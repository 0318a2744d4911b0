"""What every rollout worker carries, and which of them takes the next group.

A step hands hundreds of groups to thousands of workers. So the counts lie in arrays that are
compared at once, and sums are kept as the counts change: nothing here loops over the workers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np


class WorkerLoads:
    """Counts of groups, by the worker's number: its place in the list of all.

    Args:
        nodes: each worker's node.
        max_on_worker: groups that one store holds.
        max_on_node: node -> groups that its stores hold together.

    Attributes:
        num_stored: groups that take room in a store, on all workers together: running ones, and
            those whose rows lie there.
        max_groups: that all stores hold.
    """

    def __init__(
        self, nodes: Sequence[str], max_on_worker: int, max_on_node: Mapping[str, int]
    ) -> None:
        self.num_stored = 0
        self.max_groups = sum(max_on_node.values())
        number = {node: i for i, node in enumerate(max_on_node)}
        self._node = np.array([number[node] for node in nodes], np.intp)
        self._max_on_worker = max_on_worker
        self._max_on_node = np.array(list(max_on_node.values()), np.int64)
        self._on_node = np.zeros(len(number), np.int64)
        self._version, self._running, self._held, self._promised = np.zeros(
            (4, len(nodes)), np.int64
        )

    def note(self, worker: int, *, version: int, num_running: int, num_held: int) -> None:
        """The worker's counts are these now."""
        num_new = num_running + num_held - int(self._running[worker] + self._held[worker])
        self._on_node[self._node[worker]] += num_new
        self.num_stored += num_new
        self._version[worker] = version
        self._running[worker] = num_running
        self._held[worker] = num_held

    def promise(self, worker: int, num_groups: int) -> None:
        """The worker was chosen for so many groups that do not run yet.

        Args:
            num_groups: negative once they run, or will not.
        """
        self._promised[worker] += num_groups
        self._on_node[self._node[worker]] += num_groups

    def least_loaded(self, version: int) -> int | None:
        """The worker that holds `version` or a later one, has room, and runs the fewest groups.

        Of several the first; None: there is no such worker.
        """
        if not len(self._node):
            return None
        busy = self._running + self._promised
        is_able = self._version >= version
        is_able &= busy + self._held < self._max_on_worker
        is_able &= (self._on_node < self._max_on_node)[self._node]
        worker = int(np.where(is_able, busy, np.iinfo(np.int64).max).argmin())
        return worker if is_able[worker] else None
