"""The address of a run, and agents outside that find it there."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import stat
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from integration.run_process import PATIENT, SCRIPTS, tiny_run
from waiting import wait_until

from areal_sc import OnlineWorkflow
from areal_sc.controller.ledger.ledger_account import GroupAccount, read_account
from areal_sc.errors import ConfigError

ONLINE = SCRIPTS / "online_run.py"
ROUTER = "-m areal_sc.agents.router"
LIMIT_S = 120.0
SETTINGS = (
    *("total_steps=2", "rollout.train_batch_groups=2", "rollout.group_size=2"),
    *PATIENT,
    *("rollout.max_staleness=0", "rollout.rejection_window=1000"),
)


class Outside:
    """An agent outside, which knows `agents.json` alone."""

    def __init__(self, run_dir: Path) -> None:
        self.path = run_dir / "agents.json"
        wait_until(self.path.exists)
        told = json.loads(self.path.read_text())
        self.url, self.key = told["url"].removesuffix("/v1"), told["key"]

    def post(self, path: str, body: Any = None, key: str | None = None) -> tuple[int, Any]:
        """Status, and what the body says; 0: there is no connection, or it ended."""
        data = (
            body if isinstance(body, bytes) else json.dumps({} if body is None else body).encode()
        )
        headers = {"Authorization": f"Bearer {self.key if key is None else key}"}
        request = urllib.request.Request(f"{self.url}{path}", data, headers, method="POST")
        try:
            try:
                with urllib.request.urlopen(request, timeout=LIMIT_S) as answer:
                    return answer.status, json.load(answer)
            except urllib.error.HTTPError as error:
                return error.code, json.load(error)
        except (OSError, http.client.HTTPException):  # there is none, or it ended in an answer
            return 0, None

    def claim(self) -> dict[str, Any] | None:
        """None: there is no episode now."""
        status, told = self.post("/episodes")
        assert status in (200, 429), told
        return told if status == 200 else None

    def claimed(self, num: int) -> list[dict[str, Any]]:
        """So many, as soon as they are admitted."""
        return [wait_until(self.claim) for _ in range(num)]

    def ask(self, episode: dict[str, Any], text: str = "a=") -> tuple[int, Any]:
        body = {"model": "policy", "messages": [{"role": "user", "content": text}]}
        return self.post("/v1/chat/completions", body, episode["api_key"])

    def end(self, episode: dict[str, Any], how: str, body: Any) -> tuple[int, str]:
        """The status, and the code of what is wrong."""
        status, told = self.post(f"/episodes/{episode['id']}/{how}", body)
        return status, told["error"]["code"] if told and "error" in told else ""


@pytest.fixture
def online(tmp_path: Path, chat_model: Path) -> Callable[..., Any]:
    return lambda *settings: tiny_run(
        tmp_path / "run", chat_model, *SETTINGS, *settings, script=ONLINE
    )


@pytest.mark.parametrize("memory", ["auto", "off"])
def test_agents_outside_are_trained_and_go_on_where_memory_outlives_their_worker(
    online: Callable[..., Any], memory: str
) -> None:
    with online("rollout.num_workers=2", f"transport.shared_memory={memory}") as run:
        outside = Outside(run.run_dir)
        assert stat.S_IMODE(outside.path.stat().st_mode) == 0o600
        log = outside.path.with_name("logs") / "agents.log"
        assert stat.S_IMODE(log.stat().st_mode) == 0o600
        episodes = outside.claimed(4)
        assert outside.claim() is None  # the staleness bound admits no more
        workers = {it["id"]: it["id"].rpartition(".")[0] for it in episodes}
        assert len(set(workers.values())) == 2
        first = [it for it in episodes if it["id"].startswith("rollout.0.")]
        second = [it for it in episodes if it["id"].startswith("rollout.1.")]
        for episode in episodes:
            assert set(episode["row"]) == {"question"}
            assert outside.ask(episode)[0] == 200
        assert outside.end(first[0], "reward", {"reward": 1.0})[0] == 200
        assert outside.end(first[0], "reward", {"reward": 1.0}) == (409, "session_ended")
        assert outside.end(first[1], "reject", {"reason": "it is boring"})[0] == 200

        os.kill(run.worker_pid("rollout/1"), signal.SIGKILL)
        for episode in second:

            def ask(episode: dict[str, Any] = episode) -> tuple[int, Any] | None:
                told = outside.ask(episode)  # the same again, which is not another sample
                return None if told[0] == 503 else told

            status, told = wait_until(ask)
            if memory == "auto":
                assert status == 200, told
                assert outside.end(episode, "reward", {"reward": 0.5})[0] == 200
            else:
                assert (status, told["error"]["code"]) == (410, "session_lost"), told
                assert outside.end(episode, "reward", {"reward": 1}) == (410, "session_lost")

        for _ in range(4 if memory == "auto" else 6):  # the group again, and the next step
            (episode,) = outside.claimed(1)
            assert outside.ask(episode)[0] == 200
            assert outside.end(episode, "reward", {"reward": 0.5})[0] == 200
        run.finish()
        assert run.summary()["rejected_episodes"] == {"agent_rejected": 1}
        assert run.summary()["num_rows_trained"] == 7
        run.wait_until_gone()
    assert not outside.path.exists()
    for path in run.run_dir.rglob("*"):
        keys = outside.key, *(it["api_key"] for it in episodes)
        assert not path.is_file() or not any(key.encode() in path.read_bytes() for key in keys)


def test_a_script_that_was_killed_gets_its_address_back(online: Callable[..., Any]) -> None:
    bind = "agents.bind=127.0.0.2"  # where no other process gets its port meanwhile
    with online(bind) as first:
        outside = Outside(first.run_dir)
        episodes = outside.claimed(4)
        assert outside.ask(episodes[0])[0] == 200
        status = first.run_dir / "status.json"
        first.wait_until(
            lambda: status.exists() and outside.url in status.read_text(),
            "the address in the status",
        )
        shown = subprocess.run(
            [sys.executable, "-m", "areal_sc", "status", str(first.run_dir)],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        assert f"{outside.url}/v1" in shown
        assert outside.key not in shown

        first.send(signal.SIGKILL)
        first.wait()
        while outside.ask(episodes[0])[0]:  # it ends with its script
            time.sleep(0.02)
        with online(bind) as second:
            second.wait_until(lambda: outside.ask(episodes[1])[0] == 200, "the address")
            assert Outside(second.run_dir).__dict__ == outside.__dict__
            assert outside.claim() is None
            (router,) = (pid for pid, it in second.processes().items() if ROUTER in it)
            os.kill(router, signal.SIGKILL)
            second.wait_until(lambda: outside.post("/episodes")[0] == 429, "the address again")
            for episode in episodes:
                assert outside.ask(episode)[0] == 200
                assert outside.end(episode, "reward", {"reward": 1.0})[0] == 200
            for episode in outside.claimed(4):
                assert outside.ask(episode)[0] == 200
                assert outside.end(episode, "reward", {"reward": 0.5})[0] == 200
            second.finish()
            second.wait_until_gone()
    groups: list[GroupAccount] = []
    read_account(first.run_dir / "ledger", groups.append)
    assert [(it.outcome, it.attempt) for it in groups] == [("trained", 0)] * 4


def test_nobody_comes_for_long_and_the_run_waits(
    start_rollout: Callable[..., Any], chat_model: Path, scheduler: Any
) -> None:
    """The limit of a group does not count, and that of an idle agent counts from its claim."""

    def collect() -> None:
        outside = Outside(Path(scheduler.config.run_dir))
        time.sleep(1.5)
        left, *others = outside.claimed(4)
        for episode in others:
            assert outside.ask(episode)[0] == 200
            assert outside.end(episode, "reward", {"reward": 1.0})[0] == 200

        def refusal() -> tuple[int, Any] | None:
            told = outside.end(left, "reward", {"reward": "x"})
            return told if told != (400, "invalid_reward") else None

        assert wait_until(refusal) == (410, "session_lost")

    limits = "rollout.group_timeout_s=1", "agents.idle_timeout_s=10"
    settings = f"actor.path={chat_model}", "rollout.group_size=2", *limits
    with ThreadPoolExecutor(1) as outside, start_rollout(*settings) as rollout:
        collecting = outside.submit(collect)
        batch = rollout.rollout_batch([{"question": "a"}] * 2, OnlineWorkflow())
        assert [row.reward for row in batch.rows] == [1.0] * 3
        assert rollout.rejections.by_cause() == {"agent_idle": 1}
        collecting.result()


def test_an_address_that_another_process_has_is_named(
    start_rollout: Callable[..., Any], chat_model: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        settings = f"actor.path={chat_model}", f"agents.bind=127.0.0.1:{port}"
        named = f"agents.bind: 127.0.0.1, port {port}, cannot be listened on"
        with start_rollout(*settings) as rollout, pytest.raises(ConfigError, match=named):
            rollout.rollout_batch([{"question": "a"}], OnlineWorkflow())
