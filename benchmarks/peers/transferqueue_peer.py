"""TransferQueue's simple storage, as configured by default: two storage processes, one client.

Run under the peers' environment. `put` and `get_data` of the client; what is timed holds no
metadata request. Rows of one length are a dense tensor, others a jagged one.
"""

from __future__ import annotations

import itertools
import time
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
    tables = {name: table_of(make()) for name, make in PAYLOADS.items()}
    numbers = itertools.count()

    def put(payload: str) -> tuple[Any, float]:
        """Metadata of the payload in a partition of its own, and the seconds that putting took."""
        table, partition = tables[payload], f"{payload}-{next(numbers)}"
        start = time.perf_counter()
        client.put(table, partition_id=partition)
        seconds = time.perf_counter() - start
        metadata = client.get_meta(
            data_fields=list(table.keys()),
            batch_size=table.batch_size[0],
            partition_id=partition,
            task_name="benchmark",
        )
        return metadata, seconds

    def drop(metadata: Any) -> None:
        client.clear_partition(partition_id=metadata.partition_ids[0])

    def check(payload: str) -> None:
        metadata, _ = put(payload)
        got, table = client.get_data(metadata), tables[payload]
        for name in table.keys():  # noqa: SIM118 a TensorDict iterates over rows
            for mine, theirs in zip(got[name].unbind(), table[name].unbind(), strict=True):
                assert torch.equal(mine, theirs), "arrived changed"
        drop(metadata)

    def cycle(payload: str) -> dict[str, float]:
        """{"put_s", "get_s"} of the payload, put anew."""
        metadata, put_s = put(payload)
        start = time.perf_counter()
        client.get_data(metadata)
        get_s = time.perf_counter() - start
        drop(metadata)
        return {"put_s": put_s, "get_s": get_s}

    def one_row(count: int) -> float:
        metadata, _ = put("rows")
        rows = [metadata.select_samples([row]) for row in range(count)]
        start = time.perf_counter()
        for row in rows:
            client.get_data(row)
        seconds = time.perf_counter() - start
        drop(metadata)
        return seconds

    return {
        "check": check,
        "cycle": cycle,
        "one_row": one_row,
        "label": lambda: f"TransferQueue {transfer_queue.__version__} get_data",
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    with ray_session():
        transfer_queue.init()
        try:
            serve(transferqueue_role())
        finally:
            transfer_queue.close()
