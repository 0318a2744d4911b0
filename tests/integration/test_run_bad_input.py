"""Bad input ends with its cause and its exit code, or is survived; never a hang."""

from __future__ import annotations

import resource
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from integration.run_process import (
    NO_ORPHANS,
    assert_nothing_was_started,
    open_gate,
    tiny_run,
)
from integration.scripts import agents, episodes
from integration.scripts.tiny_run import letter_prompts

from areal_sc import AgentWorkflow, SingleTurnWorkflow, Workflow
from areal_sc.config.schema import GenerationConfig
from areal_sc.errors import ConfigError, NeverWorks, TooManyRejections, WorkflowError

ROWS_A_STEP = 4 * 2


def test_an_unknown_key_on_the_command_line(tmp_path: Path, tiny_model_folder: Path) -> None:
    with tiny_run(tmp_path / "run", tiny_model_folder, "rollout.group_sise=4") as run:
        assert run.wait() == 2, run.story()
        assert "rollout.group_sise" in run.output
        assert "rollout.group_size" in run.output  # the nearest known one
        assert_nothing_was_started(run)


@pytest.mark.parametrize("what", ["weights", "folder"])
def test_a_model_folder_without_weights_or_that_is_not_there(
    tmp_path: Path, tiny_model_folder: Path, what: str
) -> None:
    folder = tmp_path / "model"
    if what == "weights":
        shutil.copytree(
            tiny_model_folder, folder, ignore=shutil.ignore_patterns("*.safetensors", "*.bin")
        )
    with tiny_run(tmp_path / "run", folder, NO_ORPHANS) as run:
        assert run.wait() == 6, run.story()
        assert str(folder) in run.output
        assert "Traceback" not in run.output
        assert not list((run.run_dir / "logs").glob("train-*")), run.story()
        run.wait_until_gone()


@pytest.mark.parametrize(
    ("workflow", "cause", "said"),
    [
        (episodes.ReturnsNothing(), "rejected", "the workflow returned None"),
        (episodes.UnequalLengths(), "workflow_error", "fields differ in length"),
        (episodes.Tokens(65), "too_long", "65 tokens, expected at most rollout.max_context"),
        (
            episodes.Tokens(60, num_rows=2),
            "too_long",
            "2 rows have 120 tokens together, expected at most 64: raise rollout.max_episode_tok",
        ),
        (episodes.Raises(), "workflow_error", "ZeroDivisionError: of the episode"),
        (
            SingleTurnWorkflow(episodes.right, GenerationConfig(max_new_tokens=4, temperature=0)),
            "workflow_error",
            "tokens of temperature 0, expected finite numbers above 0: a greedy answer",
        ),
    ],
    ids=["None", "unequal lengths", "too long", "many rows", "workflow raises", "greedy"],
)
def test_episodes_that_are_all_rejected_end_the_run_with_their_cause(
    start_rollout: Callable[..., Any], workflow: Workflow, cause: str, said: str
) -> None:
    with (
        start_rollout("rollout.rejection_window=4") as rollout,
        pytest.raises(TooManyRejections, match=rf"Causes: {cause}[^,]* x\d+\.") as failure,
    ):
        rollout.prepare_batch(letter_prompts(32, seed=5), workflow)
    assert said in str(failure.value)
    assert "rollout.max_rejection_rate" in str(failure.value)
    assert failure.value.exit_code == 7
    account = rollout.groups.ledger.account()
    assert account["rows_trained"] == 0
    assert sum(n for c, n in account["rejected"].items() if c.startswith(cause)) >= 4


@pytest.mark.parametrize(
    ("workflow", "said"),
    [
        (SingleTurnWorkflow(episodes.right, use_chat_template=True), "has no chat template"),
        (AgentWorkflow(agents.asks_with_a_tool), "refused in every episode: .*no chat template"),
        (AgentWorkflow("integration.scripts.unimportable:agent"), "cannot be imported: .*KeyError"),
        (
            SingleTurnWorkflow(episodes.right, GenerationConfig(max_new_tokens=4, top_p=2.0)),
            "generation.top_p must be",
        ),
        (SingleTurnWorkflow(episodes.cannot_be_prepared), "cannot be loaded in its process: Oper"),
    ],
    ids=["no chat template", "tools", "unimportable agent", "impossible sampling", "unprepared"],
)
def test_what_no_retry_can_change_ends_the_run_at_the_first(
    start_rollout: Callable[..., Any], workflow: Workflow, said: str
) -> None:
    with (
        start_rollout("rollout.rejection_window=100000") as rollout,
        pytest.raises((NeverWorks, ConfigError), match=said),
    ):
        rollout.prepare_batch(letter_prompts(32, seed=5), workflow)
    assert rollout.rejections.num_episodes == 0


def test_a_dataset_that_cannot_be_read(start_rollout: Callable[..., Any]) -> None:
    with (
        start_rollout("rollout.rejection_window=4") as rollout,
        pytest.raises(TooManyRejections, match=r"row \d+ is on a broken disk"),
    ):
        rollout.prepare_batch(episodes.UnreadableRows(), SingleTurnWorkflow(episodes.right))


