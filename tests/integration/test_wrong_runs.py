"""What the page tells of runs in which one thing goes wrong: see `scripts/wrong_run.py`."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from integration.run_process import REPOSITORY, SCRIPTS

from areal_sc.page.followed_run import FollowedRun
from areal_sc.page.group_book import GroupQuery
from areal_sc.page.row_search import recorded_query

LIMIT_S = 1800


def shows_reward_bug(run: FollowedRun) -> bool:
    """It learns, but not what is held out; and wrong answers have the highest reward."""
    steps = run.steps()
    held_out = next(it for it in steps["evaluations"] if it["name"] == "after")
    while not run.read_rows(1.0)["is_whole"]:
        pass
    best = run.recorded_rows(recorded_query({"sort": "-reward"}), 0, 50)["rows"]
    is_wrong = [sorted(row["prompt"].strip("=")) != list(row["answer"].strip("$")) for row in best]
    return steps["columns"]["reward"][-1] > held_out["accuracy_high"] and any(is_wrong)


def shows_collapse(run: FollowedRun) -> bool:
    columns = run.steps()["columns"]
    kl = [it for it in columns["train/proximal_kl"] if it is not None]
    return max(kl) > 1 and columns["answer_tokens"][-1] == 32 and columns["train/lr"][0] > 0.05


def shows_slow_reward(run: FollowedRun) -> bool:
    (totals,) = [it["totals"] for it in run.time_line()["processes"] if it["name"] == "rollout/0"]
    return bool(totals["the reward slow_reward"][1] > 0.7 * totals["episode"][1])


def shows_dying_worker(run: FollowedRun) -> bool:
    restarts = [it for it in run.steps()["events"] if it["name"] == "workers_restarted"]
    groups = run.groups(GroupQuery(cause="worker_died"), 0, 100)["groups"]
    is_told = all((it["data_row"] or "").startswith("{'prompt': 'q") for it in groups)
    return len(restarts) > 3 and "SIGKILL" in restarts[0]["cause"] and len(groups) > 0 and is_told


SHOWS: dict[str, Callable[[FollowedRun], bool]] = {
    "reward_bug": shows_reward_bug,
    "collapse": shows_collapse,
    "slow_reward": shows_slow_reward,
    "dying_worker": shows_dying_worker,
}


@pytest.mark.long
@pytest.mark.timeout(4 * LIMIT_S)
def test_the_page_shows_what_went_wrong(tmp_path: Path) -> None:
    for fault, shows in SHOWS.items():
        command = [sys.executable, str(SCRIPTS / "wrong_run.py"), fault, str(tmp_path / fault)]
        command += ["--warm-start", str(tmp_path / "warm_start")]
        code = subprocess.run(command, cwd=REPOSITORY, timeout=LIMIT_S, check=False).returncode
        assert code == 0 or (fault == "dying_worker" and code == 10)
        assert shows(FollowedRun(tmp_path / fault, fault, tmp_path / "cache")), fault
