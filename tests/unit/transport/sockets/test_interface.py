"""Where workers listen, and what they tell others."""

from __future__ import annotations

import errno
import socket
from datetime import timedelta
from types import NoneType
from typing import Any

import pytest

from areal_sc.engines.training.process_group import host_rendezvous
from areal_sc.errors import ConfigError
from areal_sc.transport.rpc.method import Method
from areal_sc.transport.rpc.server import RpcServer
from areal_sc.transport.rpc.transport import ZmqTransport
from areal_sc.transport.sockets.interface import (
    Interface,
    host_of,
    own_address_towards,
    port_of,
)

WHO = Method("who", NoneType, str)


def stands_for(monkeypatch: pytest.MonkeyPatch, *addresses: str) -> None:
    """Sets the addresses of this machine's name."""

    def lookup(name: str, *rest: Any) -> list[Any]:
        if not addresses:
            raise socket.gaierror("Name or service not known")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (a, 0)) for a in addresses]

    monkeypatch.setattr(socket, "gethostname", lambda: "gpu-17")
    monkeypatch.setattr(socket, "getaddrinfo", lookup)


@pytest.mark.parametrize(
    ("bind", "host"),
    [
        ("127.0.0.1", "127.0.0.1"),
        ("127.0.0.2", "127.0.0.2"),  # on no list of the system's, and yet this machine's
        ("lo", "127.0.0.1"),
        ("localhost", "127.0.0.1"),
        ("127.0.0.0/8", "127.0.0.1"),
        ("::1", "::1"),
        ("::/96", "::1"),
        ("auto", "127.0.0.1"),
    ],
)
def test_what_is_listened_on_is_what_others_are_told(bind: str, host: str) -> None:
    interface = Interface.of(bind)
    assert interface == Interface(host, host)
    told = interface.reachable("tcp://0.0.0.0:4711")
    assert (host_of(told), port_of(told)) == (host, 4711)


@pytest.mark.parametrize(
    ("controller", "host"), [("127.0.0.1", "127.0.0.1"), ("127.0.1.1", "127.0.0.1"), ("::1", "::1")]
)
def test_auto_follows_the_way_to_the_controller(controller: str, host: str) -> None:
    assert Interface.of("auto", controller).host == host


def test_auto_is_loopback_of_ipv6_where_there_is_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    create = socket.create_server

    def without_ipv4(address: tuple[str, int], **how: Any) -> socket.socket:
        if how["family"] == socket.AF_INET:
            raise OSError(errno.EADDRNOTAVAIL, "Cannot assign requested address")
        return create(address, **how)

    monkeypatch.setattr(socket, "create_server", without_ipv4)
    assert Interface.of("auto") == Interface("::1", "::1")
    with pytest.raises(
        ConfigError, match=r"bind='127\.0\.0\.1': 127\.0\.0\.1 cannot be listened on"
    ):
        Interface.of("127.0.0.1")


def test_a_name_of_ipv6_alone_stands_for_that(monkeypatch: pytest.MonkeyPatch) -> None:
    def look_up(host: str, port: None) -> list[tuple[object, ...]]:
        assert host == "v6.example"
        return [(0, 0, 0, "", ("::1", 0))]

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    assert Interface.of("v6.example").host == "::1"


def test_where_no_way_leads_to_the_controller_the_setting_is_named() -> None:
    with pytest.raises(ConfigError, match=r"finds no way to 255\.255\.255\.255.*transport\.bind"):
        own_address_towards("255.255.255.255")


