"""A whole run that trains an adapter: its reference is the model under it, and ranks may die."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import torch
from integration.ranks import loaded_weights
from integration.run_process import open_gate, tiny_run
from safetensors.torch import load_file

from areal_sc.__main__ import main
from areal_sc.config.lora_settings import LoraConfig

SETTINGS = (
    *("actor.lora.rank=3", "actor.lora.targets=[q_proj,v_proj,down_proj]", "total_steps=5"),
    *("actor.optimizer.lr=1e-2", "actor.ppo.kl_coefficient=0.1", "checkpoint.every_steps=2"),
    *("task.num_free_episodes=32", "rollout.max_staleness=0", "actor.ppo.kl_estimator=k3"),
)


def test_a_rank_dies_and_the_run_ends_with_an_adapter(
    tmp_path: Path, tiny_model_folder: Path
) -> None:
    run_dir = tmp_path / "run"
    with tiny_run(run_dir, tiny_model_folder, *SETTINGS) as run:
        run.wait_for_step(2)
        os.kill(run.worker_pid("train/0"), signal.SIGKILL)
        for _ in range(9):
            open_gate(run_dir)
        run.finish()
        steps = [step["train"] for step in run.records("step")]
        run.wait_until_gone()
    assert [step["num_updates"] for step in steps] == [2] * 5
    # KL to the model under the adapter, as it is estimated: 0 while that is new
    assert abs(steps[0]["reference_kl"]) < abs(steps[-1]["reference_kl"])
    # what is served is the adapter merged, and what is trained computes with it apart
    assert all(step["mismatch"] <= 1e-4 for step in steps)

    main(["export", str(run_dir), str(tmp_path / "adapter"), "--adapter"])
    main(["export", str(run_dir), str(tmp_path / "whole")])
    assert_adapter_is_merged(tiny_model_folder, tmp_path / "adapter", run_dir / "model", rank=3)
    whole, left = (loaded_weights(it) for it in (tmp_path / "whole", run_dir / "model"))
    assert all(torch.equal(left[name], whole[name]) for name in whole | left)

    # it is what the next run begins with, in generation, too
    settings = (*SETTINGS, "actor.ppo.kl_coefficient=0", "total_steps=1")
    settings += (f"actor.lora.path={tmp_path / 'adapter'}",)
    with tiny_run(tmp_path / "again", tiny_model_folder, *settings) as run:
        run.finish()
        (step,) = run.records("step")
        run.wait_until_gone()
    assert step["train"]["mismatch"] <= 1e-4


def assert_adapter_is_merged(base: Path, adapter: Path, merged: Path, *, rank: int) -> None:
    """The merged model is the base model and what the adapter adds."""
    parts = load_file(adapter / "adapter_model.safetensors")
    of_base, of_merged = loaded_weights(base), loaded_weights(merged)
    scale = LoraConfig().alpha / rank
    num_changed = 0
    for name, values in of_base.items():
        key = f"base_model.model.{name.removesuffix('.weight')}.lora_A.weight"
        expected = values
        if key in parts:
            expected = values + scale * (parts[key.replace("lora_A", "lora_B")] @ parts[key])
            num_changed += not torch.equal(of_merged[name], values)
        assert torch.allclose(of_merged[name], expected, atol=1e-6), name
    assert num_changed == len(parts) // 2 > 0
