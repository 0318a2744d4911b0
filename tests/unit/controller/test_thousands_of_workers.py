"""What a step costs the controllers' loop as workers and groups become many; counted, not timed."""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from simulation.behavior import Behavior
from simulation.network import NetworkConnection
from simulation.settings import Settings
from simulation.training_run import TrainingRun
from simulation.virtual_loop import VirtualTimeLoop, run_virtual

from areal_sc import controller
from areal_sc.controller.rollout.worker_set import GROUPS_PER_TURN, WorkerLoads
from areal_sc.transport.rpc.method import Method
from areal_sc.weights.methods import ADOPT_WEIGHTS
from areal_sc.weights.updates import BEGUN_PER_TURN
from areal_sc.workers.calls import RUN_GROUP

NUM_GROUPS = 96


def lines_of_first_batch(num_workers: int) -> int:
    """Lines of the controllers' code that the admission and the batch of 16 groups run."""
    settings = Settings(
        num_rollout_workers=num_workers, batch_groups=16, max_staleness=0, num_steps=1
    )
    folder = str(Path(controller.__file__).parent)
    num_lines = 0

    def trace(frame: FrameType, event: str, arg: Any) -> Any:
        nonlocal num_lines
        if Path(frame.f_code.co_filename).parent.as_posix() != folder:
            return None
        num_lines += event == "line"
        return trace

    async def scenario() -> None:
        async with TrainingRun(settings).started() as run:
            before = sys.gettrace()
            sys.settrace(trace)
            try:
                await run.rollout.prepare_batch_async(run.prompts, run.workflow)
            finally:
                sys.settrace(before)

    run_virtual(scenario())
    return num_lines


def test_the_work_of_a_batch_grows_no_faster_than_the_number_of_workers() -> None:
    few, many = lines_of_first_batch(16), lines_of_first_batch(128)
    assert many < 8 * few


@pytest.mark.parametrize(
    ("method", "limit"), [(RUN_GROUP, GROUPS_PER_TURN), (ADOPT_WEIGHTS, BEGUN_PER_TURN)]
)
def test_calls_of_many_workers_leave_the_loop_its_turns(
    method: Method[Any, Any], limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    turns: Counter[int] = Counter()
    call = NetworkConnection.call

    async def noted(self: NetworkConnection, called: Any, *args: Any, **options: Any) -> Any:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualTimeLoop)
        turns[loop._num_turns] += called is method
        return await call(self, called, *args, **options)

    monkeypatch.setattr(NetworkConnection, "call", noted)
    settings = Settings(
        num_rollout_workers=NUM_GROUPS,
        batch_groups=NUM_GROUPS,
        max_concurrent_groups=NUM_GROUPS,
        max_staleness=0,
        num_steps=2,
    )
    run = run_virtual(TrainingRun(settings).play())
    assert turns.total() == settings.num_steps * NUM_GROUPS
    assert max(turns.values()) <= limit
    assert {len(worker.history) for worker in run.cluster.rollout_workers} == {3}


@given(data=st.data())
def test_the_least_loaded_worker_is_the_one_that_a_search_finds(data: st.DataObject) -> None:
    nodes = data.draw(st.lists(st.sampled_from("abc"), min_size=1, max_size=8))
    max_on_worker = data.draw(st.integers(1, 4))
    max_on_node = {node: data.draw(st.integers(1, 8)) for node in set(nodes)}
    loads = WorkerLoads(nodes, max_on_worker, max_on_node)
    counts = [(0, 0, 0)] * len(nodes)
    promised, gets_newest = [0] * len(nodes), [False] * len(nodes)
    for _ in range(data.draw(st.integers(1, 20))):
        worker = data.draw(st.integers(0, len(nodes) - 1))
        version, num_running, num_held = counts[worker] = data.draw(
            st.tuples(st.integers(0, 2), st.integers(0, 3), st.integers(0, 3))
        )
        gets_newest[worker] = data.draw(st.booleans())
        loads.note_load(
            worker,
            version=version,
            num_running=num_running,
            num_held=num_held,
            gets_newest=gets_newest[worker],
        )
        stored = [counts[i][1] + counts[i][2] + promised[i] for i in range(len(nodes))]
        wanted = data.draw(st.integers(0, 2))
        roomy = [
            i
            for i, node in enumerate(nodes)
            if stored[i] < max_on_worker
            and sum(n for n, of in zip(stored, nodes, strict=True) if of == node)
            < max_on_node[node]
        ]
        able = [i for i in roomy if counts[i][0] >= wanted]
        busy = [counts[i][1] + promised[i] for i in range(len(nodes))]
        expected = min(able, key=lambda i: busy[i], default=None)
        num_waiting = data.draw(st.integers(1, 5))
        sharing = [i for i in roomy if i in able or gets_newest[i]]
        share = (sum(busy[i] for i in sharing) + num_waiting) / max(1, len(sharing))
        if expected is not None and busy[expected] >= share:
            expected = None
        assert loads.least_loaded(wanted, num_waiting) == expected
        assert loads.num_stored == sum(running + held for _, running, held in counts)
        if expected is not None:
            promised[expected] += 1
            loads.promise(expected, 1)


def test_the_first_worker_that_holds_a_version_does_not_get_all_of_its_groups() -> None:
    """Weights arrive at different times, and all groups of a step are admitted at one."""
    settings = Settings(
        num_rollout_workers=4,
        batch_groups=8,
        num_steps=12,
        behavior=Behavior(generation_s=3.0, publication_s=lambda rng: rng.random()),
    )
    run = run_virtual(TrainingRun(settings).play())
    starts = Counter((s.admitted_version, s.worker) for s in run.cluster.starts)
    most = [max(n for (of, _), n in starts.items() if of == version) for version in range(2, 9)]
    assert max(most) <= 5, f"of about 8 groups: {most}"
