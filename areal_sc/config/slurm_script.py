"""The text of each job that `scheduler.type=slurm` submits."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from areal_sc.config.placement import Purpose
from areal_sc.config.schema import SchedulerConfig
from areal_sc.config.slurm_jobs import JobPlan

AGENT_WORDS: Final = "AREAL_SC_AGENT"
"""Prefix of the environment variables that hold the agents' arguments; none of them is secret."""
COMES_BACK: Final = "AREAL_SC_COMES_BACK"
"""Environment variable of agents that SLURM starts again when it has preempted them, or in whose
place the run asks for another node."""
NUM_AGENT_WORDS: Final = 3
RESTART_COUNT: Final = "SLURM_RESTART_COUNT"
"""Environment variable of a job that SLURM has started again, and so of its agents. Whoever starts
a step in it from elsewhere sets it, as SLURM does not."""
_AGENT_LOG: Final = (
    f"agent-$SLURMD_NODENAME-$SLURM_JOB_ID.$SLURM_STEP_ID${{{RESTART_COUNT}:+-${RESTART_COUNT}}}"
)
"""Name of the log of one start of an agent, without `.log`; the shell fills in its variables."""
_END_LINES: Final = ("trap : TERM  # the agents get it, too", "until wait; do :; done")
JOIN_SECRET: Final = "AREAL_SC_JOIN_SECRET"
"""Environment variable of a job: the first line of its agents' input, which is secret."""


def job_script(config: SchedulerConfig, run_dir: Path, plan: JobPlan) -> str:
    """What `sbatch` gets; the arguments of the agents are in its environment.

    Args:
        run_dir: absolute; nodes that do not see it keep their logs to themselves.
    """
    lines = _wish_lines(config, plan)
    # a shell that has it from the beginning shows it in /proc as long as it lives
    again = f'exec env -u {JOIN_SECRET} bash "$0" <<<"${JOIN_SECRET}"'
    lines += _log_lines(config, run_dir, "slurm-$SLURM_JOB_ID")
    lines.append('cd "$SLURM_SUBMIT_DIR" 2>/dev/null || cd /')
    lines.append(f'[ -z "${{{JOIN_SECRET}:-}}" ] || {again}')
    is_replaced = not config.slurm.gang and plan.shares == {Purpose.rollout: 1}
    lines += [f"export {COMES_BACK}=1"] if config.slurm.requeue or is_replaced else []
    names = '$(scontrol show hostnames "$SLURM_JOB_NODELIST")'
    lines += _begin_lines(config)
    lines += _each_node(names, _start_line(config, run_dir, plan))
    return "\n".join(["#!/bin/bash", *lines, *_END_LINES]) + "\n"


def _wish_lines(config: SchedulerConfig, plan: JobPlan) -> list[str]:
    """What `sbatch` reads of a job."""
    request = plan.request
    flags = {
        "nodes": plan.num_nodes,
        "ntasks-per-node": 1,
        "gpus-per-node": request.gpus_per_node,
        "cpus-per-task": request.cpus_per_node,
        "mem": request.memory_per_node,
        "time": request.time_limit,
        "partition": request.partition,
        "account": request.account,
        "constraint": request.constraint,
        # a node may have neither the run folder nor the folder that the script was started in
        "output": "/dev/null",
        "chdir": "/",
    }
    lines = [
        f"#SBATCH --{flag}={shlex.quote(str(value))}" for flag, value in flags.items() if value
    ]
    lines.append(f"#SBATCH --{'requeue' if config.slurm.requeue else 'no-requeue'}")
    return [*lines, "#SBATCH --no-kill", *(f"#SBATCH {flag}" for flag in request.extra_flags)]


def step_lines(
    config: SchedulerConfig,
    run_dir: Path,
    plan: JobPlan,
    nodes: Sequence[str],
    srun_flags: Sequence[str],
    before: str = "",
) -> list[str]:
    """Shell lines that start agents from outside of their job, one a node, and end with them.

    Args:
        nodes: those of the agents.
        srun_flags: further flags of `srun`.
        before: a shell command that each node runs first.
    """
    start = _start_line(config, run_dir, plan, srun_flags, before)
    lines = _begin_lines(config)
    if len(nodes) == 1:
        return [
            *lines,
            f"node={shlex.quote(nodes[0])}",
            f"exec {start}",
        ]  # whose exit code tells what happened
    return [*lines, *_each_node(shlex.join(nodes), start), *_END_LINES]


def _begin_lines(config: SchedulerConfig) -> list[str]:
    """Shell lines before those of agents; its input is the first line of each agent's own."""
    return [
        "read -r join_secret",
        'export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"',
        'export TOKENIZERS_PARALLELISM="${TOKENIZERS_PARALLELISM:-false}"',
        *config.slurm.setup,
    ]


def _each_node(names: str, start: str) -> list[str]:
    return [f"for node in {names}; do", f"  {start} &", "done"]


def _start_line(
    config: SchedulerConfig,
    run_dir: Path,
    plan: JobPlan,
    srun_flags: Sequence[str] = (),
    before: str = "",
) -> str:
    """The shell's words that start an agent on `$node`; arguments as in `step_lines`.

    Each agent has an `srun` of its own, since one for all nodes ends when a node comes back after a
    loss that slurmctld did not notice. Each has a log of its own, named after its step.
    """
    step = [
        # an `srun` that gets its task's output would wait for that of a node that is lost
        *("srun", "--nodes=1", "--ntasks=1", "--output=none"),
        *([f"--cpus-per-task={cpus}"] if (cpus := plan.request.cpus_per_node) else []),
        *srun_flags,
    ]
    container, python = config.slurm.container, config.slurm.python or sys.executable
    if container and container[0].startswith("--"):
        step, container = [*step, *container], []
    agent = f"exec {shlex.join([*container, python])} -P -m areal_sc.nodes.agent"
    run_id, *others = (f"${AGENT_WORDS}_{number}" for number in range(NUM_AGENT_WORDS))
    # two jobs of a run may have a node in common: what one ends must not be the other's memory
    words = " ".join(f'"{word}"' for word in (f"{run_id}-$SLURM_JOB_ID", *others))
    first = "; ".join(_log_lines(config, run_dir, _AGENT_LOG))
    command = shlex.quote(f"{first}; {before}{agent} {words}")
    return f'{shlex.join(step)} --nodelist="$node" bash -c {command} <<<"$join_secret"'


def _log_lines(config: SchedulerConfig, run_dir: Path, name: str) -> list[str]:
    """Shell lines that give what follows a log: in the run folder, if the node can write there."""
    folder = shlex.quote(str(run_dir / "logs"))
    other = shlex.quote(config.node_folder)
    return [
        f"logs={folder} mine={other}/areal_sc-$(id -u)",
        # a folder that another user has put there is not written to
        '[ -w "$logs" ] || { (umask 077; mkdir -p "$mine/logs"); logs=; }',
        '[ -n "$logs" ] || [ ! -O "$mine" ] || logs=$mine/logs',
        f'[ -z "$logs" ] || exec >>"$logs/{name}.log" 2>&1',
    ]
