"""Where workers listen, and what they tell others."""

from __future__ import annotations

import socket
from typing import Any

import pytest

from areal_sc.errors import TransportError
from areal_sc.transport.rpc.server import RpcServer
from areal_sc.transport.sockets.interface import Interface


def stands_for(monkeypatch: pytest.MonkeyPatch, *addresses: str) -> None:
    """Sets the addresses of this machine's name."""

    def lookup(name: str, *rest: Any) -> list[Any]:
        if not addresses:
            raise socket.gaierror("Name or service not known")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (a, 0)) for a in addresses]

    monkeypatch.setattr(socket, "gethostname", lambda: "gpu-17")
    monkeypatch.setattr(socket, "getaddrinfo", lookup)


@pytest.mark.parametrize("bind", ["127.0.0.1", "10.0.0.5", "lo", "eth0.100", "ib-0"])
def test_one_interface_is_listened_on_and_told_as_it_is(bind: str) -> None:
    interface = Interface.of(bind)
    assert interface.bind == f"tcp://{bind}"
    assert interface.reachable("tcp://10.0.0.5:4711") == "tcp://10.0.0.5:4711"


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
        TransportError, match=r"bind=0\.0\.0\.0: .*gpu-17, stands for 127\.0\.1\.1.*set transport"
    ):
        Interface.of("0.0.0.0")
    stands_for(monkeypatch)
    with pytest.raises(TransportError, match=r"gpu-17, has no address .*set transport\.bind to"):
        Interface.of("*")


@pytest.mark.parametrize("bind", ["", "10.0.0.5:80", "tcp://10.0.0.5", "a b", "x" * 65])
def test_what_is_no_interface_is_refused(bind: str) -> None:
    with pytest.raises(TransportError, match=r"transport\.bind='.*'"):
        Interface.of(bind)


async def test_the_name_of_an_interface_becomes_its_address() -> None:
    interface = Interface.of("lo")
    server = RpcServer([], node_id="w", incarnation="a", bind=interface.bind)
    try:
        assert interface.reachable(await server.start()).startswith("tcp://127.0.0.1:")
    finally:
        await server.close()


async def test_loopback_is_closed_to_the_network() -> None:
    """A socket on 127.0.0.1 does not take the port on other addresses of the machine."""
    server = RpcServer([], node_id="w", incarnation="a", bind=Interface.of("127.0.0.1").bind)
    port = int((await server.start()).rpartition(":")[2])
    try:
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.2", port), 10.0)
    finally:
        await server.close()


async def test_an_interface_that_is_not_there_is_named() -> None:
    server = RpcServer([], node_id="w", incarnation="a", bind=Interface.of("nosuch0").bind)
    with pytest.raises(TransportError, match=r"w cannot listen on tcp://nosuch0:0"):
        await server.start()
