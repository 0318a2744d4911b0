"""Two models in one script: their workers, logs, snapshots and exports do not meet."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from areal_sc import FSDPPPOActor, GRPOConfig, TrainController, start
from areal_sc.errors import ConfigError
from areal_sc.run.run_folder import RunFolder
from areal_sc.schedulers.base import Scheduler
from areal_sc.sources.prompts import Prompts
from areal_sc.system.durable import partial_of


class Demonstrations(Prompts):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        return {"input_ids": [1, 2, 3 + index, 4], "loss_mask": [0, 1, 1, 1]}


def test_two_controllers_of_one_role_are_refused_before_anything_starts(
    tiny_config: Callable[..., GRPOConfig], scheduler: Scheduler
) -> None:
    actors = [TrainController(FSDPPPOActor(tiny_config().actor), scheduler) for _ in range(2)]
    with pytest.raises(ConfigError, match="two controllers have the role 'train'"), start(*actors):
        pass


def test_each_controller_has_what_is_its_own(
    tiny_config: Callable[..., GRPOConfig], scheduler: Scheduler, tmp_path: Path
) -> None:
    config = tiny_config("actor.optimizer.lr=1e-2")
    run = RunFolder(scheduler.config.run_dir)
    actor = TrainController(FSDPPPOActor(config.actor), scheduler)
    reference = TrainController(FSDPPPOActor(config.actor), scheduler, role="ref")
    with start(actor, reference):
        actor.sft_update(Demonstrations(), [0, 1])
        reference.sft_update(Demonstrations(), [2, 3])
        for controller in (actor, reference):
            controller.begin_snapshot().result()
            controller.save_hf(tmp_path / controller.role)
        snapshot = run.snapshot_path(1)
        partial_of(snapshot).rename(snapshot)
        assert {folder.name for folder in snapshot.iterdir()} == {"engine", "engine-ref"}
        reference.sft_update(Demonstrations(), [0, 1])
        reference.load_snapshot(1)
        reference.save_hf(tmp_path / "again")
        assert (run.log_path("train/0").is_file(), run.log_path("ref/0").is_file()) == (
            True,
            True,
        )
    assert not run.exports.exists()
    weights = {
        name: AutoModelForCausalLM.from_pretrained(tmp_path / name).get_output_embeddings().weight
        for name in ("train", "ref", "again")
    }
    assert (weights["train"] - weights["ref"]).abs().max() > 1e-3
    assert weights["again"].equal(weights["ref"])
