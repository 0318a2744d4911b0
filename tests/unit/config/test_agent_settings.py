"""The address of a run, as `agents.bind` says it."""

from __future__ import annotations

import pytest

from areal_sc.config.agent_settings import AgentsConfig
from areal_sc.errors import ConfigError


@pytest.mark.parametrize(
    ("bind", "bound"),
    [
        ("", ("127.0.0.1", 0)),
        ("0.0.0.0", ("0.0.0.0", 0)),
        ("10.0.0.1:8000", ("10.0.0.1", 8000)),
        ("::1", ("::1", 0)),
        ("[::1]:8000", ("::1", 8000)),
    ],
)
def test_an_address_with_or_without_a_port(bind: str, bound: tuple[str, int]) -> None:
    assert AgentsConfig(bind=bind).bound() == bound


@pytest.mark.parametrize("bind", ["localhost", ":80", "127.0.0.1:", "127.0.0.1:65536", "1.2.3.4:x"])
def test_what_is_no_address(bind: str) -> None:
    with pytest.raises(ConfigError, match=r"agents\.bind: expected an IP address"):
        AgentsConfig(bind=bind).bound()
