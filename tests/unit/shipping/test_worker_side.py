"""A worker's files where its node does not share the run folder."""

from __future__ import annotations

from pathlib import Path

from areal_sc.config.schema import Device, SchedulerConfig
from areal_sc.nodes.spec import Shipped, WorkerOrder
from areal_sc.shipping.worker_side import ShippedFiles
from areal_sc.transport.rpc.transport import ZmqTransport


async def test_the_nearest_path_that_was_brought_counts(tmp_path: Path) -> None:
    places = {
        "/home/me": "/here/1",
        "/home/me/task": "/here/2",
        "/data.jsonl": "/here/3/data.jsonl",
    }
    config = SchedulerConfig(run_dir=str(tmp_path), node_folder=str(tmp_path))
    transport = ZmqTransport()
    files = ShippedFiles(Shipped("/runs/1", places), config, transport)
    for path, here in (
        *(("/home/me/train.py", "/here/1/train.py"), ("/home/me/task/x.py", "/here/2/x.py")),
        *(("/home/me", "/here/1"), ("/home/meadow/x", "/home/meadow/x"), ("relative", "relative")),
        *(("/data.jsonl", "/here/3/data.jsonl"), ("/runs/1/sources/x", f"{tmp_path}/sources/x")),
    ):
        assert files.place(path) == here
    order = WorkerOrder("train", 0, "FSDPPPOActor", {"path": "/home/me/model"}, Device.cpu, 1)
    placed = files.placed(order)
    assert placed.engine_config["path"] == "/here/1/model"
    assert order.engine_config["path"] == "/home/me/model", "as the script knows it"
    assert files.script_path(tmp_path / "exports" / "x") == "/runs/1/exports/x"
    await transport.close()
