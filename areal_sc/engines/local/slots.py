"""Which sequences run, and which tokens the next forward pass computes. No torch.

A running request owns a row of the key-value cache. Rows are dense: the decode batch is always
rows `0 .. num_rows`. Per row the table knows the tokens, and how many of them have a valid
key-value entry under the current weights:

    tokens   [p p p p p p g g g]          p prompt, g generated
    cached    ^^^^^^^^^^^                 valid entries; a decode step needs length - 1 of them

One step computes the tokens between `cached` and `length` and samples the next one. This single
rule covers decoding (one token is missing), a new prompt (all are), a prompt longer than the
budget (computed over several steps) and a weight update (`invalidate` sets `cached` to 0). A row
whose entries are not complete within the step's budget waits; it never samples from stale ones.

Rows of one prefix group share what their tokens have in common: the oldest computes it, the
others copy its entries, within the same step where they start together.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from areal_sc.engines.base import Completion, TopTokens
from areal_sc.engines.local.random import stream_key, uniforms
from areal_sc.engines.stop_strings import StopStrings
from areal_sc.token_fields import TensorMetadata

if TYPE_CHECKING:
    from areal_sc.engines.local.adapters import LoadedAdapter

Ints = npt.NDArray[np.int64]


@dataclass(slots=True, eq=False)
class SlotRequest:
    """One completion to sample.

    Attributes:
        request_id: ascending in order of arrival; it names the random stream.
        prompt: [P] int64, P >= 1.
        max_length: tokens of prompt and completion after which it ends.
        min_length: tokens of prompt and completion before which no token ends it.
        length_reason: finish reason at `max_length`, `length` or `context`.
        stop_token_ids: tokens that end the completion.
        stops: strings that end it.
        is_streamed: its tokens are kept for `take_streamed`.
        adapter: that its tokens are computed with; None: none.
        num_top: the most probable tokens are told, so many at each place; 0: they are not.
        prompt_logprobs: [P], as in `Completion`, as far as they are known; None: they are not
            asked for.
        prompt_top, top: [P] and [C] of the most probable tokens, if they are asked for.
        pictures: where those of the prompt are, a `RowPictures`; None: there are none.
        row: row of the table while running, -1 otherwise.
        is_finished: it has left the table.
    """

    request_id: int
    prompt: Ints
    max_length: int
    length_reason: str
    min_length: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    stop_token_ids: tuple[int, ...] = ()
    stops: StopStrings | None = None
    prefix_group: str | None = None
    is_streamed: bool = False
    adapter: LoadedAdapter | None = None
    num_top: int = 0
    prompt_logprobs: npt.NDArray[np.float32] | None = None
    prompt_top: list[TopTokens] = field(default_factory=list)
    top: list[TopTokens] = field(default_factory=list)
    pictures: Any = None
    row: int = -1
    is_finished: bool = False


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """Tokens `start .. end` of a row, computed ahead of the row's last token.

    Attributes:
        first_token: index of its first token in the pass.
    """

    row: int
    start: int
    end: int
    first_token: int

    @property
    def num_tokens(self) -> int:
        return self.end - self.start


@dataclass(slots=True)
class StepPlan:
    """One forward pass: the tokens of all chunks, then the last token of every row.

    Attributes:
        token_ids: [T] int64.
        positions: [T] int64, within the token's sequence.
        is_ready: [N] bool, rows whose next token is sampled; results of others are void.
        chunks: in the order of the tokens.
        asked_chunks: those whose tokens' log-probabilities are asked for.
        row_copies: length -> (source, target) rows: cache entries copied before the pass.
        write_tokens: [M] int64, which token's entry is written ...
        write_rows: [M] int64, ... to which row (entries of shared prefixes to several).
        max_length: longest row, in tokens.
        num_prefill_tokens: computed prompt tokens.
        num_recomputed_tokens: tokens computed again because the weights changed.
        num_shared_tokens: prompt tokens taken from another row.
    """

    token_ids: Ints
    positions: Ints
    is_ready: npt.NDArray[np.bool_]
    write_tokens: Ints
    write_rows: Ints
    max_length: int
    chunks: list[PrefillChunk] = field(default_factory=list)
    asked_chunks: list[PrefillChunk] = field(default_factory=list)
    row_copies: dict[int, list[tuple[int, int]]] = field(default_factory=dict)
    num_prefill_tokens: int = 0
    num_recomputed_tokens: int = 0
    num_shared_tokens: int = 0

    @property
    def num_rows(self) -> int:
        return len(self.is_ready)

    def token_rows(self) -> Ints:
        """[T] the row of each token of the pass."""
        chunks = [np.full(chunk.num_tokens, chunk.row) for chunk in self.chunks]
        return np.concatenate([*chunks, np.arange(self.num_rows)])


class SlotTable:
    """Waiting and running requests.

    Args:
        routes: the field of the experts that a token goes through, to be noted; None: they are not.
        max_asked_tokens: of prompts, whose log-probabilities one pass may tell.

    Attributes:
        num_adapted: running requests that have an adapter.

    A token goes through experts each time that its cache entry is computed: once, and again after
    new weights. Its `entry_routes` are those of the entry as it is now. Its `routes`, of the first
    `num_routed` tokens of a row, stay as they were when the token behind it was sampled or, of a
    prompt, the first one behind the prompt.
    """

    def __init__(
        self,
        max_rows: int,
        max_context_tokens: int,
        max_prefill_tokens: int,
        seed: int,
        routes: TensorMetadata | None = None,
        max_asked_tokens: int = 1 << 31,
    ) -> None:
        self.max_rows = max_rows
        self.max_prefill_tokens = max_prefill_tokens
        self.max_asked_tokens = max_asked_tokens
        self.seed = seed
        self.num_rows = 0
        self.waiting: deque[SlotRequest] = deque()
        self.is_admitting = True
        self._requests: dict[int, SlotRequest] = {}  # by row
        self._free_rows: list[int] = []  # below num_rows, until filled or compacted
        self._groups: dict[str, list[SlotRequest]] = {}  # running, oldest first
        self._streamed: list[tuple[int, int]] = []
        self.num_adapted = 0
        self._is_foreign = np.zeros(max_rows, dtype=np.bool_)
        self._foreign_rows: list[int] = []

        self.tokens = np.zeros((max_rows, max_context_tokens), dtype=np.int64)
        self.logprobs = np.zeros((max_rows, max_context_tokens), dtype=np.float32)
        self.versions = np.zeros((max_rows, max_context_tokens), dtype=np.int64)
        of_token = routes or TensorMetadata()
        shape = max_rows, max_context_tokens if routes else 0, *of_token.sizes
        self.routes = np.zeros(shape, dtype=of_token.dtype)
        self.entry_routes = np.zeros_like(self.routes)
        self.num_routed = np.zeros(max_rows, dtype=np.int64)
        self.length = np.zeros(max_rows, dtype=np.int64)
        self.cached = np.zeros(max_rows, dtype=np.int64)
        self.is_recomputing = np.zeros(max_rows, dtype=np.bool_)
        self.max_length = np.zeros(max_rows, dtype=np.int64)
        self.min_length = np.zeros(max_rows, dtype=np.int64)
        self.temperature = np.zeros(max_rows, dtype=np.float32)
        self.top_p = np.zeros(max_rows, dtype=np.float32)
        self.top_k = np.zeros(max_rows, dtype=np.int64)
        self.stream_keys = np.zeros(max_rows, dtype=np.uint64)
        self.stop_token_ids = np.full((max_rows, 1), -1, dtype=np.int64)
        self.has_stop_strings = np.zeros(max_rows, dtype=np.bool_)
        self.is_streamed = np.zeros(max_rows, dtype=np.bool_)

    @property
    def num_running(self) -> int:
        return self.num_rows - len(self._free_rows)

    @property
    def has_work(self) -> bool:
        return self.num_running > 0 or (self.is_admitting and bool(self.waiting))

    def add(self, request: SlotRequest) -> None:
        self.waiting.append(request)

    def admit(self) -> list[tuple[int, int]]:
        """Gives rows to waiting requests and closes the gaps that are left.

        Returns: (source, target) rows whose cache entries move.
        """
        while self.is_admitting and self.waiting and self.num_running < self.max_rows:
            if not self._free_rows:
                self._free_rows.append(self.num_rows)
                self.num_rows += 1
            self._place(self.waiting.popleft(), self._free_rows.pop())
        return self._compact() if self._free_rows else []

    def random(self) -> npt.NDArray[np.float32]:
        """[N] the random numbers of the rows' next tokens."""
        n = self.num_rows
        return uniforms(self.stream_keys[:n], self.length[:n])

    def impossible_ends(self, vocab_size: int) -> tuple[Ints, Ints]:
        """[E] rows and [E] tokens: which tokens must not be sampled next, as they end too early."""
        n = self.num_rows
        stops = self.stop_token_ids[:n]
        is_early = (self.length[:n] < self.min_length[:n])[:, None]
        rows, places = np.nonzero(is_early & (stops >= 0) & (stops < vocab_size))
        return rows, stops[rows, places]

    def plan(self) -> StepPlan:
        """What the next pass computes; needs at least one running request, and no gaps."""
        n = self.num_rows
        length = self.length[:n]
        last = length - 1
        rows = np.arange(n)
        plan = StepPlan(
            token_ids=self.tokens[rows, last],
            positions=last,
            is_ready=self.cached[:n] == last,
            write_tokens=rows,
            write_rows=rows,
            max_length=int(length.max()),
        )
        if not plan.is_ready.all():
            self._plan_prefill(plan)
        return plan

    def adapters(self) -> list[LoadedAdapter | None]:
        """[N] the adapter of each running row."""
        return [self._requests[row].adapter for row in range(self.num_rows)]

    def asking_for_top(self) -> list[SlotRequest]:
        """Running requests that are told the most probable tokens."""
        return [request for request in self._requests.values() if request.num_top]

    def request_of(self, row: int) -> SlotRequest:
        return self._requests[row]

    def fail(self, plan: StepPlan, row: int) -> SlotRequest:
        """Removes a running request, of which the plan samples nothing; returns it."""
        request = self._requests[row]
        plan.is_ready[row] = False
        self._release(request)
        return request

    def take_foreign_rows(self) -> list[int]:
        """Rows that were given anew since last time, and whose cache entries are of an adapter.

        What an adapter computes may be no number, which would spread even from entries that are
        masked out: these have to be cleared.
        """
        rows, self._foreign_rows = self._foreign_rows, []
        return rows

    def record(
        self,
        plan: StepPlan,
        token_ids: Ints,
        logprobs: npt.NDArray[np.float32],
        version: int,
        routes: npt.NDArray[Any] | None = None,
    ) -> list[tuple[SlotRequest, Completion]]:
        """Appends the sampled tokens of the ready rows; returns and removes what is finished.

        Args:
            token_ids, logprobs: [N], void where `plan.is_ready` is False.
            version: policy version that sampled them.
            routes: [T, L, k], the experts that the plan's tokens went through, where these are
                noted.
        """
        rows = np.flatnonzero(plan.is_ready)
        if routes is not None:
            self._note_routes(plan, routes)
        sampled, length = token_ids[rows], self.length[rows]
        self.tokens[rows, length] = sampled
        self.logprobs[rows, length] = logprobs[rows]
        self.versions[rows, length] = version
        self.cached[rows] = length
        self.length[rows] = length + 1
        has_stopped = (self.stop_token_ids[rows] == sampled[:, None]).any(axis=1)
        for at in np.flatnonzero(self.has_stop_strings[rows]):
            stops = self._requests[rows[at]].stops
            has_stopped[at] |= stops is not None and stops.completes(int(sampled[at]))
        for at in np.flatnonzero(self.is_streamed[rows]):
            self._streamed.append((self._requests[rows[at]].request_id, int(sampled[at])))
        is_finished = has_stopped | (length + 1 >= self.max_length[rows])
        finished = []
        for i in np.flatnonzero(is_finished):
            request = self._requests[rows[i]]
            reason = "stop" if has_stopped[i] else request.length_reason
            finished.append((request, self._completion(request, reason)))
            self._release(request)
        return finished

    def _note_routes(self, plan: StepPlan, routes: npt.NDArray[Any]) -> None:
        for length, pairs in plan.row_copies.items():
            for source, target in pairs:
                self.entry_routes[target, :length] = self.entry_routes[source, :length]
        written = plan.write_tokens if plan.chunks else slice(None)
        self.entry_routes[plan.write_rows, plan.positions[written]] = routes[written]
        for row in np.flatnonzero(plan.is_ready):
            new = slice(self.num_routed[row], self.length[row])
            self.routes[row, new] = self.entry_routes[row, new]
            self.num_routed[row] = self.length[row]

    def parts_with_pictures(self, plan: StepPlan) -> list[tuple[int, Any, int, int]]:
        """Tokens of the plan whose requests have pictures.

        Returns: index of the first of them in the pass, the request's `pictures`, and which tokens
            of its row they are.
        """
        first_last = len(plan.token_ids) - plan.num_rows
        parts = [(it.first_token, it.row, it.start, it.end) for it in plan.chunks]
        for row, length in enumerate(self.length[: plan.num_rows].tolist()):
            parts.append((first_last + row, row, length - 1, length))
        of_rows = {row: it.pictures for row, it in self._requests.items() if it.pictures}
        return [
            (first, of_rows[row], start, end) for first, row, start, end in parts if row in of_rows
        ]

    def take_streamed(self) -> list[tuple[int, int]]:
        """(request id, token) of what `record` was given for streamed requests since last time."""
        streamed, self._streamed = self._streamed, []
        return streamed

    def cancel(self, request: SlotRequest) -> int:
        """Removes a waiting or running request; returns how many tokens it has."""
        if request.row < 0:
            self.waiting.remove(request)
            request.is_finished = True
            return 0
        num_tokens = int(self.length[request.row]) - len(request.prompt)
        self._release(request)
        return num_tokens

    def invalidate(self) -> None:
        """Marks all cache entries as computed under other weights than the current ones."""
        n = self.num_rows
        self.is_recomputing[:n] |= self.cached[:n] > 0
        self.cached[:n] = 0

    def _place(self, request: SlotRequest, row: int) -> None:
        request.row = row
        self._requests[row] = request
        if self._is_foreign[row]:
            self._foreign_rows.append(row)
        self._is_foreign[row] = request.adapter is not None
        self.num_adapted += request.adapter is not None
        self.tokens[row, : len(request.prompt)] = request.prompt
        self.length[row] = len(request.prompt)
        self.cached[row] = 0
        self.num_routed[row] = 0
        self.is_recomputing[row] = False
        self.max_length[row] = request.max_length
        self.min_length[row] = request.min_length
        self.temperature[row] = request.temperature
        self.top_p[row] = request.top_p
        self.top_k[row] = request.top_k
        self.stream_keys[row] = stream_key(self.seed, request.request_id)
        num_stops = len(request.stop_token_ids)
        if (num_added := num_stops - self.stop_token_ids.shape[1]) > 0:
            widths = ((0, 0), (0, num_added))
            self.stop_token_ids = np.pad(self.stop_token_ids, widths, constant_values=-1)
        self.stop_token_ids[row] = -1
        self.stop_token_ids[row, :num_stops] = request.stop_token_ids
        self.has_stop_strings[row] = request.stops is not None
        self.is_streamed[row] = request.is_streamed
        if request.prefix_group is not None:
            self._groups.setdefault(request.prefix_group, []).append(request)

    def _completion(self, request: SlotRequest, reason: str) -> Completion:
        row, start, end = request.row, len(request.prompt), int(self.length[request.row])
        routes = self.routes[row, :end].copy()
        routes[end - 1 :] = 0  # nothing was sampled behind the last token
        asked = request.prompt_logprobs
        return Completion(
            token_ids=self.tokens[row, start:end].tolist(),
            logprobs=self.logprobs[row, start:end].tolist(),
            versions=self.versions[row, start:end].tolist(),
            finish_reason=reason,
            temperature=request.temperature,
            stop=request.stops.strings if request.stops else (),
            routes=routes if routes.size else None,
            prompt_logprobs=[] if asked is None else asked.tolist(),
            prompt_top=request.prompt_top,
            top=request.top,
        )

    def _release(self, request: SlotRequest) -> None:
        del self._requests[request.row]
        self.num_adapted -= request.adapter is not None
        self._free_rows.append(request.row)
        request.row = -1
        request.is_finished = True
        if request.prefix_group is not None:
            members = self._groups[request.prefix_group]
            members.remove(request)
            if not members:
                del self._groups[request.prefix_group]

    def _compact(self) -> list[tuple[int, int]]:
        """Moves the last rows into the gaps."""
        num_running = self.num_running
        targets = sorted(row for row in self._free_rows if row < num_running)
        sources = [row for row in range(num_running, self.num_rows) if row in self._requests]
        self.num_rows = num_running
        self._free_rows.clear()
        if not sources:
            return []
        longest = int(self.length[sources].max())
        for table in (self.tokens, self.logprobs, self.versions, self.routes, self.entry_routes):
            table[targets, :longest] = table[sources, :longest]
        for column in (
            self.length,
            self.cached,
            self.is_recomputing,
            self.max_length,
            self.min_length,
            self.temperature,
            self.top_p,
            self.top_k,
            self.stream_keys,
            self.stop_token_ids,
            self.has_stop_strings,
            self.is_streamed,
            self.num_routed,
        ):
            column[targets] = column[sources]
        self._foreign_rows += [row for row in targets if self._is_foreign[row]]
        self._is_foreign[targets] = self._is_foreign[sources]
        moves = list(zip(sources, targets, strict=True))
        for source, target in moves:
            request = self._requests[target] = self._requests.pop(source)
            request.row = target
        return moves

    def _plan_prefill(self, plan: StepPlan) -> None:
        """Adds what the rows lack besides their last token, oldest requests first."""
        budget, num_askable = self.max_prefill_tokens, self.max_asked_tokens
        cached_before = self.cached[: self.num_rows].copy()
        # row -> (row that takes over its entries, from, to) where both start in this step
        shared: dict[int, list[tuple[int, int, int]]] = {}
        behind = [self._requests[row] for row in np.flatnonzero(~plan.is_ready).tolist()]
        for request in sorted(behind, key=attrgetter("request_id")):
            row = request.row
            last = int(self.length[row]) - 1
            is_asked = request.prompt_logprobs is not None and last == len(request.prompt) - 1
            if is_asked:
                start = int(self.cached[row])
                end = min(last, start + budget, start + num_askable)
                num_askable -= end - start
            else:
                start = self._share_prefix(request, cached_before, plan, shared)
                end = min(last, start + budget)
            if end > start:
                first_token = self.max_prefill_tokens - budget
                plan.chunks.append(PrefillChunk(row, start, end, first_token))
                plan.asked_chunks += plan.chunks[-1:] if is_asked else []
                budget -= end - start
            plan.is_ready[row] = end == last
            if self.is_recomputing[row]:
                plan.num_recomputed_tokens += end - start
                self.is_recomputing[row] = end < last
            elif end > start:
                # the last prompt token counts with its prompt; where all before it came from
                # another row, it is a decode step like any other
                plan.num_prefill_tokens += end - start + int(end == last)
            self.cached[row] = end
        self._append_chunks(plan, shared)

    def _share_prefix(
        self,
        request: SlotRequest,
        cached_before: Ints,
        plan: StepPlan,
        shared: dict[int, list[tuple[int, int, int]]],
    ) -> int:
        """Takes what the oldest of the request's group has, or gets in this very step.

        If the oldest is not complete then, the step's budget is spent: it was served before the
        others, so they do not compute what it will have in the next step.

        Returns: how many entries the row has then.
        """
        row = request.row
        start = int(self.cached[row])
        if request.prefix_group is None:
            return start
        leader = self._groups[request.prefix_group][0]
        if leader is request:
            return start
        last = int(self.length[row]) - 1
        num_comparable = min(last, int(self.length[leader.row]))
        differs = self.tokens[row, :num_comparable] != self.tokens[leader.row, :num_comparable]
        num_common = int(differs.argmax()) if differs.any() else num_comparable
        available = min(num_common, int(self.cached[leader.row]))
        # ready rows were complete before this step
        in_cache = min(available, int(cached_before[leader.row]))
        if in_cache > start:
            plan.row_copies.setdefault(in_cache, []).append((leader.row, row))
        if available > max(start, in_cache):
            shared.setdefault(leader.row, []).append((row, max(start, in_cache), available))
        if available > start:
            plan.num_shared_tokens += available - start
            start = available
        return start

    def _append_chunks(self, plan: StepPlan, shared: dict[int, list[tuple[int, int, int]]]) -> None:
        """Puts the chunks' tokens before the rows' last tokens, with all cache writes."""
        if not plan.chunks:
            return
        tokens, positions, write_tokens, write_rows = [], [], [], []
        for chunk in plan.chunks:
            row, start, end = chunk.row, chunk.start, chunk.end
            tokens.append(self.tokens[row, start:end])
            positions.append(np.arange(start, end))
            for target, first, stop in ((row, start, end), *shared.get(row, ())):
                write_tokens.append(np.arange(first, stop) + (chunk.first_token - start))
                write_rows.append(np.full(stop - first, target))
        num_tokens = chunk.first_token + chunk.num_tokens
        plan.token_ids = np.concatenate([*tokens, plan.token_ids])
        plan.positions = np.concatenate([*positions, plan.positions])
        plan.write_tokens = np.concatenate([*write_tokens, plan.write_tokens + num_tokens])
        plan.write_rows = np.concatenate([*write_rows, plan.write_rows])
