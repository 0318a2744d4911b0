"""Own addresses are never asked for by a proxy, whatever the environment says of others."""

from __future__ import annotations

import urllib.request
from typing import Any

import httpx
import pytest

from areal_sc.system.own_addresses import keep_from_proxies

PROXY = "http://proxy.example:3128"


def environment_of(monkeypatch: pytest.MonkeyPatch, told: dict[str, str]) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    for name, value in told.items():
        monkeypatch.setenv(name, value)
    for name in ("no_proxy", "NO_PROXY"):  # is put back behind the test
        monkeypatch.setenv(name, told.get(name, ""))


@pytest.mark.parametrize("name", ["HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"])
@pytest.mark.parametrize(
    "told",
    [
        {},
        {"NO_PROXY": "in.house"},
        {"no_proxy": "in.house"},
        {"no_proxy": " in.house , 127.0.0.1", "NO_PROXY": "other.house"},
    ],
)
def test_own_hosts_are_reached_directly_and_others_as_before(
    name: str, told: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    environment_of(monkeypatch, told | {name: PROXY})
    keep_from_proxies("10.0.0.7")
    for host in ("localhost:80", "127.0.0.1:8000", "10.0.0.7:1"):
        assert urllib.request.proxy_bypass(host)
    assert not urllib.request.proxy_bypass("judge.example:80")
    assert bool(urllib.request.proxy_bypass("in.house:80")) == bool(told)
    with httpx.Client() as client:
        for url in ("http://127.0.0.1:8000", "http://localhost/v1"):
            assert _transport(client, url) is client._transport
        assert _transport(client, "http://judge.example") is not client._transport


def _transport(client: httpx.Client, url: str) -> Any:
    return client._transport_for_url(httpx.URL(url))


def test_who_wants_no_proxy_at_all_gets_none(monkeypatch: pytest.MonkeyPatch) -> None:
    environment_of(monkeypatch, {"no_proxy": "*", "HTTP_PROXY": PROXY})
    keep_from_proxies()
    assert urllib.request.proxy_bypass("judge.example:80")


def test_it_may_be_said_again() -> None:
    environment = {"NO_PROXY": "in.house"}
    keep_from_proxies(environment=environment)
    before = dict(environment)
    keep_from_proxies(environment=environment)
    assert environment == before
