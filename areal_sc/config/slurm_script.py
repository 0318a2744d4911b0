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
"""Of a start of an agent; in words of the shell."""
_END_LINES: Final = ("trap : TERM  # the agents get it, too", "until wait; do :; done")
JOIN_SECRET: Final = "AREAL_SC_JOIN_SECRET"
"""Environment variable of a job: the first line of its agents' input, which is secret; of a
heterogeneous job a line for each component."""


def job_script(config: SchedulerConfig, run_dir: Path, plans: Sequence[JobPlan]) -> str:
    """What `sbatch` gets; the arguments of the agents are in its environment.

    Args:
        run_dir: absolute; nodes that do not see it keep their logs to themselves.
        plans: one of `submissions`: a job, or the components of one.
    """
    wishes = [_wish_lines(config, plan) for plan in plans]
    lines = [*wishes[0], *(line for more in wishes[1:] for line in ("#SBATCH hetjob", *more))]
    # a shell that has it from the beginning shows it in /proc as long as it lives
    again = f'exec env -u {JOIN_SECRET} bash "$0" <<<"${JOIN_SECRET}"'
    lines += _log_lines(config, run_dir, "slurm-$SLURM_JOB_ID")
    lines.append('cd "$SLURM_SUBMIT_DIR" 2>/dev/null || cd /')
    lines.append(f'[ -z "${{{JOIN_SECRET}:-}}" ] || {again}')
    is_replaced = not config.slurm.gang and plans[0].shares == {Purpose.rollout: 1}
    lines += [f"export {COMES_BACK}=1"] if config.slurm.requeue or is_replaced else []
    return "\n".join(["#!/bin/bash", *lines, *_job_lines(config, run_dir, plans)]) + "\n"


def _wish_lines(config: SchedulerConfig, plan: JobPlan) -> list[str]:
    """What `sbatch` reads of a job, or of a component."""
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
        "qos": request.qos,
        "constraint": request.constraint,
        # a node may have neither the run folder nor the folder that the script was started in
        "output": "/dev/null",
        "chdir": "/",
    }
    lines = [
        f"#SBATCH --{flag}={shlex.quote(str(value))}" for flag, value in flags.items() if value
    ]
    lines.append(f"#SBATCH --{'requeue' if config.slurm.requeue else 'no-requeue'}")
    # a component of which a node is lost cannot go on: SLURM would end the others alone
    lines += [] if plan.is_component else ["#SBATCH --no-kill"]
    return [*lines, *(f"#SBATCH {flag}" for flag in request.extra_flags)]


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
    lines = _begin_lines(config, [plan])
    if len(nodes) == 1:
        return [
            *lines,
            f"node={shlex.quote(nodes[0])}",
            f"exec {start}",
        ]  # whose exit code tells what happened
    return [*lines, *_each_node(shlex.join(nodes), start), *_END_LINES]


def _job_lines(config: SchedulerConfig, run_dir: Path, plans: Sequence[JobPlan]) -> list[str]:
    """Shell lines that start the agents of a job, or of the components of one, one a node."""
    lines = _begin_lines(config, plans)
    for plan in plans:
        group = f"_HET_GROUP_{plan.component}" if plan.is_component else ""
        names = f'$(scontrol show hostnames "$SLURM_JOB_NODELIST{group}")'
        lines += _each_node(names, _start_line(config, run_dir, plan))
    return [*lines, *_END_LINES]


def _begin_lines(config: SchedulerConfig, plans: Sequence[JobPlan]) -> list[str]:
    """The shell's input has a line for each plan: the first one of its agents' own input."""
    return [
        *(f"read -r {_secret_of(plan)}" for plan in plans),
        'export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"',
        'export TOKENIZERS_PARALLELISM="${TOKENIZERS_PARALLELISM:-false}"',
        *config.slurm.setup,
    ]


def _secret_of(plan: JobPlan) -> str:
    """Name of the shell's variable."""
    return f"join_secret_{plan.component}" if plan.is_component else "join_secret"


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
        *([f"--het-group={plan.component}"] if plan.is_component else []),
        *([f"--cpus-per-task={cpus}"] if (cpus := plan.request.cpus_per_node) else []),
        *srun_flags,
    ]
    container, python = config.slurm.container, config.slurm.python or sys.executable
    if container and container[0].startswith("--"):
        step, container = [*step, *container], []
    agent = f"exec {shlex.join([*container, python])} -P -m areal_sc.workers.agent"
    run_id, *others = (f"${AGENT_WORDS}_{number}" for number in range(NUM_AGENT_WORDS))
    # two jobs of a run may have a node in common: what one ends must not be the other's memory
    words = " ".join(f'"{word}"' for word in (f"{run_id}-${{SLURM_JOB_ID/+/-}}", *others))
    # SLURM tells the tasks of all components the id of the first one
    own_id = [f"SLURM_JOB_ID={plan.job_id('$SLURM_JOB_ID')}"] if plan.is_component else []
    first = "; ".join([*own_id, *_log_lines(config, run_dir, _AGENT_LOG)])
    command = shlex.quote(f"{first}; {before}{agent} {words}")
    return f'{shlex.join(step)} --nodelist="$node" bash -c {command} <<<"${_secret_of(plan)}"'


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
