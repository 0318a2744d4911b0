"""Whole runs whose answers come from SGLang: learning, publication, servers lost on the way."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest
from integration.run_process import REPOSITORY, TINY_YAML, RunProcess, started, tiny_run
from integration.scripts.episodes import by_letters
from integration.scripts.tiny_run import letter_prompts
from integration.sglang.policies import Policies
from integration.sglang.test_sglang_bad_input import KEY_VARIABLE, running_servers

from areal_sc import (
    FSDPPPOActor,
    GRPOConfig,
    RolloutController,
    SingleTurnWorkflow,
    TrainController,
    load_config,
    make_generator,
    make_scheduler,
)
from areal_sc import start as start_controllers
from areal_sc.engines.servers.engine import ServerEngine

pytestmark = pytest.mark.timeout(300)

SAME_KL = 1e-6
"""Of SGLang's log-probabilities and the trainer's; an update of lr 1e-2 moves it by far more."""

SERVERS = ("rollout.engine=sglang", "sglang.num_servers=2", "sglang.stop_timeout_s=2")


def schedulers(run: RunProcess) -> list[int]:
    """Process ids of the servers' scheduler processes."""
    return [pid for pid, line in run.processes().items() if "sglang::scheduler" in line]


def launchers(run: RunProcess) -> list[int]:
    return [pid for pid, line in run.processes().items() if "servers/launcher.py" in line]


def test_letter_sort_learns(sglang_python: Path, tmp_path: Path) -> None:
    """As with the embedded engine; that the engine is SGLang is one line of the settings."""
    arguments = (
        *("--config", str(REPOSITORY / "configs" / "letter_sort.yaml")),
        *(f"actor.path={tmp_path / 'warm_start'}", "total_steps=40", "task.median_letters=4"),
        *(*SERVERS, f"sglang.python={sglang_python}"),
    )
    with started(tmp_path / "run", REPOSITORY / "examples" / "letter_sort.py", *arguments) as run:
        run.wait(240)
        run.finish()
        summary = run.summary()
        assert summary["num_rows_trained"] == 40 * 32 * 8
        assert summary["num_rows_trained_twice"] == 0
        assert summary["accuracy_after"] > summary["accuracy_before"] + 0.15
        last = run.records("step")[-1]["counters"]
        assert last["updated_servers"] >= 40  # two servers; a busy one may skip versions
        assert last["update_bytes"] > 0
        run.wait_until_gone()


def test_servers_that_are_lost_cost_no_row(
    sglang_python: Path, tmp_path: Path, tiny_model_folder: Path
) -> None:
    """One is killed, later one hangs; the account is whole, and both come back."""
    with tiny_run(
        tmp_path / "run",
        tiny_model_folder,
        *(*SERVERS, f"sglang.python={sglang_python}", "total_steps=24"),
        *("task.num_free_episodes=24", "sglang.hung_after_s=4", "scheduler.orphan_timeout_s=20"),
    ) as run:
        run.wait_for_step(1)
        os.kill(launchers(run)[0], signal.SIGKILL)
        run.wait_until(lambda: "is back" in story(run, 1), "the killed server to be back")
        (gate := gate_file(run)).write_bytes(b"." * 2)
        run.wait_for_step(5)
        os.kill(schedulers(run)[1], signal.SIGSTOP)
        gate.write_bytes(b"." * 3)
        run.wait_until(lambda: "is back" in story(run, 2), "the hung server to be back")
        assert len(run.steps()) < 24
        gate.write_bytes(b"." * 1000)
        run.finish()
        summary = run.summary()
        assert summary["num_rows_trained"] == 24 * 4 * 2
        assert summary["num_rows_trained_twice"] == 0
        assert summary["num_episodes_rejected"] == 0
        run.wait_until_gone()


def story(run: RunProcess, times: int) -> str:
    """The worker's log if servers have come back that often, else nothing."""
    log = (run.run_dir / "logs" / "rollout-0.log").read_text()
    return log if log.count(" is back ") >= times else ""


def gate_file(run: RunProcess) -> Path:
    return run.run_dir.with_name(f"{run.run_dir.name}-gate")


@pytest.mark.asyncio(loop_scope="session")
@pytest.mark.parametrize("method", ["disk", "collective"])
async def test_servers_that_run_already_get_the_trainers_weights(
    engine: ServerEngine,
    policies: Policies,
    tmp_path: Path,
    method: str,
) -> None:
    """What they sample then has the log-probabilities that the trainer computes."""
    servers = running_servers(engine, num_servers=2)
    overrides = (
        *("--config", str(TINY_YAML), f"run_dir={tmp_path / 'run'}", "task.gate=unused"),
        *(f"actor.path={policies.folder}", "actor.optimizer.lr=2e-3", "rollout.num_workers=2"),
        *("rollout.engine=sglang", f"sglang.urls=[{','.join(servers.urls)}]"),
        *(f"sglang.api_key_env={KEY_VARIABLE}", f"weight_update.method={method}"),
        "weight_update.bucket_bytes=50000",
    )
    await asyncio.to_thread(train_and_compare, load_config(overrides, GRPOConfig))
    version = policies.add()
    await engine.update_weights(version, policies.source(version))  # they are the engine's again


def train_and_compare(config: GRPOConfig) -> None:
    prompts, workflow = letter_prompts(16, seed=3), SingleTurnWorkflow(by_letters)
    scheduler = make_scheduler(config.scheduler)
    try:
        actor = TrainController(FSDPPPOActor(config.actor), scheduler)
        rollout = RolloutController(make_generator(config.rollout), scheduler)
        with start_controllers(actor, rollout):
            for step in range(3):
                batch = rollout.rollout_batch(prompts, workflow, 4)
                batch = actor.compute_proximal_logprobs(actor.compute_advantages(batch))
                stats = actor.ppo_update(batch)
                assert stats["behavior_kl"] < SAME_KL, f"version {step}"
                assert stats["grad_norm"] > 0
                actor.publish_weights(rollout)
                rollout.wait_for_weights()
            assert actor.publication_stats["failed_broadcasts"] == 0
    finally:
        scheduler.close()
