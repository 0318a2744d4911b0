"""Answers of the page's server."""

from __future__ import annotations

from typing import Any

from aiohttp import web

from areal_sc.system.json_lines import to_json


def answer(value: Any, status: int = 200) -> web.Response:
    """JSON; floats that are not finite are null."""
    return web.Response(body=to_json(value), status=status, content_type="application/json")


def refusal(status: int, why: str) -> web.Response:
    """Says in one sentence why there is no answer: to a script as JSON."""
    return answer({"error": why}, status)


def text_refusal(status: int, why: str) -> web.Response:
    """The same for whoever opens the page."""
    return web.Response(text=f"{why}\n", status=status)
