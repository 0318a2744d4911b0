"""The examples of agents outside: when they collect, and how they deploy."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from unittest.mock import MagicMock

import closed_loop
import online
import pytest

from areal_sc.engines.servers.process import free_port


def test_it_is_collected_until_the_address_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A killed script's address stays; one that begins from nothing deletes it for a while."""
    path, told = tmp_path / "agents.json", list[str]()
    path.write_text(json.dumps({"url": "http://old/v1", "key": "k"}))

    async def collect_all(where: dict[str, str]) -> bool:
        told.append(where["url"])
        if told == ["http://old/v1"]:
            path.unlink()
            return False
        if told.count("http://new/v1") == 1:
            return True  # the script was killed
        path.unlink()
        return True

    def wait(seconds: float) -> None:
        if told == ["http://old/v1"]:
            path.write_text(json.dumps({"url": "http://new/v1", "key": "k"}))

    monkeypatch.setattr(online, "collect_all", collect_all)
    monkeypatch.setattr("time.sleep", wait)
    online.main(["collect", str(tmp_path)])
    assert told == ["http://old/v1", "http://new/v1", "http://new/v1"]
    assert capsys.readouterr().out == "the run has ended\n"


async def test_where_nobody_answers_nothing_is_collected() -> None:
    url = f"http://127.0.0.1:{free_port()}/v1"
    assert not await online.collect_all({"url": url, "key": "k"})


def test_a_model_is_deployed_from_any_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    started = MagicMock()
    monkeypatch.setattr("subprocess.Popen", started)
    monkeypatch.setattr("urllib.request.urlopen", MagicMock())
    with closed_loop.deployed(closed_loop.DEPLOY, Path("/my runs/it's/model")) as url:
        (words,), _ = started.call_args
    assert words[:4] == [sys.executable, "-m", "sglang.launch_server", "--model-path"]
    assert words[4:7] == ["/my runs/it's/model", "--port", url.split(":")[2].removesuffix("/v1")]
