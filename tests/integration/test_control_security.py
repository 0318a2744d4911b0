"""The control plane is closed to strangers: nothing is served, everything is counted."""

from __future__ import annotations

import asyncio
import os
import socket
import stat
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from types import NoneType
from typing import Any

import pytest
import zmq
from integration.rpc_methods import named

from areal_sc.config.plain import to_plain
from areal_sc.config.schema import Device, GRPOConfig
from areal_sc.errors import ProtocolError, TransportError, WorkerStartError
from areal_sc.schedulers.base import Node
from areal_sc.schedulers.factory import make_scheduler
from areal_sc.schedulers.local import LocalScheduler
from areal_sc.transport.rpc.codec import ANY_INCARNATION
from areal_sc.transport.rpc.method import Method
from areal_sc.transport.rpc.server import RpcServer
from areal_sc.transport.rpc.transport import ZmqTransport
from areal_sc.transport.security.curve import CurveAuthenticator
from areal_sc.transport.security.keys import KEYS_VARIABLE, RunKeys
from areal_sc.workers.spec import (
    LAUNCH,
    LOG_TAIL,
    Launch,
    WorkerOrder,
    WorkerReport,
)

LIMIT_S = 30.0
NO_SERVICE_S = 1.0
"""How long a stranger tries; members are served within a few milliseconds."""


@pytest.fixture(scope="module")
def keys() -> RunKeys:
    return RunKeys.create()


class Service:
    """A server of a run.

    Attributes:
        served: arguments of the calls whose handler ran.
    """

    def __init__(self, keys: RunKeys) -> None:
        self.served: list[dict[str, Any]] = []
        self.authenticator = CurveAuthenticator(keys, "train/0")
        self.server = RpcServer(
            [named("work").served_by(self._work)],
            node_id="train/0",
            incarnation="a1",
            authenticator=self.authenticator,
        )
        self.address = ""

    async def _work(self, args: dict[str, Any]) -> str:
        self.served.append(args)
        return "done"


@asynccontextmanager
async def service(keys: RunKeys) -> AsyncIterator[Service]:
    serving = Service(keys)
    serving.address = await serving.server.start()
    try:
        yield serving
    finally:
        await serving.server.close()


@asynccontextmanager
async def transport(authenticator: CurveAuthenticator | None) -> AsyncIterator[ZmqTransport]:
    made = ZmqTransport(authenticator=authenticator)
    try:
        yield made
    finally:
        await made.close()


async def call(
    serving: Service, authenticator: CurveAuthenticator | None, who: str, timeout_s: float = LIMIT_S
) -> Any:
    async with transport(authenticator) as made:
        connection = made.connect(serving.address, "train/0", "a1")
        return await connection.call(named("work"), {"who": who}, timeout_s=timeout_s)


class Stranger:
    """In the place of a `CurveAuthenticator`: configures callers as it was told."""

    def __init__(self, configure: Callable[[zmq.Socket[bytes]], None]) -> None:
        self.configure_client = configure

    def configure_server(self, context: Any, socket: zmq.Socket[bytes]) -> Any:
        raise NotImplementedError


def with_keys(server_public: bytes, client: RunKeys) -> Stranger:
    def configure(socket: zmq.Socket[bytes]) -> None:
        socket.curve_serverkey = server_public
        socket.curve_publickey = client.client_public
        socket.curve_secretkey = client.client_secret

    return Stranger(configure)


def borrowed_public_key(keys: RunKeys) -> Stranger:
    """Shows the admitted public key without having its secret."""

    def configure(socket: zmq.Socket[bytes]) -> None:
        socket.curve_serverkey = keys.server_public
        socket.curve_publickey = keys.client_public
        socket.curve_secretkey = RunKeys.create().client_secret

    return Stranger(configure)


STRANGERS: dict[str, Callable[[RunKeys], CurveAuthenticator | None]] = {
    "no key": lambda keys: None,
    "keys of another run": lambda keys: CurveAuthenticator(RunKeys.create(), "stranger"),
    "a wrong server key": lambda keys: with_keys(RunKeys.create().server_public, keys),
    "an unlisted client key": lambda keys: with_keys(keys.server_public, RunKeys.create()),
    "a client key without its secret": borrowed_public_key,
}


