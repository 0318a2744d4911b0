"""The control plane is closed to strangers: nothing is served, everything is counted."""

from __future__ import annotations

import asyncio
import os
import random
import stat
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import zmq
from integration.agents import connect_agent, launch_of
from integration.bulk_member import BulkMember
from integration.rpc_methods import named
from waiting import until

from areal_sc.config.loading.plain import to_plain
from areal_sc.config.schema import Device, GRPOConfig
from areal_sc.errors import NotPermitted, ProtocolError, TransportError
from areal_sc.nodes.spec import (
    DESCRIBE,
    LAUNCH,
    STACKS,
    STOP,
    STOP_RUN,
    WATCH,
    NodeFacts,
    Stop,
    Watch,
    WorkerOrder,
    WorkerReport,
)
from areal_sc.schedulers.factory import make_scheduler
from areal_sc.schedulers.local import LocalScheduler
from areal_sc.transport.bulk.session import OPEN_SESSION
from areal_sc.transport.rpc.codec import ANY_INCARNATION, Request, encode
from areal_sc.transport.rpc.method import A, Method, R, pack
from areal_sc.transport.rpc.server import RpcServer
from areal_sc.transport.rpc.transport import ZmqTransport
from areal_sc.transport.security.curve import CurveClient, CurveServer
from areal_sc.transport.security.keys import KeyPair, RunKeys
from areal_sc.transport.security.passes import WORKERS, Caller, Passes, WorkerKeys
from areal_sc.workers.calls import SHUTDOWN, STATS, SWEEP, Sweep

LIMIT_S = 60.0
NO_SERVICE_S = 1.0
"""How long a stranger tries at a time; members are served within a few milliseconds."""


@pytest.fixture(scope="module")
def keys() -> RunKeys:
    return RunKeys.create()


class Service:
    """A worker of a run.

    Attributes:
        served: arguments of the calls whose handler ran.
    """

    def __init__(self, keys: RunKeys) -> None:
        self.served: list[dict[str, Any]] = []
        own = Passes(keys).issue("train/0", Caller.train)
        self.security = CurveServer.of_worker(own, "train/0")
        self.server = RpcServer(
            [named("work").served_by(self._work), PULL.served_by(lambda _: "pulled")],
            node_id="train/0",
            incarnation="a1",
            security=self.security,
        )
        self.address = ""

    async def _work(self, args: dict[str, Any]) -> str:
        self.served.append(args)
        return "done"


PULL = Method("pull", int, str, callers=WORKERS)


@asynccontextmanager
async def service(keys: RunKeys) -> AsyncIterator[Service]:
    serving = Service(keys)
    serving.address = await serving.server.start()
    try:
        yield serving
    finally:
        await serving.server.close()


@asynccontextmanager
async def transport(client: CurveClient | None) -> AsyncIterator[ZmqTransport]:
    made = ZmqTransport(client=client)
    try:
        yield made
    finally:
        await made.close()


async def call(
    serving: Service, client: CurveClient | None, who: str, timeout_s: float = LIMIT_S
) -> Any:
    async with transport(client) as made:
        connection = made.connect(serving.address, "train/0", "a1")
        return await connection.call(named("work"), {"who": who}, timeout_s=timeout_s)


def borrowed_key(keys: RunKeys) -> CurveClient:
    """Shows the controller's public key without having its secret."""
    client = CurveClient.of_controller(keys)
    own = client.configure

    def configure(socket: zmq.Socket[bytes]) -> None:
        own(socket)
        socket.curve_secretkey = KeyPair.create().secret

    client.configure = configure  # type: ignore[method-assign]
    return client


def issued_by(keys: RunKeys) -> WorkerKeys:
    return Passes(keys).issue("rollout/0", Caller.rollout)


def borrowed_pass(keys: RunKeys) -> CurveClient:
    """Shows a worker's pass with another key."""
    return CurveClient(KeyPair.create(), keys.workers.public, issued_by(keys).shown_pass)


def foreign_pass(keys: RunKeys) -> CurveClient:
    theirs = issued_by(RunKeys.create())
    return CurveClient(theirs.own, keys.workers.public, theirs.shown_pass)


