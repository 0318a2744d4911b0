"""Episodes of agents on virtual time, each with the faults that follow from its seed.

An agent has several clients, which branch, change their past, give up, come back and lose answers.
Meanwhile weights are updated, servers fail, the worker dies, or the episode ends early. A lost
episode is played again, as the run does it.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Final

from simulation.virtual_loop import run_virtual

from areal_sc.agents.calls import CallRefused, ModelCall
from areal_sc.agents.session import Session, SessionSettings
from areal_sc.config.schema import GenerationConfig
from areal_sc.engines.base import Completion
from areal_sc.errors import WorkerError
from areal_sc.workflows.chat_format import Message
from areal_sc.workflows.trajectory import Trajectory

NUM_TURNS: Final = 4
ANSWER_S: Final = 10.0
SAMPLING: Final = GenerationConfig(max_new_tokens=64)
TOOL: Final = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


class UpdatedEngine:
    """Takes a random time for an answer, in which weights may be updated and the server may fail.

    Attributes:
        given: number in the answer's text -> what was sent for it, and what came back.
        dies_at_s: when the server fails.
    """

    def __init__(self, tokenizer: Any, rng: random.Random, dies_at_s: float) -> None:
        self.tokenizer = tokenizer
        self.max_context_tokens = 10_000
        self.end_token_ids = (tokenizer.convert_tokens_to_ids("<|im_end|>"),)
        self.given = dict[int, tuple[list[int], Completion]]()
        self.dies_at_s = dies_at_s
        self.num_updates = 0
        self._rng = rng
        self._version = 0
        self._num_asked = 0

    async def generate(
        self, input_ids: Sequence[int], sampling: GenerationConfig, **_: Any
    ) -> Completion:
        self._num_asked += 1
        number = self._num_asked
        text = f"<think>\nhm {number}\n</think>\n\nanswer {number}<|im_end|>"
        tokens = self.tokenizer.encode(text, add_special_tokens=False)
        versions = list[int]()
        for begin in range(0, len(tokens), 4):
            await asyncio.sleep(self._rng.uniform(0.0, ANSWER_S / 4))
            if asyncio.get_running_loop().time() >= self.dies_at_s:
                raise WorkerError("the server has died")
            if self._rng.random() < 0.1:
                self._version += 1
                self.num_updates += 1
            versions += [self._version] * len(tokens[begin : begin + 4])
        logprobs = [-number - n / 1000 for n in range(len(tokens))]
        completion = Completion(tokens, logprobs, versions, "stop", 1.0)
        self.given[number] = list(input_ids), completion
        return completion


class Clients:
    """Several clients of one session, and the answers that they have got.

    Attributes:
        got: numbers of the answers.
    """

    def __init__(self, session: Session, rng: random.Random) -> None:
        self.got = set[int]()
        self._session = session
        self._rng = rng
        self._pasts: list[list[Message]] = [[{"role": "user", "content": "hi there"}]]

    async def one(self, key: str) -> None:
        """A call, with a client that may give up, and come back."""
        rng = self._rng
        past = list(rng.choice(self._pasts))
        answered = [n for n, it in enumerate(past) if it["role"] == "assistant"]
        if answered and rng.random() < 0.1:  # it changes what was said
            place = rng.choice(answered)
            past[place] = {**past[place], "content": "something else"}
        if answered and rng.random() < 0.1:  # it makes its history shorter
            past = [{"role": "user", "content": f"so far: {past[-1]['content']}"}]
        call = ModelCall(tuple(past), (TOOL,) if rng.random() < 0.2 else ())
        with suppress(CallRefused):  # the session has ended, or the engine failed
            while not await self._tried(call, past, key):
                if rng.random() < 0.4:
                    return  # it gives up for good
                await asyncio.sleep(rng.uniform(0.0, ANSWER_S))

    async def _tried(self, call: ModelCall, past: list[Message], key: str) -> bool:
        """Whether the client has the answer."""
        rng = self._rng
        begun = self._session.begin(call, digest=key)
        with begun.client():
            patience_s = rng.uniform(0.0, 2 * ANSWER_S) if rng.random() < 0.3 else None
            try:
                async with asyncio.timeout(patience_s):
                    answer = await begun.answer()
            except TimeoutError:
                return False
            try:
                with begun.delivering():
                    await asyncio.sleep(rng.uniform(0.0, 1.0))
                    if rng.random() < 0.2:
                        raise ConnectionError
            except ConnectionError:
                return False
        self.got.add(int(answer.turn.content.split()[-1]))
        message = dict(answer.turn.message)
        if rng.random() < 0.5:
            message.pop("reasoning_content", None)
        self._pasts.append([*past, message, {"role": "user", "content": f"and {rng.random()}?"}])
        return True


def play(tokenizer: Any, seed: int) -> Counter[str]:
    """Plays one episode until it is trained, or rejected for want of an answer.

    Returns: how often what happened.
    Raises: AssertionError: a token is trained twice, never, or with what is not its own; a reward
        is another than the agent's; a call is open behind its session. Stalled: somebody waits for
        what never comes.
    """
    return run_virtual(_play(tokenizer, random.Random(seed)))


async def _play(tokenizer: Any, rng: random.Random) -> Counter[str]:
    counts = Counter[str]()
    while not await _played(tokenizer, rng, counts):
        pass
    ends = counts["trained"] + counts["rejected"] + counts["server_deaths"]
    assert counts["episodes"] == ends + counts["worker_deaths"]
    return counts


async def _played(tokenizer: Any, rng: random.Random, counts: Counter[str]) -> bool:
    """Whether the episode has ended for good."""
    loop = asyncio.get_running_loop()
    fault = rng.choice(["none", "none", "none", "server", "worker", "early"])
    at_s = loop.time() + rng.uniform(0.0, NUM_TURNS * ANSWER_S)
    engine = UpdatedEngine(tokenizer, rng, at_s if fault == "server" else float("inf"))
    session = Session(engine, SAMPLING, SessionSettings())
    clients = Clients(session, rng)
    counts["episodes"] += 1
    lost = CallRefused(410, "session_lost", "the worker of this episode ends")
    why = {"worker": lost, "early": None}
    timer = loop.call_at(at_s, session.end, why[fault]) if fault in why else None
    for turn in range(NUM_TURNS):
        calls = [clients.one(f"{turn} {n}") for n in range(rng.randrange(1, 5))]
        await asyncio.gather(*calls)
    died = fault == "worker" and loop.time() >= at_s
    if timer:
        timer.cancel()
    session.end()
    await asyncio.sleep(0)
    assert not [it for it in asyncio.all_tasks() if it.get_name().startswith("call ")]
    counts["updates"] += engine.num_updates
    counts["retries"] += session.counts["retries"]
    if died:
        counts["worker_deaths"] += 1
        return False
    try:
        with session.raising():
            pass
    except WorkerError:
        counts["server_deaths"] += 1
        return False
    if not clients.got:
        counts["rejected"] += 1
        return True
    counts["trained"] += 1
    reward = rng.uniform(0.5, 1.0)
    rows = session.trajectories(reward)
    assert {row.reward for row in rows} == {reward}
    _check_trained(engine, rows, clients.got)
    counts["calls"] += len(clients.got)
    counts["undelivered"] += len(engine.given) - len(clients.got)
    counts["rows"] += len(rows)
    return True


def _check_trained(engine: UpdatedEngine, rows: Sequence[Trajectory], got: set[int]) -> None:
    """Each token that a client has got is trained once, behind the tokens that it came after."""
    trained = [
        (list(row.input_ids[:place]), row.input_ids[place], *columns)
        for row in rows
        for place, (mask, *columns) in enumerate(
            zip(row.loss_mask, row.behavior_logprobs, row.versions, strict=True)
        )
        if mask
    ]
    expected = [
        (sent + list(it.token_ids[:n]), it.token_ids[n], it.logprobs[n], it.versions[n])
        for number, (sent, it) in engine.given.items()
        if number in got
        for n in range(len(it.token_ids))
    ]
    assert sorted(trained) == sorted(expected)
