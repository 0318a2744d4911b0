"""Agents that branch, give up and come back while workers die."""

from __future__ import annotations

from collections import Counter

import agent_schedules
import chat_templates as templates
import pytest

NUM_SCHEDULES = 60


@pytest.mark.parametrize("template", ["QWEN", "QWEN_THINKING"])
def test_every_answer_that_was_delivered_is_trained_once(template: str) -> None:
    tokenizer = templates.tokenizer_for(getattr(templates, template))
    counts = Counter[str]()
    for seed in range(NUM_SCHEDULES):
        counts += agent_schedules.play(tokenizer, seed)
    assert counts["rows"] > counts["trained"] > NUM_SCHEDULES // 2
    met = ("retries", "undelivered", "updates", "server_deaths", "worker_deaths")
    assert min(counts[name] for name in met) > NUM_SCHEDULES // 20
