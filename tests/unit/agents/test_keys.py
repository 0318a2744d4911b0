"""Keys of sessions: made with the run's secret, or no keys."""

from __future__ import annotations

import pytest

from areal_sc.agents.keys import SessionKeys, SessionName

NAME = SessionName("rollout-group/12", "0a1b2c", 7)


def test_a_key_is_read_by_whoever_has_the_secret() -> None:
    key = SessionKeys(b"s" * 32).key_of(NAME)
    assert SessionKeys(b"s" * 32).read(key) == NAME
    assert SessionKeys(b"t" * 32).read(key) is None
    assert SessionKeys().read(key) is None
    assert key.startswith("areal-rollout-group/12-0a1b2c-7-")


def test_one_that_was_changed_is_no_key() -> None:
    keys = SessionKeys(b"s" * 32)
    key = keys.key_of(NAME)
    for place, char in enumerate(key):
        changed = key[:place] + ("x" if char != "x" else "y") + key[place + 1 :]
        assert keys.read(changed) is None
        assert not keys.is_run_key(changed)
    assert keys.read(key.replace("-7-", "-\u0667-")) is None


@pytest.mark.parametrize(
    "told", ["", "-", "areal-run", "areal-run-", "a-b-c-d", "\udc80-1", "é" * 99]
)
def test_what_is_no_key(told: str) -> None:
    keys = SessionKeys()
    assert keys.read(told) is None
    assert not keys.is_run_key(told)


def test_the_key_of_the_run_is_none_of_a_session() -> None:
    keys = SessionKeys()
    assert keys.is_run_key(keys.run_key)
    assert keys.read(keys.run_key) is None
    assert not keys.is_run_key(keys.key_of(NAME))
