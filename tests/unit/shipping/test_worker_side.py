"""A worker's files where its node does not share the run folder."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from areal_sc.config.schema import Device, SchedulerConfig
from areal_sc.errors import ModelError, NotPermitted
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


async def test_an_adapter_is_brought_once_and_is_whole_or_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, contents = list[str](), dict[str, bytes]()

    class Script:
        async def read_all(self, path: str, name: str) -> bytes:
            assert path == ""
            asked.append(name)
            if name not in contents:
                raise NotPermitted(f"{name} is not there")
            return contents[name]

    @asynccontextmanager
    async def opened(_: ShippedFiles) -> AsyncIterator[Script]:
        yield Script()

    monkeypatch.setattr(ShippedFiles, "_opened", opened)
    config = SchedulerConfig(run_dir=str(tmp_path / "node"), node_folder=str(tmp_path))
    transport = ZmqTransport()
    files = ShippedFiles(Shipped("/runs/1", {}), config, transport)
    name = "serving/adapters/a"
    contents[f"{name}/adapter_model.safetensors"] = b"values"
    with pytest.raises(ModelError, match="adapter serving/adapters/a cannot be brought to this"):
        await files.bring_adapter(name)
    contents[f"{name}/adapter_config.json"] = b"{}"
    folders = await asyncio.gather(*(files.bring_adapter(name) for _ in range(3)))
    (folder,) = set(folders)
    assert folder == tmp_path / "node" / name
    assert (folder / "adapter_model.safetensors").read_bytes() == b"values"
    assert (folder / "adapter_config.json").read_bytes() == b"{}"
    assert len(asked) == 4, "twice in vain, and then once"
    with pytest.raises(ModelError, match=r"adapter \.\./x: expected a folder in the run folder"):
        await files.bring_adapter("../x")
    await transport.close()
