"""What lends the nodes of a run: the job that SLURM is asked for, or what a Ray cluster is.

A scheduler is one of `SchedulerType`, or a class of the user's own by its import path.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

from areal_sc.config.fields import Section, apart, setting, shared
from areal_sc.user_code import named


class SchedulerType(StrEnum):
    """Where workers run.

    local: on this machine.
    slurm: on nodes of a cluster that SLURM has.
    ray: on nodes of a Ray cluster.
    """

    local = "local"
    slurm = "slurm"
    ray = "ray"


@dataclass
class RoleNodes(Section):
    """Nodes for one role alone; what is not given is as for the others."""

    nodes: int = setting(0, "nodes for this role alone; 0: it shares scheduler.slurm.nodes", ge=0)
    gpus_per_node: int = apart("${scheduler.slurm.gpus_per_node}", 0, "GPUs of each node", ge=0)
    cpus_per_node: int = apart("${scheduler.slurm.cpus_per_node}", 0, "CPUs of each node", ge=0)
    memory_per_node: str = apart("${scheduler.slurm.memory_per_node}", "", "memory of each: 64G")
    time_limit: str = apart("${scheduler.slurm.time_limit}", "", "most time of the job")
    partition: str = apart("${scheduler.slurm.partition}", "", "partition of the nodes")
    account: str = shared("${scheduler.slurm.account}", "", "who pays")
    constraint: str = apart("${scheduler.slurm.constraint}", "", "features that nodes need")
    extra_flags: list[str] = apart("${scheduler.slurm.extra_flags}", list, "flags of sbatch")


@dataclass
class RolloutNodes(RoleNodes):
    """Nodes for generation alone; what is not given is as for the others."""

    role_workers: int = shared("${rollout.num_workers}", 0, "rollout workers", ge=0)


@dataclass
class SlurmConfig(Section):
    """The jobs that the slurm scheduler submits; what is empty or 0 is left to the cluster."""

    nodes: int = setting(
        1,
        "nodes for roles without nodes of their own; each gets one agent",
        ge=1,
        idle=("train.nodes!=0 and rollout.nodes!=0",),
    )
    gpus_per_node: int = setting(0, "GPUs of each node", ge=0)
    cpus_per_node: int = setting(0, "CPUs of each node", ge=0)
    memory_per_node: str = setting("", "memory of each node: 64G")
    time_limit: str = setting("", "most time of a job: 12:00:00")
    partition: str = setting("", "partition that the nodes are of")
    account: str = setting("", "who pays")
    constraint: str = setting("", "features that the nodes need to have")
    extra_flags: list[str] = setting(list, "further flags of sbatch: [--exclusive]")
    gang: bool = setting(
        True,
        "all nodes begin together; false: those for generation join singly, and are asked for and "
        "given back as the run scales",
    )
    requeue: bool = setting(
        False, "SLURM starts jobs again that it has preempted, and the run waits for them"
    )
    setup: list[str] = setting(list, "shell lines before the agents start: [module load cuda]")
    container: list[str] = setting(
        list, "around agents: [apptainer, exec, x.sif]; or flags of srun, for pyxis"
    )
    python: str = setting("", "interpreter on the nodes; empty: where this one is")
    train: RoleNodes = setting(RoleNodes, idle=("train.nodes=0",))
    rollout: RolloutNodes = setting(RolloutNodes, idle=("rollout.nodes=0",))


_BUILT_IN: Final = [kind.value for kind in SchedulerType]


def own_scheduler(name: str) -> Any:
    """The class at `package.module:Class`; None: the name is one of `SchedulerType`.

    It is found as the caller would import it, that is also beside a script.

    Raises: ConfigError: there is none of that name.
    """
    if name in _BUILT_IN:
        return None
    return named(name, f"scheduler.type: expected {', '.join(_BUILT_IN)} or package.module:Class")


@dataclass
class RayConfig:
    """What the ray scheduler asks its cluster for."""

    address: str = setting("auto", "host:6379, ray://host:10001; auto: this machine's cluster")
    nodes: int = setting(0, "Ray nodes, each gets one agent; 0: all that have the resources", ge=0)
    resources: dict[str, float] = setting(
        dict, "of each node: {GPU: 8, CPU: 64}; empty: all CPUs and GPUs that it has"
    )
    runtime_env: dict[str, Any] = setting(dict, "of the actors, as ray.init takes it")