STRANGERS: dict[str, Callable[[RunKeys], CurveClient | None]] = {
    "no key": lambda keys: None,
    "keys of another run": lambda keys: CurveClient.of_controller(RunKeys.create()),
    "a wrong server key": lambda keys: CurveClient(keys.controller, KeyPair.create().public),
    "an unknown key": lambda keys: CurveClient(KeyPair.create(), keys.workers.public),
    "a key without its secret": borrowed_key,
    "the pass of another worker": borrowed_pass,
    "a pass of another run": foreign_pass,
}


async def is_never_served(attempt: Awaitable[object]) -> None:
    with pytest.raises(TransportError):
        await attempt


async def test_members_are_served_while_strangers_try(keys: RunKeys) -> None:
    async with service(keys) as serving:

        def of_stranger(make: Callable[[RunKeys], CurveClient | None]) -> Awaitable[object]:
            return call(serving, make(keys), "stranger", NO_SERVICE_S)

        strangers = [
            asyncio.create_task(is_never_served(of_stranger(make))) for make in STRANGERS.values()
        ]
        async with transport(CurveClient.of_controller(keys)) as made:
            connection = made.connect(serving.address, "train/0", "a1")
            while not all(stranger.done() for stranger in strangers):
                await connection.call(named("work"), {"who": "member"}, timeout_s=LIMIT_S)
        await asyncio.gather(*strangers)
        assert {args["who"] for args in serving.served} == {"member"}


async def test_a_member_does_not_talk_to_a_server_of_another_run(keys: RunKeys) -> None:
    """Whoever took over the address of a worker learns nothing of what it is told."""
    for impostor_keys in (RunKeys.create(), None):
        security = impostor_keys and CurveServer.of_worker(issued_by(impostor_keys), "impostor")
        served: list[Any] = []
        impostor = RpcServer(
            [named("work").served_by(served.append)],
            node_id="train/0",
            incarnation="a1",
            security=security,
        )
        address = await impostor.start()
        try:
            async with transport(CurveClient.of_controller(keys)) as made:
                connection = made.connect(address, "train/0", "a1")
                with pytest.raises(TransportError):
                    await connection.call(named("work"), {"who": "member"}, timeout_s=NO_SERVICE_S)
        finally:
            await impostor.close()
        assert served == []


async def test_a_worker_may_call_what_workers_may_and_nothing_else(
    keys: RunKeys, caplog: pytest.LogCaptureFixture
) -> None:
    passes = Passes(keys)
    first, second = (passes.issue("rollout/0", Caller.rollout) for _ in range(2))
    async with service(keys) as serving, transport(CurveClient.of_worker(first)) as made:
        worker = made.connect(serving.address, "train/0", "a1")
        for _ in range(2):
            assert await worker.call(PULL, 0, timeout_s=LIMIT_S) == "pulled"
            with pytest.raises(NotPermitted, match="a rollout may not call work of train/0"):
                await worker.call(named("work"), {}, timeout_s=LIMIT_S)
            with pytest.raises(NotPermitted):
                await worker.call(named("no such method"), {}, timeout_s=LIMIT_S)
        assert serving.security.refused.num == 4
        assert "count=1 reason=a rollout may not call work of train/0" in caplog.text
        serving.security.callers.note_replaced(passes.replaced)  # on an open connection
        async with transport(CurveClient.of_worker(second)) as others:
            successor = others.connect(serving.address, "train/0", "a1")
            with pytest.raises(NotPermitted, match="an earlier life of rollout/0"):
                await worker.call(PULL, 0, timeout_s=LIMIT_S)
            assert await successor.call(PULL, 0, timeout_s=LIMIT_S) == "pulled"
        assert serving.served == []


async def test_no_worker_takes_terms_or_ends_the_calls_of_others(keys: RunKeys) -> None:
    async with service(keys) as serving:
        client = CurveClient.of_worker(issued_by(keys))
        made = ZmqTransport(client=client, term=1 << 40)
        try:
            worker = made.connect(serving.address, "train/0", "a1")
            assert await worker.call(PULL, 0, timeout_s=LIMIT_S) == "pulled"
        finally:
            await made.close()
        assert serving.server.newest_term.number == 0
        assert await call(serving, CurveClient.of_controller(keys), "controller") == "done"


