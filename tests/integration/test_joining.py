"""Invited agents join a run, once in each place, also when it starts again; strangers do not."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import NoneType

import pytest

from areal_sc.commands import stop
from areal_sc.config.schema import SchedulerConfig
from areal_sc.errors import (
    NotPermitted,
    ProtocolError,
    RunFolderError,
    StaleTerm,
    TransportError,
)
from areal_sc.ids import random_id
from areal_sc.nodes.joining import Invitation
from areal_sc.nodes.spec import (
    CALLS_FORMAT,
    DESCRIBE,
    END,
    JOIN,
    Joining,
    NodeDescription,
    NodeFacts,
)
from areal_sc.run.run_folder import RunFolder
from areal_sc.schedulers.agent_calls import UnseenAgents, note_unseen
from areal_sc.schedulers.join_server import JoinServer
from areal_sc.transport.rpc.codec import ANY_INCARNATION
from areal_sc.transport.rpc.method import Method
from areal_sc.transport.rpc.server import RpcServer
from areal_sc.transport.rpc.transport import ZmqTransport
from areal_sc.transport.security.curve import CurveClient, CurveServer
from areal_sc.transport.security.keys import KeyPair, RunKeys
from areal_sc.transport.security.passes import Caller, KnownCallers, Passes
from areal_sc.transport.sockets.interface import LOOPBACK

LIMIT_S = 90.0
"""Far above what anything here takes, for a machine that is busy with other work."""
NO_SERVICE_S = 1.0


@pytest.fixture
def keys() -> RunKeys:
    return RunKeys.create()


@pytest.fixture
def joins(keys: RunKeys, tmp_path: Path) -> Iterator[JoinServer]:
    server = JoinServer(keys, Passes(keys), LOOPBACK, RunFolder(tmp_path))
    server.open()
    yield server
    server.close()


def secret_of(joins: JoinServer, num_nodes: int, num_restarts: int = 0) -> str:
    """That of a new invitation, without the key of the script."""
    return joins.invite(random_id(), num_nodes, num_restarts).split()[1]


def facts_of_a_blind_agent(own: KeyPair) -> NodeFacts:
    """It does not see the run folder, and nobody is heard at its address."""
    place = "token", 0, "/memory", "tcp://127.0.0.1:1", "1", own.public.decode()
    return NodeFacts("host", *place, shares_folder=False)


async def come(
    joins: JoinServer,
    keys: RunKeys,
    own: KeyPair,
    secret: str,
    monkeypatch: pytest.MonkeyPatch,
    *,
    node: str = "node1",
    job: str = "7",
    restart: str | None = None,
    facts: NodeFacts | None = None,
) -> None:
    """An agent joins."""
    monkeypatch.setenv("SLURM_JOB_ID", job)
    monkeypatch.setenv("SLURMD_NODENAME", node)
    if restart is not None:
        monkeypatch.setenv("SLURM_RESTART_COUNT", restart)
    invitation = Invitation(joins.address, Path("none"), keys.controller.public, secret)
    await invitation.accept(own, facts or f"{node} says", LIMIT_S)


async def test_an_invitation_is_good_for_one_agent_in_each_place(
    joins: JoinServer,
    keys: RunKeys,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    secret, first, second, third = secret_of(joins, 2), *(KeyPair.create() for _ in range(3))
    await come(joins, keys, first, secret, monkeypatch)
    await come(joins, keys, first, secret, monkeypatch)  # it tells again that it is there
    with pytest.raises(NotPermitted, match="another agent of node node1 has joined"):
        await come(joins, keys, second, secret, monkeypatch)
    await come(joins, keys, second, secret, monkeypatch, node="node2")
    for node, restart in (("node3", "0"), ("node1", "1"), ("node9", "7")):
        with pytest.raises(NotPermitted, match="2 nodes and 0 restarts of one job, and they have"):
            await come(joins, keys, third, secret, monkeypatch, node=node, restart=restart)
    with pytest.raises(NotPermitted, match="node node1 of job 8, restart 0"):
        await come(joins, keys, first, secret, monkeypatch, job="8", restart="0")
    for guess in ("", secret[:-1], secret + "x", secret_of(joins, 1).swapcase(), "\ufffd" * 40):
        with pytest.raises(NotPermitted, match="the secret is that of no invitation"):
            await come(joins, keys, third, guess, monkeypatch, node="node3", restart="0")
    told = joins.joined("7")
    assert {name: it.agent_key for name, it in told.items()} == {
        "node1": first.public.decode(),
        "node2": second.public.decode(),
    }
    assert joins.refused.num >= 10
    refusals = [r.getMessage() for r in caplog.records if "joining_refused" in r.getMessage()]
    assert len(refusals) == 1, "a flood is one line"
    assert secret not in caplog.text + repr(told)
    # a later step on the same node has an invitation of its own
    await come(joins, keys, third, secret_of(joins, 1), monkeypatch, restart="0")
    assert joins.joined("7")["node1"].agent_key == third.public.decode()


async def test_an_agent_is_noted_that_does_not_see_the_folder_though_it_fails_at_first(
    joins: JoinServer, keys: RunKeys, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, own, secret = RunFolder(tmp_path), KeyPair.create(), secret_of(joins, 1)
    unseen = facts_of_a_blind_agent(own)
    folder.logs.mkdir()
    keys.write(folder.keys_path)  # for what serves files to the agent
    folder.joined_path.mkdir()  # so it cannot be written
    with pytest.raises(RunFolderError, match="cannot write"):
        await come(joins, keys, own, secret, monkeypatch, facts=unseen)
    folder.joined_path.rmdir()
    await come(joins, keys, own, secret, monkeypatch, facts=unseen)
    [noted] = json.loads(folder.joined_path.read_text())
    assert noted["facts"]["incarnation"] == "1"
    assert secret not in folder.joined_path.read_text()
    written = folder.joined_path.stat().st_ino
    await come(joins, keys, own, secret, monkeypatch, facts=unseen)
    assert folder.joined_path.stat().st_ino == written, "nothing is new"


async def test_a_job_that_slurm_starts_again_is_invited_again(
    joins: JoinServer, keys: RunKeys, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret, lives = secret_of(joins, 1, 1), [KeyPair.create() for _ in range(3)]
    for own, restart in zip(lives, "012", strict=True):
        if restart == "2":
            with pytest.raises(NotPermitted):
                await come(joins, keys, own, secret, monkeypatch, restart=restart)
        else:
            await come(joins, keys, own, secret, monkeypatch, restart=restart)
    assert joins.joined("7")["node1"].agent_key == lives[1].public.decode()


async def test_the_next_start_lets_in_whom_an_earlier_one_invited_once_it_knows(
    keys: RunKeys, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An agent whose job has waited may come to where the earlier start was, at any time."""
    folder = RunFolder(tmp_path)
    earlier = JoinServer(keys, Passes(keys), LOOPBACK, folder)
    secret = earlier.invite("a job", 1).split()[1]
    folder.write_atomic(folder.join_path, earlier.address.encode())
    earlier.close()
    joins = JoinServer(keys, Passes(keys, 1, is_first=False), LOOPBACK, folder)
    try:
        assert joins.address == earlier.address
        coming = asyncio.create_task(come(joins, keys, KeyPair.create(), secret, monkeypatch))
        await asyncio.wait([coming], timeout=NO_SERVICE_S)
        assert not coming.done()
        joins.invite("a job", 1)
        joins.open()
        await coming
        other = JoinServer(keys, Passes(keys, 2, is_first=False), LOOPBACK, folder)
        other.close()
        assert other.address != joins.address, "that port is taken"
    finally:
        joins.close()


