"""What became of every row of a run whose workers and script were killed, and that rejects some."""

from __future__ import annotations

import os
import signal
from collections import Counter
from pathlib import Path

from integration.run_process import PATIENT, gate_of, tiny_run

from areal_sc.controller.ledger.group_lives import RowFate, group_lives
from areal_sc.records.reading import rows


def test_every_row_has_one_life_and_none_ends_without_a_reason(
    tmp_path: Path, tiny_model_folder: Path
) -> None:
    settings = (
        *(*PATIENT, "total_steps=12", "rollout.num_workers=2"),
        *("rollout.keep_groups=with_signal", "actor.parallel.data=2"),
        # of 80 groups some 18 have a signal: several steps come, and not all before it is held
        *("task.num_free_episodes=80", "evaluation.every_steps=0"),
    )
    with tiny_run(tmp_path / "run", tiny_model_folder, *settings) as first:
        first.wait_for_step(1)
        os.kill(first.worker_pid("rollout/0"), signal.SIGKILL)
        first.wait_until(lambda: first.events("workers_restarted"), "a worker that is back")
        gate_of(first.run_dir).write_bytes(b"." * 99)
        first.wait_for_step(2)
        first.send(signal.SIGKILL)
        first.wait()
        with tiny_run(tmp_path / "run", tiny_model_folder, *settings) as second:
            second.finish()
    lives = {life.group: life for life in group_lives(first.run_dir)}
    assert list(lives) == [*range(len(lives))]
    ended = [row for life in lives.values() for it in life.attempts for row in it.rows]
    assert all(row.why for row in ended if row.fate not in (RowFate.trained, RowFate.waiting))
    assert {row.fate for row in ended} >= {RowFate.trained, RowFate.rejected}
    for life in lives.values():
        assert [it.attempt for it in life.attempts] == [*range(len(life.attempts))]
        assert all(it.why for it in life.attempts[:-1])
    trained = [row for row in ended if row.fate is RowFate.trained]
    assert Counter(row.version for row in trained) == dict.fromkeys(range(1, 13), 8)
    for version in range(1, 13):
        of_step = [row for row in trained if row.version == version]
        assert sorted(row.place or 0 for row in of_step) == [*range(8)]
        places = {(row.rank, row.minibatch) for row in of_step}
        assert places == {(rank, minibatch) for rank in (0, 1) for minibatch in (0, 1)}
    found = Counter[tuple[int, int, int, int]]()
    for recorded in rows(first.run_dir):
        place = recorded.group, recorded.attempt, recorded.episode, recorded.row
        found[place] += 1
        attempt = lives[recorded.group].attempts[recorded.attempt]
        if attempt.why and not attempt.rows:  # killed when they were written, and not yet told
            assert attempt.worker == recorded.worker == "rollout/0"
            continue
        (row,) = (it for it in attempt.rows if (it.episode, it.row) == place[2:])
        assert (attempt.worker, row.reward) == (recorded.worker, recorded.reward)
        assert row.num_tokens == len(recorded.input_ids)
        assert Counter(recorded.versions[recorded.loss_mask].tolist()) == dict(row.versions)
    assert set(found.values()) == {1}
