"""Which network interface a process listens on, and under which address others reach it."""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Iterable, Iterator, MutableMapping
from dataclasses import dataclass
from typing import Final

import psutil

from areal_sc.errors import ConfigError

AUTO: Final = "auto"
EVERYWHERE: Final = ("0.0.0.0", "*")
"""`transport.bind` that means all interfaces."""

_HOW_TO: Final = (
    "expected auto, an IP address of this machine, the name of one of its network interfaces, a "
    "network such as 10.1.0.0/16, or 0.0.0.0 for all"
)
_LOOPBACK_HOSTS: Final = ("127.0.0.1", "::1")
_ANY_PORT: Final = 9  # nothing is sent to it


@dataclass(frozen=True, slots=True)
class Interface:
    """Where sockets listen.

    Attributes:
        host: IP address that is listened on.
        advertised_host: IP address that others connect to.
    """

    host: str
    advertised_host: str

    @classmethod
    def of(cls, bind: str, controller: str = "") -> Interface:
        """From `transport.bind`.

        Args:
            bind: `auto`, an IP address, the name of an interface or a host name of this machine, a
                network such as `10.1.0.0/16` or `fd00::/8`, or `0.0.0.0` or `*`.
            controller: IP address under which this machine reaches the script's; `auto` is the
                address that the way there begins at. "": the script runs here, and `auto` is
                loopback: that of IPv6 where there is no other.
        Raises: ConfigError: this machine has no such address; or all interfaces are meant, and its
            own name does not lead to any that others can reach.
        """
        if bind in EVERYWHERE:
            return cls("0.0.0.0", _address_of_own_name(bind))
        if bind == AUTO:
            hosts = (own_address_towards(controller),) if controller else _LOOPBACK_HOSTS
        else:
            hosts = (_address_meant_by(bind),)
        failures = list[OSError]()
        for host in hosts:
            try:
                socket.create_server((host, 0), family=family_of(host)).close()
            except OSError as error:
                failures.append(error)
            else:
                return cls(host, host)
        raise ConfigError(
            f"transport.bind={bind!r}: {hosts[0]} cannot be listened on: {failures[0].strerror}; "
            f"{_HOW_TO} (ports are chosen by the system); its interfaces: {_own_interfaces()}"
        ) from failures[0]

    @classmethod
    def towards(cls, bind: str, hosts: Iterable[str]) -> Interface:
        """What `of` finds for the first machine in reach; this machine comes last.

        Args:
            hosts: names or IP addresses of machines, of which one is enough.
        Raises: ConfigError: there is a way to none.
        """
        own, failure = None, ConfigError(f"transport.bind={bind}: no machine is named")
        for host in hosts:
            try:
                addresses = dict.fromkeys(str(it[4][0]) for it in socket.getaddrinfo(host, None))
            except OSError as error:
                failure = ConfigError(f"the host {host} has no address: {error.strerror}")
                continue
            for address in addresses:  # of both protocols, of which one may lead there
                try:
                    found = cls.of(bind, address)
                except ConfigError as error:
                    failure = error
                    continue
                if not ipaddress.ip_address(found.host).is_loopback:
                    return found
                own = found
        if own is None:
            raise failure
        return own

    @property
    def bind(self) -> str:
        """ZMQ's name for it, without a port."""
        return f"tcp://{bracketed(self.host)}"

    def reachable(self, address: str) -> str:
        """The bound endpoint `tcp://<host>:<port>` as others connect to it."""
        return f"tcp://{bracketed(self.advertised_host)}:{port_of(address)}"

    def tell_libraries(self, environment: MutableMapping[str, str] = os.environ) -> None:
        """Has gloo and NCCL use this interface, unless the user has told them another one.

        Left alone, gloo listens on what the host name stands for, which on Debian is 127.0.1.1, and
        ranks on two machines do not meet.
        """
        for name, address in _own_addresses():
            if address == self.advertised_host:
                environment.setdefault("GLOO_SOCKET_IFNAME", name)
                environment.setdefault("NCCL_SOCKET_IFNAME", f"={name}")  # not what begins so
                return


LOOPBACK: Final = Interface("127.0.0.1", "127.0.0.1")
"""Only processes of this machine can connect."""


def own_address_towards(host: str) -> str:
    """The address of this machine from which it talks to that one; nothing is sent.

    Raises: ConfigError: there is no way to it.
    """
    try:
        with socket.socket(family_of(host), socket.SOCK_DGRAM) as probe:
            probe.connect((host, _ANY_PORT))
            own: str = probe.getsockname()[0]
            return own
    except OSError as error:
        raise ConfigError(
            f"transport.bind=auto: this machine, {socket.gethostname()}, finds no way to {host}: "
            f"{error.strerror}; set transport.bind to a network that both are in"
        ) from error


def bracketed(host: str) -> str:
    """An IP address as it stands before a port: `10.0.0.1`, `[fd00::1]`."""
    return f"[{host}]" if ":" in host else host


def host_of(address: str) -> str:
    """The host of an endpoint `tcp://<host>:<port>`, without brackets."""
    return address.removeprefix("tcp://").rpartition(":")[0].strip("[]")


def port_of(address: str) -> int:
    """The port of an endpoint `tcp://<host>:<port>`."""
    return int(address.rpartition(":")[2])


def family_of(host: str) -> socket.AddressFamily:
    """The address family of an IP address."""
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def _address_meant_by(bind: str) -> str:
    """Raises: ConfigError: this machine has none of that kind."""
    found = None
    try:
        if "/" in bind:
            network = ipaddress.ip_network(bind)
            its = (ipaddress.ip_address(address) for _, address in _own_addresses())
            found = next((str(address) for address in its if address in network), None)
        else:
            names = [address for name, address in _own_addresses() if name == bind]
            found = names[0] if names else _address_of(bind)
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise ConfigError(f"transport.bind={bind!r}: {why}; {_HOW_TO}") from error
    if found is None:
        raise ConfigError(
            f"transport.bind={bind!r}: this machine, {socket.gethostname()}, has no address in "
            f"that network; its interfaces: {_own_interfaces()}"
        )
    return found


def _address_of(host: str) -> str:
    """An IP address stays what it is; a host name stands for its IPv4 address, if it has one."""
    if ":" in host:
        return str(ipaddress.ip_address(host))
    found = [str(it[4][0]) for it in socket.getaddrinfo(host, None)]
    return min(found, key=lambda address: ":" in address)


def _own_addresses() -> Iterator[tuple[str, str]]:
    """(interface, IP address), IPv4 addresses first; link-local ones, which need more, left out."""
    for family in (socket.AF_INET, socket.AF_INET6):
        for name, addresses in psutil.net_if_addrs().items():
            for entry in addresses:
                if entry.family == family and "%" not in entry.address:
                    yield name, str(ipaddress.ip_address(entry.address))


def _own_interfaces() -> str:
    return ", ".join(f"{name} {address}" for name, address in _own_addresses())


def _address_of_own_name(bind: str) -> str:
    """The address that this machine's name stands for."""
    name = socket.gethostname()
    try:
        found = [entry[4][0] for entry in socket.getaddrinfo(name, None, socket.AF_INET)]
    except OSError as error:
        raise ConfigError(
            f"transport.bind={bind}: the name of this machine, {name}, has no address ({error}), "
            f"so other machines cannot be told where to connect; {_HOW_TO}"
        ) from error
    for address in map(str, found):
        if not ipaddress.ip_address(address).is_loopback:
            return address
    raise ConfigError(
        f"transport.bind={bind}: the name of this machine, {name}, stands for {found[0]}, which "
        f"other machines cannot reach; {_HOW_TO}"
    )
