"""Names that come over a socket: none of them leads out of the folders that are meant."""

from __future__ import annotations

from pathlib import Path

import pytest

from areal_sc.errors import NotPermitted
from areal_sc.shipping.names import checked_name, listable, readable, writable
from areal_sc.transport.security.passes import Caller

RUN = Path("/run")

OUTSIDE = [
    *("", ".", "..", "/", "/etc/passwd", "../x", "a/../b", "a//b", "a/", "/a", "a/./b", "a\\b"),
    *("a\0b", "a\nb", ".hidden", "a/.hidden", "a/" * 25 + "b", "a" * 2000, "a/" + "b" * 300),
]


@pytest.mark.parametrize("name", OUTSIDE)
def test_a_name_that_leads_elsewhere_is_refused(name: str) -> None:
    for check in (
        checked_name,
        *(lambda n, f=f: f(RUN, n) for f in (readable, listable)),
        lambda n: writable(RUN, n, Caller.train),
    ):
        with pytest.raises(NotPermitted):
            check(name)


@pytest.mark.parametrize("name", ["a", "a/b.py", "model-00001-of-2.safetensors", "a b/ü.txt"])
def test_a_file_below_a_folder_has_a_name(name: str) -> None:
    assert checked_name(name) == name


@pytest.mark.parametrize(
    "name",
    [
        *("keys.json", "ledger/1", ".lock", ".term", ".nonce", "config.yaml", "logs/files.log"),
        *("checkpoints/step-000002", "checkpoints/step-000002/controllers.msgpack"),
        *("sources", "sources/a/b", "agents/x.json", "sources/../keys.json"),
        *("a/../adapter_config.json", ".a/adapter_config.json", "a/adapter_config.json.key"),
        *("adapter_config.json", "a/adapter_config.json/key", "serving/key", "serving/journal"),
    ],
)
def test_nothing_else_of_the_run_folder_is_read(name: str) -> None:
    with pytest.raises(NotPermitted):
        readable(RUN, name)


@pytest.mark.parametrize(
    "name",
    [
        *("sources/1.json", "checkpoints/step-000002/engine/rank-0.safetensors", "keys.json"),
        *("checkpoints/.step-000002.partial/controllers.msgpack", "logs/controller.log"),
        *("exports/train/../x/y", "exports/train/xyz/config.json", ".term", "config.yaml"),
    ],
)
def test_nothing_that_the_run_goes_by_is_written(name: str) -> None:
    with pytest.raises(NotPermitted):
        writable(RUN, name, Caller.train)


def test_what_nodes_need_they_get() -> None:
    snapshot = "checkpoints/step-000002/engine-critic"
    assert readable(RUN, "sources/123.json") == RUN / "sources" / "123.json"
    assert readable(RUN, f"{snapshot}/rank-0.safetensors").name == "rank-0.safetensors"
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        assert readable(RUN, f"serving/adapters/a-1/{name}").name == name
    assert listable(RUN, snapshot) == RUN / snapshot
    for name in (
        "checkpoints/.step-000002.partial/engine/snapshot.json",
        "exports/train/0123abcd/model.safetensors",
    ):
        assert writable(RUN, name, Caller.train) == RUN / name
        for other in (Caller.rollout, None):
            with pytest.raises(NotPermitted):
                writable(RUN, name, other)
    log = "logs/node1/rollout-0.log"
    for caller in (Caller.train, Caller.rollout):
        assert writable(RUN, log, caller) == RUN / log
