"""The address of a run, and agents outside that find it there."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from integration.run_process import SCRIPTS, RunProcess, tiny_run

ONLINE = SCRIPTS / "online_run.py"
LIMIT_S = 120.0
SETTINGS = (
    *("total_steps=2", "rollout.train_batch_groups=2", "rollout.group_size=2"),
    *("rollout.max_staleness=0", "scheduler.orphan_timeout_s=600", "rollout.rejection_window=1000"),
)


class Outside:
    """An agent outside, which knows `agents.json` alone."""

    def __init__(self, run: RunProcess) -> None:
        self.path = run.run_dir / "agents.json"
        run.wait_until(self.path.exists, "agents.json")
        told = json.loads(self.path.read_text())
        self.url, self.key = told["url"].removesuffix("/v1"), told["key"]

    def post(self, path: str, body: Any = None, key: str | None = None) -> tuple[int, Any]:
        """Status, and what the body says; 0: there is no connection."""
        data = (
            body if isinstance(body, bytes) else json.dumps({} if body is None else body).encode()
        )
        headers = {"Authorization": f"Bearer {self.key if key is None else key}"}
        request = urllib.request.Request(f"{self.url}{path}", data, headers, method="POST")
        try:
            with urllib.request.urlopen(request, timeout=LIMIT_S) as answer:
                return answer.status, json.load(answer)
        except urllib.error.HTTPError as error:
            return error.code, json.load(error)
        except (urllib.error.URLError, OSError):
            return 0, None

    def claim(self) -> dict[str, Any] | None:
        """None: there is no episode now."""
        status, told = self.post("/episodes")
        assert status in (200, 429), told
        return told if status == 200 else None

    def claimed(self, num: int) -> list[dict[str, Any]]:
        """So many, as soon as they are admitted."""
        found, give_up_s = list[dict[str, Any]](), time.monotonic() + LIMIT_S
        while len(found) < num:
            assert time.monotonic() < give_up_s, f"{len(found)} episodes"
            if episode := self.claim():
                found.append(episode)
            else:
                time.sleep(0.05)
        return found

    def ask(self, episode: dict[str, Any], text: str = "a=") -> tuple[int, Any]:
        body = {"model": "policy", "messages": [{"role": "user", "content": text}]}
        return self.post("/v1/chat/completions", body, episode["api_key"])

    def end(self, episode: dict[str, Any], how: str, body: Any) -> tuple[int, str]:
        """The status, and the code of what is wrong."""
        status, told = self.post(f"/episodes/{episode['id']}/{how}", body)
        return status, told["error"]["code"] if "error" in told else ""


@pytest.fixture
def online(tmp_path: Path, chat_model: Path) -> Callable[..., Any]:
    return lambda *settings: tiny_run(
        tmp_path / "run", chat_model, *SETTINGS, *settings, script=ONLINE
    )


def test_try(online: Callable[..., Any]) -> None:
    with online() as run:
        outside = Outside(run)
        print(outside.url, outside.key)
        episodes = outside.claimed(4)
        assert outside.claim() is None
        for episode in episodes:
            status, told = outside.ask(episode)
            print(status, told)
            assert status == 200
            print(outside.end(episode, "reward", {"reward": 1.0}))
        for episode in outside.claimed(4):
            outside.ask(episode)
            outside.end(episode, "reward", {"reward": 0.5})
        run.finish()
        print(run.story())
        run.wait_until_gone()
        assert not outside.path.exists()