@pytest.mark.parametrize("bind", ["0.0.0.0", "*"])
def test_every_interface_is_told_by_the_machines_own_address(
    bind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    stands_for(monkeypatch, "127.0.1.1", "10.0.0.5")
    interface = Interface.of(bind)
    assert interface.bind == "tcp://0.0.0.0"
    assert interface.reachable("tcp://0.0.0.0:4711") == "tcp://10.0.0.5:4711"


def test_a_machine_whose_name_leads_nowhere_needs_the_setting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stands_for(monkeypatch, "127.0.1.1")
    with pytest.raises(
        ConfigError, match=r"bind=0\.0\.0\.0: .*gpu-17, stands for 127\.0\.1\.1.*expected auto"
    ):
        Interface.of("0.0.0.0")
    stands_for(monkeypatch)
    with pytest.raises(ConfigError, match=r"gpu-17, has no address .*expected auto"):
        Interface.of("*")


@pytest.mark.parametrize(
    "bind",
    [
        *("10.0.0.5:80", "tcp://10.0.0.5", "nosuch0", "x" * 65, "fd00::zz"),
        *("127.0.0.1/8", "203.0.113.7", "203.0.113.0/24", "2001:db8::/32"),
    ],
)
def test_what_is_none_of_this_machines_is_refused_with_what_it_has(bind: str) -> None:
    with pytest.raises(ConfigError, match=r"transport\.bind='.*'.*(expected auto|lo 127\.0\.0\.1)"):
        Interface.of(bind)


@pytest.mark.parametrize("bind", ["::1", "lo"])
async def test_calls_go_over_ipv6_as_over_ipv4(bind: str) -> None:
    interface = Interface.of(bind)
    served = [WHO.served_by(lambda _: "w")]
    server = RpcServer(served, node_id="w", incarnation="a", bind=interface.bind)
    transport = ZmqTransport()
    try:
        address = interface.reachable(await server.start())
        assert host_of(address) == interface.host
        assert await transport.connect(address, "w", "a").call(WHO, None, timeout_s=30) == "w"
    finally:
        await transport.close()
        await server.close()


@pytest.mark.parametrize("host", ["::1", "127.0.0.1"])
def test_ranks_meet_on_ipv6_as_on_ipv4(host: str) -> None:
    import torch.distributed as dist

    store, address = host_rendezvous(host)
    assert host_of(address) == host
    other = dist.TCPStore(host, port_of(address), timeout=timedelta(seconds=30))
    other.set("met", "yes")
    assert store.get("met") == b"yes"


def test_libraries_are_told_the_interface_and_the_user_has_the_last_word() -> None:
    environment: dict[str, str] = {}
    Interface.of("auto").tell_libraries(environment)
    assert environment == {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "=lo"}
    chosen = {"GLOO_SOCKET_IFNAME": "ib0", "NCCL_SOCKET_IFNAME": "ib"}
    Interface.of("::1").tell_libraries(own := dict(chosen))
    assert own == chosen


async def test_loopback_is_closed_to_the_network() -> None:
    """A socket on 127.0.0.1 does not take the port on other addresses of the machine."""
    server = RpcServer([], node_id="w", incarnation="a", bind=Interface.of("auto").bind)
    port = int((await server.start()).rpartition(":")[2])
    try:
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.2", port), 10.0)
    finally:
        await server.close()


def test_the_way_to_one_of_several_machines_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """A login node may not know the names of all nodes, or lack a protocol that some speak."""
    addresses = {
        **{"v6": ["fd77:ffff::1"], "here": ["127.0.0.1"], "far": ["192.0.2.7"]},
        "both": ["fd77:ffff::1", "192.0.2.7"],
    }
    ways = {"127.0.0.1": "127.0.0.1", "192.0.2.7": "127.0.0.2"}

    def look_up(host: str, port: None) -> list[tuple[object, ...]]:
        if host not in addresses:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return [(0, 0, 0, "", (address, 0)) for address in addresses[host]]

    def own_address(host: str) -> str:
        if host not in ways:
            raise ConfigError(f"finds no way to {host}")
        return ways[host]

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    monkeypatch.setattr(f"{Interface.__module__}.own_address_towards", own_address)
    assert Interface.towards("auto", ["unknown", "v6", "here"]).host == "127.0.0.1"
    assert Interface.towards("auto", ["both"]).host == "127.0.0.2"
    with pytest.raises(ConfigError, match="the host unknown has no address: Name or service"):
        Interface.towards("auto", ["v6", "unknown"])
    with pytest.raises(ConfigError, match="finds no way to fd77:ffff::1"):
        Interface.towards("auto", ["unknown", "v6"])
