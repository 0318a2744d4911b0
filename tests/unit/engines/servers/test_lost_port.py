"""Servers whose ports another process has taken before they listened there."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from areal_sc.config.schema import RolloutConfig
from areal_sc.engines.servers.handle import ServerInstance
from areal_sc.engines.servers.process import ServerProcess
from areal_sc.engines.servers.server import MAX_PORT_RACES, ServerLife
from areal_sc.engines.servers.sglang.handle import SGLangEngine
from areal_sc.errors import PeerLost, WorkerStartError

LOST = "torch.distributed.DistNetworkError: ... code: -98, message: address already in use", "bye"
OTHER = ("RuntimeError: no kernel", "bye")


@pytest.mark.parametrize(
    ("tails", "num_starts"),
    [
        ([LOST, LOST], 3),
        ([LOST] * 9, MAX_PORT_RACES + 1),
        ([LOST, OTHER], 2),
        ([OTHER], 1),
    ],
)
async def test_a_server_that_has_lost_a_port_starts_again(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    tiny_model_folder: Path,
    tails: list[tuple[str, ...]],
    num_starts: int,
) -> None:
    config = RolloutConfig(path=str(tiny_model_folder))
    server = ServerLife(SGLangEngine(config), tmp_path, "rollout-0", is_cuda=False)
    num_begun = 0

    async def start() -> None:
        nonlocal num_begun
        num_begun += 1
        if num_begun <= len(tails):
            raise WorkerStartError("it ended", log_tail=tails[num_begun - 1])

    monkeypatch.setattr(server, "_start_own", start)
    if num_starts > len(tails):
        await server.start()
    else:
        with pytest.raises(WorkerStartError):
            await server.start()
    assert num_begun == num_starts


async def test_what_an_earlier_life_has_logged_is_not_told_of_the_present_one(
    tmp_path: Path, tiny_model_folder: Path
) -> None:
    handle = SGLangEngine(RolloutConfig(path=str(tiny_model_folder)))
    log = tmp_path / "server.log"
    log.write_text("\n".join(LOST) + "\n")
    begin = log.stat().st_size
    with log.open("a") as file:
        file.write("RuntimeError: no kernel\n")
    ended: Any = SimpleNamespace(pid=0, returncode=1)
    client: Any = None
    instance = ServerInstance(1, "key", is_cuda=False)
    server = ServerProcess(ended, handle, instance, log, begin)
    with pytest.raises(WorkerStartError) as told:
        await server.wait_ready(client, 1.0)
    assert list(told.value.log_tail) == ["RuntimeError: no kernel"]


async def test_a_server_that_cannot_listen_and_does_not_end_is_given_up(
    tmp_path: Path, tiny_model_folder: Path
) -> None:
    handle = SGLangEngine(RolloutConfig(path=str(tiny_model_folder)))
    log, bound = tmp_path / "server.log", "error while attempting to bind on address"
    log.write_text(f"[Errno 98] {bound} ('127.0.0.1', 40862): address already in use\n")
    hangs: Any = SimpleNamespace(pid=0, returncode=None)

    class Unreached:
        num_asked = 0

        async def check_health(self, timeout_s: float) -> None:
            self.num_asked += 1
            if self.num_asked == 2:  # that of another port was nothing to it
                with log.open("a") as file:
                    file.write(f"[Errno 98] {bound} ('127.0.0.1', 40861): address already in use\n")
            raise PeerLost("it refused the connection")

    client: Any = Unreached()
    instance = ServerInstance(40861, "key", is_cuda=False)
    server = ServerProcess(hangs, handle, instance, log, 0)
    with pytest.raises(WorkerStartError, match="40861 cannot listen there"):
        await server.wait_ready(client, 1000.0)
    assert client.num_asked == 2
