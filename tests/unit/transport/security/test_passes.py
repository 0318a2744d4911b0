"""A pass says who a worker is, to whoever knows the public half of the run's signing key."""

from __future__ import annotations

import msgspec
import pytest

from areal_sc.errors import NotPermitted, TransportError
from areal_sc.transport.security.keys import RunKeys
from areal_sc.transport.security.passes import (
    MAX_PASS_BYTES,
    Caller,
    KnownCallers,
    Pass,
    Passes,
    WorkerKeys,
)


@pytest.fixture
def keys() -> RunKeys:
    return RunKeys.create()


def known_to(keys: WorkerKeys) -> KnownCallers:
    """What the worker with these keys knows at first."""
    return KnownCallers(keys.controller, keys.authority)


def key_of(keys: WorkerKeys) -> str:
    return keys.own.public.decode()


def test_a_worker_is_known_by_its_pass_and_the_controller_without_one(keys: RunKeys) -> None:
    passes = Passes(keys)
    server, caller = passes.issue("train/0", Caller.train), passes.issue("r/0", Caller.rollout)
    known = known_to(server)
    assert known.find(keys.controller.public.decode(), b"") is Caller.controller
    assert known.find(key_of(caller), b"") is None
    assert key_of(caller) not in known.known
    assert known.find(key_of(caller), caller.shown_pass) is Caller.rollout
    assert key_of(caller) in known.known
    assert known.find(key_of(caller), b"") is Caller.rollout, "it is shown once"
    assert passes.replaced == {}


def test_a_pass_is_good_for_its_own_key_and_run_alone_and_as_it_was_signed(keys: RunKeys) -> None:
    passes = Passes(keys)
    known = known_to(passes.issue("train/0", Caller.train))
    mine, other = passes.issue("rollout/0", Caller.rollout), passes.issue("r/1", Caller.rollout)
    assert known.find(key_of(mine), other.shown_pass) is None, "borrowed"
    stranger = Passes(RunKeys.create()).issue("rollout/0", Caller.rollout)
    assert known.find(key_of(stranger), stranger.shown_pass) is None, "of another run"
    signature, content = mine.shown_pass[:64], mine.shown_pass[64:]
    risen = msgspec.structs.replace(
        msgspec.msgpack.decode(content, type=Pass), caller=Caller.controller
    )
    for forged in (
        signature + msgspec.msgpack.encode(risen),
        stranger.shown_pass[:64] + content,
        keys.signing_key().sign(content) + content,  # for another purpose
        mine.shown_pass[:-1],
        mine.shown_pass + b"\0",
        mine.shown_pass + bytes(MAX_PASS_BYTES),
        signature,
        b"\0",
    ):
        assert known.find(key_of(mine), forged) is None
    for bit in range(0, 8 * len(mine.shown_pass), 7):
        flipped = bytearray(mine.shown_pass)
        flipped[bit // 8] ^= 1 << bit % 8
        assert known.find(key_of(mine), bytes(flipped)) is None
    assert known.find(key_of(mine), mine.shown_pass) is Caller.rollout


@pytest.mark.parametrize("learns", ["by being told", "by its call"])
def test_the_key_of_an_earlier_life_is_void_once_the_next_one_is_known(
    keys: RunKeys, learns: str
) -> None:
    passes = Passes(keys)
    known = known_to(passes.issue("train/0", Caller.train))
    first, second = (passes.issue("rollout/0", Caller.rollout) for _ in range(2))
    other = passes.issue("rollout/1", Caller.rollout)
    for worker in (first, other):
        assert known.find(key_of(worker), worker.shown_pass) is Caller.rollout
    if learns == "by being told":
        known.note_replaced(passes.replaced)
    else:
        assert known.find(key_of(second), second.shown_pass) is Caller.rollout
    for _ in range(2):
        with pytest.raises(NotPermitted, match="an earlier life of rollout/0"):
            known.find(key_of(first), first.shown_pass)
        assert known.find(key_of(first), b"") is None
    known.note_replaced({"rollout/0": 1})  # old news
    for worker in (second, other):
        assert known.find(key_of(worker), worker.shown_pass) is Caller.rollout
    third = passes.issue("rollout/0", Caller.rollout)
    known.note_replaced(passes.replaced)
    with pytest.raises(NotPermitted):
        known.find(key_of(second), second.shown_pass)
    assert known.find(key_of(third), third.shown_pass) is Caller.rollout


def test_passes_of_a_restarted_script_are_later_than_those_before(keys: RunKeys) -> None:
    before, after = Passes(keys, term=1), Passes(keys, term=2, is_first=False)
    lives = [before.issue("rollout/0", Caller.rollout) for _ in range(3)]
    server = after.issue("train/0", Caller.train)
    successor = after.issue("rollout/0", Caller.rollout)
    assert after.replaced.keys() == {"train/0", "rollout/0"}, "it does not know who had one"
    known = known_to(server)
    known.note_replaced(after.replaced)
    for life in lives:
        with pytest.raises(NotPermitted):
            known.find(key_of(life), life.shown_pass)
    assert known.find(key_of(successor), successor.shown_pass) is Caller.rollout


def test_newcomers_are_taken_only_where_they_are_expected(keys: RunKeys) -> None:
    worker = Passes(keys).issue("rollout/0", Caller.rollout)
    agent = KnownCallers(keys.controller.public)
    assert not agent.may_connect(key_of(worker)), "an agent is called by the controller alone"
    assert agent.find(key_of(worker), worker.shown_pass) is None
    script = KnownCallers(keys.controller.public, takes_newcomers=True)
    assert script.find(key_of(worker), b"") is Caller.newcomer
    assert script.find(key_of(worker), worker.shown_pass) is None
    assert script.find(keys.controller.public.decode(), b"") is Caller.controller


@pytest.mark.parametrize("key", [b"", b"short", b"x" * 41])
def test_what_is_no_key_is_nobodys(key: bytes) -> None:
    with pytest.raises(TransportError, match="has 40 characters"):
        KnownCallers(key)


def test_no_text_shows_a_secret(keys: RunKeys) -> None:
    worker = Passes(keys).issue("rollout/0", Caller.rollout)
    for secret in (worker.own.secret, worker.servers.secret):
        assert secret.decode() not in f"{worker} {worker!r} {[worker]}"
