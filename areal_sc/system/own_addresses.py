"""A run's own addresses are reached directly, and never by the proxy that leads outside."""

from __future__ import annotations

import os
from collections.abc import MutableMapping
from typing import Final

_LOOPBACK: Final = ("localhost", "127.0.0.1")  # older clients fail by `::1` there
_EXCEPTIONS: Final = ("no_proxy", "NO_PROXY")
"""Clients read one of the two names, which one first differs: so both get the same value."""
_ALL: Final = "*"


def keep_from_proxies(*hosts: str, environment: MutableMapping[str, str] | None = None) -> None:
    """Clients of HTTP reach loopback and these hosts without a proxy, whatever `HTTP_PROXY` says.

    Args:
        hosts: addresses without brackets.
        environment: of the process that the clients run in; None: this one's.
    """
    variables = os.environ if environment is None else environment
    told = (it.strip() for name in _EXCEPTIONS for it in variables.get(name, "").split(","))
    named = list(dict.fromkeys([*filter(None, told), *_LOOPBACK, *hosts]))
    # beside other names the star means nothing to some clients
    value = _ALL if _ALL in named else ",".join(named)
    variables.update(dict.fromkeys(_EXCEPTIONS, value))
