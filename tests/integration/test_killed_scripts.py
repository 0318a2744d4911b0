"""A script is killed with `kill -9`, again and again; the same command goes on where it was."""

from __future__ import annotations

import os
import signal
from collections import Counter
from contextlib import ExitStack
from pathlib import Path

import pytest
from integration.run_process import SCRIPTS, RunProcess, gate_of, tiny_run

from areal_sc.controller.ledger.ledger_account import GroupAccount, read_account

KILLED = SCRIPTS / "killed_run.py"

PLACES = (
    *("evaluating", "generating", "computing", "training", "trained", "sealed"),
    *("taking_up", "taking_over", "recorded", "snapshot"),
)


def num_lives(run_dir: Path, worker: str) -> int:
    log = (run_dir / "logs" / f"{worker}.log").read_text()
    return log.count(" serving address=")


@pytest.mark.parametrize("num_workers", [pytest.param(1, marks=pytest.mark.long), 2])
def test_wherever_the_script_is_killed_nothing_is_done_twice(
    tmp_path: Path, tiny_model_folder: Path, monkeypatch: pytest.MonkeyPatch, num_workers: int
) -> None:
    book = tmp_path / "book"
    settings = (
        *(f"+task.book={book}", "total_steps=8", "checkpoint.every_steps=2"),
        *("scheduler.orphan_timeout_s=600", "evaluation.every_steps=3"),
        *(f"actor.parallel.data={num_workers}", f"rollout.num_workers={num_workers}"),
    )
    run_dir = tmp_path / "run"

    def start(place: str) -> RunProcess:
        monkeypatch.setenv("DIE_AT", place)
        return stack.enter_context(tiny_run(run_dir, tiny_model_folder, *settings, script=KILLED))

    with ExitStack() as stack:
        for place in PLACES:
            run = start(place)
            assert run.wait() == -signal.SIGKILL, f"{place}\n{run.story()}"
        run = start("")
        run.finish()
        groups: list[GroupAccount] = []
        account = read_account(run_dir / "ledger", groups.append)
    story = run.story()
    assert [group.attempt for group in groups] == [0] * 32, story
    assert {group.outcome for group in groups} == {"trained"}
    assert len(account.lineages) == 1
    assert (account.rows_lost, account.trained_again) == (0, [])
    # the books of the workers themselves
    episodes = Counter(line.split()[0] for line in book.read_text().splitlines())
    assert (set(episodes.values()), len(episodes)) == ({2}, 32), story
    for role in ("train", "rollout"):
        for index in range(num_workers):
            assert num_lives(run_dir, f"{role}-{index}") == 1, story
    names = [(record["name"], record["step"]) for record in run.records("evaluation")]
    assert len(names) == len(set(names))
    assert {name for name, _ in names} == {"before", "periodic", "after", "greedy"}
    # the step whose script died between its publication and its record
    assert len(set(range(1, 9)) - set(run.steps())) <= 1
    run.wait_until_gone()


def test_a_worker_that_dies_while_it_is_taken_over_is_started_again(
    tmp_path: Path, tiny_model_folder: Path
) -> None:
    settings = (
        *("total_steps=12", "rollout.num_workers=2", "evaluation.every_steps=0"),
        "scheduler.orphan_timeout_s=600",
        "task.num_free_episodes=24",  # of each of two workers: it is held after six steps
    )
    with tiny_run(tmp_path / "run", tiny_model_folder, *settings) as first:
        first.wait_for_step(2)
        first.send(signal.SIGKILL)
        first.wait()
        # it answers nothing, and its agent takes it for alive
        os.kill(first.worker_pid("rollout/0"), signal.SIGSTOP)
        gate_of(first.run_dir).write_bytes(b"." * 4)
        with tiny_run(tmp_path / "run", tiny_model_folder, *settings) as second:
            second.finish()
    account = read_account(first.run_dir / "ledger", lambda group: None)
    assert (account.rows_lost, account.trained_again, account.version) == (0, [], 12)
    lives = [num_lives(first.run_dir, name) for name in ("train-0", "rollout-0", "rollout-1")]
    assert lives == [1, 2, 1], second.story()
