"""Which network interface a worker listens on, and under which address others reach it."""

from __future__ import annotations

import ipaddress
import re
import socket
from dataclasses import dataclass
from typing import Final

import zmq

from areal_sc.config.machine import EVERYWHERE
from areal_sc.errors import TransportError

_NAME: Final = re.compile(r"[A-Za-z0-9_.@-]{1,64}")
_HOW_TO: Final = "set transport.bind to the IP address or the name of one network interface"


@dataclass(frozen=True, slots=True)
class Interface:
    """Where sockets listen.

    Attributes:
        bind: ZMQ interface, without a port.
        advertised_host: IP address that others connect to; None: the one that is listened on.
    """

    bind: str
    advertised_host: str | None = None

    @classmethod
    def of(cls, bind: str) -> Interface:
        """From `transport.bind`: an IPv4 address, the name of an interface, or `0.0.0.0` or `*`.

        Raises: TransportError: it is none of them, or every interface is meant and this machine's
            own name does not lead to any that others can reach.
        """
        if bind in EVERYWHERE:
            return cls("tcp://0.0.0.0", _own_address(bind))
        if not _NAME.fullmatch(bind):
            raise TransportError(f"transport.bind={bind!r}: {_HOW_TO}")
        return cls(f"tcp://{bind}")

    def listening_host(self) -> str:
        """The IPv4 address of `bind`, for sockets that are not ZMQ's; ZMQ resolves it for both.

        Raises: TransportError: this machine has no such interface or address.
        """
        with zmq.Context() as context, context.socket(zmq.ROUTER) as probe:
            try:
                probe.bind(f"{self.bind}:0")
            except zmq.ZMQError as error:
                raise TransportError(f"{self.bind} cannot be listened on: {error}") from error
            return host_of(probe.getsockopt_string(zmq.LAST_ENDPOINT))

    def reachable(self, address: str) -> str:
        """The bound endpoint `tcp://<host>:<port>` as others connect to it."""
        if self.advertised_host is None:
            return address
        return f"tcp://{self.advertised_host}:{address.rpartition(':')[2]}"


LOOPBACK: Final = Interface("tcp://127.0.0.1")
"""Only processes of this machine can connect."""


def _own_address(bind: str) -> str:
    """The address that this machine's name stands for."""
    name = socket.gethostname()
    try:
        found = [entry[4][0] for entry in socket.getaddrinfo(name, None, socket.AF_INET)]
    except OSError as error:
        raise TransportError(
            f"transport.bind={bind}: the name of this machine, {name}, has no address ({error}), "
            f"so other machines cannot be told where to connect; {_HOW_TO}"
        ) from error
    for address in map(str, found):
        if not ipaddress.ip_address(address).is_loopback:
            return address
    raise TransportError(
        f"transport.bind={bind}: the name of this machine, {name}, stands for {found[0]}, which "
        f"other machines cannot reach; {_HOW_TO}"
    )


def host_of(address: str) -> str:
    """The host of an endpoint `tcp://<host>:<port>`."""
    return address.removeprefix("tcp://").rpartition(":")[0]


def port_of(address: str) -> int:
    """The port of an endpoint `tcp://<host>:<port>`."""
    return int(address.rpartition(":")[2])
