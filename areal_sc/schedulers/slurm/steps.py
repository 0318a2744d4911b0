"""Steps in jobs, each with an agent on a node; an `srun` on this machine for each of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from areal_sc.config.schema import SchedulerConfig
from areal_sc.config.slurm_script import RESTART_COUNT, step_lines
from areal_sc.ids import random_id
from areal_sc.nodes.spec import Joining
from areal_sc.run.run_folder import RunFolder
from areal_sc.schedulers.agent_process import start_beside, wait_or_kill
from areal_sc.schedulers.join_server import JoinServer
from areal_sc.schedulers.slurm import commands
from areal_sc.schedulers.slurm.job import Job, Step

STEPS_LOG: Final = "slurm-steps"
STEP_END_S: Final = 5.0
"""An `srun` whose step has ended follows it by then."""


class Steps:
    """The steps that this process has started.

    Args:
        variables: further environment of agents.
        joins: invites them.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        folder: RunFolder,
        variables: Mapping[str, str],
        joins: JoinServer,
    ) -> None:
        self._config = config
        self._folder = folder
        self._variables = variables
        self._joins = joins
        self._steps: list[Step] = []

    def start(self, job: Job, nodes: Sequence[str], *, restart: int, before: str = "") -> Step:
        """An agent on each of these nodes of a job: the run's own, or the one around the script.

        Args:
            restart: how often SLURM has started the job again.
            before: a shell command that each node runs first.
        """
        flags = [f"--jobid={job.job_id}", "--overlap", f"--job-name={job.name}"]
        lines = step_lines(self._config, self._folder.path, job.plan, nodes, flags, before)
        restarts = {RESTART_COUNT: str(restart)} if restart else {}
        env = commands.environment({**self._variables, **restarts})
        command = ["bash", "-c", "\n".join(lines)]
        step = start_beside(command, self._folder.log_path(STEPS_LOG), env)
        self._steps.append(step)
        assert step.stdin is not None
        with suppress(BrokenPipeError), step.stdin as pipe:  # who waits for the step learns its end
            pipe.write(f"{self._joins.invite(random_id(), len(nodes), restart)}\n".encode())
        return step

    def close(self, *, have_ended: bool) -> None:
        """Nothing of them is left on this machine.

        Args:
            have_ended: SLURM says so; each `srun` follows.
        """
        for step in self._steps:
            wait_or_kill(step, STEP_END_S if have_ended else 0)


def log_of(agent: Joining, folder: RunFolder) -> Path:
    """Where its `srun` writes what it says: each agent of a run has a log of its own."""
    again = f"-{agent.restart}" if agent.restart else ""
    return folder.log_path(f"agent/{agent.node}-{agent.job}.{agent.step}{again}")
