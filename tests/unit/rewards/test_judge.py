"""The judge asks a real server on this machine, which answers what a test tells it to."""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiohttp import web

from areal_sc.agents.command import AgentCommand
from areal_sc.agents.online import OnlineWorkflow
from areal_sc.agents.workflow import AgentWorkflow
from areal_sc.errors import NeverWorks, RewardError, WorkflowError
from areal_sc.rewards.judge import JudgeReward, RankingJudge
from areal_sc.workflows.single_turn import SingleTurnWorkflow
from areal_sc.workflows.trajectory import Trajectory

ROW = {"prompt": "How many {legs}?", "answer": "4"}


class Endpoint:
    """Gives one of `replies` a request, the last one for ever: a text, or a status."""

    def __init__(self) -> None:
        self.url = ""
        self.replies: list[str | int] = ["1"]
        self.requests: list[tuple[Any, str | None]] = []
        self.most_at_once = 0
        self.held: asyncio.Event | None = None
        self.two_wait = asyncio.Event()
        self._at_once = 0

    async def answer(self, request: web.Request) -> web.Response:
        self.requests.append((await request.json(), request.headers.get("Authorization")))
        self._at_once += 1
        self.most_at_once = max(self.most_at_once, self._at_once)
        try:
            if self._at_once == 2:
                self.two_wait.set()
            if self.held is not None:
                await self.held.wait()
        finally:
            self._at_once -= 1
        reply = self.replies.pop(0) if len(self.replies) > 1 else self.replies[0]
        if isinstance(reply, int):
            return web.Response(status=reply, text="not now")
        return web.json_response({"choices": [{"message": {"content": reply}}]})


