"""Which jobs a run asks SLURM for.

Nodes that are alike are one job, whatever they are for; nodes that differ are a job each.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from types import MappingProxyType
from typing import Final

from areal_sc.config.placement import Purpose
from areal_sc.config.slurm_settings import RoleNodes, SlurmConfig

_SHIFTS: Final = MappingProxyType({"K": 10, "": 20, "M": 20, "G": 30, "T": 40})


@dataclass(frozen=True)
class NodeRequest:
    """What each node of a job has to be; what is empty or 0 is left to the cluster."""

    gpus_per_node: int = 0
    cpus_per_node: int = 0
    memory_per_node: str = ""
    time_limit: str = ""
    partition: str = ""
    account: str = ""
    constraint: str = ""
    extra_flags: tuple[str, ...] = ()

    @classmethod
    def of(cls, settings: SlurmConfig | RoleNodes) -> NodeRequest:
        """What the settings say of each node."""
        values = {it.name: getattr(settings, it.name) for it in fields(cls)}
        return cls(**values | {"extra_flags": tuple(settings.extra_flags)})


@dataclass(frozen=True)
class JobPlan:
    """A job to submit.

    Attributes:
        request: each of its nodes.
        shares: purpose -> number of its nodes.
        num_jobs: so many like this.
    """

    request: NodeRequest
    shares: dict[Purpose, int] = field(hash=False)
    num_jobs: int = 1

    @property
    def num_nodes(self) -> int:
        return sum(self.shares.values())

    @property
    def kind(self) -> str:
        """Names it in messages and in the names of jobs: `any`, `train`, `train-rollout`."""
        return "-".join(self.shares)

    @property
    def single(self) -> JobPlan:
        """One of `num_jobs`."""
        return replace(self, num_jobs=1)

    def of_one(self, purpose: Purpose) -> JobPlan:
        """A job of one node, in the place of one that is lost."""
        return replace(self, shares={purpose: 1}, num_jobs=1)


def job_plans(slurm: SlurmConfig) -> list[JobPlan]:
    """The jobs of a run: one, unless roles have nodes of their own that differ, or join singly."""
    plans: list[JobPlan] = []
    for purpose, num_nodes, request in _wanted(slurm):
        if purpose is Purpose.rollout and not slurm.gang:
            plans.append(JobPlan(request, {purpose: 1}, num_nodes))
        elif plans and plans[0].request == request:
            plans[0].shares[purpose] = num_nodes
        else:
            plans.append(JobPlan(request, {purpose: num_nodes}))
    return plans


def memory_bytes(words: str) -> int | None:
    """Bytes that sbatch reads in words such as `64G`; a number without a letter is in MiB. None:
    the words say nothing, or something else."""
    found = re.fullmatch(r"([0-9]+)([KMGT]?)B?", words.strip().upper())
    return int(found[1]) << _SHIFTS[found[2]] if found and int(found[1]) else None


def nodes_for(slurm: SlurmConfig, role: str) -> tuple[int, NodeRequest]:
    """How many nodes the workers of a role may run on, and what each of them has."""
    wanted = [it for it in _wanted(slurm) if it[0].takes(role)]
    [(_, num_nodes, request)] = wanted
    return num_nodes, request


def single_plan(slurm: SlurmConfig) -> JobPlan:
    """A further node, for generation alone."""
    _, request = nodes_for(slurm, Purpose.rollout)
    return JobPlan(request, {Purpose.rollout: 1})


def workers_of_single(slurm: SlurmConfig) -> int:
    """Rollout workers that a node is for which joins singly, if it has no GPUs."""
    num_nodes, _ = nodes_for(slurm, Purpose.rollout)
    return -(-slurm.rollout.role_workers // num_nodes)


def merged_plan(plans: Sequence[JobPlan]) -> JobPlan:
    """All nodes as one job, which is there already, and is as it is."""
    shares = {
        purpose: number * plan.num_jobs for plan in plans for purpose, number in plan.shares.items()
    }
    return JobPlan(plans[0].request, shares)


def _wanted(slurm: SlurmConfig) -> Iterator[tuple[Purpose, int, NodeRequest]]:
    own: dict[Purpose, RoleNodes] = {Purpose.train: slurm.train, Purpose.rollout: slurm.rollout}
    if slurm.gang and not any(role.nodes for role in own.values()):
        yield Purpose.any, slurm.nodes, NodeRequest.of(slurm)
        return
    for purpose, role in own.items():
        nodes = role if role.nodes else slurm
        yield purpose, nodes.nodes, NodeRequest.of(nodes)
