"""`ray.put` of numpy arrays in an actor, `ray.get` in the driver: Ray's shared memory.

Run under the peers' environment. `ray.get` gives read-only views of shared memory; a cycle may
also copy them into memory that the process has used before.
"""

from __future__ import annotations

import time

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
    def __init__(self) -> None:
        self._arrays = {payload: arrays_of(payload) for payload in PAYLOADS}

    def put(self, payload: str) -> tuple[list[ray.ObjectRef], float]:
        """References, and the seconds that it took."""
        start = time.perf_counter()
        references = [ray.put(values) for values in self._arrays[payload]]
        return references, time.perf_counter() - start


def ray_role() -> Handlers:
    owner = Owner.remote()
    rows, _ = ray.get(owner.put.remote("rows"))
    places = {payload: arrays_of(payload) for payload in PAYLOADS}

    def check(payload: str) -> None:
        references, _ = ray.get(owner.put.remote(payload))
        for got, values in zip(ray.get(references), arrays_of(payload), strict=True):
            assert np.array_equal(got, values), "arrived changed"

    def cycle(payload: str, copies: bool = True) -> dict[str, float]:
        """{"put_s", "get_s"} of the payload, put anew; what is got is then copied, or not."""
        references, put_s = ray.get(owner.put.remote(payload))
        start = time.perf_counter()
        arrays = ray.get(references)
        if copies:
            for into, values in zip(places[payload], arrays, strict=True):
                np.copyto(into, values)
        return {"put_s": put_s, "get_s": time.perf_counter() - start}

    def one_row(count: int) -> float:
        start = time.perf_counter()
        for row in rows[:count]:
            ray.get(row)
        return time.perf_counter() - start

    return {
        "check": check,
        "cycle": cycle,
        "one_row": one_row,
        "map": lambda payload: cycle(payload, copies=False)["get_s"],
        "label": lambda: f"ray {ray.__version__} get, copied into a pooled place",
    }


if __name__ == "__main__":
    with ray_session():
        serve(ray_role())
