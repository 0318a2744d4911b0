"""Runs at the edges of what the processes around them can do."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path

import pytest
from integration.run_process import PATIENT, tiny_run

from areal_sc.run.agent_files import living_agents


@pytest.mark.parametrize("is_agent", [True, False])
def test_the_death_of_the_agent_ends_the_run_and_is_named(
    tmp_path: Path, tiny_model_folder: Path, monkeypatch: pytest.MonkeyPatch, is_agent: bool
) -> None:
    """It, or its fork server, takes all workers along."""
    if is_agent:
        monkeypatch.setenv("AREAL_SC_TEST_EXECUTED", "1")  # not forked, see `agent_forks`
    memory = tmp_path / "memory"
    shared = f"transport.shared_memory={memory}"
    settings = (*PATIENT, "total_steps=100000", "scheduler.max_deaths=0", shared)
    with tiny_run(tmp_path / "run", tiny_model_folder, *settings) as run:
        run.wait_for_step(2)
        (agent,) = living_agents(run.run_dir)
        (server,) = (pid for pid in run.processes() if _parent(pid) == agent.pid)
        os.kill(agent.pid if is_agent else server, signal.SIGKILL)
        assert run.wait(60.0) == 5, run.story()
        if is_agent:
            assert "its agent ended with signal 9 (SIGKILL)" in run.output
            assert str(run.run_dir / "logs" / "agent-0.log") in run.output
        else:
            assert "ended with signal 9 (SIGKILL), since the fork server is gone" in run.output
        assert len(run.output.partition("ERROR ")[2].splitlines()) < 40
        run.wait_until_gone()
        assert not list(memory.iterdir())


def test_a_rank_without_rows_takes_part_and_weights_are_drawn_once(
    tmp_path: Path, tiny_model_folder: Path
) -> None:
    """As many minibatches as rows: in each of them one of two ranks has nothing to train on.

    The folder has no weights: those of the ranks are what the first answers are sampled by.
    """
    model = tmp_path / "model"
    shutil.copytree(tiny_model_folder, model, ignore=shutil.ignore_patterns("*.safetensors"))
    with tiny_run(
        tmp_path / "run",
        model,
        *("total_steps=2", "actor.parallel.data=2", "actor.ppo.num_minibatches=8"),
        "actor.random_init=true",
    ) as run:
        run.finish()
        first = run.records("step")[0]["train"]
        assert abs(first["behavior_kl"]) < 1e-4
        assert run.summary()["num_rows_trained"] == 2 * 8
        assert all(record["train"]["grad_norm"] >= 0 for record in run.records("step"))


def _parent(pid: int) -> int:
    """0: it has ended."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return 0
    return int(stat.rpartition(")")[2].split()[1])
