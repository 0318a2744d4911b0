"""Agents on a real worker: what they called is trained, and what fails has a name."""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from integration.scripts import agents, episodes, own_sessions
from waiting import wait_until

from areal_sc import AgentCommand, AgentWorkflow
from areal_sc.errors import ConfigError


def test_agents_are_trained_or_have_a_cause(
    start_rollout: Callable[..., Any], chat_model: Path
) -> None:
    wrong = {
        "calls nobody": "agent_no_call",
        "raises": r"agent_error: KeyError at agents\.py:\d+",
        "dies": r"agent_died: agents\.py:\d+",
        "returns None": r"bad_reward: agents\.py:\d+",
        "returns NaN": r"bad_reward: agents\.py:\d+",
        "returns text": r"bad_reward: agents\.py:\d+",
    }
    rows = [{"prompt": f"a{n}", "does": what} for n, what in enumerate((*wrong, "answers"))]
    settings = f"actor.path={chat_model}", "rollout.rejection_window=1000", "rollout.group_size=2"
    with start_rollout(*settings) as rollout:
        batch = rollout.rollout_batch(rows, AgentWorkflow(agents.does, discount=0.5))
        assert [row.reward for row in batch.rows] == [0.5, 0.5]
        counted = rollout.rejections.by_cause()
        assert sum(counted.values()) == 2 * len(wrong)
        for cause in set(wrong.values()):
            found = sum(n for told, n in counted.items() if re.fullmatch(cause, told))
            assert found == 2 * [*wrong.values()].count(cause), counted

        answers = rows[-1:]
        own = rollout.rollout_batch(answers, own_sessions.OpensASession())
        assert [row.reward for row in own.rows] == [0.5, 0.5]

        shell = "import sys; sys.path.insert(0, sys.argv[1]); import agents, json"
        shell += "; print(agents.does(json.load(sys.stdin)))"
        words = ["python", "-c", shell, str(Path(agents.__file__).parent)]
        program = AgentWorkflow(AgentCommand(words, episodes.by_letters))
        assert rollout.rollout_batch(answers, program).rows[0].reward == sum(map(ord, "the"))

        result = rollout.evaluate(answers, AgentWorkflow(agents.does), num_prompts=1)
        assert result.reward == 0.5
        assert result.metrics["agent/calls"] == 1.0


def test_what_an_agent_has_written_is_among_the_samples(
    start_rollout: Callable[..., Any], chat_model: Path, scheduler: Any
) -> None:
    rows = [{"prompt": f"a{n}", "does": "answers"} for n in range(8)]
    samples = Path(scheduler.config.run_dir, "samples.jsonl")
    settings = f"actor.path={chat_model}", "rollout.train_batch_groups=2", "rollout.group_size=2"
    with start_rollout(*settings) as rollout:
        rollout.prepare_batch(rows, AgentWorkflow(agents.does))
        wait_until(lambda: samples.exists() and samples.read_text().endswith("\n"))
        first = json.loads(samples.read_text().splitlines()[0])
        assert first["output"].startswith("the model said ")


@pytest.mark.parametrize("network", ["all", "session"])
def test_an_agent_can_be_left_with_the_model_alone(
    start_rollout: Callable[..., Any], chat_model: Path, network: str
) -> None:
    settings = f"actor.path={chat_model}", f"agents.network={network}", "rollout.group_size=2"
    with socket.create_server(("127.0.0.1", 0)) as other, start_rollout(*settings) as rollout:
        rows = [{"prompt": "a", "port": other.getsockname()[1]}]
        batch = rollout.rollout_batch(rows, AgentWorkflow(agents.sees_the_model_alone))
        assert [row.reward for row in batch.rows] == [float(network == "session")] * 2


def test_a_network_that_agents_cannot_have_ends_the_run(
    start_rollout: Callable[..., Any], chat_model: Path
) -> None:
    """Which no check has seen: the workflow is the user's own."""
    settings = (
        f"actor.path={chat_model}",
        "agents.network=session",
        "rollout.sandbox.isolation=none",
    )
    rows = [{"prompt": "a", "does": "answers"}]
    with (
        start_rollout(*settings) as rollout,
        pytest.raises(ConfigError, match=r"agents\.network=session: .* needs namespaces"),
    ):
        rollout.rollout_batch(rows, own_sessions.OpensASession())
