"""The examples in which a model learns to use a tool: in a workflow, and as an agent."""

from __future__ import annotations

import ast
import json
import re
import sys
from pathlib import Path

import pytest
from integration.run_process import REPOSITORY, SCRIPTS, started
from tokenizers import Tokenizer

from areal_sc.records.reading import rows

EXAMPLES = REPOSITORY / "examples"
CONFIG = ("--config", str(REPOSITORY / "configs" / "tool_use.yaml"))


def test_the_example_runs(tmp_path: Path) -> None:
    few = ("rollout.train_batch_groups=4", "rollout.group_size=2", "evaluation.num_prompts=4")
    arguments = (*CONFIG, f"actor.path={tmp_path / 'model'}", "total_steps=2", *few)
    arguments += ("task.warm_up_steps=2",)
    with started(tmp_path / "run", EXAMPLES / "tool_use.py", *arguments) as run:
        run.finish()
        assert run.summary()["num_rows_trained"] == 2 * 4 * 2
        assert (tmp_path / "model" / "model.safetensors").is_file()


@pytest.mark.long
def test_the_tool_is_learned(tmp_path: Path) -> None:
    arguments = (*CONFIG, f"actor.path={tmp_path / 'model'}")
    with started(tmp_path / "run", EXAMPLES / "tool_use.py", *arguments) as run:
        run.finish()
        summary = run.summary()
    assert summary["accuracy_before"] < 0.4
    assert summary["accuracy_after"] >= 0.8
    assert summary["num_episodes_rejected"] == 0


def test_agents_outside_go_on_with_the_deployed_model(tmp_path: Path) -> None:
    few = ("rollout.train_batch_groups=4", "rollout.group_size=2", "evaluation.num_prompts=4")
    arguments = (*CONFIG, f"actor.path={tmp_path / 'model'}", "total_steps=2", *few)
    server = f'+task.deploy="{sys.executable} {SCRIPTS / "serve_model.py"} {{model}} {{port}}"'
    loop = EXAMPLES / "closed_loop.py"
    with started(tmp_path / "run", loop, *arguments, "task.warm_up_steps=2", server) as run:
        run.finish()
        assert run.summary()["num_rows_trained"] == 2 * 4 * 2
        assert re.search(r"the deployed model: 0\.\d+ of 64 answers right", run.output)
        run.wait_until_gone()


def test_an_agent_learns_the_tool(tmp_path: Path) -> None:
    """In three runs the accuracy rose by 0.41, 0.46 and 0.48, greedy to 1.

    With batches so small and the rate of the configuration it fell to 0 in one run of many.
    """
    fewer = ("total_steps=20", "rollout.train_batch_groups=16", "evaluation.num_prompts=128")
    fewer += ("actor.optimizer.lr=2e-4",)
    arguments = (*CONFIG, f"actor.path={tmp_path / 'model'}", *fewer)
    with started(tmp_path / "run", EXAMPLES / "agent.py", *arguments) as run:
        run.finish()
        summary = run.summary()
    assert summary["accuracy_before"] < 0.4
    assert summary["accuracy_after"] - summary["accuracy_before"] >= 0.22
    assert summary["greedy_accuracy_after"] >= 0.8
    assert summary["num_episodes_rejected"] == 0
    assert (tmp_path / "model" / "model.safetensors").is_file()
    check_conversations(tmp_path / "run", tmp_path / "model")


def check_conversations(run_dir: Path, model: Path) -> None:
    """Of each row its record has the turns that its tokens are, by role, tool and result."""
    tokenizer, num_tools = Tokenizer.from_file(str(model / "tokenizer.json")), 0
    recorded = list(rows(run_dir))
    for row in recorded:
        (call, *more), given = row.calls, row.calls[0].num_given
        sizes = [it.num_given + it.num_sampled for it in row.calls]
        assert sum(sizes) == len(row.input_ids)
        assert not row.loss_mask[:given].any()
        assert row.loss_mask[given : given + call.num_sampled].all()
        text = tokenizer.decode(row.input_ids.tolist(), skip_special_tokens=False)
        assert [it.role for it in call.given] == ["user"]
        assert call.given[0].text in text
        assert len(more) == bool(call.answer.tool_calls)
        assert row.began <= call.began <= row.began + row.took_s
        for it in more:
            assert it.after == call.number
            assert it.began >= call.began
            for tool, result in zip(call.answer.tool_calls, it.given, strict=True):
                num_tools += 1
                assert tool.name == "look_up"
                assert (result.role, result.answers) == ("tool", tool.id)
                key = str(json.loads(tool.arguments).get("key"))
                table = ast.literal_eval(row.prompt)["table"]
                assert result.text == table.get(key, "none")
    assert num_tools > 0
    assert {it.model for row in recorded for it in row.calls} == {"policy"}