@pytest.mark.parametrize("name", STRANGERS)
async def test_strangers_are_not_served(
    keys: RunKeys, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with service(keys) as serving:
        async with asyncio.timeout(LIMIT_S):
            while not serving.authenticator.num_refused:  # a busy machine may take several calls
                with pytest.raises(TransportError):
                    await call(serving, STRANGERS[name](keys), "stranger", NO_SERVICE_S)
        # the server lives, for those who may
        member = CurveAuthenticator(keys, "controller")
        assert await call(serving, member, "member") == "done"
        assert serving.served == [{"who": "member"}]
    refused = [r for r in caplog.records if "refused_connection node=train/0" in r.getMessage()]
    assert len(refused) == 1, "a stranger that tries again and again is one line"


async def test_members_are_served_while_strangers_try(keys: RunKeys) -> None:
    async with service(keys) as serving:
        strangers = [
            asyncio.create_task(call(serving, make(keys), "stranger", 3 * NO_SERVICE_S))
            for make in STRANGERS.values()
        ]
        async with transport(CurveAuthenticator(keys, "controller")) as made:
            connection = made.connect(serving.address, "train/0", "a1")
            while not all(stranger.done() for stranger in strangers):
                await connection.call(named("work"), {"who": "member"}, timeout_s=LIMIT_S)
        for stranger in strangers:
            assert isinstance(stranger.exception(), TransportError)
        assert {args["who"] for args in serving.served} == {"member"}
        async with asyncio.timeout(LIMIT_S):
            while serving.authenticator.num_refused < len(STRANGERS):  # noqa: ASYNC110 - no event
                await asyncio.sleep(0.01)


async def test_a_member_does_not_talk_to_a_server_of_another_run(keys: RunKeys) -> None:
    """Whoever took over the address of a worker learns nothing of what it is told."""
    for impostor_keys in (RunKeys.create(), None):
        authenticator = impostor_keys and CurveAuthenticator(impostor_keys, "impostor")
        served: list[Any] = []
        impostor = RpcServer(
            [named("work").served_by(served.append)],
            node_id="train/0",
            incarnation="a1",
            authenticator=authenticator,
        )
        address = await impostor.start()
        try:
            async with transport(CurveAuthenticator(keys, "controller")) as made:
                connection = made.connect(address, "train/0", "a1")
                with pytest.raises(TransportError):
                    await connection.call(named("work"), {"who": "member"}, timeout_s=NO_SERVICE_S)
        finally:
            await impostor.close()
        assert served == []


async def test_random_bytes_at_the_port_change_nothing(keys: RunKeys) -> None:
    async with service(keys) as serving:
        port = int(serving.address.rpartition(":")[2])
        greeting = b"\xff" + bytes(8) + b"\x7f\x03\x01CURVE".ljust(54, b"\0") + bytes(32)
        for number in range(300):
            noise = os.urandom(1 + 37 * number)
            with socket.create_connection(("127.0.0.1", port), LIMIT_S) as stranger:
                try:
                    stranger.sendall(noise if number % 2 else greeting + noise)
                except OSError:
                    continue  # the server has ended the connection
        give_up = time.monotonic() + LIMIT_S
        while serving.authenticator.num_refused < 300:
            assert time.monotonic() < give_up
            await asyncio.sleep(0.01)
        assert await call(serving, CurveAuthenticator(keys, "c"), "member") == "done"
        assert serving.authenticator.num_refused == 300


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


async def launch(config: GRPOConfig, node: Node, keys: RunKeys) -> WorkerReport:
    """Has the agent start a train worker."""
    actor = to_plain(config.actor)
    order = WorkerOrder("train", 0, "FSDPPPOActor", actor, Device.cpu, 1 << 20, incarnation="i0")
    async with transport(CurveAuthenticator(keys, "controller")) as made:
        agent = made.connect(node.facts.address, "agent", node.facts.incarnation)
        launched = await agent.call(LAUNCH, Launch([order], 120.0), timeout_s=150.0)
    assert not launched.failure
    return launched.workers[0]


async def call_worker(
    keys: RunKeys | None, method: Method[Any, Any], args: Any, address: str, name: str
) -> Any:
    """Calls with these keys."""
    authenticator = CurveAuthenticator(keys, "caller") if keys else None
    async with transport(authenticator) as made:
        connection = made.connect(address, name, ANY_INCARNATION)
        return await connection.call(method, args, timeout_s=NO_SERVICE_S)


async def test_a_real_agent_and_worker_serve_their_run_alone(
    config: GRPOConfig, scheduler: LocalScheduler, tmp_path: Path
) -> None:
    keys_file = tmp_path / "keys.json"
    assert stat.S_IMODE(keys_file.stat().st_mode) == 0o600
    assert RunKeys.read(keys_file) == scheduler.keys
    (node,) = await scheduler.nodes()
    worker = await launch(config, node, scheduler.keys)
    stats = Method("stats", NoneType, Any)  # type: ignore[arg-type]
    for name, address, method, args, log in (
        ("agent", node.facts.address, LOG_TAIL, "train/0", "agent-0.log"),
        ("train/0", worker.address, stats, None, "train-0.log"),
    ):
        assert address.startswith("tcp://127.0.0.1:"), "a local run listens on loopback only"
        with pytest.raises(TransportError):
            await call_worker(None, method, args, address, name)
        with pytest.raises(TransportError):
            await call_worker(RunKeys.create(), method, args, address, name)
        assert await call_worker(scheduler.keys, method, args, address, name)
        assert f"refused_connection node={name}" in (tmp_path / "logs" / log).read_text()
    pids = [worker.pid, os.getpid(), scheduler._agent.pid]
    for secret in (scheduler.keys.server_secret, scheduler.keys.client_secret):
        assert_is_nowhere(secret.decode(), tmp_path, pids, allowed=keys_file)
    scheduler.close()
    assert not keys_file.exists(), "nothing is left of the keys"


async def test_what_comes_over_a_socket_names_no_file(
    config: GRPOConfig, scheduler: LocalScheduler, tmp_path: Path
) -> None:
    (node,) = await scheduler.nodes()
    async with transport(CurveAuthenticator(scheduler.keys, "controller")) as made:
        agent = made.connect(node.facts.address, "agent", node.facts.incarnation)
        for role in ("../../train", "train/0", "", "a" * 100):
            order = WorkerOrder(role, 0, "FSDPPPOActor", {}, Device.cpu, 1)
            with pytest.raises(ProtocolError, match="not of the declared type"):
                await agent.call(LAUNCH, Launch([order], LIMIT_S), timeout_s=LIMIT_S)
        assert await agent.call(LOG_TAIL, "../../../etc/passwd", timeout_s=LIMIT_S) == []


def assert_is_nowhere(secret: str, run_dir: Path, pids: list[int], allowed: Path) -> None:
    """Not on a command line, not in an environment, not in a log."""
    for name in ("cmdline", "environ"):
        for process in pids:
            assert secret.encode() not in Path(f"/proc/{process}/{name}").read_bytes()
    for file in run_dir.rglob("*"):
        if file.is_file() and file != allowed:
            assert secret not in file.read_text(errors="replace"), file


async def test_each_start_has_keys_of_its_own(config: GRPOConfig, tmp_path: Path) -> None:
    config.scheduler.run_dir = str(tmp_path)
    schedulers = []
    for _ in range(2):
        scheduler = make_scheduler(config.scheduler)
        schedulers.append(scheduler)
        scheduler.close()
    assert schedulers[0].keys != schedulers[1].keys


async def test_an_agent_does_not_start_with_keys_that_others_can_read(
    config: GRPOConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = RunKeys.write

    def write_for_all(keys: RunKeys, path: Path) -> None:
        write(keys, path)
        path.chmod(0o644)

    monkeypatch.setattr(RunKeys, "write", write_for_all)
    config.scheduler.run_dir = str(tmp_path)
    scheduler = make_scheduler(config.scheduler)
    try:
        with pytest.raises(WorkerStartError) as caught:
            await scheduler.nodes()
        assert "expected mode 0600, got 0644" in "\n".join(caught.value.log_tail)
    finally:
        scheduler.close()


def test_a_worker_takes_keys_from_the_environment_and_leaves_none_there(
    keys: RunKeys, tmp_path: Path
) -> None:
    """What its children inherit is seen from a child."""
    keys.write(tmp_path / "keys.json")
    script = (
        "import os, subprocess\n"
        "from areal_sc.transport.security.keys import RunKeys\n"
        "keys = RunKeys.from_environment(os.environ)\n"
        "print(keys.server_public.decode())\n"
        "print(subprocess.run(['env'], capture_output=True, text=True).stdout)\n"
    )
    finished = subprocess.run(
        [sys.executable, "-c", script],
        env=os.environ | {KEYS_VARIABLE: (tmp_path / "keys.json").read_text()},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert finished.stdout.startswith(keys.server_public.decode())
    assert KEYS_VARIABLE not in finished.stdout
    for secret in (keys.server_secret, keys.client_secret):
        assert secret.decode() not in finished.stdout + finished.stderr
