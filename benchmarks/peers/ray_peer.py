"""`ray.put` of numpy arrays in an actor, `ray.get` in the driver: Ray's shared memory.

Run under the peers' environment. `get` gives read-only views of shared memory; `get_copied` also
copies each into fresh memory of the process, `get_pooled` into memory that it has used before.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import ray
from planes_payloads import PAYLOADS
from planes_role import Handlers, serve
from ray_session import ray_session


def arrays_of(payload: str) -> list[np.ndarray]:
    made = PAYLOADS[payload]()
    arrays = [values for shard in made.shards for values in shard.values()]
    if payload == "rows":
        return np.split(arrays[0], len(made.lengths[0]))
    return arrays


@ray.remote(num_cpus=1)
class Owner:
    def put(self, payload: str) -> list[ray.ObjectRef]:
        return [ray.put(values) for values in arrays_of(payload)]

    def put_s(self, payload: str) -> float:
        """Seconds to put the payload, which is dropped again."""
        arrays = arrays_of(payload)
        start = time.perf_counter()
        references = [ray.put(values) for values in arrays]
        seconds = time.perf_counter() - start
        del references
        return seconds


def ray_role() -> Handlers:
    owner = Owner.remote()
    held: dict[str, list[ray.ObjectRef]] = {}
    destinations: dict[str, list[np.ndarray]] = {}

    def prepare(payload: str) -> None:
        held[payload] = ray.get(owner.put.remote(payload))
        expected = arrays_of(payload)
        for got, values in zip(ray.get(held[payload]), expected, strict=True):
            assert np.array_equal(got, values), "arrived changed"
        destinations[payload] = expected

    def get(payload: str) -> float:
        return _timed(lambda: ray.get(held[payload]))

    def get_copied(payload: str) -> float:
        return _timed(lambda: [values.copy() for values in ray.get(held[payload])])

    def get_pooled(payload: str) -> float:
        def work() -> None:
            for into, values in zip(destinations[payload], ray.get(held[payload]), strict=True):
                np.copyto(into, values)

        return _timed(work)

    def one_row(count: int) -> float:
        rows = held["rows"][:count]

        def work() -> None:
            for row in rows:
                ray.get(row)

        return _timed(work)

    return {
        "prepare": prepare,
        "get": get,
        "get_copied": get_copied,
        "get_pooled": get_pooled,
        "put": lambda payload: ray.get(owner.put_s.remote(payload)),
        "one_row": one_row,
        "version": lambda: ray.__version__,
    }


def _timed(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


if __name__ == "__main__":
    with ray_session():
        serve(ray_role())
