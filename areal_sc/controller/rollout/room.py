"""How many groups the stores of rollout workers hold, at their worst-case size."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from areal_sc.config.schema import RolloutConfig
from areal_sc.errors import ConfigError
from areal_sc.nodes.spec import WorkerReport
from areal_sc.sizing.store_room import describe_largest_group, max_group_bytes
from areal_sc.transport.shards.arena import block_span


class StoreRoom(NamedTuple):
    """Groups that fit.

    Attributes:
        on_worker: into one store.
        on_node: node -> into its stores together.
    """

    on_worker: int
    on_node: dict[str, int]

    @property
    def num_groups(self) -> int:
        """Number of groups that all stores hold."""
        return sum(self.on_node.values())


def store_room(workers: Sequence[WorkerReport], config: RolloutConfig) -> StoreRoom:
    """By the limits that are set, which were checked before, and by how much memory is free."""
    group_bytes = max_group_bytes(config)
    on_worker = max(1, config.store_bytes // group_bytes)
    num_workers = Counter(worker.node for worker in workers)
    on_node = {node: on_worker * count for node, count in num_workers.items()}
    if config.node_store_bytes:
        of_node = config.node_store_bytes // group_bytes
        on_node = {node: min(num, of_node) for node, num in on_node.items()}
    for worker in workers:
        if free := worker.store_room_bytes:  # 0: not known
            # a limit counts shards; of the memory itself their blocks take whole pages
            on_node[worker.node] = min(on_node[worker.node], free // block_span(group_bytes))
    return StoreRoom(on_worker, on_node)


def check_room(room: StoreRoom, config: RolloutConfig) -> None:
    """Raises: ConfigError: the stores do not hold one training batch."""
    if room.num_groups < config.train_batch_groups:
        raise ConfigError(
            "transport.shared_memory: expected room for a batch, that is for "
            f"rollout.train_batch_groups={config.train_batch_groups} groups "
            f"({describe_largest_group(config)}), but what is free there, and the limits of the "
            f"stores, leave room for {room.num_groups}; give more room, a smaller "
            "rollout.max_context_tokens, smaller batches, another folder, or more workers"
        )