def test_agents_that_are_not_heard_when_they_are_to_end_can_be_found_later(
    keys: RunKeys, tmp_path: Path
) -> None:
    folder = RunFolder(tmp_path)
    keys.write(folder.keys_path)
    own = KeyPair.create()
    note_unseen(folder, [Joining("7", "node1", 5, facts_of_a_blind_agent(own), "its key")])
    unseen = UnseenAgents(folder)
    assert unseen.end(LIMIT_S) == []
    assert unseen.silent == ["node1"]
    assert folder.joined_path.exists()
    assert folder.keys_path.exists()


@pytest.mark.parametrize("are_locks_seen", [True, False])
async def test_a_script_that_starts_while_the_run_is_ended_from_outside_loses_nothing(
    keys: RunKeys, tmp_path: Path, *, are_locks_seen: bool
) -> None:
    """It has to wait, or, on a machine that does not see the lock, is left alone."""
    own, is_ending = KeyPair.create(), asyncio.Event()
    agent = RpcServer(
        [
            DESCRIBE.served_by(
                lambda _: NodeDescription(unseen, SchedulerConfig(), [], CALLS_FORMAT)
            ),
            END.served_by(lambda _: is_ending.set()),
        ],
        node_id="agent",
        incarnation="1",
        bind=LOOPBACK.bind,
        security=CurveServer(own, KnownCallers(keys.controller.public), "agent"),
    )
    unseen = replace(facts_of_a_blind_agent(own), address=await agent.start())
    with RunFolder(tmp_path) as folder:
        folder.lock()
        keys.write(folder.keys_path)
        note_unseen(folder, [Joining("7", "node1", 5, unseen, "its key")])
    words = Namespace(run_dir=tmp_path, timeout=LIMIT_S)
    stopping = asyncio.create_task(asyncio.to_thread(stop.run, words))
    async with asyncio.timeout(LIMIT_S):
        await is_ending.wait()
    with RunFolder(tmp_path) as other:
        if are_locks_seen:
            with pytest.raises(RunFolderError, match="is running in it"):
                await asyncio.to_thread(other.lock)
            await agent.close()
            await stopping
        else:
            (tmp_path / ".lock").unlink()
            other.lock()
            await agent.close()
            with pytest.raises(StaleTerm, match="another start of the script has taken the run"):
                await stopping
    assert folder.joined_path.exists() is not are_locks_seen
    assert folder.keys_path.exists() is not are_locks_seen


