"""`python -m areal_sc page` as a process: beside a run that goes on, and for an old one."""

from __future__ import annotations

import json
import re
import select
import signal
import subprocess
import sys
import tarfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest
from integration.run_process import LIMIT_S, gate_of, tiny_run

from areal_sc.controller.ledger.ledger_account import GroupAccount, read_account
from areal_sc.records.reading import rows as recorded_rows
from areal_sc.run.run_folder import RunFolder

OLD_RUN = Path(__file__).with_name("old_runs") / "tiny_run_a32ae4a.tar.xz"


class Page:
    """The address of a page, and its key; `link` has both."""

    def __init__(self, address: str, key: str) -> None:
        self.address, self._key = address, key
        self.link = f"{address}/?key={key}"

    def get(self, path: str) -> Any:
        sign = "&" if "?" in path else "?"
        with urlopen(f"{self.address}{path}{sign}key={self._key}", timeout=LIMIT_S) as answer:
            return json.loads(answer.read())

    def control(self, **wanted: Any) -> str:
        """What is said to it."""
        path = f"{self.address}/api/runs/0/control?key={self._key}"
        request = Request(path, json.dumps(wanted).encode(), {"Origin": self.address})
        with urlopen(request, timeout=LIMIT_S) as answer:
            return str(json.loads(answer.read())["text"])


@contextmanager
def page_of(*run_dirs: Path, options: Sequence[str] = ()) -> Iterator[Page]:
    """A page that is served meanwhile, and ends by Ctrl-C without an error."""
    command = [sys.executable, "-m", "areal_sc", "page", *map(str, run_dirs), *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
        try:
            assert process.stdout is not None
            assert select.select([process.stdout], [], [], LIMIT_S)[0], "it says nothing"
            said = process.stdout.readline().decode()
            found = re.search(r"(http://127\.0\.0\.1:\d+)/\?key=(\S+)", said)
            assert found, said
            yield Page(*found.groups())
            process.send_signal(signal.SIGINT)
            assert process.wait(LIMIT_S) == 0, process.stdout.read()
        finally:
            process.kill()


def check_is_as_in_the_files(page: Page, run_dir: Path) -> None:
    folder = RunFolder(run_dir)
    steps = page.get("/api/runs/0/steps")
    records = [json.loads(line) for line in folder.metrics_path.read_text().splitlines()]
    of_steps = [record for record in records if record["kind"] == "step"]
    assert of_steps
    for name in ("step", "reward", "wait_s", "bound", "token_staleness_mean", "time"):
        written = [record[name] for record in of_steps]
        # the word of older run folders
        expected = ["rollout" if it == "generation" else it for it in written]
        assert steps["columns"][name] == expected, name
    for name, value in of_steps[-1]["train"].items():
        assert steps["columns"][f"train/{name}"][-1] == value, name
    evaluations = [record for record in records if record["kind"] == "evaluation"]
    assert [it["reward"] for it in steps["evaluations"]] == [it["reward"] for it in evaluations]
    while not page.get("/api/runs/0/reading")["is_whole"]:
        pass
    rows = page.get("/api/runs/0/recorded?sort=group&limit=500")["rows"]
    told = [(row["group"], row["attempt"], row["episode"], row["reward"]) for row in rows]
    written = [(it.group, it.attempt, it.episode, it.reward) for it in recorded_rows(run_dir)]
    if len(told) == 500:  # there may be more, and the last group may be told in part
        last = max(told)[0]
        told, written = ([it for it in its if it[0] < last] for its in (told, written))
    assert sorted(it for it in told if it[2] >= 0) == sorted(written)
    groups: list[GroupAccount] = []
    account = read_account(folder.ledger, groups.append)
    told = page.get("/api/runs/0/groups?limit=500")
    assert told["account"]["totals"] == account.totals
    assert {it["group"]: it["outcome"] for it in told["groups"]} == {
        it.group: it.outcome for it in groups
    }
    trained = next(it for it in groups if it.outcome == "trained")
    life = page.get(f"/api/runs/0/groups/{trained.group}")
    assert [it["what"] for it in life["events"]][-3:] == ["consumed", "trained", "published"]
    assert life["account"]["step"] == trained.step + 1


def workers_of(page: Page) -> set[str]:
    status = page.get("/api/runs/0/fleet")["status"]
    roles = status["roles"].values() if status else ()
    return {worker["name"] for role in roles for worker in role["workers"]}


def test_beside_a_run_that_goes_on(tmp_path: Path, tiny_model_folder: Path) -> None:
    held = ("task.num_free_episodes=32", "total_steps=5000")  # after the evaluation and three steps
    with tiny_run(tmp_path / "run", tiny_model_folder, *held) as run:
        run.wait_for_step(1)
        with page_of(run.run_dir, options=["--control"]) as page:
            run.wait_until(lambda: workers_of(page) == {"train/0", "rollout/0"}, "its workers")
            page.control(what="pause")
            assert page.get("/api/runs/0/fleet")["status"]["wishes"]["pause"] is not None
            assert page.control(what="resume") == "the run goes on"
            before = page.get("/api/runs/0/steps")
            assert before["columns"]["step"][0] == 1
            assert "are 2 from now on" in page.control(what="scale", num_workers=2)
            all_three = {"train/0", "rollout/0", "rollout/1"}
            run.wait_until(lambda: workers_of(page) == all_three, "a second rollout worker")
            gate_of(run.run_dir).write_bytes(b"." * 8)
            run.wait_for_step(5)
            assert "stopped: nothing of the run is left" in page.control(what="stop")
            assert run.wait() == 130
            known = f"epoch={before['epoch']}&first={before['num_steps']}"
            after = page.get(f"/api/runs/0/steps?{known}")
            steps = before["columns"]["step"] + after["columns"]["step"]
            assert steps == [*range(1, len(steps) + 1)]
            assert len(steps) >= 5
            fleet = page.get("/api/runs/0/fleet")
            assert fleet["state"] == "interrupted"
            for role in fleet["status"]["roles"].values():
                for worker in role["workers"]:
                    assert worker["held_bytes"] >= 0 == worker["store_bytes"], "without a limit"
            check_is_as_in_the_files(page, run.run_dir)


def test_a_run_of_an_earlier_areal_sc(tmp_path: Path) -> None:
    with tarfile.open(OLD_RUN) as archive:
        archive.extractall(tmp_path, filter="data")
    with page_of(tmp_path / "tiny") as page:
        check_is_as_in_the_files(page, tmp_path / "tiny")
        assert page.get("/api/runs")[0]["settings"]["total_steps"] == "9"
        assert page.get("/api/runs/0/fleet")["step"] == 3
        with pytest.raises(HTTPError, match="401"):
            Page(page.address, "another-key").get("/api/runs")
