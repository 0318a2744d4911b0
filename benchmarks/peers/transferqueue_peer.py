"""TransferQueue's simple storage, as configured by default: two storage processes, one client.

Run under the peers' environment. `put` and `get_data` of the client; what is timed holds no
metadata request. Rows of one length are a dense tensor, others a jagged one.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import Any

import torch
import transfer_queue
from planes_payloads import PAYLOADS, Payload
from planes_role import Handlers, serve
from ray_session import ray_session
from tensordict import TensorDict


def table_of(payload: Payload) -> TensorDict:
    """All shards as one table, a row each trajectory."""
    lengths = list(itertools.chain.from_iterable(payload.lengths))
    columns: dict[str, Any] = {}
    for name in payload.shards[0]:
        packed = torch.cat([torch.from_numpy(shard[name]) for shard in payload.shards])
        if len(set(lengths)) == 1:
            columns[name] = packed.view(len(lengths), lengths[0])
        else:
            columns[name] = torch.nested.as_nested_tensor(
                packed.split(lengths), layout=torch.jagged
            )
    return TensorDict(columns, batch_size=len(lengths))


def transferqueue_role() -> Handlers:
    client = transfer_queue.get_client()
    tables: dict[str, TensorDict] = {}
    known: dict[str, Any] = {}
    numbers = itertools.count()

    def prepare(payload: str) -> None:
        table = tables[payload] = table_of(PAYLOADS[payload]())
        client.put(table, partition_id=payload)
        known[payload] = client.get_meta(
            data_fields=list(table.keys()),
            batch_size=table.batch_size[0],
            partition_id=payload,
            task_name="benchmark",
        )
        got = client.get_data(known[payload])
        for name in table.keys():  # noqa: SIM118 a TensorDict iterates over rows
            for mine, theirs in zip(got[name].unbind(), table[name].unbind(), strict=True):
                assert torch.equal(mine, theirs), "arrived changed"

    def get(payload: str) -> float:
        return _timed(lambda: client.get_data(known[payload]))

    def put(payload: str) -> float:
        partition = f"{payload}-{next(numbers)}"
        seconds = _timed(lambda: client.put(tables[payload], partition_id=partition))
        client.clear_partition(partition_id=partition)
        return seconds

    def one_row(count: int) -> float:
        rows = [known["rows"].select_samples([row]) for row in range(count)]

        def work() -> None:
            for row in rows:
                client.get_data(row)

        return _timed(work)

    return {
        "prepare": prepare,
        "get": get,
        "put": put,
        "one_row": one_row,
        "version": lambda: transfer_queue.__version__,
    }


def _timed(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


if __name__ == "__main__":
    torch.set_num_threads(1)
    with ray_session():
        transfer_queue.init()
        try:
            serve(transferqueue_role())
        finally:
            transfer_queue.close()
