"""AReaL's RTensor: its `/data` blueprint in one process, `RTensor.localize` in another.

Run under the peers' environment; it starts its server (`areal_peer.py server`) itself, as AReaL's
own `run_server` does it (Werkzeug, one thread a connection). AReaL's package imports the whole
trainer; here the parent packages are empty, and the modules used are the installed ones unchanged.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import sys
import threading
import time
import types
from pathlib import Path
from typing import Any

import torch
from planes_payloads import PAYLOADS
from planes_role import Handlers, Role, serve


def skip_package_imports() -> None:
    """Makes the parent packages of AReaL's transport importable without running them."""
    spec = importlib.util.find_spec("areal")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    root = Path(next(iter(spec.submodule_search_locations)))
    for name in ("areal", "areal.infra", "areal.infra.rpc.guard"):
        package = types.ModuleType(name)
        package.__path__ = [str(root.joinpath(*name.split(".")[1:]))]
        sys.modules[name] = package


def server_role() -> Handlers:
    from areal.infra.rpc import rtensor
    from areal.infra.rpc.guard.data_blueprint import data_bp
    from flask import Flask
    from werkzeug.serving import make_server

    app = Flask("areal")
    app.register_blueprint(data_bp)
    server = make_server("127.0.0.1", 0, app, threaded=True)
    address = f"127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, daemon=True).start()

    made = {name: make() for name, make in PAYLOADS.items()}

    def put(payload: str) -> dict[str, Any]:
        """Stores the payload: a tensor a field and shard, or a row where single rows are asked."""
        shards = made[payload].shards
        tensors = [torch.from_numpy(values) for shard in shards for values in shard.values()]
        if payload == "rows":
            tensors = list(tensors[0].split(made[payload].lengths[0]))
        stored = rtensor.RTensor.remotize(tensors, node_addr=address)
        return {
            "shards": [
                [r.shard.shard_id, list(r.data.shape), str(r.data.dtype).removeprefix("torch.")]
                for r in stored
            ],
            "address": address,
        }

    def drop(stored: dict[str, Any]) -> None:
        for shard_id, _, _ in stored["shards"]:
            rtensor.remove(shard_id)

    return {"put": put, "drop": drop}


def client_role(server: Role) -> Handlers:
    from areal.infra.rpc.rtensor import RTensor, TensorShardInfo, clear_fetch_buffer

    def put(payload: str) -> tuple[dict[str, Any], list[RTensor]]:
        """What is stored, and the handles of its shards."""
        stored = server.call("put", payload=payload)
        return stored, [
            RTensor(
                TensorShardInfo(shard_id, stored["address"]),
                torch.empty(shape, dtype=getattr(torch, dtype), device="meta"),
            )
            for shard_id, shape, dtype in stored["shards"]
        ]

    def fetch(wanted: list[RTensor]) -> list[torch.Tensor]:
        tensors = RTensor.localize(wanted)
        clear_fetch_buffer()
        return tensors

    def check(payload: str) -> None:
        stored, wanted = put(payload)
        fetched = fetch(wanted)
        made = [values for shard in PAYLOADS[payload]().shards for values in shard.values()]
        if payload == "rows":
            fetched = [torch.cat(fetched)]
        for got, expected in zip(fetched, made, strict=True):
            assert torch.equal(got, torch.from_numpy(expected)), "arrived changed"
        server.call("drop", stored=stored)

    def cycle(payload: str) -> dict[str, float]:
        """{"get_s"} of the payload, put anew; that is by reference, so there is nothing to time."""
        stored, wanted = put(payload)
        start = time.perf_counter()
        fetch(wanted)
        get_s = time.perf_counter() - start
        server.call("drop", stored=stored)
        return {"get_s": get_s}

    _, rows = put("rows")

    def one_row(count: int) -> float:
        start = time.perf_counter()
        for row in rows[:count]:
            fetch([row])
        return time.perf_counter() - start

    return {
        "check": check,
        "cycle": cycle,
        "one_row": one_row,
        "label": lambda: f"AReaL {importlib.metadata.version('areal')} RTensor fetch",
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    skip_package_imports()
    if sys.argv[1:] == ["server"]:
        serve(server_role())
    else:
        with Role("areal server", Path(__file__), ["server"]) as areal_server:
            serve(client_role(areal_server))
