"""Whole runs on rows with no, one and several pictures, of which processes are killed."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from builders import picture
from integration.run_process import PATIENT, REPOSITORY, SCRIPTS, open_gate, tiny_run
from integration.test_dead_rollout_workers import kill_and_see_it_again
from picture_models import save_picture_model
from PIL import Image

from areal_sc import DPOTrainer, GRPOConfig, load_config
from areal_sc.controller.ledger.ledger_account import GroupAccount, read_account
from areal_sc.controller.train.train_controller import TrainController
from areal_sc.records.metrics_log import History
from areal_sc.records.reading import pictures, rows
from areal_sc.run.run_folder import RunFolder

TOTAL_STEPS = 20
NUM_FREE_EPISODES = 40
"""Two lives of a worker cannot end the run with that many."""
COLOURS = {"r": "red", "b": "blue", "g": "green"}


def test_a_worker_and_a_rank_die_and_each_row_is_trained_once(tmp_path: Path) -> None:
    model = save_picture_model(tmp_path / "model", "qwen2_5_vl")
    drawn = [picture(seed) for seed in range(8)]
    for number, content in enumerate(drawn):
        (tmp_path / f"{number}.png").write_bytes(content)
    # row n has n % 3 pictures, of which others have some
    seen = [[(number + it) % len(drawn) for it in range(number % 3)] for number in range(48)]
    given = [
        {"prompt": f"see {number}", "images": [str(tmp_path / f"{it}.png") for it in its]}
        for number, its in enumerate(seen)
    ]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(it) + "\n" for it in given))
    with tiny_run(
        tmp_path / "run",
        model,
        *(f"total_steps={TOTAL_STEPS}", f"task.num_free_episodes={NUM_FREE_EPISODES}", *PATIENT),
        *(f"+task.rows={file}", "actor.train_vision_tower=true"),
        script=SCRIPTS / "seen_run.py",
    ) as run:
        run.wait_for_step(1)
        for worker in ("rollout/0", "train/0"):
            kill_and_see_it_again(run, worker, run.worker_pid(worker))
        for _ in range(TOTAL_STEPS):
            open_gate(run.run_dir)
        run.finish()
        assert run.steps() == list(range(1, TOTAL_STEPS + 1))
        summary = run.summary()
        assert summary["num_rows_trained"] == TOTAL_STEPS * 4 * 2
        assert summary["num_rows_trained_twice"] == 0
        assert summary["num_episodes_rejected"] == 0
        assert summary["num_worker_restarts"] == 2
        # of the first policy, which has seen the same pictures
        assert abs(run.records("step")[0]["train"]["behavior_kl"]) < 1e-6
        groups = list[GroupAccount]()
        account = read_account(run.run_dir / "ledger", groups.append)
        assert (account.rows_lost, account.trained_again) == (0, [])
        content = {told.digest: it for told, it in pictures(run.run_dir)}
        assert set(content.values()) == set(drawn)
        for row in rows(run.run_dir):
            its = [content[it.digest] for it in row.pictures]
            assert its == [drawn[number] for number in seen[row.index]]


def colour_pairs(folder: Path, count: int, seed: int) -> list[dict[str, Any]]:
    """The preferred answer names the colours of the pictures; without any it is `n`."""
    chance = np.random.default_rng(seed)
    found = []
    for number in range(count):
        names = chance.choice([*COLOURS], number % 3)
        paths = []
        for place, name in enumerate(names):
            colour = Image.new("RGB", (24, 24), COLOURS[name])
            noise = chance.integers(0, 255, (24, 24, 3), dtype=np.uint8)
            path = folder / f"{seed}-{number}-{place}.jpg"
            Image.blend(colour, Image.fromarray(noise), 0.2).save(path)
            paths.append(str(path))
        others = chance.choice([*COLOURS], 2) if not len(names) else np.roll([*"rbg"], 1)
        swap = dict(zip("rbg", others, strict=True)) if len(names) else {}
        chosen = "".join(names) or "n"
        rejected = "".join(swap[name] for name in names) or str(others[0])
        pair = {"prompt": "name them", "chosen": chosen, "rejected": rejected}
        found.append({**pair, "images": paths} if paths else pair)
    return found


def test_dpo_learns_what_is_preferred_of_pictures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rank dies once, before a step."""
    model = save_picture_model(tmp_path / "model", "idefics3")
    num_steps, update = 0, TrainController.update_rows

    def update_after_death(self: TrainController, *arguments: Any, **named: Any) -> Any:
        nonlocal num_steps
        num_steps += 1
        if num_steps == 6:
            os.kill(self.fleet.members[0].worker.pid, signal.SIGKILL)
        return update(self, *arguments, **named)

    monkeypatch.setattr(TrainController, "update_rows", update_after_death)
    config = load_config(
        ["--config", str(REPOSITORY / "configs" / "dpo.yaml"), f"run_dir={tmp_path / 'run'}"],
        GRPOConfig,
        f"actor.path={model}",
        *("total_steps=40", "actor.dtype=float32", "actor.device=cpu", "actor.optimizer.lr=5e-3"),
        *("actor.max_tokens_per_micro_batch=512", "evaluation.every_steps=20", *PATIENT),
        generates=False,
    )
    DPOTrainer(config).fit(
        colour_pairs(tmp_path, 96, 0), batch_size=16, held_out=colour_pairs(tmp_path, 24, 1)
    )
    history = History.read(RunFolder(tmp_path / "run").metrics_path)
    assert [it.step for it in history.steps] == list(range(1, 41))
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["num_worker_restarts"] == 1
    before, after = history.evaluations[0], history.evaluations[-1]
    assert before.workflow["margin"] == pytest.approx(0.0, abs=1e-4)
    assert after.accuracy is not None
    assert after.accuracy > 0.75
