"""Sessions: trees of calls against what was sent and sampled, retries, lost answers, the end."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import chat_templates as templates
import pytest
from scripted_engine import ScriptedEngine, answer_to, check_trained, engine_for

from areal_sc.agents.calls import CallRefused, ModelAnswer, ModelCall
from areal_sc.agents.session import MAX_RUNNING_CALLS, Session, SessionSettings
from areal_sc.agents.session_call import SessionCall
from areal_sc.config.schema import GenerationConfig
from areal_sc.errors import AgentError, NeverWorks, WorkflowError
from areal_sc.workflows.chat_format import Message
from areal_sc.workflows.trajectory import Trajectory

TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "number"}},
        },
    },
}
SAMPLING = GenerationConfig(max_new_tokens=64)


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def session_of(engine: ScriptedEngine, **settings: Any) -> Session:
    return Session(engine, SAMPLING, SessionSettings(**settings))


def weather_call(city: str, **more: Any) -> str:
    call = json.dumps({"name": "weather", "arguments": {"city": city, **more}})
    return f"<tool_call>\n{call}\n</tool_call>"


class Agent:
    """A client that keeps a conversation, and sends all of it each time."""

    def __init__(self, session: Session, question: str, tools: Sequence[Mapping[str, Any]] = ()):
        self.session = session
        self.messages: list[Message] = [user(question)]
        self.tools = tuple(tools)

    @property
    def call(self) -> ModelCall:
        return ModelCall(tuple(self.messages), self.tools)

    async def turn(self, *behind: str) -> ModelAnswer:
        """Asks; keeps the answer as clients do, and puts messages of the user behind it."""
        answer = await answer_to(self.session, self.call)
        self.messages.append(as_sent_back(answer))
        self.messages += [call.answer("sunny") for call in answer.turn.tool_calls]
        self.messages += map(user, behind)
        return answer


def as_sent_back(answer: ModelAnswer) -> Message:
    """The message as a client of OpenAI has it: arguments are text, reasoning is dropped."""
    calls = [
        {
            "type": "function",
            "id": it.id,
            "function": {"arguments": json.dumps(it.arguments), "name": it.name},
        }
        for it in answer.turn.tool_calls
    ]
    message: Message = {"role": "assistant", "content": answer.turn.content or None}
    return (
        {**message, "tool_calls": calls} if calls else {**message, "content": answer.turn.content}
    )


def check_calls(engine: ScriptedEngine, rows: Sequence[Trajectory]) -> None:
    """The calls of a row are its tokens, one behind the other, as they were sent and sampled."""
    for row in rows:
        end = 0
        for call in row.calls:
            begin, end = end + call.num_given, end + call.num_given + call.num_sampled
            sampled = list(row.input_ids[begin:end])
            assert (list(row.input_ids[:begin]), sampled) in zip(
                engine.sent, engine.sampled, strict=True
            )
        assert end == len(row.input_ids)


def lengths(rows: Sequence[Trajectory]) -> list[tuple[int, int]]:
    """(tokens, trained ones) of each row."""
    return [(len(row.input_ids), sum(row.loss_mask)) for row in rows]


async def test_a_tool_loop_is_one_row_of_what_was_sent_and_sampled() -> None:
    engine = engine_for(templates.QWEN)
    session = session_of(engine)
    agent = Agent(session, "hi there", [TOOL])
    engine.will_say(
        f"{weather_call('Paris')}<|im_end|>", f"{weather_call('Rome')}<|im_end|>", "fine<|im_end|>"
    )
    first = await agent.turn()
    assert [it.arguments for it in first.turn.tool_calls] == [{"city": "Paris"}]
    second = await agent.turn()
    last = await agent.turn()
    assert last.turn.content == "fine"
    assert last.num_prompt_tokens == len(engine.sent[-1])
    rows = session.trajectories(0.5)
    assert len(rows) == 1
    check_calls(engine, rows)
    given = [[(it.role, it.text, it.answers) for it in call.given] for call in rows[0].calls]
    ids = [turn.id for call in (first, second) for turn in call.turn.tool_calls]
    assert given == [[("user", "hi there", "")], *([("tool", "sunny", it)] for it in ids)]
    asked = [call.answer.tool_calls for call in rows[0].calls]
    cities = [[("weather", f'{{"city": "{city}"}}')] for city in ("Paris", "Rome")]
    assert [[(it.name, it.arguments) for it in its] for its in asked] == [*cities, []]
    assert [[it.id for it in its] for its in asked[:2]] == [[it] for it in ids]
    assert rows[0].calls[-1].answer.text == "fine"
    assert rows[0].input_ids == engine.sent[-1] + engine.sampled[-1]
    assert rows[0].metrics == {
        "agent/calls": 3.0,
        "agent/undelivered": 0.0,
        "agent/retries": 0.0,
        "agent/refused": 0.0,
        "agent/other_sampling": 0.0,
        "agent/rewritten_history": 0.0,
        "agent/other_tools": 0.0,
        "agent/template_rewrites": 0.0,
    }
    check_trained(engine, rows)


async def test_branches_and_a_compacted_history_are_a_tree_trained_once() -> None:
    """Two agents go on from one answer, beside each other; then the history is made shorter."""
    engine = engine_for(templates.QWEN)
    session = session_of(engine)
    main = Agent(session, "hi there")
    engine.will_say(*[f"answer {n}<|im_end|>" for n in range(8)])
    await main.turn()
    branches = [Agent(session, "") for _ in range(2)]
    for branch, question in zip(branches, ("Paris?", "Rome?"), strict=True):
        branch.messages = [*main.messages, user(question)]
    await asyncio.gather(*[branch.turn("more") for branch in branches])
    await asyncio.gather(*[branch.turn() for branch in branches])
    other = Agent(session, "another agent, with a question of its own")
    await other.turn()
    compacted = Agent(session, "so far: Paris is sunny, Rome has rain")
    await compacted.turn("and now?")
    await compacted.turn()
    rows = session.trajectories(1.0)
    assert len(rows) == 4  # two branches, the other agent, the compacted history
    check_trained(engine, rows)
    check_calls(engine, rows)
    begun = rows[0].calls[0].number
    assert [row.calls[0].number == begun for row in rows] == [True, True, False, False]
    assert len({call.number for row in rows for call in row.calls}) == 8
    for row in rows:
        afters, numbers = zip(*((it.after, it.number) for it in row.calls), strict=True)
        assert afters == (-1, *numbers[:-1])
    first = len(engine.sampled[0])
    one, two = (row for row in rows if row.input_ids[: len(engine.sent[0])] == engine.sent[0])
    start = len(engine.sent[0])
    assert sum(one.loss_mask[start : start + first]) == first
    assert sum(two.loss_mask[start : start + first]) == 0  # context in the other row
    assert session.counts["rewritten_history"] == 0


@pytest.mark.parametrize("template", ["QWEN", "LLAMA", "MISTRAL", "GLM"])
async def test_a_client_may_write_the_past_otherwise_if_it_means_the_same(template: str) -> None:
    engine = engine_for(getattr(templates, template))
    tokenizer = engine.tokenizer
    session = session_of(engine)
    agent = Agent(session, "hi there", [TOOL])
    said = {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {
                "id": "call00000",
                "type": "function",
                "function": {"name": "weather", "arguments": {"city": "Paris", "days": 3.0}},
            }
        ],
    }
    given = {"tools": [TOOL], "tokenize": False}
    before = tokenizer.apply_chat_template([user("hi there")], add_generation_prompt=True, **given)
    whole = tokenizer.apply_chat_template([user("hi there"), said], **given)
    text = whole.removeprefix(before).rstrip()
    engine.will_say(text if text.endswith(templates.ENDS) else f"{text}<|observation|>")
    await agent.turn()
    [call] = agent.messages[1]["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == {"city": "Paris", "days": 3.0}
    call["function"]["arguments"] = '{ "days":3,\n "city": "\\u0050aris" }'
    agent.messages[1] = {"tool_calls": [call], "content": "", "refusal": None, "role": "assistant"}
    engine.will_say("fine<|im_end|>")
    await agent.turn()
    assert session.counts["rewritten_history"] == 0
    rows = session.trajectories(1.0)
    assert len(rows) == 1
    check_trained(engine, rows)


async def test_an_answer_that_was_changed_begins_a_branch_behind_what_is_the_same() -> None:
    engine = engine_for(templates.QWEN)
    session = session_of(engine)
    agent = Agent(session, "hi there")
    engine.will_say(*[f"answer {n}<|im_end|>" for n in range(4)])
    for _ in range(3):
        await agent.turn("more")
    agent.messages[3] = {"role": "assistant", "content": "another answer"}
    await agent.turn()
    assert session.counts["rewritten_history"] == 1
    rows = session.trajectories(1.0)
    check_trained(engine, rows)
    assert len(rows) == 2
    # the first answer is as it was sampled, and not tokenized again
    assert engine.sent[3][: len(engine.sent[0])] == engine.sent[0]
    behind = engine.sent[3][len(engine.sent[0]) :]
    assert behind[: len(engine.sampled[0])] == engine.sampled[0]
    assert "another answer" in engine.tokenizer.decode(engine.sent[3])


async def test_few_shots_are_no_history_that_was_rewritten() -> None:
    engine = engine_for(templates.QWEN)
    session = session_of(engine)
    shots = [user("1 + 1"), {"role": "assistant", "content": "2"}]
    engine.will_say("4<|im_end|>", "6<|im_end|>", "8<|im_end|>")
    for question in ("2 + 2", "3 + 3"):
        agent = Agent(session, question)
        agent.messages = [*shots, user(question)]
        await agent.turn("more")
    await agent.turn()
    assert session.counts["rewritten_history"] == 0
    check_trained(engine, session.trajectories(1.0))


async def test_reasoning_that_comes_back_or_not_goes_on_and_other_reasoning_does_not() -> None:
    engine = engine_for(templates.QWEN_THINKING)
    session = session_of(engine)
    text = f"<think>\nhm\n</think>\n\n{weather_call('Paris')}<|im_end|>"
    engine.will_say(text, *["<think>\nso\n</think>\n\nfine<|im_end|>"] * 3)
    agent = Agent(session, "hi there", [TOOL])
    await agent.turn()
    whole = list(agent.messages)
    rewritten = [0, 0, 1]
    for reasoning, expected in zip(("", "hm", "something else"), rewritten, strict=True):
        agent.messages = list(whole)
        agent.messages[1] = {**whole[1], "reasoning_content": reasoning}
        await agent.turn()
        assert session.counts["rewritten_history"] == expected
    assert engine.sent[1] == engine.sent[2]
    assert "hm" in engine.tokenizer.decode(engine.sent[1])
    assert "something else" in engine.tokenizer.decode(engine.sent[3])
    check_trained(engine, session.trajectories(1.0))


async def test_equal_answers_of_two_agents_stay_apart_by_the_ids_of_their_calls() -> None:
    engine = engine_for(templates.QWEN)
    session = session_of(engine)
    agents = [Agent(session, "hi there", [TOOL]) for _ in range(2)]
    letters = [
        engine.tokenizer.encode(it, add_special_tokens=False) for it in weather_call("Paris")
    ]
    end = engine.tokenizer.convert_tokens_to_ids("<|im_end|>")
    engine.will_say(f"{weather_call('Paris')}<|im_end|>")
    engine.answers.append([*(token for it in letters for token in it), end])  # other tokens
    await asyncio.gather(*[agent.turn() for agent in agents])
    engine.will_say("fine<|im_end|>", "well<|im_end|>")
    for agent in agents:
        await agent.turn()
    for number in range(2):
        sent = engine.sent[number] + engine.sampled[number]
        assert engine.sent[2 + number][: len(sent)] == sent
    check_trained(engine, session.trajectories(1.0))


async def test_other_tools_and_a_template_that_rewrites_begin_rows_and_are_counted() -> None:
    engine = engine_for(templates.QWEN_THINKING)
    session = session_of(engine)
    engine.will_say(*["<think>\nhm\n</think>\n\nhello<|im_end|>"] * 3)
    agent = Agent(session, "hi there")
    await agent.turn("more")
    await agent.turn("more")
    agent.tools = (TOOL,)
    await agent.turn()
    assert (session.counts["template_rewrites"], session.counts["other_tools"]) == (1, 1)
    rows = session.trajectories(1.0)
    assert len(rows) == 3
    check_trained(engine, rows)
    check_calls(engine, rows)
    calls = [row.calls[0] for row in rows]
    assert [it.after for it in calls] == [-1, *(it.number for it in calls[:2])]
    assert [it.new_row for it in calls[::2]] == ["", "it got other tools or arguments"]
    assert calls[1].new_row.startswith("it leaves out the reasoning")


async def test_rows_per_call_and_the_longest_one() -> None:
    engine = engine_for(templates.QWEN)
    engine.will_say(*[f"answer {n}<|im_end|>" for n in range(4)])
    trained = {}
    for kind in ("merge", "per_call", "longest"):
        copy = replace(engine, sent=[], sampled=[], answers=list(engine.answers))
        session = session_of(copy, rows=kind)
        agent = Agent(session, "hi there")
        for _ in range(3):
            await agent.turn("more")
        await Agent(session, "another one").turn()
        rows = session.trajectories(1.0)
        trained[kind] = lengths(rows)
        if kind != "longest":
            check_trained(copy, rows)
    sizes = [len(it) for it in copy.sampled]
    sent = [len(it) for it in copy.sent]
    first = (sent[2] + sizes[2], sum(sizes[:3]))
    assert trained["merge"] == [first, (sent[3] + sizes[3], sizes[3])]
    assert trained["longest"] == [first]
    assert trained["per_call"] == [(a + b, b) for a, b in zip(sent, sizes, strict=True)]


async def test_answers_of_a_row_have_discounted_returns() -> None:
    engine = engine_for(templates.QWEN)
    session = session_of(engine)
    engine.will_say(*[f"answer {n}<|im_end|>" for n in range(3)])
    agent = Agent(session, "hi there")
    for _ in range(3):
        last = await agent.turn("more")
    (row,) = session.trajectories(2.0, discount=0.5)
    sizes = [len(it) for it in engine.sampled]
    assert row.returns == [*zip([0.5, 1.0, 2.0], sizes, strict=True)]
    assert row.reward == pytest.approx(3.5 / 3)
    check_trained(engine, [row])
    rows = session.trajectories({f"chatcmpl-{last.answer_id}": 3.0})
    assert [(row.reward, row.returns) for row in rows] == [(3.0, [])]
    with pytest.raises(WorkflowError, match=r"names of models .* got \['judge'\]"):
        session.trajectories({"judge": 1.0})
    with pytest.raises(WorkflowError, match=r"expected a number, .* got \{\}"):
        session.trajectories({})


async def test_roles_have_rewards_of_their_own() -> None:
    engine = engine_for(templates.QWEN)
    session = session_of(engine)
    engine.will_say(*[f"answer {n}<|im_end|>" for n in range(5)])
    for number, model in enumerate(["solver", "critic", "solver", "critic", "helper"]):
        await answer_to(session, ModelCall((user(f"question {number}"),), model=model))
    rows = session.trajectories({"solver": 1.0, "critic": -1.0}, discount=0.5)
    assert [row.reward for row in rows] == [0.5, -0.5, 1.0, -1.0]  # the helper is not trained


async def lost(begun: SessionCall) -> None:
    """The client gets the answer, and its connection breaks before the last byte."""
    await begun.answer()
    with pytest.raises(ConnectionError), begun.delivering():
        raise ConnectionError


async def test_an_answer_that_was_lost_is_not_trained_unless_a_later_call_goes_on_from_it() -> None:
    engine = engine_for(templates.QWEN)
    session = session_of(engine)
    engine.will_say(*[f"answer {n}<|im_end|>" for n in range(3)])
    agent = Agent(session, "hi there")
    await agent.turn("more")
    await lost(session.begin(agent.call))
    [row] = session.trajectories(1.0)
    assert row.input_ids == engine.sent[0] + engine.sampled[0]
    assert row.metrics["agent/undelivered"] == 1.0
    agent.messages += [{"role": "assistant", "content": "answer 1"}, user("and now?")]
    await agent.turn()
    check_trained(engine, session.trajectories(1.0))
    assert session.trajectories(1.0)[0].metrics["agent/undelivered"] == 0.0


async def test_a_retry_joins_the_running_call_or_gets_its_answer() -> None:
    engine = engine_for(templates.QWEN)
    session = session_of(engine)
    agent = Agent(session, "hi there")
    engine.will_say("hello<|im_end|>")
    engine.may_answer.clear()
    first = session.begin(agent.call, digest="k")
    with first.client():
        joined = session.begin(agent.call, digest="k", attempt=1)
    assert joined is first  # the first client has given up
    again = session.begin(agent.call, digest="k")
    assert again is first
    engine.may_answer.set()
    answer = await again.answer()
    assert session.begin(agent.call, digest="k") is first  # as its answer was not delivered
    with first.delivering():
        pass
    again = session.begin(agent.call, digest="k", attempt=1)
    assert await again.answer() is answer
    assert session.counts["retries"] == 4
    assert len(engine.sent) == 1
    check_trained(engine, session.trajectories(1.0))


async def test_the_same_question_again_is_another_sample() -> None:
    """An agent that samples several answers, beside each other or in turn, says no retry."""
    engine = engine_for(templates.QWEN)
    session = session_of(engine)
    agent = Agent(session, "hi there")
    engine.will_say("one<|im_end|>", "two<|im_end|>", "three<|im_end|>")

    async def ask() -> str:
        begun = session.begin(agent.call, digest="k")
        with begun.client(), begun.delivering():
            return (await begun.answer()).turn.content

    assert await asyncio.gather(ask(), ask()) == ["one", "two"]
    assert await ask() == "three"
    rows = session.trajectories(1.0)
    assert len(rows) == 3
    check_trained(engine, rows)


async def test_retries_of_equal_calls_find_the_one_that_was_left() -> None:
    engine = engine_for(templates.QWEN)
    session = session_of(engine)
    agent = Agent(session, "hi there")
    engine.will_say("one<|im_end|>", "two<|im_end|>")
    first, second = (session.begin(agent.call, digest="k") for _ in range(2))
    assert first is second  # as nobody waits for it yet
    with first.client():
        second = session.begin(agent.call, digest="k")
        with second.client():
            assert await second.answer() is not await first.answer()
            with second.delivering():
                pass
    assert session.begin(agent.call, digest="k", attempt=1) is first
    with first.delivering():
        pass
    check_trained(engine, session.trajectories(1.0))


async def test_a_retry_of_a_call_that_was_sent_away_is_another_sample() -> None:
    engine = engine_for(templates.QWEN)
    session = session_of(engine)
    call = Agent(session, "hi there").call
    engine.may_answer.clear()
    engine.will_say(*(f"{n}<|im_end|>" for n in range(MAX_RUNNING_CALLS + 2)))
    with ExitStack() as clients:

        def begin(attempt: int) -> SessionCall:
            begun = session.begin(call, digest="k", attempt=attempt)
            clients.enter_context(begun.client())
            return begun

        calls = [begin(0) for _ in range(MAX_RUNNING_CALLS)]
        for _ in range(2):
            with pytest.raises(CallRefused, match="expected no more beside each other"):
                begin(0)
        engine.may_answer.set()
        await asyncio.gather(*(it.answer() for it in calls))
        calls += [begin(1) for _ in range(2)]
        answers = await asyncio.gather(*(it.answer() for it in calls))
    assert len({it.turn.content for it in answers}) == MAX_RUNNING_CALLS + 2
    assert session.counts["retries"] == 0


async def test_of_equal_calls_none_is_joined_by_a_retry_that_may_be_of_another() -> None:
    engine = engine_for(templates.QWEN)
    session = session_of(engine)
    agent = Agent(session, "hi there")
    engine.will_say(*(f"{name}<|im_end|>" for name in ("one", "two", "three", "four")))

    async def ask(attempt: int) -> str:
        begun = session.begin(agent.call, digest="k", attempt=attempt)
        with begun.client(), begun.delivering():
            return (await begun.answer()).turn.content

    assert await asyncio.gather(ask(0), ask(0)) == ["one", "two"]
    assert await ask(1) == "three"  # of which of the two?
    assert await ask(2) == "three"
    assert await ask(2) == "four"  # it is none's of these
    assert session.counts["retries"] == 1


async def test_an_answer_that_one_of_two_clients_gets_is_delivered() -> None:
    engine = engine_for(templates.QWEN)
    session = session_of(engine)
    engine.will_say("hello<|im_end|>")
    begun = session.begin(Agent(session, "hi there").call, digest="k")
    await begun.answer()
    with begun.delivering():
        await lost(begun)
    check_trained(engine, session.trajectories(1.0))


async def test_a_call_that_failed_can_be_tried_again() -> None:
    engine = engine_for(templates.QWEN)
    session = session_of(engine)
    agent = Agent(session, "hi there")
    with pytest.raises(CallRefused) as refused:  # nothing to say: the engine fails
        await session.begin(agent.call, digest="k").answer()
    assert (refused.value.status, refused.value.code) == (503, "engine_failed")
    engine.will_say("hello<|im_end|>")
    begun = session.begin(agent.call, digest="k", attempt=1)
    with begun.delivering():
        assert (await begun.answer()).turn.content == "hello"
    check_trained(engine, session.trajectories(1.0))


async def test_the_end_of_a_session_cancels_its_calls_and_refuses_others() -> None:
    engine = engine_for(templates.QWEN)
    session = session_of(engine)
    agent = Agent(session, "hi there")
    engine.will_say("hello<|im_end|>", "again<|im_end|>")
    await agent.turn("more")
    engine.may_answer.clear()
    running = asyncio.create_task(answer_to(session, agent.call))
    await asyncio.sleep(0)
    session.end()
    for call in (running, answer_to(session, agent.call)):
        with pytest.raises(CallRefused) as refused:
            await call
        assert (refused.value.status, refused.value.code) == (409, "session_ended")
    [row] = session.trajectories(1.0)
    assert row.input_ids == engine.sent[0] + engine.sampled[0]


async def test_limits_of_calls() -> None:
    engine = engine_for(templates.QWEN, max_context_tokens=200)
    session = session_of(engine, max_turns=2)
    engine.will_say("hello<|im_end|>", "again<|im_end|>")
    for _ in range(2):
        await Agent(session, "hi there").turn()
    with pytest.raises(CallRefused) as refused:
        await Agent(session, "hi there").turn()
    assert (refused.value.status, refused.value.code) == (400, "max_turns")
    session = session_of(engine)
    with pytest.raises(CallRefused) as refused:
        await Agent(session, "hi " * 100).turn()
    assert (refused.value.status, refused.value.code) == (400, "context_length_exceeded")
    for bad in ({"rows": "all"}, {"history": "drop"}, {"max_turns": -1}):
        with pytest.raises(WorkflowError, match=f"{next(iter(bad))}: expected"):
            session_of(engine, **bad)


@pytest.mark.parametrize(
    ("messages", "problem"),
    [
        ((), "answers to, got none"),
        ((user("hi"), {"role": "assistant", "content": "so"}), "answers to, got its own"),
        (({"role": "wizard", "content": "hi"},), "expected a role of"),
        ((user("hi \ud800"),), "surrogates not allowed"),
    ],
)
async def test_messages_that_cannot_be_answered(messages: Any, problem: str) -> None:
    session = session_of(engine_for(templates.QWEN))
    with pytest.raises(CallRefused, match=problem) as refused:
        await answer_to(session, ModelCall(messages))
    assert refused.value.status == 400
    assert session.trajectories(1.0) == []


REFUSED_FOR_ALL = {
    "no tools": (templates.GEMMA, {"tools": (TOOL,)}, "does not tell a model of tools"),
    "bad stop": (templates.QWEN, {"stop": ("",)}, "stop: expected"),
    "argument": (templates.QWEN, {}, "does not read 'depth'"),
}


@pytest.mark.parametrize("what", REFUSED_FOR_ALL)
async def test_what_is_refused_in_every_episode_ends_the_run_where_the_agent_fails(
    what: str,
) -> None:
    template, how, told = REFUSED_FOR_ALL[what]
    engine = engine_for(template)
    arguments = {"depth": 3} if what == "argument" else {}
    session = session_of(engine, chat_template_arguments=arguments)

    async def fail(error: Exception) -> None:
        with session.raising():
            with pytest.raises(CallRefused, match=told) as refused:
                await answer_to(session, ModelCall((user("hi"),), **how))
            assert refused.value.status == 400
            raise error

    with pytest.raises(NeverWorks, match=f"refused in every episode: .*{told}"):
        await fail(AgentError("its client raised", kind="agent_error"))
    for kind in ("agent_rejected", "agent_idle"):  # by somebody outside, whom others follow
        with pytest.raises(AgentError):
            await fail(AgentError("it is", kind=kind))


async def test_an_agent_that_goes_on_otherwise_fails_by_itself() -> None:
    engine = engine_for(templates.GEMMA)
    session = session_of(engine)
    engine.will_say("hello<end_of_turn>")
    of_messages = ModelCall(({"role": "system", "content": "be kind"},))

    async def fail() -> None:
        with session.raising():
            for refused in (ModelCall((user("hi"),), (TOOL,)), of_messages):
                with pytest.raises(CallRefused):
                    await answer_to(session, refused)
                if refused is not of_messages:
                    await answer_to(session, ModelCall((user("hi"),)))
            raise KeyError

    with pytest.raises(KeyError):
        await fail()


async def test_the_run_says_how_is_sampled_and_an_agent_may_only_shorten() -> None:
    engine = engine_for(templates.QWEN)
    sampled = list[GenerationConfig]()
    generate = engine.generate

    async def noted(input_ids: Sequence[int], sampling: GenerationConfig, **more: Any) -> Any:
        sampled.append(sampling)
        return await generate(input_ids, sampling, **more)

    engine.generate = noted  # type: ignore[method-assign]
    run = GenerationConfig(max_new_tokens=8, temperature=1.0, stop=["!"])
    session = Session(engine, run)
    engine.will_say("one, two<|im_end|>", "three</so> four<|im_end|>")
    asked = {"temperature": 0.2, "top_p": 1.0, "presence_penalty": 0.5}
    await answer_to(session, ModelCall((user("hi"),), max_tokens=99, sampling=asked))
    answer = await answer_to(session, ModelCall((user("so"),), max_tokens=3, stop=("</so>",)))
    assert (answer.turn.content, answer.stop) == ("three", "</so>")
    assert sampled == [run, replace(run, max_new_tokens=3, stop=["!", "</so>"])]
    assert session.counts["other_sampling"] == 2


async def test_content_is_told_while_it_is_sampled_and_from_its_beginning() -> None:
    engine = engine_for(templates.QWEN)
    session = session_of(engine)
    engine.will_say("one, two<|im_end|>")
    call = ModelCall((user("hi"),), is_streamed=True)
    begun = session.begin(call, digest="k")
    texts = begun.texts()
    first = await anext(texts)
    assert "one, two".startswith(first)
    assert first != "one, two"
    joined = session.begin(call, digest="k", attempt=1)
    assert [first + "".join([it async for it in texts])] == ["one, two"]
    assert [it async for it in joined.texts()] == ["one, two"]
    assert (await begun.answer()).turn.content == "one, two"


async def test_logprobs_are_those_of_the_sampled_tokens() -> None:
    engine = engine_for(templates.QWEN)
    session = session_of(engine)
    engine.will_say("one, two<|im_end|>")
    answer = await answer_to(session, ModelCall((user("hi"),), wants_logprobs=True))
    assert "".join(it.text for it in answer.tokens) == "one, two<|im_end|>"
    assert [it.logprob for it in answer.tokens] == session.trajectories(1.0)[0].behavior_logprobs[
        -len(answer.tokens) :
    ]


@pytest.mark.parametrize(
    ("stop", "problem"),
    [
        (("<|im_end|>",), r"stop: '<\|im_end\|>' is a special token"),
        (("",), "stop: expected at most 16 strings of 1 to 64 characters"),
        (("x" * 65,), "stop: expected at most 16 strings of 1 to 64 characters"),
        (tuple(map(str, range(16))), r"with those of generation.stop, \['!'\], got"),
    ],
)
async def test_strings_by_which_no_answer_can_end_are_refused(
    stop: tuple[str, ...], problem: str
) -> None:
    engine = engine_for(templates.QWEN)
    session = Session(engine, replace(SAMPLING, stop=["!"]))
    with pytest.raises(CallRefused, match=problem) as refused:
        await session.begin(ModelCall((user("hi"),), stop=stop)).answer()
    assert (refused.value.status, refused.value.code) == (400, "invalid_call")
    with session.raising():  # it is no failure
        assert engine.sent == []


async def test_arguments_too_deep_to_be_read_are_refused() -> None:
    session = session_of(engine_for(templates.QWEN))
    function = {"name": "weather", "arguments": f'{{"city": {"[" * 10_000}{"]" * 10_000}}}'}
    said = {"role": "assistant", "content": "", "tool_calls": [{"id": "1", "function": function}]}
    with pytest.raises(CallRefused) as refused:
        await session.begin(ModelCall((user("hi"), said, user("so")))).answer()
    assert (refused.value.status, refused.value.code) == (400, "invalid_call")
    assert session.failure is None


async def test_a_failure_that_the_agent_has_caught_is_raised_in_the_end() -> None:
    session = session_of(engine_for(templates.QWEN))
    with (
        pytest.raises(IndexError, match="pop from empty list"),
        session.raising(),
        pytest.raises(CallRefused, match="the engine failed"),
    ):
        await session.begin(Agent(session, "hi").call).answer()
    with pytest.raises(IndexError) as raised, session.raising():
        raise ValueError("what the agent made of it")
    assert isinstance(raised.value.__cause__, ValueError)
    with pytest.raises(asyncio.CancelledError), session.raising():
        raise asyncio.CancelledError


async def test_half_a_character_in_a_tool_call_is_an_answer_of_the_model() -> None:
    engine = engine_for(templates.QWEN)
    session = session_of(engine)
    text = weather_call("\ud83d")  # as its escape
    engine.will_say(f"{text}<|im_end|>", "fine<|im_end|>")
    agent = Agent(session, "hi there", [TOOL])
    answer = await agent.turn("what?")
    assert (answer.turn.content, answer.turn.tool_calls) == (text, ())
    await agent.turn()
    assert session.counts["refused"] == 0
    assert len(session.trajectories(1.0)) == 1
    check_trained(engine, session.trajectories(1.0))


async def test_a_call_goes_on_from_an_answer_by_its_id() -> None:
    """Exactly that one, though others have said the same; instructions are those of the call."""
    engine = engine_for(templates.QWEN)
    session = session_of(engine)
    engine.will_say(*["same<|im_end|>"] * 2, *[f"answer {n}<|im_end|>" for n in range(4)])
    instructed = ({"role": "system", "content": "be kind"}, user("hi"))

    async def ask(*messages: Message, after: str = "", num_instructions: int = 1) -> ModelAnswer:
        call = ModelCall(messages, after=after, num_instructions=num_instructions, is_kept=True)
        return await answer_to(session, call)

    first = await ask(*instructed)
    await ask(*instructed)
    third = await ask(instructed[0], user("and?"), after=first.answer_id)
    assert engine.sent[2][: len(engine.sent[0]) + len(engine.sampled[0])] == (
        engine.sent[0] + engine.sampled[0]
    )
    last = await ask(instructed[0], user("so?"), after=third.answer_id)
    rows = session.trajectories(1.0)
    trained = [{round(-value) for value in row.behavior_logprobs if value} for row in rows]
    assert trained == [{2}, {1, 3, 4}]
    check_trained(engine, rows)
    other = {"role": "system", "content": "be short"}
    await ask(other, user("why?"), after=last.answer_id)
    told = engine.tokenizer.decode(engine.sent[4])
    assert "be kind" not in told
    assert [told.count(it) for it in ("be short", "same", "and?", "answer 1", "why?")] == [1] * 5
    plain = await answer_to(session, ModelCall((user("hi"),)))
    assert len(session.trajectories(1.0)) == 4
    for unknown in (plain.answer_id, "resp_1"):
        with pytest.raises(CallRefused, match=r"no answer .* that has ended") as caught:
            await ask(user("and?"), after=unknown, num_instructions=0)
        assert (caught.value.status, caught.value.code) == (400, "previous_response_not_found")


@pytest.mark.parametrize("num_instructions", [0, 1])
async def test_a_kept_conversation_has_its_system_message_once(num_instructions: int) -> None:
    """As instructions in one call, as an item of the whole history in the next."""
    engine = engine_for(templates.QWEN)
    session = session_of(engine)
    engine.will_say(*[f"answer {n}<|im_end|>" for n in range(3)])
    system: Message = {"role": "system", "content": "be kind"}
    other = 1 - num_instructions

    async def ask(*messages: Message, number: int, after: str = "") -> ModelAnswer:
        call = ModelCall(messages, after=after, num_instructions=number, is_kept=True)
        return await answer_to(session, call)

    first = await ask(system, user("hi"), number=num_instructions)
    whole = (system, user("hi"), first.turn.message, user("and?"))
    second = await ask(*whole, number=other)
    given = [system] if other else []
    await ask(*given, user("why?"), number=other, after=second.answer_id)
    told = engine.tokenizer.decode(engine.sent[2])
    said = ("be kind", "hi", "answer 0", "and?", "answer 1", "why?")
    assert [told.count(it) for it in said] == [1] * 6


async def test_a_named_answer_counts_as_delivered_under_other_instructions() -> None:
    """It is read under those alone, though another answer to them says the same."""
    engine = engine_for(templates.QWEN)
    session = session_of(engine)
    engine.will_say(*["same<|im_end|>"] * 2, *["answer<|im_end|>"] * 2)

    def call(instructions: str, text: str, after: str = "") -> ModelCall:
        messages = ({"role": "system", "content": instructions}, user(text))
        return ModelCall(messages, after=after, num_instructions=1, is_kept=True)

    first = session.begin(call("be kind", "hi"))
    await first.answer()  # and no client is told
    await answer_to(session, call("be short", "hi"))
    assert not first.is_delivered
    await answer_to(session, call("be brief", "and?", first.answer_id))
    assert first.is_delivered
    await answer_to(session, call("be short", "and?", first.answer_id))
    assert "be kind" not in engine.tokenizer.decode(engine.sent[3])