@pytest.fixture
async def endpoint(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Endpoint]:
    monkeypatch.setattr("areal_sc.rewards.asked_model._FIRST_PAUSE_S", 0.0)
    served = Endpoint()
    app = web.Application()
    app.router.add_post("/v1/chat/completions", served.answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    served.url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1/"
    yield served
    await runner.cleanup()


async def test_the_verdict_is_the_last_number_of_the_reply(endpoint: Endpoint) -> None:
    endpoint.replies = ["<think>Not 0.7.</think> The answer 4 is right, so: 0.5 <think>or 1"]
    assert await JudgeReward(endpoint.url, "judge")(ROW, "It has {4} legs.") == 0.5
    ((body, key),) = endpoint.requests
    asked = body["messages"][0]["content"]
    assert key is None
    assert body["model"] == "judge"
    assert all(text in asked for text in ("How many {legs}?", "\n4\n", "It has {4} legs."))


async def test_a_tag_holds_the_verdict(endpoint: Endpoint) -> None:
    endpoint.replies = ["<grade>3</grade> of 10"]
    judge = JudgeReward(endpoint.url, "judge", highest=10, tag="grade")
    assert await judge(ROW, "4") == 3.0


async def test_a_prompt_of_messages_is_its_last_one(endpoint: Endpoint) -> None:
    row = {"prompt": [{"role": "user", "content": "Which number?"}], "answer": "4"}
    await JudgeReward(endpoint.url, "judge")(row, "4")
    assert "Which number?\n" in endpoint.requests[0][0]["messages"][0]["content"]


@pytest.mark.parametrize("failure", [503, 429, "I cannot tell", "2", "-1", "v1.0b"])
async def test_what_is_no_verdict_is_asked_again(endpoint: Endpoint, failure: str | int) -> None:
    endpoint.replies = [failure, failure, "1"]
    assert await JudgeReward(endpoint.url, "judge")(ROW, "4") == 1.0
    assert len(endpoint.requests) == 3


@pytest.mark.parametrize("failure", [503, "I cannot tell"])
async def test_a_judge_that_fails_gives_no_number(endpoint: Endpoint, failure: str | int) -> None:
    endpoint.replies = [failure]
    with pytest.raises(RewardError, match="no answer in 2 tries"):
        await JudgeReward(endpoint.url, "judge", tries=2)(ROW, "4")
    assert len(endpoint.requests) == 2


async def test_a_refusal_is_not_asked_again(endpoint: Endpoint) -> None:
    endpoint.replies = [401, "1", 401]
    judge = JudgeReward(endpoint.url, "judge")
    with pytest.raises(NeverWorks, match="status 401: not now"):
        await judge(ROW, "4")
    assert len(endpoint.requests) == 1
    await judge(ROW, "4")
    with pytest.raises(RewardError, match="status 401: not now"):  # it did work
        await judge(ROW, "4")
    assert len(endpoint.requests) == 3


async def test_nobody_answers() -> None:
    with pytest.raises(RewardError, match="no answer in 1 tries: Cannot connect"):
        await JudgeReward("http://127.0.0.1:9/v1", "judge", tries=1)(ROW, "4")


async def test_the_key_comes_from_the_environment(
    endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    judge = JudgeReward(endpoint.url, "judge", api_key_variable="JUDGE_KEY")
    with pytest.raises(NeverWorks, match="JUDGE_KEY, which holds its key, is not set"):
        await judge(ROW, "4")
    monkeypatch.setenv("JUDGE_KEY", "secret")
    await judge(ROW, "4")
    assert endpoint.requests[0][1] == "Bearer secret"
    assert "secret" not in str(judge.constructor_arguments())


async def test_so_many_are_asked_at_once(endpoint: Endpoint) -> None:
    endpoint.held = asyncio.Event()
    judge = JudgeReward(endpoint.url, "judge", at_once=2)
    calls = [asyncio.create_task(judge(ROW, str(number))) for number in range(5)]
    await asyncio.wait_for(endpoint.two_wait.wait(), 60)
    endpoint.held.set()
    assert await asyncio.gather(*calls) == [1.0] * 5
    assert endpoint.most_at_once <= 2


async def test_a_column_that_is_missing_is_named(endpoint: Endpoint) -> None:
    judge = JudgeReward(endpoint.url, "judge")
    judge.check_row(ROW)
    for row in ({"prompt": "How many?"}, {**ROW, "answer": None}, {**ROW, "answer": math.nan}):
        with pytest.raises(WorkflowError, match="nothing in its column 'answer'"):
            judge.check_row(row)
    with pytest.raises(RewardError, match="no column 'answer'"):
        await JudgeReward(endpoint.url, "judge")({"prompt": "How many?"}, "4")


@pytest.mark.parametrize(
    "settings", [{"lowest": 1.0}, {"tries": 0}, {"at_once": 0}, {"timeout_s": 0}, {"question": "?"}]
)
def test_settings_are_checked(settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="expected"):
        JudgeReward("http://127.0.0.1:9/v1", "judge", **settings)


def answers(*texts: str) -> list[Trajectory]:
    return [Trajectory([1], [True], [0.0], [0], [1.0], 0.25, answer=text) for text in texts]


def shown(endpoint: Endpoint, number: int = 0) -> list[str]:
    """The answers in the order in which the judge saw them."""
    asked = endpoint.requests[number][0]["messages"][0]["content"]
    return re.findall(r"Answer \d+:\n(\w+)", asked)


async def test_a_ranking_judge_gives_the_best_1_and_the_worst_0(endpoint: Endpoint) -> None:
    endpoint.replies = ["none", "[1, 2, 2]", "[1, 2]", "<think>[1, 2, 3]</think> so [3, 1, 2]."]
    judge = RankingJudge(endpoint.url, "judge")
    found = await judge(ROW, answers("four", "six", "six", "two"))
    assert len(endpoint.requests) == 4
    first, second, third = shown(endpoint)
    expected = {third: 1.0, first: 0.5, second: 0.0}
    assert found == [expected[it] for it in ("four", "six", "six", "two")]
    assert await judge(ROW, answers("two", "four", "six")) == [
        expected[it] for it in ("two", "four", "six")
    ]
    assert shown(endpoint, 4) == [first, second, third]


async def test_several_orders_of_a_group_are_averaged(endpoint: Endpoint) -> None:
    endpoint.replies = ["[1, 2, 3]"]  # a judge that likes what it reads first
    found = await RankingJudge(endpoint.url, "judge", num_orders=8)(ROW, answers("a", "b", "c"))
    assert len(endpoint.requests) == 8
    assert len({tuple(shown(endpoint, number)) for number in range(8)}) > 1
    firsts = [shown(endpoint, number) for number in range(8)]
    assert found == [1 - sum(it.index(text) for it in firsts) / 16 for text in "abc"]


async def test_nothing_to_compare_asks_nobody(endpoint: Endpoint) -> None:
    judge = RankingJudge(endpoint.url, "judge")
    assert await judge(ROW, answers("four")) == [0.25]
    assert await judge(ROW, answers("four", "four")) == [0.5, 0.5]
    assert not endpoint.requests


def test_a_workflow_asks_its_judge_about_a_row() -> None:
    judge = RankingJudge("http://localhost:1", "judge", question="{rubric} {answers}")
    workflows = (
        SingleTurnWorkflow(None, group_reward=judge),
        AgentWorkflow(AgentCommand(["sh"]), group_reward=judge),
        OnlineWorkflow(group_reward=judge),
    )
    for workflow in workflows:
        workflow.check_row({"prompt": "p", "rubric": "short"})
        with pytest.raises(WorkflowError, match="nothing in its column 'rubric'"):
            workflow.check_row({"prompt": "p"})


async def test_a_ranking_that_fails_is_no_ranking(endpoint: Endpoint) -> None:
    endpoint.replies = ["[1, 1]"]
    with pytest.raises(RewardError, match=r"no answer in 2 tries: .* 1 to 2, each once"):
        await RankingJudge(endpoint.url, "judge", tries=2)(ROW, answers("four", "six"))
    with pytest.raises(ValueError, match=r"expected \{answers\} in it"):
        RankingJudge(endpoint.url, "judge", question="{prompt}")
    with pytest.raises(ValueError, match="num_orders=0"):
        RankingJudge(endpoint.url, "judge", num_orders=0)