async def test_of_a_stranger_no_long_message_is_read(keys: RunKeys) -> None:
    async with service(keys) as serving:
        stranger = CurveClient(KeyPair.create(), keys.workers.public)
        sent = asyncio.create_task(call(serving, stranger, "x" * (1 << 20)))
        await until(lambda: serving.security.refused.num > 0)
        assert not (await asyncio.wait([sent], timeout=NO_SERVICE_S))[0], "it is answered"
        sent.cancel()
        await asyncio.wait([sent])
        assert serving.security.refused.num == 1
        assert serving.server.malformed.num == 0


async def test_whatever_a_stranger_says_who_knows_the_server_it_gets_no_answer(
    keys: RunKeys,
) -> None:
    shown_pass = issued_by(keys).shown_pass
    client = CurveClient(KeyPair.create(), keys.workers.public)
    request = Request("r", ANY_INCARNATION, "work", pack({}), 1 << 40, shown_pass)
    rng = random.Random(7)
    async with service(keys) as serving:
        with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
            dealer.linger = 0
            client.configure(dealer)
            client.expect(dealer, "")
            dealer.connect(serving.address)
            for number in range(300):
                message = bytearray(encode(request))
                for _ in range(number % 4):
                    message[rng.randrange(len(message))] = rng.randrange(256)
                dealer.send(message if number % 5 else rng.randbytes(number))
            refused, malformed = serving.security.refused, serving.server.malformed
            await until(lambda: refused.num + malformed.num >= 300)
            assert not dealer.poll(0)
        assert serving.security.refused.num > 60, "the others were not understood"
        assert serving.server.newest_term.number == 0
        assert await call(serving, CurveClient.of_controller(keys), "controller") == "done"
        assert serving.served == [{"who": "controller"}]


# ---------------------------------------------------------------------- workers


@pytest.fixture(scope="module")
def config(tiny_config: Callable[..., GRPOConfig]) -> GRPOConfig:
    return tiny_config()


@pytest.fixture
def scheduler(config: GRPOConfig, tmp_path: Path) -> Any:
    config.scheduler.run_dir = str(tmp_path)
    config.scheduler.orphan_timeout_s = 100.0  # nobody watches the workers
    scheduler = make_scheduler(config.scheduler)
    yield scheduler
    scheduler.close()


async def call_with(
    client: CurveClient | None,
    method: Method[A, R],
    args: A,
    server: NodeFacts | WorkerReport,
    timeout_s: float = LIMIT_S,
) -> R:
    """One call of an agent or a worker."""
    async with transport(client) as made:
        if isinstance(server, NodeFacts):
            connection = connect_agent(made, server)
        else:
            connection = made.connect(server.address, server.name, ANY_INCARNATION)
        return await connection.call(method, args, timeout_s=timeout_s)


