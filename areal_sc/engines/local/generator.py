"""The generation loop's body: one call of `step` is one forward pass. Synchronous, one thread."""

from __future__ import annotations

import math
import time
from collections.abc import Container, Sequence

import numpy as np
import numpy.typing as npt
import torch

from areal_sc.engines.base import Completion, TopTokens
from areal_sc.engines.local.adapters import AdapterStack, PassAdapters
from areal_sc.engines.local.attention import SlotAttention, SlotCache
from areal_sc.engines.local.model import LocalModel
from areal_sc.engines.local.sampling import sample
from areal_sc.engines.local.slots import Ints, SlotRequest, SlotTable, StepPlan
from areal_sc.errors import ModelError

Finished = list[tuple[SlotRequest, Completion | ModelError]]
"""What ended in a step: with an error, where a request's own adapter is to blame."""


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
        self._adapters = AdapterStack((), {})

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
            self._adapters = AdapterStack((), {})
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
            if foreign := table.take_foreign_rows():
                cache.clear_rows(foreign)
            if moves:
                cache.copy_rows(moves, max(int(table.cached[target]) for _, target in moves))
            for length, pairs in plan.row_copies.items():
                cache.copy_rows(pairs, length)
            token_ids, logprobs = self._forward(plan)
        failed = self._fail_adapted(plan, logprobs)
        if not np.isfinite(logprobs[plan.is_ready]).all():
            raise ModelError(
                f"the model of policy version {self.version} gave a log-probability that is not "
                "finite; its weights or its dtype's range are the likely cause"
            )
        routers = self._model.routers
        routes = None if routers is None else routers.routes().cpu().numpy()
        finished: Finished = [
            *failed,
            *table.record(plan, token_ids, logprobs, self.version, routes),
        ]
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

    def _fail_adapted(self, plan: StepPlan, logprobs: npt.NDArray[np.float32]) -> Finished:
        """Takes out the requests whose adapter gives no numbers; the others know nothing of it."""
        table = self.table
        if not table.num_adapted:
            return []
        is_bad = plan.is_ready & ~np.isfinite(logprobs)
        failed: Finished = []
        for row in np.flatnonzero(is_bad).tolist():
            if (adapter := table.request_of(row).adapter) is not None:
                error = ModelError(
                    f"adapter {adapter.name}: with it the model gives a log-probability that is "
                    "not finite"
                )
                failed.append((table.fail(plan, row), error))
        return failed

    def _forward(self, plan: StepPlan) -> tuple[Ints, npt.NDArray[np.float32]]:
        """[N] int64 sampled tokens and [N] float32 log-probabilities, on the host."""
        device, n = self._model.device, plan.num_rows
        token_ids = torch.from_numpy(plan.token_ids).to(device)
        positions = torch.from_numpy(plan.positions).to(device)
        attention = SlotAttention(plan, self._cache, positions)
        table = self.table
        asked, adapters = None, self._of_tokens(plan) if table.num_adapted else None
        if plan.asked_chunks:
            places = [np.arange(it.num_tokens) + it.first_token for it in plan.asked_chunks]
            asked = torch.from_numpy(np.concatenate(places)).to(device)
        spans = () if self._model.pictures is None else table.parts_with_pictures(plan)
        logits = self._model(token_ids, positions, attention, n, asked, adapters, spans)
        self._tell_prompts(plan, logits[:-n])
        logits = logits[-n:]
        self._tell_top(plan, logits)
        rows, tokens = table.impossible_ends(logits.shape[-1])
        if len(rows):
            logits = logits.float()
            logits[
                torch.from_numpy(rows).to(device), torch.from_numpy(tokens).to(device)
            ] = -math.inf
        sampled, logprobs = sample(
            logits, table.random(), table.temperature[:n], table.top_p[:n], table.top_k[:n]
        )
        # one transfer: every token id is exact in float64
        both = torch.stack((sampled.double(), logprobs.double())).cpu().numpy()
        return both[0].astype(np.int64), both[1].astype(np.float32)

    def _of_tokens(self, plan: StepPlan) -> PassAdapters:
        model, of_rows = self._model, self.table.adapters()
        wanted = [adapter for adapter in of_rows if adapter is not None]
        stack = self._adapters.covering(wanted, model.adaptable)
        if stack is not self._adapters:
            model.adapt(stack.layers)
            self._adapters = stack
        return stack.of_tokens(of_rows, plan.token_rows(), model.device)

    def _tell_prompts(self, plan: StepPlan, logits: torch.Tensor) -> None:
        """Notes the log-probabilities of prompts that are asked for.

        Args:
            logits: [A, V] at the tokens of the chunks that are asked for.
        """
        at = 0
        for chunk in plan.asked_chunks:
            own = logits[at : at + chunk.num_tokens]
            at += chunk.num_tokens
            request, new = self.table.request_of(chunk.row), slice(chunk.start + 1, chunk.end + 1)
            logprobs = torch.log_softmax(own.float(), dim=-1)
            targets = torch.from_numpy(request.prompt[new]).to(logprobs.device)
            assert request.prompt_logprobs is not None
            told = logprobs.gather(1, targets[:, None])[:, 0]
            request.prompt_logprobs[new] = told.cpu().numpy()
            if request.num_top:
                request.prompt_top[new] = _top(logprobs, request.num_top)

    def _tell_top(self, plan: StepPlan, logits: torch.Tensor) -> None:
        """Notes the most probable tokens of [N, V], for the requests that ask for them."""
        for request in self.table.asking_for_top():
            if plan.is_ready[request.row]:
                own = logits[request.row].float() / (request.temperature or 1.0)
                request.top += _top(torch.log_softmax(own, dim=-1)[None], request.num_top)


def _top(logprobs: torch.Tensor, num_tokens: int) -> list[TopTokens]:
    """The most probable tokens of [T, V]."""
    values, tokens = logprobs.topk(min(num_tokens, logprobs.shape[-1]))
    pairs = zip(tokens.tolist(), values.tolist(), strict=True)
    return [list(zip(*pair, strict=True)) for pair in pairs]
