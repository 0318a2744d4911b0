"""Counters of a data plane. No torch."""

from __future__ import annotations

from msgspec import Struct


class PlaneStats(Struct, frozen=True):
    """What a worker's data plane holds now, and counters since its start.

    The names of the fields are those of the run's metrics.

    Attributes:
        store_bytes, store_shards: held now.
        mapped_retired_bytes: of forgotten shards those that others still read, and so still held.
        pulled_bytes: came from elsewhere.
        mapped_bytes: came from other workers' memory on this node.
        local_bytes: came from the own store.
        served_bytes: went out in answer to `bulk_requests`.
        bulk_requests: answered.
        bulk_refused: frames that no member of the run sent.
    """

    store_bytes: int = 0
    store_shards: int = 0
    mapped_retired_bytes: int = 0
    pulled_bytes: int = 0
    mapped_bytes: int = 0
    local_bytes: int = 0
    served_bytes: int = 0
    bulk_requests: int = 0
    bulk_refused: int = 0