async def test_a_real_agent_and_worker_serve_their_run_alone_and_workers_what_they_may(
    config: GRPOConfig, scheduler: LocalScheduler, tmp_path: Path
) -> None:
    keys_file, keys, passes = tmp_path / "keys.json", scheduler.keys, scheduler.passes
    assert stat.S_IMODE(keys_file.stat().st_mode) == 0o600
    assert RunKeys.read(keys_file) == keys
    controller = CurveClient.of_controller(keys)
    ((node,), actor) = await scheduler.nodes(), to_plain(config.actor)
    order = WorkerOrder("train", 0, "FSDPPPOActor", actor, Device.cpu, 1 << 20, incarnation="i0")
    launch = launch_of(passes, [order], 120.0)
    async with transport(controller) as made:
        agent = connect_agent(made, node.facts)
        launched = await agent.call(LAUNCH, launch, timeout_s=150.0)
        (worker,), (its_keys,) = launched.workers, launch.keys
        knows_servers = CurveClient(KeyPair.create(), scheduler.keys.workers.public)
        for stranger in (None, CurveClient.of_controller(RunKeys.create()), knows_servers):
            for method, args, server in (
                (STACKS, ["train/0"], node.facts),
                (STATS, None, worker),
            ):
                await is_never_served(call_with(stranger, method, args, server, NO_SERVICE_S))
        await until(lambda: is_told("refused node=train/0", tmp_path / "logs" / "train-0.log"))
        assert await agent.call(STACKS, ["train/0"], timeout_s=LIMIT_S)
        assert (await call_with(controller, STATS, None, worker)).control_refused
        for address in (node.facts.address, worker.address):
            assert address.startswith("tcp://127.0.0.1:"), "a local run listens on loopback only"

        as_worker = CurveClient.of_worker(its_keys)
        assert (await call_with(as_worker, OPEN_SESSION, "me", worker)).address
        for method, args in ((STATS, None), (SHUTDOWN, None), (SWEEP, Sweep(1 << 40))):
            with pytest.raises(NotPermitted, match="a train may not call"):
                await call_with(as_worker, method, args, worker)
        for method, args in ((DESCRIBE, None), (STOP_RUN, None), (LAUNCH, launch)):
            with pytest.raises(TransportError):
                await call_with(as_worker, method, args, node.facts, NO_SERVICE_S)
        # with the agent's own key for that of its server, too
        impostor = CurveClient(its_keys.own, node.facts.key.encode(), its_keys.shown_pass)
        with pytest.raises(TransportError):
            await call_with(impostor, STOP, Stop(["i0"], 0.0), node.facts, NO_SERVICE_S)

        other = CurveClient.of_worker(passes.issue("rollout/0", Caller.rollout))
        clients = as_worker, other, as_worker
        grants = [await call_with(it, OPEN_SESSION, "me", worker) for it in clients]
        pulling, others = (BulkMember(grant) for grant in grants[:2])
        for member in (pulling, others):
            assert isinstance(await member.ask([]), bytes)

        passes.issue("train/0", order.caller)  # it is to be started again
        watch = Watch("train", 0, 0.0, replaced=passes.replaced)
        await agent.call(WATCH, watch, timeout_s=LIMIT_S)
        give_up_s = time.monotonic() + LIMIT_S
        refused: NotPermitted | None = None
        while refused is None:  # the worker is told by its agent
            assert time.monotonic() < give_up_s
            try:
                await call_with(as_worker, OPEN_SESSION, "me", worker)
            except NotPermitted as error:
                refused = error
        assert "an earlier life of train/0" in str(refused)
        late = BulkMember(grants[2])
        await until(lambda: pulling.is_lost and late.is_lost)
        assert isinstance(await others.ask([]), bytes), "it is not concerned"
        for member in (pulling, others, late):
            member.close()
    pids = [worker.pid, os.getpid(), scheduler._agent.pid]
    secrets = keys.controller_secret, keys.workers_secret, keys.signing_seed, its_keys.own.secret
    for secret in secrets:
        assert_is_nowhere(secret.decode(), tmp_path, pids, allowed=keys_file)
    scheduler.close()
    assert not keys_file.exists(), "nothing is left of the keys"


def is_told(what: str, log: Path) -> bool:
    return what in log.read_text()


async def test_what_comes_over_a_socket_names_no_file(
    config: GRPOConfig, scheduler: LocalScheduler, tmp_path: Path
) -> None:
    (node,) = await scheduler.nodes()
    async with transport(CurveClient.of_controller(scheduler.keys)) as made:
        agent = connect_agent(made, node.facts)
        for role in ("../../train", "train/0", "", "a" * 100):
            order = WorkerOrder(role, 0, "FSDPPPOActor", {}, Device.cpu, 1)
            launch = launch_of(scheduler.passes, [order], LIMIT_S)
            with pytest.raises(ProtocolError, match="not of the declared type"):
                await agent.call(LAUNCH, launch, timeout_s=LIMIT_S)
        assert await agent.call(STACKS, ["../../../etc/passwd"], timeout_s=LIMIT_S) == []


def assert_is_nowhere(secret: str, run_dir: Path, pids: list[int], allowed: Path) -> None:
    """Not on a command line, not in an environment, not in a log."""
    for name in ("cmdline", "environ"):
        for process in pids:
            assert secret.encode() not in Path(f"/proc/{process}/{name}").read_bytes()
    for file in run_dir.rglob("*"):
        if file.is_file() and file != allowed:
            assert secret not in file.read_text(errors="replace"), file
