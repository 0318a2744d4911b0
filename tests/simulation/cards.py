"""The memory of the cards of a simulated run, in bytes, by the numbers of the plan."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import TYPE_CHECKING, Final

from simulation.settings import Settings, configs

from areal_sc.engines.handles import FSDPPPOActor, LocalGenerator
from areal_sc.nodes.spec import ROLLOUT_ROLE
from areal_sc.sizing.machine import Machine
from areal_sc.sizing.model_folder import ModelShape
from areal_sc.sizing.model_formula import LayerSizes
from areal_sc.sizing.worker_plan import RunPlan, WorkerPlan

if TYPE_CHECKING:
    from simulation.workers import SimulatedWorker

CARD: Final = "cuda:0"
_MACHINE: Final = Machine(1 << 40, (None,))
_7B: Final = {"hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28}
_7B_HEADS: Final = {"num_attention_heads": 28, "num_key_value_heads": 4, "vocab_size": 152_064}
SHAPE: Final = ModelShape(
    num_parameters=7_615_616_512,
    num_layer_parameters=233_057_792,
    num_other_parameters=1_089_998_336,
    num_vocabulary_parameters=544_997_376,
    kv_values_per_token=2 * 28 * 4 * 128,
    heads=28,
    kv_heads=4,
    vocabulary=152_064,
    layer=LayerSizes.of({"model_type": "qwen2", **_7B, **_7B_HEADS}),
)
"""A Qwen2.5-7B."""


class SmallCards:
    """Cards that have room for the larger side of a machine's workers, and for nothing else.

    Attributes:
        most_used: the largest share of a card's room that was used.
    """

    def __init__(self, settings: Settings) -> None:
        actor, rollout = configs(settings)
        ranks = FSDPPPOActor(actor).plan_worker(0, SHAPE, [CARD], _MACHINE)
        engines = LocalGenerator(rollout).plan_worker(0, SHAPE, [CARD], _MACHINE)
        self._plans = {False: ranks[0], True: engines[0]}
        self._room = cache(self._room_of)
        self.most_used = 0.0

    def used_bytes(self, worker: SimulatedWorker) -> int:
        """A rank that computes nothing has what it holds all the time, until it sleeps."""
        if not worker.has_memory:
            return 0
        plan = self._plan_of(worker)
        is_busy = plan.generates or worker.num_using > 0
        return plan.memory[CARD] if is_busy else plan.held_bytes

    def excess(self, workers: Iterable[SimulatedWorker]) -> int:
        """By how many bytes the workers of a machine are above its cards."""
        living = [worker for worker in workers if worker.exit_status is None]
        if not living:
            return 0
        names = {worker.name: self._plan_of(worker).generates for worker in living}
        room = self._room(sum(names.values()), len(names))
        used = sum(map(self.used_bytes, living))
        self.most_used = max(self.most_used, used / room)
        return used - room

    def _plan_of(self, worker: SimulatedWorker) -> WorkerPlan:
        return self._plans[worker.role == ROLLOUT_ROLE]

    def _room_of(self, num_engines: int, num_workers: int) -> int:
        plans = [self._plans[number < num_engines] for number in range(num_workers)]
        plan = RunPlan(tuple(plans), {}, is_model_known=True, takes_turns=True)
        return plan.needed_bytes[CARD]
