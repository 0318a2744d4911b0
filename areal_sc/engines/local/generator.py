"""The generation loop's body: one call of `step` is one forward pass. Synchronous, one thread."""

from __future__ import annotations

import time
from collections.abc import Container, Sequence

import numpy as np
import numpy.typing as npt
import torch

from areal_sc.engines.base import Completion
from areal_sc.engines.local.attention import SlotAttention, SlotCache
from areal_sc.engines.local.model import LocalModel
from areal_sc.engines.local.sampling import sample
from areal_sc.engines.local.slots import Ints, SlotRequest, SlotTable, StepPlan
from areal_sc.errors import ModelError

Finished = list[tuple[SlotRequest, Completion]]


class SlotGenerator:
    """Requests in, completions out, weights replaced between steps.

    Attributes:
        version: policy version of the weights.
        is_asleep: it has no weights until there are new ones, and cannot step.
        counters: what `stats()` of the engine shows.
    """

    def __init__(self, model: LocalModel, table: SlotTable, max_context_tokens: int) -> None:
        self.version = 0
        self.is_asleep = False
        self.counters: dict[str, float] = dict.fromkeys(
            (
                "generated_tokens",
                "prefill_tokens",
                "shared_prompt_tokens",
                "recomputed_tokens",
                "recompute_s",
                "finished_requests",
                "cancelled_requests",
                "cancelled_tokens",
                "weight_updates",
                "steps",
                "busy_s",
                "answer_s",
            ),
            0,
        )
        self.table = table
        self._model = model
        self._max_context_tokens = max_context_tokens
        self._cache = SlotCache(table.max_rows, max_context_tokens)

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        return self._model.device

    @property
    def weight_names(self) -> Container[str]:
        """Names of the weights that `update_weights` takes."""
        return self._model.weight_names

    def cancel(self, request: SlotRequest) -> None:
        self.counters["cancelled_requests"] += 1
        self.counters["cancelled_tokens"] += self.table.cancel(request)

    def update_weights(
        self, version: int, named_tensors: Sequence[tuple[str, torch.Tensor]]
    ) -> None:
        """Replaces the weights; running requests recompute their cache in the steps to come.

        Raises: ModelError: the tensors do not fit the model. It keeps its weights then; asleep, it
            still has none, but their memory, until the next `sleep`.
        """
        if self.is_asleep:
            self._model.take_memory()
        self._model.replace_weights(named_tensors)
        self.is_asleep = False
        self.table.invalidate()
        self.version = version
        self.counters["weight_updates"] += 1

    def sleep(self) -> None:
        """Drops weights and cache; running requests recompute theirs under the next weights."""
        self.is_asleep = True
        if not self._model.is_dropped:
            self._model.drop_weights()
            self._cache = SlotCache(self.table.max_rows, self._max_context_tokens)
            self.table.invalidate()
            if self.device.type == "cuda":
                torch.cuda.empty_cache()

    def step(self) -> Finished:
        """Computes one pass for the running requests and returns those that are finished."""
        start = time.perf_counter()
        table, cache = self.table, self._cache
        with torch.inference_mode():
            moves = table.admit()
            plan = table.plan()
            cache.reserve(plan.num_rows, plan.max_length)
            if moves:
                cache.copy_rows(moves, max(int(table.cached[target]) for _, target in moves))
            for length, pairs in plan.row_copies.items():
                cache.copy_rows(pairs, length)
            token_ids, logprobs = self._forward(plan)
        if not np.isfinite(logprobs[plan.is_ready]).all():
            raise ModelError(
                f"the model of policy version {self.version} gave a log-probability that is not "
                "finite; its weights or its dtype's range are the likely cause"
            )
        routers = self._model.routers
        routes = None if routers is None else routers.routes().cpu().numpy()
        finished = table.record(plan, token_ids, logprobs, self.version, routes)
        counters = self.counters
        counters["generated_tokens"] += int(plan.is_ready.sum())
        counters["prefill_tokens"] += plan.num_prefill_tokens
        counters["shared_prompt_tokens"] += plan.num_shared_tokens
        counters["recomputed_tokens"] += plan.num_recomputed_tokens
        counters["finished_requests"] += len(finished)
        counters["steps"] += 1
        spent_s = time.perf_counter() - start
        counters["busy_s"] += spent_s
        counters["answer_s"] += spent_s * plan.num_rows
        counters["recompute_s"] += spent_s * plan.num_recomputed_tokens / len(plan.token_ids)
        return finished

    def _forward(self, plan: StepPlan) -> tuple[Ints, npt.NDArray[np.float32]]:
        """[N] int64 sampled tokens and [N] float32 log-probabilities, on the host."""
        device, n = self._model.device, plan.num_rows
        token_ids = torch.from_numpy(plan.token_ids).to(device)
        positions = torch.from_numpy(plan.positions).to(device)
        attention = SlotAttention(plan, self._cache, positions)
        table = self.table
        spans = () if self._model.pictures is None else table.parts_with_pictures(plan)
        logits = self._model(token_ids, positions, attention, n, spans)
        sampled, logprobs = sample(
            logits, table.random(), table.temperature[:n], table.top_p[:n], table.top_k[:n]
        )
        # one transfer: every token id is exact in float64
        both = torch.stack((sampled.double(), logprobs.double())).cpu().numpy()
        return both[0].astype(np.int64), both[1].astype(np.float32)
