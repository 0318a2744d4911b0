"""Deaths of workers, as the screen tells them."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from unit.trainer.conftest import shown

from areal_sc.errors import WorkerError, WorkerLost
from areal_sc.fleet.worker_life import UnitLost, UnitServes
from areal_sc.records.metrics_log import History
from areal_sc.trainer.outages import Outage, Outages
from areal_sc.trainer.run import Run

KILLED = "ended with signal 9 (SIGKILL)"


class Story:
    """Outages on a clock that the test moves."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.run_again = Counter[str]()
        self.told: list[str] = []
        self.shown: list[str] = []
        self.outages = Outages(
            self.show,
            lambda outage: self.told.append(str(outage)),
            lambda: self.run_again,
            lambda: self.now_s,
        )

    def show(self, outages: Sequence[str]) -> None:
        self.shown[:] = outages

    def lose(self, unit: str, worker: str, cause: str = KILLED) -> None:
        loss = WorkerLost.with_log(f"worker {worker} {cause}", Path("/run/logs/x.log"), [])
        self.outages.hear(UnitLost(unit, loss, is_news=True))

    def bring_back(self, unit: str, at_s: float) -> None:
        self.now_s = at_s
        self.outages.hear(UnitServes(unit))


def test_one_death_is_one_sentence() -> None:
    story = Story()
    story.run_again["rollout/1"] = 7  # of an earlier death
    story.lose("rollout/1", "rollout/1")
    assert story.shown == [f"rollout/1 {KILLED}; being started again"]
    story.run_again["rollout/1"] += 12
    story.bring_back("rollout/1", 1.6)
    assert story.shown == []
    assert story.told == [f"rollout/1 {KILLED}; started again in 1.60s; 12 groups run again"]


def test_what_one_event_takes_along_is_one_sentence() -> None:
    story = Story()
    cause = f"{KILLED}, since the fork server is gone"
    story.lose("train", "train/1", cause)
    for name in ("rollout/0", "rollout/1"):
        story.lose(name, name, cause)
    story.run_again.update(["rollout/1"])
    story.bring_back("train", 3.0)
    story.bring_back("rollout/0", 4.0)
    assert story.told == []
    assert story.shown == [f"train/1, rollout/0 and rollout/1 {cause}; being started again"]
    story.bring_back("rollout/1", 5.0)
    assert story.told == [
        f"train/1, rollout/0 and rollout/1 {cause}; started again in 5.00s; 1 group runs again"
    ]


def test_two_controllers_tell_of_one_node() -> None:
    story = Story()
    story.lose("train", "train/0", f"went down with node a: its agent {KILLED}")
    story.now_s = 1.3
    story.lose("rollout/0", "rollout/0", "went down with node a: its agent was started again")
    story.bring_back("rollout/0", 4.0)
    story.bring_back("train", 5.0)
    names = "train/0 and rollout/0"
    assert story.told == [
        f"{names} went down with node a: its agent {KILLED}; started again in 5.00s"
    ]


def test_deaths_of_other_causes_or_times_are_told_by_themselves() -> None:
    story = Story()
    story.lose("rollout/0", "rollout/0")
    story.lose("rollout/1", "rollout/1", "ended with exit code 3")
    story.now_s = 10.0
    story.lose("rollout/2", "rollout/2")
    story.bring_back("rollout/2", 11.0)
    story.bring_back("rollout/1", 12.0)
    story.outages.hear(UnitLost("rollout/3", WorkerError("it has no GPU"), is_news=True))
    story.bring_back("rollout/3", 13.0)
    assert story.told == [
        f"rollout/2 {KILLED}; started again in 1.00s",
        "rollout/1 ended with exit code 3; started again in 12.0s",
        "rollout/3 was lost: it has no GPU; started again in 1.00s",
    ]


def test_an_outage_is_shown_kept_and_counted(run: Run) -> None:
    run._tell_outage(Outage(("train/0", "rollout/0"), KILLED, 4.5, 3))
    assert "WARNING" in shown(run)
    assert f"train/0 and rollout/0 {KILLED}; started again in 4.50s; 3 groups" in shown(run)
    (line,) = run.folder.metrics_path.read_text().splitlines()
    assert json.loads(line)["workers"] == ["train/0", "rollout/0"]
    assert History.read(run.folder.metrics_path).num_worker_restarts == 2
