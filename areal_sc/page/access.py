"""Access to the page: by its key, under a name of this machine, from the page itself.

the key      in the address that the command prints, then in a cookie; compared in constant time
Host         an address, `localhost`, or a name of this machine, so that no foreign name which
             is made to point here (DNS rebinding) reads runs in somebody's browser
Origin       of a request that has one: the page's own
the browser  is told to load nothing from elsewhere, and to run no script but the page's
"""

from __future__ import annotations

import hmac
import ipaddress
import socket
from collections.abc import Awaitable, Callable
from typing import Any, Final
from urllib.parse import urlsplit

from aiohttp import web

from areal_sc.system.json_lines import to_json

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

HEADERS: Final = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-store",
}


class Access:
    """Decides about requests, and sets the headers of answers.

    Args:
        key: of the page.
        names: host names under which the page may be asked for, beside addresses and `localhost`.
    """

    def __init__(self, key: str, names: tuple[str, ...]) -> None:
        self._key = key.encode()
        self._names = {"localhost", *(name.casefold() for name in names)}

    @web.middleware
    async def middleware(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Serves, or refuses."""
        is_new = False
        if not self._is_host_ours(request):
            answer: web.StreamResponse = refusal(
                421, "the page is not served under this name; take the address that it printed"
            )
        elif not self._is_origin_ours(request):
            answer = refusal(403, "another site's pages may not ask for this one")
        elif not (is_new := self._has_key(request.query.get("key"))) and not self._has_key(
            request.cookies.get(_cookie_name(request))
        ):
            answer = refusal(
                401,
                "the key is wrong or missing; take the whole address that "
                "`python -m areal_sc page` printed: each start has a key of its own",
            )
        else:
            answer = await handler(request)
        if not answer.prepared:  # a stream has them already
            answer.headers.update(HEADERS)
            if is_new:
                name, value = _cookie_name(request), self._key.decode()
                answer.set_cookie(name, value, httponly=True, samesite="Strict")
        return answer

    def _has_key(self, told: str | None) -> bool:
        return told is not None and hmac.compare_digest(told.encode(errors="replace"), self._key)

    def _is_host_ours(self, request: web.Request) -> bool:
        name = _host_name(request.headers.get("Host", ""))
        return name is not None and (name in self._names or _is_address(name))

    def _is_origin_ours(self, request: web.Request) -> bool:
        origin = request.headers.get("Origin")
        if origin is not None and origin != f"http://{request.headers.get('Host', '')}":
            return False
        # a link to the page is another site's navigation; what the page loads is its own
        site = request.headers.get("Sec-Fetch-Site", "none")
        return site in ("none", "same-origin") or request.path == "/"


def names_of_machine(bind: str) -> tuple[str, ...]:
    """Host names under which a server that listens at an address is asked for."""
    return (bind, socket.gethostname(), socket.getfqdn())


def _cookie_name(request: web.Request) -> str:
    """Browsers share cookies between the ports of a host."""
    sockname = request.transport and request.transport.get_extra_info("sockname")
    return f"areal_sc_page_{sockname[1] if sockname else 0}"


def _host_name(host: str) -> str | None:
    """The name in a `Host` header, in small letters; None: it is none."""
    try:
        parts = urlsplit(f"//{host}")
        _ = parts.port
    except ValueError:
        return None
    is_plain = host and parts.netloc == host and not parts.path and "@" not in host
    return (parts.hostname or "").casefold() if is_plain else None


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def answer(value: Any, status: int = 200) -> web.Response:
    """JSON; floats that are not finite are null."""
    return web.Response(body=to_json(value), status=status, content_type="application/json")


def refusal(status: int, why: str) -> web.Response:
    """Says in one sentence why there is no answer."""
    return answer({"error": why}, status)
