"""Agents outside play on while worker and script of their run are killed between two turns."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, suppress
from pathlib import Path
from typing import Any, Literal

from integration.run_process import LIMIT_S, SCRIPTS, RunProcess
from integration.test_run_address import Outside
from waiting import wait_until

from areal_sc.controller.ledger.ledger_account import read_account

BOOKED = SCRIPTS / "booked_online.py"
SETTINGS = (
    *("rollout.train_batch_groups=2", "rollout.group_size=2", "rollout.max_staleness=0"),
    *("generation.max_new_tokens=5", "rollout.max_context_tokens=256"),
    *("rollout.max_episode_tokens=2048", "rollout.rejection_window=1000"),
    *("scheduler.max_deaths=1000", "scheduler.orphan_timeout_s=600"),
    *("scheduler.heartbeat_interval_s=10", "agents.bind=127.0.0.3"),
)
EPISODES_A_STEP = 4
_COME_AGAIN_S = 0.1

Killed = Literal["worker", "script", "both"]
Start = Callable[[], AbstractContextManager[RunProcess]]


class Client:
    """An agent outside, which plays one episode, and asks again where it has no answer.

    Attributes:
        texts, logprobs: of all tokens that the model has sampled for it.
    """

    def __init__(self, outside: Outside, episode: dict[str, Any], says: str) -> None:
        self.question: str = episode["row"]["question"]
        self.texts: list[str] = []
        self.logprobs: list[float] = []
        self._outside = outside
        self._episode = episode
        self._says = says
        self._messages: list[dict[str, Any]] = []
        self._last: tuple[dict[str, Any], Any] = {}, None

    def take_turn(self) -> None:
        self._messages.append({"role": "user", "content": self._says})
        body = {"model": "policy", "messages": list(self._messages), "logprobs": True}
        answer = self._until_told("/v1/chat/completions", body, self._episode["api_key"])
        self._last = body, answer
        (choice,) = answer["choices"]
        self._messages.append(choice["message"])
        self.texts += [it["token"] for it in choice["logprobs"]["content"]]
        self.logprobs += [it["logprob"] for it in choice["logprobs"]["content"]]

    def repeat(self) -> None:
        """Asks the same again, as who has not got the answer: it is the same one."""
        body, answer = self._last
        again = self._until_told("/v1/chat/completions", body, self._episode["api_key"])
        assert again == answer

    def check_strangers(self) -> None:
        """Keys of others open nothing, whatever has become of the worker."""
        key = self._episode["api_key"]
        life, number, code = key.rsplit("-", 2)
        for wrong in (key[:-1], f"{life}-{int(number) + 1}-{code}", self._outside.key):
            self._until_told("/v1/chat/completions", {}, wrong, enough=(401,))

    def end(self, reward: float) -> None:
        """A reward that came just before a death is told twice, and counts once."""
        path = f"/episodes/{self._episode['id']}/reward"
        self._until_told(path, {"reward": reward}, self._outside.key, enough=(200, 409))

    def _until_told(self, path: str, body: Any, key: str, enough: tuple[int, ...] = (200,)) -> Any:
        give_up_s = time.monotonic() + LIMIT_S
        while True:
            status, told = self._outside.post(path, body, key)
            if status in enough:
                return told
            assert status in (0, 503), (status, told)
            assert time.monotonic() < give_up_s, (status, told)
            time.sleep(_COME_AGAIN_S)


class OutsideKills:
    """A run whose processes are killed while clients play.

    Args:
        start: starts the script, in the same run folder each time.
        num_turns: of each episode.
        says: what clients say in each turn.
        memory: of the run.

    Attributes:
        took_s: of each kill, until the last client had its next answer.
        ended: the clients whose episodes have ended.
    """

    def __init__(self, start: Start, num_turns: int, says: str, memory: Path) -> None:
        self.took_s: list[float] = []
        self.ended: list[Client] = []
        self._start = start
        self._num_turns = num_turns
        self._says = says
        self._memory = memory
        self._stack = ExitStack()
        self._runs: list[RunProcess] = []  # processes that outlive one are found by its mark

    def play(self, num_steps: int, kinds: Iterator[Killed]) -> RunProcess:
        """Each kill is between two turns of all episodes of a step. Returns: the ended run."""
        with self._stack:
            run = self._start_again()
            outside = Outside(run.run_dir)
            for _ in range(num_steps):
                run.wait_until(lambda: outside.post("/episodes", key="x")[0], "the address")
                episodes = outside.claimed(EPISODES_A_STEP)
                ids = {it["id"] for it in episodes}
                wait_until(lambda ids=ids: self._journals == ids, what="other journals to go")
                clients = [Client(outside, it, self._says) for it in episodes]
                for turn in range(self._num_turns):
                    began_s = time.monotonic()
                    for client in clients:
                        client.take_turn()
                    if turn:
                        self.took_s[-1] += time.monotonic() - began_s
                    if turn == self._num_turns - 1:
                        break
                    began_s = time.monotonic()
                    run = self._kill(run, next(kinds))
                    if turn % 2:
                        for client in clients:
                            client.repeat()
                    clients[0].check_strangers()
                    self.took_s.append(time.monotonic() - began_s)
                for number, client in enumerate(clients):
                    client.end(float(number))
                self.ended += clients
            run.finish()
            for it in self._runs:
                it.wait_until_gone()
            return run

    @property
    def _journals(self) -> set[str]:
        """Ids of the sessions that are written down."""
        return {it.name for it in self._memory.rglob("sessions/*")}

    def _kill(self, run: RunProcess, kind: Killed) -> RunProcess:
        if kind != "script":
            pids = {pid for it in self._runs for pid in it.processes()}
            (pid,) = (it for it in pids if _name_of(it) == "areal:rollout/0")
            os.kill(pid, signal.SIGKILL)
        if kind == "worker":
            return run
        run.send(signal.SIGKILL)
        run.wait()
        return self._start_again()

    def _start_again(self) -> RunProcess:
        self._runs.append(self._stack.enter_context(self._start()))
        return self._runs[-1]

    def check(self, run: RunProcess, tokenizer: Any) -> None:
        """Each episode is one row, trained once, with the tokens that its client was told."""
        lines = Path(f"{run.run_dir}.book").read_text().splitlines()
        book = [json.loads(line) for line in lines]
        assert len(book) == len(self.ended)
        rows: list[tuple[str, list[str], list[float]]] = []
        for (row,) in book:
            texts = tokenizer.batch_decode([[it] for it in row["sampled"]])
            rows.append((row["question"], texts, row["logprobs"]))
        told = [(it.question, it.texts, it.logprobs) for it in self.ended]
        assert sorted(rows) == sorted(told)
        groups: list[Any] = []
        account = read_account(run.run_dir / "ledger", groups.append)
        assert {it.outcome for it in groups} == {"trained"}
        assert sum(it.num_trained for it in groups) == len(self.ended)
        assert (account.rows_lost, account.trained_again) == (0, [])
        assert run.summary()["num_rows_trained"] == len(self.ended)
        assert not run.summary()["rejected_episodes"]
        assert not list(self._memory.rglob("*"))


def _name_of(pid: int) -> str:
    """ "": it has ended."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/comm").read_text().strip()
    return ""


def end_turns(model: Path, mark: str) -> None:
    """Has the chat template end each turn, an answer as the model does: a conversation is a row."""
    path = model / "tokenizer_config.json"
    settings = json.loads(path.read_text())
    end = "{{ '$' if message.role == 'assistant' else '" + mark + "' }}"
    settings["chat_template"] = (
        "{% for message in messages %}{{ message.content }}" + end + "{% endfor %}"
    )
    path.write_text(json.dumps(settings))
