"""What the script tells the process that has the run's address. No torch."""

from __future__ import annotations

from msgspec import Struct


class AgentsAt(Struct, frozen=True, array_like=True):
    """Where a life of a worker serves its sessions.

    Attributes:
        life: incarnation of the worker.
        fingerprint: of the certificate there, SHA-256 in hex; "": HTTP as it is.
    """

    life: str
    url: str
    fingerprint: str = ""


class Routes(Struct, frozen=True):
    """The workers that belong to the run; any other one has left it for good.

    Attributes:
        up: that do their work, by name.
        coming: names of those that are being started, maybe again.
    """

    up: dict[str, AgentsAt]
    coming: list[str] = []


class RouterStart(Struct, frozen=True):
    """The first line on the standard input of the process; each later one is `Routes`.

    Attributes:
        secret: of the keys, in hex.
        port: 0: any free one.
        at_any_port: where another process has the port, any other one will do.
    """

    secret: str
    host: str
    port: int
    at_any_port: bool
    routes: Routes


class RouterStarted(Struct, frozen=True):
    """The only line on its standard output. `problem`: why it does not listen."""

    port: int = 0
    problem: str = ""
