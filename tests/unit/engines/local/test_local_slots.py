"""The table of running requests: which tokens a step computes, and what it may not."""

from __future__ import annotations

import random
from typing import Any, ClassVar, cast

import numpy as np

from areal_sc.engines.base import Completion
from areal_sc.engines.local.slots import SlotRequest, SlotTable, StepPlan
from areal_sc.engines.stop_strings import StopStrings


def make_table(max_rows: int = 4, max_prefill_tokens: int = 100) -> SlotTable:
    return SlotTable(max_rows, 64, max_prefill_tokens, seed=0)


def add(
    table: SlotTable,
    request_id: int,
    prompt: list[int],
    new: int,
    group: str | None = None,
    stop: tuple[int, ...] = (),
) -> SlotRequest:
    request = SlotRequest(
        request_id,
        np.array(prompt),
        len(prompt) + new,
        "length",
        prefix_group=group,
        stop_token_ids=stop,
    )
    table.add(request)
    return request


def step(
    table: SlotTable, token: int = 9, version: int = 0
) -> tuple[StepPlan, list[tuple[SlotRequest, Completion]]]:
    """One step in which every row samples `token`; returns the plan and what finished."""
    table.admit()
    plan = table.plan()
    n = plan.num_rows
    return plan, table.record(plan, np.full(n, token), np.zeros(n, dtype=np.float32), version)


def spans(plan: StepPlan) -> list[tuple[int, int, int]]:
    return [(chunk.row, chunk.start, chunk.end) for chunk in plan.chunks]


def test_a_prompt_is_computed_once_and_then_decoded() -> None:
    table = make_table()
    add(table, 0, [5, 6, 7], new=2)
    plan, finished = step(table)
    assert spans(plan) == [(0, 0, 2)]
    assert plan.token_ids.tolist() == [5, 6, 7]
    assert plan.positions.tolist() == [0, 1, 2]
    assert plan.num_prefill_tokens == 3
    assert finished == []
    plan, finished = step(table, token=8)
    assert spans(plan) == []
    assert (plan.token_ids.tolist(), plan.positions.tolist()) == ([9], [3])
    [(_, completion)] = finished
    assert completion.token_ids == [9, 8]
    assert completion.finish_reason == "length"
    assert not table.has_work


def test_prefill_stays_within_the_budget_and_rows_wait_for_it() -> None:
    table = make_table(max_prefill_tokens=4)
    add(table, 0, [1] * 7, new=9)
    add(table, 1, [2] * 3, new=9)
    sampled = []
    for _ in range(3):
        plan, _ = step(table)
        assert sum(end - start for _, start, end in spans(plan)) <= 4
        sampled.append(plan.is_ready.tolist())
    # 4 of row 0; 2 of row 0 and 2 of row 1, which is complete then
    assert sampled == [[False, False], [True, True], [True, True]]


def test_a_group_computes_its_prompt_once() -> None:
    table = make_table()
    for i in range(4):
        add(table, i, [5, 6, 7, 8], new=2, group="g")
    plan, _ = step(table)
    assert spans(plan) == [(0, 0, 3)]
    assert plan.is_ready.all()
    assert (plan.num_prefill_tokens, plan.num_shared_tokens) == (4, 9)
    entries = sorted(
        (row, plan.positions[token], plan.token_ids[token])
        for row, token in zip(plan.write_rows, plan.write_tokens, strict=True)
    )
    assert entries == [(row, i, 5 + i) for row in range(4) for i in range(4)]


def test_a_late_member_copies_the_common_prefix() -> None:
    table = make_table()
    add(table, 0, [5, 6, 7, 8], new=9, group="g")
    step(table)
    add(table, 1, [5, 6, 7, 8], new=9, group="g")
    add(table, 2, [5, 6, 1, 2, 3], new=9, group="g")
    add(table, 3, [5, 6, 7, 8], new=9)  # of no group
    plan, _ = step(table)
    assert plan.row_copies == {3: [(0, 1)], 2: [(0, 2)]}
    assert spans(plan) == [(2, 2, 4), (3, 0, 3)]
    assert plan.is_ready.all()


def test_members_wait_for_a_prompt_longer_than_the_budget() -> None:
    table = make_table(max_prefill_tokens=4)
    for i in range(2):
        add(table, i, list(range(10)), new=3, group="g")
    computed = []
    for _ in range(3):
        plan, _ = step(table)
        computed += spans(plan)
    assert computed == [(0, 0, 4), (0, 4, 8), (0, 8, 9)]
    assert plan.is_ready.all()


def test_after_invalidation_no_row_samples_before_its_entries_are_complete() -> None:
    table = make_table(max_prefill_tokens=3)
    for i in range(3):
        add(table, i, [1, 2, 3 + i], new=20)
    while not step(table)[0].is_ready.all():
        pass
    lengths = table.length[:3].copy()
    table.invalidate()
    num_recomputed = 0
    for _ in range(30):
        table.admit()
        plan = table.plan()
        num_recomputed += plan.num_recomputed_tokens
        assert sum(end - start for _, start, end in spans(plan)) <= 3
        table.record(plan, np.full(3, 9), np.zeros(3, dtype=np.float32), 1)
        if plan.is_ready.all():
            break
    assert num_recomputed == sum(lengths - 1)
    for row in range(3):
        end = int(table.length[row])
        versions = table.versions[row, 3:end].tolist()
        first_new = versions.index(1)
        assert set(versions[:first_new]) <= {0}
        assert set(versions[first_new:]) == {1}


