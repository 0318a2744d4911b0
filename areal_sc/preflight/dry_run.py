"""`--dry-run`: what a run would start, where, and what it would go on from. Nothing is written.

Its other half, the task, is looked at when the script shows it: `controller.dry_run`.
"""

from __future__ import annotations

import atexit
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, TypeVar

from areal_sc.config.loading.loader import config_text
from areal_sc.config.parallel_settings import AutoscaleConfig
from areal_sc.config.schema import GRPOConfig, Resume
from areal_sc.config.slurm_jobs import JobPlan, job_plans, memory_bytes
from areal_sc.config.slurm_script import job_script
from areal_sc.config.slurm_settings import SchedulerType
from areal_sc.engines.handles import make_actor
from areal_sc.errors import ConfigError, ModelError, SchedulerSilent
from areal_sc.preflight.checks import check_models
from areal_sc.preflight.machine_limits import DiskPlan, shared_memory, shared_memory_line
from areal_sc.preflight.plan import PlannedNode, placement_lines, plan, plans, settle_placement
from areal_sc.run.run_folder import Opening, RunFolder
from areal_sc.schedulers.slurm import commands
from areal_sc.sizing.machine import Machine, this_machine
from areal_sc.trainer.snapshots import describe_resume

C = TypeVar("C", bound=GRPOConfig)


def without_traces(config: C) -> C:
    """The settings with a run folder that is deleted when the process ends."""
    folder = tempfile.mkdtemp(prefix="areal_sc_dry_run_")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    changes: dict[str, Any] = {"run_dir": folder, "resume": Resume.auto, "overwrite": False}
    scheduler = replace(config.scheduler, **changes)
    weights = replace(config.weight_update, folder=f"{folder}/weights")
    return replace(config, **changes, scheduler=scheduler, weight_update=weights, trackers=[])


def placed_lines(config: GRPOConfig, machine: Machine, *, generates: bool) -> Iterator[str]:
    """What the run would start on a machine, which may not be there, and how it is shared."""
    found = settle_placement(config, lambda: machine) if generates else []
    yield from plan(config, lambda: machine, generates=generates).lines()
    yield from placement_lines(config, found)


def dry_run(config: GRPOConfig, *, makes_model: bool, generates: bool) -> Iterator[str]:
    """What the run would start, and where; refused in the order in which the run would be.

    Arguments are those of `load_config`.
    """
    folder, in_folder = RunFolder(config.run_dir), 0
    opening = folder.preview(
        config_text=config_text(config),
        resume=config.resume.value,
        overwrite=config.overwrite,
        total_steps=config.total_steps,
    )
    try:
        check_models(config)
    except ModelError:
        if not makes_model:
            raise
        yield f"model {config.actor.path}: not there yet, the script makes it"
    if config.scheduler.type == SchedulerType.slurm:
        yield from _job_lines(config, generates=generates)
    elif config.scheduler.type != SchedulerType.local:
        yield f"workers are placed on what {config.scheduler.type} lends, once that is known"
    else:
        machine = this_machine()
        yield from placed_lines(config, machine, generates=generates)
        planned = plan(config, lambda: machine, generates=generates)
        root, num_bytes = shared_memory(config, planned)
        yield shared_memory_line(root, num_bytes)
        in_folder = num_bytes if root.is_relative_to(folder.path) else 0
    disk = DiskPlan.of(config, generates=generates, shared_memory_bytes=in_folder)
    disk.check()
    yield disk.line()
    if generates:
        longest = config.rollout.max_context_tokens or "as many as the model takes"
        yield f"longest row, prompt and answer: {longest} tokens (rollout.max_context_tokens)"
    yield f"run folder {folder.path}: would {opening.value}"
    if opening is Opening.resume:
        for line in describe_resume(folder, make_actor(config.actor)):
            yield f"  {line}"
    if opening is Opening.resume and config.resume is Resume.must:
        yield "  a loop without a `Run` would refuse --resume"
    elif opening is Opening.resume:
        yield "  a loop without a `Run` would start again from nothing"


def _job_lines(config: GRPOConfig, *, generates: bool) -> Iterator[str]:
    """The jobs that SLURM would get, what it says of them, and what their nodes would do.

    Raises: ConfigError: a node has too little for its workers.
    """
    scheduler, nodes = config.scheduler, list[PlannedNode]()
    run_dir, words = RunFolder(config.run_dir).path, commands.sbatch_words()
    if words:
        yield f"sbatch obeys the environment before the script: {words}"
    for job in job_plans(scheduler.slurm):
        script = job_script(scheduler, run_dir, job)
        yield script
        try:
            commands.check_submission(script, {})
            times = f", {job.num_jobs} times" if job.num_jobs > 1 else ""
            yield f"SLURM would take this job{times}"
        except (ConfigError, SchedulerSilent) as error:
            yield f"this job would not be taken: {error}"
        nodes += _planned_nodes(job)
    if not scheduler.slurm.gang:  # more workers than at first come with nodes of their own
        config = replace(config, rollout=replace(config.rollout, autoscale=AutoscaleConfig()))
    for name, planned in plans(config, nodes, generates=generates).items():
        yield f"{name}:"
        yield from (f"  {line}" for line in planned.lines())


def _planned_nodes(job: JobPlan) -> Iterator[PlannedNode]:
    """Nodes of a job; what is not asked for of their memory is not known."""
    memory = memory_bytes(job.request.memory_per_node) or None
    machine = Machine(memory, (None,) * job.request.gpus_per_node)
    for purpose, number in job.shares.items():
        for index in range(number * job.num_jobs):
            yield PlannedNode(f"node {purpose}/{index}", machine, purpose)