async def test_nobody_else_gets_anything_from_where_agents_join(
    joins: JoinServer, keys: RunKeys, caplog: pytest.LogCaptureFixture
) -> None:
    own, secret = KeyPair.create(), secret_of(joins, 1)
    joining = Joining("7", "node1", 1, "says", own.public.decode(), secret)
    worker = Passes(keys).issue("rollout/0", Caller.rollout)
    with_a_pass = CurveClient(worker.own, keys.controller.public, worker.shown_pass)
    wrong_script = CurveClient(own, KeyPair.create().public)
    for client in (None, wrong_script, with_a_pass):
        transport = ZmqTransport(client=client)
        try:
            script = transport.connect(joins.address, "scheduler", ANY_INCARNATION)
            with pytest.raises(TransportError):
                await script.call(JOIN, joining, timeout_s=NO_SERVICE_S)
        finally:
            await transport.close()
    assert joins.joined("7") == {}
    transport = ZmqTransport(client=CurveClient(own, keys.controller.public))
    try:
        script = transport.connect(joins.address, "scheduler", ANY_INCARNATION)
        nonsense = Method("join", dict, NoneType)
        for arguments in ({}, {"node": 1}, {"node": "n", "pid": "x", "secret": secret}):
            with pytest.raises(ProtocolError, match="not of the declared type"):
                await script.call(nonsense, arguments, timeout_s=LIMIT_S)
        with pytest.raises(NotPermitted, match="a newcomer may not call shutdown"):
            await script.call(Method("shutdown", NoneType, NoneType), None, timeout_s=LIMIT_S)
        huge = replace(joining, node="n" * (1 << 20))
        with pytest.raises(TransportError):
            await script.call(JOIN, huge, timeout_s=NO_SERVICE_S)
        assert joins.joined("7") == {}
        await script.call(JOIN, joining, timeout_s=LIMIT_S)
    finally:
        await transport.close()
    assert joins.joined("7").keys() == {"node1"}
    assert secret not in caplog.text


@pytest.mark.parametrize("given", [b"", b"no end", b"x" * 10_000, b"\n", b"\xff \xff\n"])
def test_whatever_is_said_to_an_agent_first_it_gets_on_or_says_so(given: bytes) -> None:
    program = (
        "from areal_sc.nodes.joining import read_introduction\n"
        "from areal_sc.transport.security.keys import KeyPair\n"
        "key, secret, nonce = read_introduction(KeyPair.create())\n"
        "print(len(key) + len(secret) + len(nonce))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], input=given, capture_output=True, timeout=LIMIT_S
    )
    if given in (b"", b"no end"):
        assert b"WorkerStartError: the standard input does not say whose" in done.stderr
    else:
        assert int(done.stdout) <= 256
