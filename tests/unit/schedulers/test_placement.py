"""Which node and which of its CUDA devices a worker gets; no process is started."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from areal_sc.config.placement import Purpose
from areal_sc.config.schema import Device
from areal_sc.errors import ConfigError
from areal_sc.nodes.spec import NodeFacts, WorkerOrder
from areal_sc.run.run_status import Wait
from areal_sc.schedulers.base import Node, lack_of_places, placed


def node(num_devices: int, name: str = "a", **attributes: Any) -> Node:
    facts = NodeFacts(name, name, num_devices, "/dev/shm", "tcp://a:1", "i")
    return Node(facts, Path("a.log"), **attributes)


def order(role: str, index: int, num_devices: int = 1, device: Device = Device.auto) -> WorkerOrder:
    return WorkerOrder(role, index, "none", {}, device, 1, num_devices)


def devices(where: Node, *workers: WorkerOrder) -> list[list[int]]:
    """Those of each worker on one node."""
    return [order.devices for order in placed(workers, [where])[where]]


def test_roles_get_nodes_of_their_own_where_there_are_enough() -> None:
    nodes = [node(0, name) for name in "abc"]

    def names(*workers: WorkerOrder) -> list[str]:
        return [it.name for it, its in placed(workers, nodes).items() for _ in its]

    assert names(order("train", 0)) == ["a"]
    assert names(order("rollout", 0), order("rollout", 1)) == ["b", "c"]
    assert names(*(order("judge", index) for index in range(4))) == ["a", "a", "b", "b"]


def test_free_devices_first_then_those_of_other_roles() -> None:
    machine = node(4)
    assert devices(machine, order("train", 0), order("train", 1)) == [[0], [1]]
    pairs = [order("rollout", 0, 2), order("rollout", 1, 2)]
    assert devices(machine, *pairs) == [[2, 3], [0, 1]], "the second shares with training"
    assert devices(machine, order("train", 2)) == [[2]], "not with its own role"


def test_what_takes_whatever_there_is_comes_where_devices_are() -> None:
    nodes = [node(0, "a"), node(2, "b")]
    chosen = placed([order("train", 0), order("train", 1)], nodes)
    assert [it.devices for it in chosen[nodes[1]]] == [[0], [1]]
    [on_cpu] = placed([order("judge", 0, device=Device.cpu)], nodes)[nodes[0]]
    assert on_cpu.devices == []


def test_a_worker_that_needs_all_gets_them_in_order() -> None:
    machine = node(3)
    assert devices(machine, order("train", 0)) == [[0]]
    assert devices(machine, order("rollout", 0, 3)) == [[0, 1, 2]], "the free ones are 1 and 2"


def test_one_device_is_shared_by_all() -> None:
    machine = node(1)
    assert devices(machine, order("train", 0)) == [[0]]
    assert devices(machine, order("rollout", 0)) == [[0]]


def test_workers_without_a_device_take_none() -> None:
    machine = node(2)
    without = [order("rollout", 0, 2, Device.cpu), order("rollout", 1, 0)]
    assert devices(machine, *without) == [[], []]
    assert devices(machine, order("train", 0)) == [[0]]


def test_a_machine_without_devices() -> None:
    machine = node(0)
    assert devices(machine, order("rollout", 0, 2)) == [[]]
    with pytest.raises(ConfigError, match="needs 1 CUDA devices, and a has 0"):
        devices(machine, order("rollout", 0, 1, Device.cuda))


def test_more_devices_than_there_are() -> None:
    machine = node(2)
    with pytest.raises(ConfigError, match=r"rollout/0 needs 3 CUDA devices.*has 2.*tp_size"):
        devices(machine, order("rollout", 0, 3))
    assert devices(machine, order("rollout", 0, 2)) == [[0, 1]], "the refused one has taken none"


def test_devices_come_back_when_a_worker_stops_or_is_replaced() -> None:
    machine = node(2)
    assert devices(machine, order("train", 0), order("train", 1)) == [[0], [1]]
    machine.placement.release("train/0")
    assert devices(machine, order("rollout", 0)) == [[0]]
    assert devices(machine, order("rollout", 0)) == [[0]], "its successor is placed as it was"


def test_workers_are_spread_evenly_and_neighbours_stay_together() -> None:
    nodes = [node(0, name) for name in "abc"]
    where = placed([order("rollout", index) for index in range(7)], nodes)
    assert [[worker.index for worker in where[n]] for n in nodes] == [[0, 1, 2], [3, 4, 5], [6]]


def test_a_worker_goes_where_there_are_devices_enough() -> None:
    small, large = node(1, "small"), node(4, "large")
    where = placed([order("rollout", index, 2) for index in range(2)], [small, large])
    assert [(worker.index, worker.devices) for worker in where[large]] == [(0, [0, 1]), (1, [2, 3])]
    assert where[small] == []


def test_nodes_that_are_there_come_before_those_that_are_on_their_way() -> None:
    nodes = [node(0, "late", coming=Wait("a node", "it", 0.0)), node(0, "there")]
    where = placed([order("rollout", index) for index in range(3)], nodes)
    assert [[worker.index for worker in where[it]] for it in nodes] == [[2], [0, 1]]


def test_how_many_workers_have_a_place() -> None:
    workers = [order("rollout", index, 2) for index in range(5)]
    trainers = node(8, "t", purpose=Purpose.train)
    with_devices = [node(4, name, purpose=Purpose.rollout, max_workers=1) for name in "ab"]
    said = "5 rollout workers need 2 CUDA devices each, .* have room for 4 of them"
    assert re.fullmatch(said, lack_of_places(workers, [trainers, *with_devices]))
    assert lack_of_places(workers[:4], [trainers, *with_devices]) == ""
    without = [node(0, name, purpose=Purpose.rollout, max_workers=2) for name in "ab"]
    said = "5 rollout workers need a place each, .* have room for 4 of them"
    assert re.fullmatch(said, lack_of_places(workers, [trainers, *without]))
    assert lack_of_places(workers[:4], without) == ""
    assert lack_of_places(workers, [node(0)]) == "", "there is no limit"


def test_what_an_agent_warns_of_is_in_the_script_s_log(caplog: pytest.LogCaptureFixture) -> None:
    facts = NodeFacts("a", "a", 0, "/dev/shm", "tcp://a:1", "i", warnings=("too little memory",))
    Node(facts, Path("a.log"))
    assert [record.getMessage() for record in caplog.records] == ["node a: too little memory"]
