"""Real workers play rows that only the script can read."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from areal_sc import Prompts, SingleTurnWorkflow
from areal_sc.errors import WorkflowError


def row_number(prompt: dict[str, Any], completion: str) -> float:
    return float(prompt["row"])


async def judged(prompt: dict[str, Any], completion: str) -> float:
    return float(prompt["row"] == 0 and prompt["span"] == (0, {2: 2**70}))


def checked(prompt: dict[str, Any], completion: str) -> float:
    return float(prompt["row"] == 0 and prompt["span"] == (0, {2: 2**70}))


class OwnRows(Prompts):
    """Only the first row arrives in other processes as it is."""

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> dict[str, Any]:
        span = (index, {2: 2**70})
        return {"prompt": "ba=", "row": index, "span": Counter("ab") if index else span}


WORKFLOW = SingleTurnWorkflow(row_number)
BOTH = SingleTurnWorkflow({"judged": judged, "checked": checked})


def stream(num_rows: int) -> Iterator[dict[str, Any]]:
    return ({"prompt": "ba=", "row": row} for row in range(num_rows))


def test_a_huge_dataset_that_no_other_process_can_build(start_rollout: Callable[..., Any]) -> None:
    class Rows:
        def __init__(self) -> None:
            self.lock = threading.Lock()
            self.read: list[int] = []

        def __len__(self) -> int:
            return 10**9

        def __getitem__(self, index: int) -> dict[str, Any]:
            with self.lock:
                self.read.append(index)
            return {"prompt": "ba=", "row": index}

    rows = Rows()
    with start_rollout() as rollout:
        batch = rollout.prepare_batch(rows, WORKFLOW)
        trained = {row.reward for row in batch.rows}
        assert len(trained) == 4
        assert trained <= {float(index) for index in rows.read}
        assert len(rows.read) <= rollout.groups.ledger.num_prompts_taken + 1
        outcome = rollout.evaluate(rows, WORKFLOW, num_prompts=3, num_samples=5)
        assert outcome.reward == 1.0, "each of the rows 0, 1 and 2 equally often"
        assert (outcome.num_prompts, outcome.num_samples) == (3, 5)


def test_a_stream_goes_on_after_a_resume(start_rollout: Callable[..., Any]) -> None:
    with start_rollout("rollout.max_staleness=1") as rollout:
        first = rollout.prepare_batch(stream(100), WORKFLOW)
        assert rollout.groups.ledger.num_prompts_taken == 8
        state = rollout.state()
    state = replace(state, training=replace(state.training, untrained=set()))  # as if trained
    with start_rollout("rollout.max_staleness=1") as rollout:
        rollout.go_back(state)
        second = rollout.prepare_batch(stream(100), WORKFLOW)
    rewards = [{row.reward for row in batch.rows} for batch in (first, second)]
    assert [len(seen) for seen in rewards] == [4, 4]
    assert set.union(*rewards) == set(range(8))


def test_a_stream_that_ends_and_a_row_that_does_not_arrive_end_the_run(
    start_rollout: Callable[..., Any],
) -> None:
    with start_rollout() as rollout:
        assert rollout.evaluate(OwnRows(), BOTH, num_prompts=1).reward == 2.0
        with pytest.raises(
            WorkflowError, match=r"row 1 of the dataset \(OwnRows\): \['span'\] is "
        ):
            rollout.evaluate(OwnRows(), BOTH)
        with pytest.raises(WorkflowError, match="a stream of prompts has no length: give num_gro"):
            rollout.rollout_batch(stream(100), WORKFLOW)
        batch = rollout.rollout_batch(stream(100), WORKFLOW, 3)
        assert {row.reward for row in batch.rows} == {0.0, 1.0, 2.0}
        with pytest.raises(WorkflowError, match="ended after 2 rows, but row 2 is needed"):
            rollout.prepare_batch(stream(2), WORKFLOW)


def test_a_prompt_that_the_tokenizer_does_not_know_is_one_warning(
    start_rollout: Callable[..., Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    import minimal  # not above: workers import this file, and have no examples on their path

    minimal.make_model(str(tmp_path / "digits"))
    settings = (
        f"actor.path={tmp_path / 'digits'}",
        "rollout.max_context_tokens=16",
        "generation.max_new_tokens=2",
    )
    with start_rollout(*settings) as rollout:
        rollout.rollout_batch([{"prompt": "1,2+>", "row": 0}], WORKFLOW)  # `+` alone
        assert "tokenizer" not in caplog.text
        rollout.rollout_batch([{"prompt": "A+B>", "row": row} for row in (1, 2)], WORKFLOW)
    (warning,) = [r.getMessage() for r in caplog.records if "tokenizer" in r.getMessage()]
    assert "{'prompt': 'A+B>', 'row': " in warning
    assert "3 of its 4 tokens are $: $ $ $ >" in warning