def test_what_cannot_be_sent_to_workers_is_refused_at_once(
    start_rollout: Callable[..., Any],
) -> None:
    right = SingleTurnWorkflow(episodes.right)
    cases: list[tuple[Any, Any, str]] = [
        ([], right, "is empty"),
        ([{"prompt": "a="}], SingleTurnWorkflow(lambda prompt, completion: 1.0), "lambda"),
        ([{"prompt": "a="}], episodes.right, "expected an instance of areal_sc.Workflow"),
        ([{"prompt": object()}], right, "prompt"),
        ([{"question": "a="}] * 9, right, "no 'prompt', only"),
    ]
    with start_rollout() as rollout:
        for prompts, workflow, said in cases:
            with pytest.raises(WorkflowError, match=said) as refusal:
                rollout.prepare_batch(prompts, workflow)
            assert refusal.value.exit_code == 7
            assert rollout.groups.ledger.num_admitted_not_rejected == 0


def test_some_bad_rows_are_left_out_and_the_run_goes_on(start_rollout: Callable[..., Any]) -> None:
    """Prompts longer than the context, and rewards that hang; neither becomes a reward of 0."""
    prompts = letter_prompts(6, seed=7)
    prompts.insert(1, {"prompt": "a" * 100 + "=", "answer": "a"})
    prompts.insert(4, {"prompt": "ba=", "answer": "ab", "hang": True})
    # A quarter of the groups is bad and the bad ones end first: the tiny run's window of 8 can fill
    # with them. This is the default window; that a full one ends the run is tested above.
    settings = ("rollout.reward_timeout_s=1.5", "rollout.rejection_window=128")
    with start_rollout(*settings) as rollout:
        workflow = SingleTurnWorkflow(episodes.hangs_for_some)
        outside = rollout.rollout_batch(prompts, workflow)
        assert {row.group_id for row in outside.rows} == {-1, -3, -4, -6, -7, -8}
        rejected = {cause.split(":")[0]: n for cause, n in rollout.rejections.episodes.items()}
        assert rejected == {"reward_timeout": 2}
        assert rollout.rejections.left_out == {1}
        batch = rollout.prepare_batch(prompts, workflow)
        assert len({row.group_id for row in batch.rows}) == 4
        for rows in (outside.rows, batch.rows):
            assert {row.reward for row in rows} == {1.0}
            assert max(row.sequence_length for row in rows) <= 64


def test_a_dataset_smaller_than_a_batch_is_repeated(start_rollout: Callable[..., Any]) -> None:
    with start_rollout() as rollout:
        batch = rollout.prepare_batch(letter_prompts(3, seed=8), SingleTurnWorkflow(episodes.right))
        assert len({row.group_id for row in batch.rows}) == 4
        assert rollout.groups.ledger.num_prompts_taken >= 4
        assert rollout.rejections.episodes.total() == 0


def test_a_reward_that_always_fails_ends_the_script_in_one_block(
    tmp_path: Path, tiny_model_folder: Path
) -> None:
    settings = "task.reward=unknown_answer", NO_ORPHANS
    with tiny_run(tmp_path / "run", tiny_model_folder, *settings) as run:
        assert run.wait() == 7, run.story()
        before, _, block = run.output.partition("ERROR ")
        assert before.count("the first for this cause: reward_error: KeyError at tiny_run.py:") == 1
        assert "episodes were rejected" in block
        assert "reward_error" in block
        assert "KeyError: 'solution'" in block
        assert len(block.splitlines()) < 15
        assert run.steps() == []
        run.wait_until_gone()


def test_a_snapshot_that_cannot_be_written_is_a_warning(
    tmp_path: Path, tiny_model_folder: Path
) -> None:
    """During steps 3 and 4 the training rank cannot write more than a page to any file."""
    with tiny_run(
        tmp_path / "run",
        tiny_model_folder,
        *("total_steps=6", "rollout.max_staleness=0", "checkpoint.every_steps=1"),
        f"task.num_free_episodes={2 * ROWS_A_STEP}",
    ) as run:
        run.wait_until(lambda: len(run.events("snapshot")) == 2, "two snapshots")
        kept = {path.name: _sizes(path) for path in (run.run_dir / "checkpoints").iterdir()}
        rank = run.worker_pid("train/0")
        limits = resource.prlimit(rank, resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
        open_gate(run.run_dir)
        run.wait_until(lambda: len(run.events("snapshot_failed")) == 2, "two failed snapshots")
        assert {p.name: _sizes(p) for p in (run.run_dir / "checkpoints").iterdir()} == kept
        resource.prlimit(rank, resource.RLIMIT_FSIZE, limits)
        open_gate(run.run_dir)
        run.finish()
        assert sorted(p.name for p in (run.run_dir / "checkpoints").iterdir()) == [
            "step-000005",
            "step-000006",
        ]
        assert "the run goes on without this snapshot" in run.output
        assert "File too large" in run.output
        assert run.steps() == [1, 2, 3, 4, 5, 6]
        assert run.summary()["num_rows_trained"] == 6 * ROWS_A_STEP
        assert (run.run_dir / "model" / "model.safetensors").is_file()


def _sizes(folder: Path) -> Sequence[tuple[str, int]]:
    return sorted(
        (str(path.relative_to(folder)), path.stat().st_size)
        for path in folder.rglob("*")
        if path.is_file()
    )
