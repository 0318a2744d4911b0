"""An agent that is a program in any language. No torch."""

from __future__ import annotations

import codecs
import math
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import IO, Any, Final, TextIO

from areal_sc.agents.agent import as_json
from areal_sc.agents.served import BadReward
from areal_sc.errors import WorkflowError
from areal_sc.rewards.base import RewardFunction, is_async
from areal_sc.sources.reference import Referable

_MAX_OUTPUT_CHARS: Final = 1 << 20
_SHOWN_CHARS: Final = 300
_READ_GRACE_S: Final = 2.0
"""After a program's end its own output is read in far less; what it left may write on."""


class CommandFailed(Exception):
    """The program did not end with exit code 0."""


class AgentCommand(Referable):
    """Runs a program, which gets its row as JSON on standard input.

    It finds the model by `OPENAI_BASE_URL`, `OPENAI_API_KEY`, `ANTHROPIC_BASE_URL` and
    `ANTHROPIC_API_KEY`, and has failed unless its exit code is 0.

    Args:
        command: the program and its arguments; no shell reads them.
        reward: called with the row and what the program wrote to standard output, as a sync reward
            is; None: the last line of that is the reward, a number.
    Raises: WorkflowError: the command is no list of words, or the reward is async.
    """

    def __init__(self, command: Sequence[str], reward: RewardFunction | None = None) -> None:
        if (
            isinstance(command, str)
            or not command
            or not all(isinstance(it, str) for it in command)
        ):
            raise WorkflowError(
                f'AgentCommand: expected the words of a command, ["node", "agent.js"] say, got '
                f"{command!r:.200}"
            )
        if reward is not None and (not callable(reward) or is_async(reward)):
            raise WorkflowError(
                f"AgentCommand: expected a reward that is a function and not async, got {reward!r}"
            )
        self.command = list(command)
        self.reward = reward
        self.__qualname__ = f"AgentCommand({' '.join(command)[:80]})"  # as messages call it

    def __call__(self, row: Mapping[str, Any]) -> Any:
        """Runs the program in an agent's process, which ends with all that the program has left.

        Raises: CommandFailed: its exit code is not 0. BadReward: there is no number.
        """
        text = as_json(row, "a program")
        program = subprocess.Popen(
            self.command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        told: list[str] = []
        errors: list[str] = []
        jobs = (
            (_feed, program.stdin, text),
            (_tell, program.stdout, sys.stdout, told),
            (_tell, program.stderr, sys.stderr, errors),
        )
        threads = [threading.Thread(target=job, args=rest, daemon=True) for job, *rest in jobs]
        for thread in threads:
            thread.start()
        program.wait()
        deadline_s = time.monotonic() + _READ_GRACE_S
        for thread in threads:  # what the program has left may hold its streams for ever
            thread.join(max(0.0, deadline_s - time.monotonic()))
        output = "".join(told)
        if program.returncode:
            last = "".join(errors).strip()[-_SHOWN_CHARS:]
            raise CommandFailed(f"exit code {program.returncode}: {last}")
        return _last_number(output) if self.reward is None else self.reward(row, output)

    def check(self) -> None:
        """Raises: WorkflowError: there is no such program on this machine."""
        if shutil.which(self.command[0]) is None:
            raise WorkflowError(f"AgentCommand: there is no program {self.command[0]!r} to run")

    def check_row(self, row: Mapping[str, Any]) -> None:
        """Raises: WorkflowError: it cannot be written as JSON."""
        as_json(row, f"agent {self.__qualname__}")


def _feed(stream: IO[bytes], text: str) -> None:
    try:
        with stream:
            stream.write(text.encode() + b"\n")
    except BrokenPipeError:
        pass  # it does not read its row


def _tell(stream: IO[bytes], output: TextIO, told: list[str]) -> None:
    """Copies what a program writes, and keeps it, of a long text the end."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    num_chars = 0
    with stream:
        while data := stream.read1(1 << 16):  # type: ignore[attr-defined]  # it is buffered
            text = decoder.decode(data)
            output.write(text)
            told.append(text)
            num_chars += len(text)
            while num_chars - len(told[0]) > _MAX_OUTPUT_CHARS:
                num_chars -= len(told.pop(0))


def _last_number(output: str) -> float:
    lines = output.split("\n")
    last = next((line.strip() for line in reversed(lines) if line.strip()), "")
    try:
        number = float(last)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise BadReward(f"the program's last line is {last[-80:]!r}: expected a finite number")
    return number
