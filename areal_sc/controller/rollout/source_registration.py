"""What a script names to the workers: prompts and workflows, checked once before they are used."""

from __future__ import annotations

from collections.abc import Callable

from areal_sc.config.schema import RolloutConfig
from areal_sc.config.slurm_settings import SchedulerType
from areal_sc.controller.ledger.group import RolloutSource, check_fields, check_first_rows
from areal_sc.controller.rollout.evaluation import EvaluationSet
from areal_sc.controller.rollout.outside_groups import RegisteredSet
from areal_sc.controller.rollout.run_address import RunAddress
from areal_sc.run.run_folder import RunFolder
from areal_sc.schedulers.base import Scheduler
from areal_sc.sizing.routed_experts import routes_field
from areal_sc.sources.row_file import PromptSource
from areal_sc.system.sandbox.opening import check_sandbox
from areal_sc.workflows.base import Workflow
from areal_sc.workflows.registry import SourceRegistry


class SourceRegistration:
    """Names the prompts and workflows of one RolloutController.

    Args:
        sources: gives them their numbers.
        address: is opened for a workflow whose agents are outside.
        reserve: takes the bytes a token of the fields that workflows add.

    Attributes:
        waits_outside: some workflow that was named waits for agents outside.
    """

    def __init__(
        self,
        config: RolloutConfig,
        scheduler: Scheduler,
        sources: SourceRegistry,
        address: RunAddress,
        reserve: Callable[[int], None],
    ) -> None:
        self.waits_outside = False
        self._reserve = reserve
        self._field_bytes = 0
        self._config = config
        self._is_local = scheduler.config.type == SchedulerType.local
        self._is_dry_run = scheduler.config.dry_run
        self._sources = sources
        self._address = address
        self._checked: set[RolloutSource] = set()
        if self._is_dry_run:
            from areal_sc.controller.dry_run import TaskLook

            self._task_look = TaskLook(config, RunFolder(scheduler.config.run_dir).path)

    def register(self, prompts: PromptSource, workflow: Workflow) -> RolloutSource:
        """Names both for the workers. Raises: the errors of `RolloutController.register`."""
        dataset = self._sources.register_prompts(prompts)
        number = self._sources.register_workflow(workflow)
        source = RolloutSource(dataset, number, self._sources.num_rows(dataset))
        if source not in self._checked:
            check_first_rows(prompts, workflow)
            of_model = sum(it.token_bytes for it in routes_field(self._config).values())
            self._field_bytes = max(self._field_bytes, check_fields(workflow) + of_model)
            workflow.check_settings(self._config)
            if workflow.runs_code() and self._is_local:
                check_sandbox(self._config.sandbox)
            self._checked.add(source)
            if self._is_dry_run:
                self._task_look.look(source, self._sources.make_readable)
        return source

    async def register_async(self, prompts: PromptSource, workflow: Workflow) -> RolloutSource:
        """Names both, which are to be used now: agents outside find the address of the run."""
        await self._sources.register_prompts_async(prompts)
        source = self.register(prompts, workflow)
        self._reserve(self._field_bytes)
        self.waits_outside |= workflow.waits_outside
        if workflow.waits_outside or self._config.agents.bind:
            await self._address.open()
        return source

    async def register_set(
        self, one: EvaluationSet, evaluation: str, version: int
    ) -> RegisteredSet:
        """Names a set, which has a workflow, to be evaluated now.

        Args:
            evaluation, version: see `RegisteredSet`.
        Raises: ValueError: a number is below 1. And what `register` raises.
        """
        num_samples = 1 if one.num_samples is None else one.num_samples
        if num_samples < 1:
            raise ValueError(f"num_samples={num_samples}: expected >= 1")
        assert one.workflow is not None
        source = await self.register_async(one.prompts, one.workflow)
        num_wanted = source.num_wanted(one.num_prompts, "num_prompts")
        num_prompts = min(num_wanted, source.num_prompts or num_wanted)
        return RegisteredSet(source, num_prompts, num_samples, one.temperature, evaluation, version)
