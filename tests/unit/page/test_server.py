"""The page's server by HTTP: who is let in, and that its answers are what the files say."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from aiohttp import ClientError, ClientResponse, ClientSession, CookieJar, web
from builders import make_evaluation, make_step, picture
from ledger_history import History, a_run
from page_runs import tokenizer
from recorded_groups import add_span, played, recorder_of, trajectory
from waiting import until

from areal_sc.__main__ import main
from areal_sc.errors import ArealError
from areal_sc.page import row_index
from areal_sc.page.access import Access, answer
from areal_sc.page.followed_run import FollowedRun
from areal_sc.page.row_search import recorded_query
from areal_sc.page.server import STATIC, PageServer
from areal_sc.records.blocks import block
from areal_sc.records.metrics_log import MetricsLog
from areal_sc.records.recorded_pictures import RecordedPicture, pack_picture
from areal_sc.records.spans import LOST
from areal_sc.run.run_folder import RunFolder
from areal_sc.system.disk import Disk

KEY = "the-key"


@pytest.fixture
async def folder(tmp_path: Path) -> RunFolder:
    """A run that was left with three steps, a journal, records and logs."""
    folder = RunFolder(tmp_path / "run")
    with folder:
        folder.open(config_text="actor:\n  dtype: bfloat16\n  lr: 1.0e-3\n")
    with closing(MetricsLog(folder.metrics_path)) as log:
        log.on_evaluation(make_evaluation())
        for step in (1, 2, 3):
            log.on_step(make_step(step, reward=step / 7))
    recorder = recorder_of(folder.path)
    recorder.add_group(played(0, [trajectory(1)], [trajectory(2)]))
    add_span(recorder, "episode", 1e9, 2.5, about="0.0.7")
    recorder.close()
    history = History(Disk(), folder.ledger)
    a_run(history)
    await history.journal.close()
    (folder.logs / "rollout-0.log").write_bytes(b"first\n" * 20_000 + b"\x1b[2J last\xff\n")
    (folder.logs / "controller.log").write_text(
        "9:59 WARNING controller x: slow disk\n10:00 WARNING controller x: slow disk\nINFO\n"
    )
    return folder


@pytest.fixture
async def port(folder: RunFolder) -> AsyncIterator[int]:
    server = PageServer([FollowedRun(folder.path, "run")], Access(KEY, ("node7.example",)))
    yield await server.start("127.0.0.1", 0)
    await server.close()


@pytest.fixture
async def session(port: int) -> AsyncIterator[ClientSession]:
    jar = CookieJar(unsafe=True)  # of addresses, too
    async with ClientSession(f"http://127.0.0.1:{port}", cookie_jar=jar) as session:
        yield session


async def get(session: ClientSession, path: str) -> Any:
    async with session.get(f"{path}{'&' if '?' in path else '?'}key={KEY}") as response:
        assert response.status == 200, await response.text()
        return await response.json()


async def status_of(session: ClientSession, path: str, **headers: str) -> tuple[int, str]:
    async with session.get(path, headers=headers) as response:
        return response.status, await response.text()


async def test_without_the_key_nothing_is_told(session: ClientSession) -> None:
    for path in ("/", "/static/app.js", "/api/runs", "/api/changes", "/api/runs/0/recorded?key="):
        status, text = await status_of(session, path)
        assert status == 401
        assert "the key is wrong or missing" in text
    assert (await status_of(session, "/?key=the-kez"))[0] == 401
    assert (await status_of(session, "/?key=%ff%00ü"))[0] == 401


async def test_the_key_once_and_then_its_cookie(session: ClientSession) -> None:
    async with session.get(f"/?key={KEY}") as response:
        assert response.status == 200
        cookie = response.headers["Set-Cookie"]
        assert "HttpOnly" in cookie
        assert "SameSite=Strict" in cookie
        assert_safe(response)
    status, text = await status_of(session, "/api/runs")
    assert (status, json.loads(text)[0]["name"]) == (200, "run")


def assert_safe(response: ClientResponse) -> None:
    policy = response.headers["Content-Security-Policy"]
    assert "default-src 'none'; script-src 'self'; style-src 'self'" in policy
    assert "unsafe" not in policy
    assert response.headers["X-Content-Type-Options"] == "nosniff"
    assert response.headers["Referrer-Policy"] == "no-referrer"


async def test_pictures_are_served_by_digest_as_what_they_are(
    folder: RunFolder, session: ClientSession
) -> None:
    drawn = picture(1)
    recorder = recorder_of(folder.path, process="rollout/1")
    recorder.add_group(played(2, [trajectory(3)], pictures=[drawn]))
    recorder.close()
    svg = b"<svg onload='alert(1)'/>"
    forged = RecordedPicture("f" * 32, "svg+xml", 1, 1, len(svg))
    name = folder.path / "records" / "rollout-9.pictures.000001"
    name.write_bytes(block(pack_picture(forged), svg))
    (shown,) = (await get(session, "/api/runs/0/recorded/2"))["rows"]
    (told,) = shown["pictures"]
    assert (told["kind"], told["width"], told["num_bytes"]) == ("PNG", 30, len(drawn))
    path = f"/api/runs/0/pictures/{told['digest']}"
    async with session.get(path) as response:
        assert (response.status, response.content_type) == (200, "image/png")
        assert_safe(response)
        assert await response.read() == drawn
    others = (forged.digest, name.name, "..%2Frecords%2F" + name.name, "%2Fetc%2Fpasswd", "%00")
    for other in others:
        status, text = await status_of(session, f"/api/runs/0/pictures/{other}")
        assert (status, "no such picture" in text) == (404, True)
    session.cookie_jar.clear()
    assert (await status_of(session, path))[0] == 401


@pytest.mark.parametrize("host", ["evil.example", "localhost.evil.example", "127.0.0.1@evil", ""])
async def test_another_name_is_not_served(session: ClientSession, host: str) -> None:
    status, text = await status_of(session, f"/?key={KEY}", Host=host)
    assert status == 421
    assert "not served under this name" in text


@pytest.mark.parametrize("host", ["localhost:1", "[::1]:8000", "10.1.2.3", "NODE7.example:80"])
async def test_names_of_the_machine_are_served(session: ClientSession, host: str) -> None:
    assert (await status_of(session, f"/?key={KEY}", Host=host))[0] == 200


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
        {"Origin": "http://127.0.0.1:1"},
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site"},
    ],
)
async def test_other_sites_pages_are_refused(
    session: ClientSession, headers: dict[str, str]
) -> None:
    status, _ = await status_of(session, f"/api/runs?key={KEY}", **headers)
    assert status == 403


async def test_its_own_page_is_served(session: ClientSession, port: int) -> None:
    own = {"Origin": f"http://127.0.0.1:{port}", "Sec-Fetch-Site": "same-origin"}
    assert (await status_of(session, f"/api/runs?key={KEY}", **own))[0] == 200


async def test_nothing_but_reading(session: ClientSession) -> None:
    async with session.post(f"/api/runs?key={KEY}") as response:
        assert response.status == 405


@pytest.mark.parametrize(
    ("path", "status", "told"),
    [
        ("/api/runs/1/steps", 404, "the page shows 1 runs"),
        ("/api/runs/x/steps", 400, "expected a whole number"),
        ("/api/runs/0/groups/99", 404, "run has nothing of that number or name"),
        ("/api/runs/0/recorded?limit=a", 400, "limit: expected a whole number, got 'a'"),
        ("/api/runs/0/recorded?reward=a", 400, "reward: expected a number"),
        ("/api/runs/0/groups/77", 404, "nothing of that number"),
        ("/api/runs/0/groups?step=-", 400, "step: expected"),
        ("/api/runs/0/logs/..%2Frun.json", 404, "nothing of that number or name"),
        ("/api/runs/0/logs/..%2F..%2Fetc%2Fpasswd", 404, "nothing"),
        ("/api/runs/0/keys", 404, "Not Found"),
        ("/static/..%2Fserver.py", 404, "no such file"),
        ("/static/../server.py", 404, "Not Found"),
        ("/api/runs/0/tokens/0/0/0/9", 404, "nothing of that number"),
        ("/api/runs/0/tokens/0/0/0/..", 404, "Not Found"),
        ("/api/runs/0/recorded?place=best", 400, "expected time, step"),
        ("/api/runs/0/recorded.jsonl?reward=a", 400, "reward: expected a number"),
        ("/api/runs/1/recorded.jsonl", 404, "the page shows 1 runs"),
        ("/api/runs/0/tokens/0/0/0/0?first=a", 400, "first: expected a whole number"),
        ("/api/runs/0/recorded/x", 400, "expected a whole number"),
        ("/api/runs/0/time?first=a", 400, "first: expected a number, got 'a'"),
        ("/api/runs/0/time?last=inf", 400, "last: expected a number, got 'inf'"),
        ("/none", 404, "Not Found"),
    ],
)
async def test_what_is_not_there_is_said(
    session: ClientSession, path: str, status: int, told: str
) -> None:
    found, text = await status_of(session, f"{path}{'&' if '?' in path else '?'}key={KEY}")
    assert found == status
    assert told in json.loads(text)["error"]


async def test_files_of_the_page_are_served(session: ClientSession) -> None:
    for path in STATIC.iterdir():
        async with session.get(f"/static/{path.name}?key={KEY}") as response:
            assert await response.read() == path.read_bytes()
            assert_safe(response)


async def test_the_tokenizer_is_found_from_the_run_folder(
    folder: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # where there is no `runs`
    (tmp_path / "warm").mkdir()
    tokenizer().save(str(tmp_path / "warm" / "tokenizer.json"))
    folder.config_path.write_text("run_dir: runs/run\nactor:\n  path: runs/warm\n")
    run = FollowedRun(folder.path, "run", tmp_path / "cache")
    assert run.recorded_rows(recorded_query({}), 0, 1)["has_texts"]
    folders = [str(folder.path), str(tmp_path / "warm"), str(folder.path / "model")]
    assert run.about()["model_folders"] == folders
    folder.config_path.write_text("actor:\n  path: runs/no--name-of-the-hub\n")
    assert run.about()["model_folders"] == [str(folder.path), str(folder.path / "model")]


async def test_answers_are_what_the_files_say(session: ClientSession, folder: RunFolder) -> None:
    (about,) = await get(session, "/api/runs")
    assert about["settings"] == {"actor.dtype": "bfloat16", "actor.lr": "0.001"}
    assert about["notes"] == []
    steps = await get(session, "/api/runs/0/steps")
    records = [json.loads(line) for line in folder.metrics_path.read_text().splitlines()]
    assert steps["columns"]["reward"] == [it["reward"] for it in records if it["kind"] == "step"]
    assert steps["evaluations"][0]["accuracy"] == records[0]["accuracy"]
    groups = await get(session, "/api/runs/0/groups?outcome=rejected")
    assert [it["cause"] for it in groups["groups"]] == ["reward_error"]
    recorded = await get(session, "/api/runs/0/recorded/0")
    assert [it["episode"] for it in recorded["attempts"][0]["rows"]] == [0, 1]
    tokens = await get(session, "/api/runs/0/tokens/0/0/1/0")
    assert tokens["ids"] == trajectory(2).input_ids
    time = await get(session, "/api/runs/0/time?width=100")
    assert [it["name"] for it in time["processes"]] == ["script", "rollout/0"]
    assert time["begin"] == 1e9
    trace = await get(session, "/api/runs/0/trace")
    of_steps = [it["args"]["about"] for it in trace["traceEvents"] if it["name"] == "train"]
    assert of_steps == ["1", "2", "3"]
    fleet = await get(session, "/api/runs/0/fleet")
    assert fleet["state"] == "dead"
    assert [log["name"] for log in fleet["logs"]] == ["controller.log", "rollout-0.log"]
    assert fleet["warnings"] == ["10:00 WARNING controller x: slow disk (2 times)"]
    log = (await get(session, "/api/runs/0/logs/rollout-0.log"))["text"]
    assert log.endswith("first\n\x1b[2J last\ufffd\n")
    assert log.startswith("first\n")
    assert len(log) < 70_000
    assert await get(session, "/api/runs/0/health") == {"complaints": {}, "num_steps": 3}


async def test_recorded_rows_are_read_found_and_downloaded(session: ClientSession) -> None:
    reading = await get(session, "/api/runs/0/reading")
    assert reading["is_whole"]
    assert reading["num_read_bytes"] == reading["num_bytes"] > 0
    found = await get(session, "/api/runs/0/recorded?sort=time")
    assert [(it["group"], it["episode"]) for it in found["rows"]] == [(0, 0), (0, 1)]
    # the ledger's group 0 was trained by its first attempt, as far as the journal tells
    life = await get(session, "/api/runs/0/groups/0")
    assert {it["outcome"] for it in found["rows"]} == {life["account"]["outcome"]}
    assert {it["step"] for it in found["rows"]} == {life["account"]["step"]}
    async with session.get(f"/api/runs/0/recorded.jsonl?sort=time&key={KEY}") as response:
        assert response.headers["Content-Disposition"] == 'attachment; filename="run.jsonl"'
        assert_safe(response)
        lines = [json.loads(line) async for line in response.content]
    assert [(it["group"], it["episode"]) for it in lines] == [(0, 0), (0, 1)]
    assert lines[0]["prompt"] == "{'prompt': 'sort <script>\u202e'}"
    assert (await get(session, "/api/runs/0/tokens/0/0/1/0?first=38"))["ids"] == trajectory(
        2
    ).input_ids[38:]


async def test_rows_that_were_not_read_before_are_downloaded(
    session: ClientSession, folder: RunFolder
) -> None:
    recorder = recorder_of(folder.path)
    for number in range(1, 30):
        recorder.add_group(played(number, [trajectory(number)]))
    recorder.close()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(row_index, "_BATCH_TOKENS", 1)
        async with session.get(f"/api/runs/0/recorded.jsonl?sort=group&key={KEY}") as response:
            lines = [json.loads(line) async for line in response.content]
    assert [it["group"] for it in lines] == [0, *range(30)]


async def test_what_is_wrong_with_the_learning_is_told(
    session: ClientSession, folder: RunFolder
) -> None:
    with closing(MetricsLog(folder.metrics_path)) as log:
        for step in range(4, 30):
            log.on_step(make_step(step, signal_share=0.0))
    told = await get(session, "/api/runs/0/health")
    assert list(told["complaints"]) == ["constant reward"]
    assert "the same reward, in the mean 0.25" in told["complaints"]["constant reward"]


async def test_a_browser_hears_what_has_changed(session: ClientSession, folder: RunFolder) -> None:
    async with session.get(f"/api/changes?key={KEY}") as response:
        assert response.content_type == "text/event-stream"
        assert_safe(response)
        assert (await response.content.readline()).startswith(b":")
        with closing(MetricsLog(folder.metrics_path)) as log:
            log.on_step(make_step(4))
        async with asyncio.timeout(60):
            while not (line := await response.content.readline()).startswith(b"data: "):
                pass
        assert json.loads(line[6:]) == {"0": ["steps"]}


async def test_whatever_lies_in_the_folder_each_view_answers(
    session: ClientSession, folder: RunFolder
) -> None:
    """Folders stand where files were, files where folders were, and nothing is sound."""
    for path in (folder.metrics_path, folder.config_path):
        path.unlink()
        path.mkdir()
    for path in folder.ledger.iterdir():
        path.unlink()
    folder.ledger.rmdir()
    folder.ledger.write_text("no folder")
    folder.status_path.write_bytes(b'{"a":' + 10_000 * b"[")
    shutil.rmtree(folder.records)
    folder.records.write_text("no folder")
    (folder.path / "run.json").unlink()
    (folder.path / ".run.json").unlink()
    (about,) = await get(session, "/api/runs")
    assert about["notes"] == [
        "run.json is gone or damaged",
        "config.yaml cannot be read: Is a directory",
    ]
    for view in ("steps", "recorded", "groups", "fleet", "time", "recorded/0"):
        assert (await get(session, f"/api/runs/0/{view}"))["damage"], view


async def test_views_of_rows_say_how_many_records_are_lost(
    session: ClientSession, folder: RunFolder
) -> None:
    recorder = recorder_of(folder.path, process="rollout/1")
    for about in ("3", "4"):
        add_span(recorder, LOST, 1e9, 0.0, about=about)
    recorder.close()
    for view in ("time", "recorded", "recorded/0"):  # the first one reads what tells it
        [told] = (await get(session, f"/api/runs/0/{view}"))["damage"]
        assert told.startswith("7 records are lost: "), view


@pytest.mark.parametrize("kept", ["run.json", ""])
async def test_named_pipes_hold_up_nobody(
    session: ClientSession, folder: RunFolder, kept: str
) -> None:
    """They stand in place of each file of the folder, or of all but one."""
    for path in [it for it in folder.path.rglob("*") if it.is_file() and it.name != kept]:
        path.unlink()
        os.mkfifo(path)
    for view in ("steps", "recorded", "groups", "fleet", "time", "recorded/0"):
        assert (await get(session, f"/api/runs/0/{view}"))["damage"], view
    for command in ("status", "ledger", "samples", "curve", "stop"):
        with suppress(ArealError):
            main([command, str(folder.path)])


@pytest.fixture
async def controlling(folder: RunFolder) -> AsyncIterator[ClientSession]:
    runs = [FollowedRun(folder.path, "run")]
    server = PageServer(runs, Access(KEY, ()), can_control=True)
    address = f"http://127.0.0.1:{await server.start('127.0.0.1', 0)}"
    async with ClientSession(address, headers={"Origin": address}) as session:
        yield session
    await server.close()


async def control(session: ClientSession, body: str, key: str = KEY, **headers: str) -> Any:
    path = f"/api/runs/0/control?key={key}"
    async with session.post(path, data=body, headers=headers) as response:
        return response.status, await response.text()


async def test_who_may_control_a_run(session: ClientSession, controlling: ClientSession) -> None:
    pause = '{"what": "pause"}'
    assert (await control(session, pause))[0] == 404, "not without --control"
    assert not (await get(session, "/api/runs"))[0]["can_control"]
    assert (await get(controlling, "/api/runs"))[0]["can_control"]
    assert (await control(controlling, pause, key="wrong"))[0] == 401
    assert (await control(controlling, pause, Origin="http://evil.example"))[0] == 403
    assert (await control(controlling, pause, Origin="null"))[0] == 403
    async with controlling.get(f"/api/runs/0/control?key={KEY}") as response:
        assert response.status == 405
    address = f"http://127.0.0.1:{controlling._base_url.port}"  # type: ignore[union-attr]
    async with (
        ClientSession(address) as nameless,
        nameless.post(f"/api/runs/0/control?key={KEY}", data=pause) as response,
    ):
        assert response.status == 403
        assert "has to name its origin" in await response.text()
    deep = f'{{"what": "pause", "x": {"[" * 200_000}{"]" * 200_000}}}'
    of_scale = ('{"what": "scale"}', '{"what": "scale", "num_workers": 0}')
    for wrong in ("", "{}", '{"what": "rm"}', *of_scale, "\xff", deep):
        assert (await control(controlling, wrong))[0] == 400, wrong[:40]
    for what in ('"pause"', '"resume"', '"scale", "num_workers": 2'):
        status, said = await control(controlling, f'{{"what": {what}}}')
        assert status == 409, said
        assert any(it in said for it in ("no run goes on", "is not paused"))


async def test_a_command_ends_with_the_page(
    folder: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waiting, pid = tmp_path / "waits.sh", tmp_path / "pid"
    waiting.write_text(f"#!/bin/sh\necho $$ > {pid}.new; mv {pid}.new {pid}; exec sleep 600\n")
    waiting.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(waiting))
    runs = [FollowedRun(folder.path, "run")]
    server = PageServer(runs, Access(KEY, ()), can_control=True)
    address = f"http://127.0.0.1:{await server.start('127.0.0.1', 0)}"
    async with ClientSession(address, headers={"Origin": address}) as session:
        asked = asyncio.create_task(control(session, '{"what": "stop"}'))
        await until(pid.exists)
        await server.close()
        with suppress(ClientError):  # if it has ended before it was answered
            assert (await asked)[0] == 409
        await until(lambda: not psutil.pid_exists(int(pid.read_text())))


async def test_a_run_is_asked_for_one_thing_at_a_time(
    controlling: ClientSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second `stop` beside the first one would end the run at once."""
    asked, may_answer = asyncio.Event(), asyncio.Event()

    async def said(_: PageServer, words: Sequence[str]) -> web.StreamResponse:
        asked.set()
        await may_answer.wait()
        return answer({"text": words[0]})

    monkeypatch.setattr(PageServer, "_said", said)
    first = asyncio.create_task(control(controlling, '{"what": "stop"}'))
    await asked.wait()
    for what in ("stop", "pause"):
        status, told = await control(controlling, f'{{"what": "{what}"}}')
        assert status == 409
        assert "an earlier request to this run goes on" in told
    may_answer.set()
    assert await first == (200, '{"text":"stop"}')
    assert (await control(controlling, '{"what": "pause"}'))[0] == 200