def test_gaps_are_filled_by_waiting_requests_then_closed() -> None:
    table = make_table(max_rows=3)
    requests = [add(table, i, [i + 1, i + 1], new=9) for i in range(4)]
    step(table)
    assert [request.row for request in requests] == [0, 1, 2, -1]
    table.cancel(requests[0])
    assert table.admit() == []
    assert requests[3].row == 0
    table.cancel(requests[3])
    assert table.admit() == [(2, 0)]
    assert (requests[2].row, table.num_rows) == (0, 2)
    assert table.cancel(requests[2]) == 1


def test_random_schedules_keep_the_tables_promises() -> None:
    """Every computed entry is written once to its row, and rows sample only from complete ones."""
    rng = random.Random(0)
    for _ in range(60):
        table = make_table(max_rows=rng.randrange(1, 6), max_prefill_tokens=rng.randrange(1, 12))
        num_requests, alive, finished = rng.randrange(1, 14), [], []
        # row -> the token whose entry it holds at each position, None where invalid
        held: dict[int, list[int | None]] = {row: [None] * 64 for row in range(6)}
        version, added = 0, 0
        for _ in range(600):
            if added < num_requests and rng.random() < 0.5:
                group = rng.choice([None, "a", "b"])
                prompt = [*range(1, rng.randrange(2, 8)), rng.randrange(3)]
                stop = tuple(rng.sample(range(9), rng.randrange(3)))
                alive.append(add(table, added, prompt, rng.randrange(1, 8), group, stop))
                added += 1
            if alive and rng.random() < 0.03:
                victim = alive.pop(rng.randrange(len(alive)))
                if not victim.is_finished:
                    table.cancel(victim)
                    finished.append(victim)
            if rng.random() < 0.1:
                table.invalidate()
                held = {row: [None] * 64 for row in range(6)}
                version += 1
            if not table.has_work:
                if added == num_requests:
                    break
                continue
            for source, target in table.admit():
                held[target] = list(held[source])
            for row in np.flatnonzero(table.cached[: table.num_rows] == 0):
                held[row] = [None] * 64
            plan = table.plan()
            for length, pairs in plan.row_copies.items():
                for source, target in pairs:
                    assert None not in held[source][:length]
                    held[target][:length] = held[source][:length]
            for row, token in zip(plan.write_rows, plan.write_tokens, strict=True):
                held[row][plan.positions[token]] = int(plan.token_ids[token])
            assert sum(chunk.num_tokens for chunk in plan.chunks) <= table.max_prefill_tokens
            for row in np.flatnonzero(plan.is_ready):
                length = int(table.length[row])
                assert held[row][:length] == table.tokens[row, :length].tolist()
            for chunk in plan.chunks:
                expected = table.tokens[chunk.row, : chunk.end].tolist()
                assert held[chunk.row][: chunk.end] == expected
            sampled = np.array([rng.randrange(9) for _ in range(plan.num_rows)])
            done = table.record(plan, sampled, np.zeros(plan.num_rows, dtype=np.float32), version)
            for request, completion in done:
                ids, stops = completion.token_ids, request.stop_token_ids
                assert not set(ids[:-1]) & set(stops)
                is_full = len(request.prompt) + len(ids) == request.max_length
                if completion.finish_reason == "stop":
                    assert ids[-1] in stops
                else:
                    assert is_full
                finished.append(request)
        assert len(finished) == num_requests
        assert table.num_running == 0


class Letters:
    """As much of a tokenizer as stop strings need: token 0 is `a`."""

    added_tokens_decoder: ClassVar[dict[int, Any]] = {}

    def decode(self, token_ids: list[int], **_: Any) -> str:
        return "".join(chr(ord("a") + token) for token in token_ids)


def test_a_stop_string_ends_its_own_row_across_an_update_and_a_move() -> None:
    table, tokenizer = make_table(), cast(Any, Letters())
    add(table, 0, [0, 1], new=1)  # it leaves a gap, which another row fills
    requests = [add(table, i, [0], new=4) for i in (1, 2, 3)]
    requests[0].stops = StopStrings(tokenizer, ["ca"])
    requests[2].stops = StopStrings(tokenizer, ["x", "ab"])  # the `a` of the prompt is not its own
    tokens, finished = [1, 0, 1, 9], []
    for version, token in enumerate(tokens):
        finished += step(table, token, version)[1]
        table.invalidate()
    found = {request.request_id: completion for request, completion in finished}
    assert [len(found[i].token_ids) for i in range(4)] == [1, 4, 4, 3]
    assert [found[i].finish_reason for i in range(4)] == ["length", "length", "length", "stop"]
    assert (found[3].token_ids, found[3].versions) == ([1, 0, 1], [0, 1, 2])
    assert [found[i].stop for i in (2, 3)] == [(), ("x", "ab")]


def test_a_stop_string_that_is_complete_at_the_limit_is_a_stop() -> None:
    table = make_table()
    add(table, 0, [5], new=2).stops = StopStrings(cast(Any, Letters()), ["jj"])
    assert step(table, 9)[1] == []
    [(_, completion)] = step(table, 9)[1]
    assert completion.finish_reason == "stop"
