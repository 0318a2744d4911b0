"""Journals of sessions: what is restored from one is what was there, wherever a death cuts it."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import chat_templates as templates
import pytest
from scripted_engine import ScriptedEngine, answer_to, engine_for
from unit.agents import test_session as scenarios
from unit.agents.test_session import SAMPLING, Agent, weather_call

from areal_sc.agents.calls import CallRefused, ModelCall
from areal_sc.agents.dialects.chat_completions import ChatCompletions
from areal_sc.agents.journal import Claimed, EpisodeEnd, SessionJournal, WrittenAnswer
from areal_sc.agents.session import Session, SessionSettings
from areal_sc.workflows.tool_calls import call_entry

PLAYED: list[Callable[..., Any]] = [
    scenarios.test_a_tool_loop_is_one_row_of_what_was_sent_and_sampled,
    scenarios.test_branches_and_a_compacted_history_are_a_tree_trained_once,
    scenarios.test_an_answer_that_was_changed_begins_a_branch_behind_what_is_the_same,
    scenarios.test_few_shots_are_no_history_that_was_rewritten,
    scenarios.test_reasoning_that_comes_back_or_not_goes_on_and_other_reasoning_does_not,
    scenarios.test_equal_answers_of_two_agents_stay_apart_by_the_ids_of_their_calls,
    scenarios.test_other_tools_and_a_template_that_rewrites_begin_rows_and_are_counted,
    scenarios.test_rows_per_call_and_the_longest_one,
    scenarios.test_answers_of_a_row_have_discounted_returns,
    scenarios.test_roles_have_rewards_of_their_own,
    scenarios.test_the_same_question_again_is_another_sample,
    scenarios.test_a_call_goes_on_from_an_answer_by_its_id,
]


def journaled(path: Path, engine: ScriptedEngine, **settings: Any) -> Session:
    """A session whose calls are written down."""
    path.touch()
    return Session(engine, SAMPLING, SessionSettings(**settings), SessionJournal(path=path))


async def restored(path: Path, tokenizer: Any, **settings: Any) -> tuple[Session, ScriptedEngine]:
    """From a copy of a journal, with an engine that has no answers of its own."""
    engine = ScriptedEngine(tokenizer)
    copy = Path(shutil.copy(path, path.with_suffix(".copy")))
    session = Session(engine, SAMPLING, SessionSettings(**settings), SessionJournal(path=copy))
    written = session.journal.read()
    await session.restore([it for it in written if isinstance(it, WrittenAnswer)])
    return session, engine


@pytest.mark.parametrize("scenario", PLAYED, ids=lambda it: it.__name__)
async def test_a_restored_session_has_the_same_rows(
    scenario: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[tuple[Path, ScriptedEngine, dict[str, Any]]] = []
    told: list[tuple[int, bytes, Any, dict[str, Any], Any]] = []

    def session_of(engine: ScriptedEngine, **settings: Any) -> Session:
        path, number = tmp_path / str(len(made)), len(made)
        made.append((path, engine, settings))
        session = journaled(path, engine, **settings)
        rows_of = session.trajectories

        def note_rows(reward: Any, **more: Any) -> Any:
            rows = rows_of(reward, **more)
            told.append((number, path.read_bytes(), reward, more, rows))
            return rows

        monkeypatch.setattr(session, "trajectories", note_rows)
        return session

    monkeypatch.setattr(scenarios, "session_of", session_of)
    await scenario()
    assert told
    for number, written, reward, more, rows in told:
        path, engine, settings = made[number]
        path.write_bytes(written)
        session, _ = await restored(path, engine.tokenizer, **settings)
        assert session.trajectories(reward, **more) == rows


async def test_a_restored_session_goes_on_as_if_nothing_had_been(tmp_path: Path) -> None:
    engine = engine_for(templates.QWEN)
    session = journaled(tmp_path / "a", engine)
    agent = Agent(session, "hi there", [scenarios.TOOL])
    engine.will_say(f"{weather_call('Paris')}<|im_end|>", f"{weather_call('Rome')}<|im_end|>")
    await agent.turn()
    last = ModelCall(tuple(agent.messages), agent.tools)
    answer = await session.begin(last, digest="d").answer()

    again, other = await restored(tmp_path / "a", engine.tokenizer)
    assert await again.begin(last, digest="d").answer() == answer  # nothing is sampled
    agent.messages.append(scenarios.as_sent_back(answer))
    agent.messages += [call.answer("rainy") for call in answer.turn.tool_calls]
    for it in (engine, other):
        it.will_say("fine<|im_end|>")
    await answer_to(session, agent.call)
    await answer_to(again, agent.call)
    assert other.sent == engine.sent[-1:]
    (row,), (expected,) = again.trajectories(1.0), session.trajectories(1.0)
    assert row.input_ids == expected.input_ids
    ids = [message["tool_calls"][0]["id"] for message in agent.messages if "tool_calls" in message]
    assert len(set(ids)) == 2


async def test_a_restored_session_has_numbers_that_json_has_not(tmp_path: Path) -> None:
    engine = engine_for(templates.QWEN)
    session = journaled(tmp_path / "a", engine)
    for number, city in enumerate(("Paris", "Rome")):
        given = {"city": city, "days": float("nan"), "most": float("inf"), "big": 10**30}
        entry = call_entry(f"call_{number}", "weather", json.dumps({**given, "least": -0.0}))
        few_shot = {"role": "assistant", "content": "", "tool_calls": [entry]}
        result = {"role": "tool", "tool_call_id": entry["id"], "content": "sunny"}
        agent = Agent(session, "hi", [scenarios.TOOL])
        agent.messages += [few_shot, result, scenarios.user("and there?")]
        engine.will_say(f"{weather_call(city)}<|im_end|>", f"it is {city}<|im_end|>")
        await agent.turn()
        await agent.turn()
    again, other = await restored(tmp_path / "a", engine.tokenizer)
    assert again.trajectories(1.0) == session.trajectories(1.0)
    assert "NaN" in engine.tokenizer.decode(again.trajectories(1.0)[0].input_ids)
    # the last answer is told in the same bytes, and the next call has the same tokens
    call = ModelCall(tuple(agent.messages[:-1]), agent.tools)
    bodies = []
    for it in (session, again):
        (last,) = [begun for begun in it._calls if begun.number == 3]
        bodies.append(json.dumps(ChatCompletions().write(call, await last.answer())))
    assert bodies[0] == bodies[1]
    agent.messages.append(scenarios.user("bye"))
    for it in (engine, other):
        it.will_say("bye<|im_end|>")
    await answer_to(session, agent.call)
    await answer_to(again, agent.call)
    assert other.sent == engine.sent[-1:]


async def test_a_key_that_came_with_another_body_is_refused_later_too(tmp_path: Path) -> None:
    engine = engine_for(templates.QWEN)
    session = journaled(tmp_path / "a", engine)
    engine.will_say("hello<|im_end|>")
    call = ModelCall((scenarios.user("hi"),))
    answer = await session.begin(call, digest="d", key="k").answer()
    again, _ = await restored(tmp_path / "a", engine.tokenizer)
    for _ in range(2):
        assert await again.begin(call, digest="d", key="k").answer() == answer
    with pytest.raises(CallRefused, match="another body"):
        again.begin(call, digest="e", key="k")


async def test_calls_keep_the_order_in_which_they_began(tmp_path: Path) -> None:
    engine = engine_for(templates.QWEN)
    session = journaled(tmp_path / "a", engine)
    engine.will_say("first<|im_end|>", "second<|im_end|>")
    answers, begun = [asyncio.Event(), asyncio.Event()], []
    generate = engine.generate

    async def in_turn(*args: Any, **more: Any) -> Any:
        number = len(begun) - 1
        found = await generate(*args, **more)
        await answers[number].wait()
        return found

    engine.generate = in_turn  # type: ignore[method-assign]
    for text in ("a", "b"):
        begun.append(session.begin(ModelCall((scenarios.user(text),))))
        await asyncio.sleep(0)
    for call, answer in zip(reversed(begun), reversed(answers), strict=True):
        answer.set()
        await call.answer()
        call.note_delivered()
    again, _ = await restored(tmp_path / "a", engine.tokenizer)
    rows = [(it.input_ids, it.reward) for it in again.trajectories(1.0, discount=0.5)]
    assert rows == [(it.input_ids, it.reward) for it in session.trajectories(1.0, discount=0.5)]
    assert [reward for _, reward in rows] == [0.5, 1.0]


def test_what_a_death_cuts_short_is_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.touch()
    journal = SessionJournal(path=path)
    records = [Claimed("k"), Claimed("k", is_confirmed=True), EpisodeEnd({"a": 0.1, "b": -1.0})]
    ends = [0]
    for record in records:
        journal.add(record)
        ends.append(path.stat().st_size)
    content = path.read_bytes()
    for size in range(len(content) + 1):
        path.write_bytes(content[:size])
        num_whole = sum(end <= size for end in ends) - 1
        assert journal.read() == records[:num_whole]
        assert path.stat().st_size == ends[num_whole]
        journal.add(EpisodeEnd(None, "why"))
        assert journal.read() == [*records[:num_whole], EpisodeEnd(None, "why")]
    path.write_bytes(content.replace(b'"k"', b'"x"', 1))
    assert journal.read() == []


def test_a_journal_that_cannot_be_written_ends_and_leaves_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "a"
    path.mkdir()
    journal = SessionJournal(path=path / "b")
    journal.add(Claimed(""))
    assert journal.path is None
    assert "would not outlive its worker" in caplog.text
    journal.add(Claimed(""))
    assert not list(path.iterdir())


def test_a_journal_that_grows_without_end_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("areal_sc.agents.journal.MAX_JOURNAL_BYTES", 200)
    path = tmp_path / "a"
    path.touch()
    journal = SessionJournal(path=path)
    while journal.path:
        assert path.stat().st_size <= 200
        journal.add(Claimed("k"))
    assert "at most 200 bytes" in caplog.text
    assert not path.exists()


async def test_others_have_their_turn_while_a_session_is_restored(tmp_path: Path) -> None:
    engine = engine_for(templates.QWEN)
    session = journaled(tmp_path / "a", engine)
    engine.will_say(*["hello<|im_end|>"] * 5)
    for number in range(5):
        await session.begin(ModelCall((scenarios.user(f"{number}"),))).answer()
    restoring = asyncio.create_task(restored(tmp_path / "a", engine.tokenizer))
    turns = 0
    while not restoring.done():
        turns += 1
        await asyncio.sleep(0)
    assert turns > 5


async def test_what_a_client_gets_back_alone_is_not_written_down(tmp_path: Path) -> None:
    engine = engine_for(templates.QWEN)
    session = journaled(tmp_path / "a", engine)
    engine.will_say("hello<|im_end|>")
    call = ModelCall((scenarios.user("hi"),), metadata={"long": "x" * 10_000})
    await session.begin(call).answer()
    assert (tmp_path / "a").stat().st_size < 2000
