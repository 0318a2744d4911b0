"""The reward of answers that are programs: they run in the worker's sandbox, on each test.

    answer ──► last code block ──► one program a test ──► sandbox ──► output ──► compared here

The sandbox gets the code and a test's input. What is expected stays here, and so does the verdict.
No torch.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from itertools import islice
from typing import Any, Final

from areal_sc.errors import RewardError, WorkflowError
from areal_sc.rejection import RejectionKind
from areal_sc.rewards.answer_text import read_all
from areal_sc.rewards.base import RunCode, Score
from areal_sc.rewards.code.answer import PYTHON, CodeBlock, last_program
from areal_sc.rewards.code.calls import call_program
from areal_sc.rewards.code.cases import Case, check_outputs, function_of, longest, read_cases
from areal_sc.rewards.code.compare import same_output
from areal_sc.sources.reference import Referable
from areal_sc.system.sandbox.program import End, Limits, Program

TEST_LIMITS: Final = Limits(time_s=6.0, memory_bytes=1 << 30)
"""Six seconds a test, as LiveCodeBench and DeepCoder have it."""


class Outcome(StrEnum):
    """What came of one test, or of an answer without a program.

    crashed: it raised, a signal ended it, or it wrote more than its limits.
    """

    passed = "passed"
    wrong = "wrong"
    no_code = "no_code"
    timeout = "timeout"
    memory = "memory"
    crashed = "crashed"


FAULTS: Final = (Outcome.no_code, Outcome.timeout, Outcome.memory, Outcome.crashed)


class CodeReward(Referable):
    """1.0 where an answer's last code block passes all tests of the row, else 0.0.

    The parts of its score are `passed`, the share of all tests that it passed, and 1.0 or 0.0 for
    each of `FAULTS`. A sandbox that fails gives no score: the call raises.

    Args:
        tests: column with the tests; `cases` has their shapes.
        pass_share: the reward is the mean over all tests; else the first test that fails decides.
        max_tests: only so many of a row's tests, those with the longest inputs; 0: all.
        limits: of the answer's program, in one test.
        commands: by the name behind a code block's fence, what runs a language other than Python:
            `{"cpp": ("sh", "-c", "g++ -O2 -o run main.cpp && ./run")}`. The code is the file
            `main.NAME` of the folder in which the command begins. Calls of functions are Python.
        fault_reward: what a test gives, in place of 0, that ends by `FAULTS`.
        tolerance: of floats, relative or absolute, whichever is larger.
        tests_at_once: of one answer; the sandbox has as many places as its own settings say.
    Raises: ValueError: an argument is out of bounds. In a call: RewardError: the row's tests cannot
        be read. SandboxError: a test could not be run.
    """

    def __init__(
        self,
        tests: str = "tests",
        *,
        pass_share: bool = False,
        max_tests: int = 0,
        limits: Limits = TEST_LIMITS,
        commands: Mapping[str, Sequence[str]] | None = None,
        fault_reward: float = 0.0,
        tolerance: float = 1e-6,
        tests_at_once: int = 4,
    ) -> None:
        if max_tests < 0 or tests_at_once < 1 or tolerance < 0 or not math.isfinite(fault_reward):
            raise ValueError(
                f"max_tests={max_tests}, tests_at_once={tests_at_once}, tolerance={tolerance}, "
                f"fault_reward={fault_reward}: expected at least 0, 1 and 0, and a finite number"
            )
        for language, command in (commands or {}).items():
            if isinstance(command, str) or not command or language in PYTHON:
                raise ValueError(
                    f"commands[{language!r}]: expected a program and its arguments, for a language "
                    f"other than Python, got {command!r}"
                )
        self._tests = tests
        self._pass_share = pass_share
        self._max_tests = max_tests
        self._limits = limits
        self._commands = {name.lower(): tuple(it) for name, it in (commands or {}).items()}
        self._values = dict.fromkeys(FAULTS, fault_reward)
        self._values |= {Outcome.passed: 1.0, Outcome.wrong: 0.0}
        self._tolerance = tolerance
        self._tests_at_once = tests_at_once

    async def __call__(
        self, prompt: Mapping[str, Any], completion: str, run_code: RunCode
    ) -> Score:
        try:
            cases = await asyncio.to_thread(self._cases, prompt)
        except ValueError as error:
            raise RewardError(
                f"column {self._tests!r}: {error}", kind=RejectionKind.dataset_error
            ) from error
        block = last_program(completion, self._commands)
        if block is None:
            outcomes = [Outcome.no_code]
        else:
            outcomes = await self._outcomes(block, cases, run_code)
        values = [self._values[outcome] for outcome in outcomes]
        parts = {outcome.value: float(outcome in outcomes) for outcome in FAULTS}
        parts["passed"] = outcomes.count(Outcome.passed) / len(cases)
        return Score(sum(values) / len(values) if self._pass_share else values[-1], parts)

    def check_row(self, row: Mapping[str, Any]) -> None:
        """Raises: WorkflowError: its tests are missing, or cannot be read."""
        try:
            self._cases(row)
        except ValueError as error:
            raise WorkflowError(f"column {self._tests!r}: {error}") from error

    def check_tests(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Reads the tests of all rows, so that none fails during the run.

        Raises: ConfigError: some cannot be read; names the first of them, with their indices.
        """
        read_all(rows, self._cases, f"the tests of {{num}} rows (column {self._tests!r})")

    def _cases(self, row: Mapping[str, Any]) -> list[Case]:
        """Raises: ValueError: there are none, or they cannot be read."""
        if row.get(self._tests) is None:
            raise ValueError(f"the row has no tests, only {sorted(row)}")
        cases = read_cases(row[self._tests], function_of(row.get("metadata")))
        if self._max_tests:
            cases = longest(cases, self._max_tests)
            check_outputs(cases)
        texts = (it.expected[0] for it in cases if not it.function)
        most = max((len(it.encode(errors="replace")) for it in texts), default=0)
        if most > self._limits.output_bytes:
            raise ValueError(
                f"an output has {most} bytes, more than a program may print; expected at most "
                f"limits.output_bytes={self._limits.output_bytes}"
            )
        return cases

    async def _outcomes(
        self, block: CodeBlock, cases: Sequence[Case], run_code: RunCode
    ) -> list[Outcome]:
        """One for each test, in order; up to the first that fails, if all have to pass."""
        ahead = (asyncio.create_task(self._outcome(block, case, run_code)) for case in cases)
        running = deque(islice(ahead, self._tests_at_once))
        outcomes: list[Outcome] = []
        try:
            while running:
                outcomes.append(await running[0])
                running.popleft()
                if outcomes[-1] is not Outcome.passed and not self._pass_share:
                    break
                running.extend(islice(ahead, 1))
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)
        return outcomes

    async def _outcome(self, block: CodeBlock, case: Case, run_code: RunCode) -> Outcome:
        ended = await run_code(self._program(block, case), limits=self._limits)
        match ended.end:
            case End.timeout:
                return Outcome.timeout
            case End.memory:
                return Outcome.memory
            case End.exited if ended.exit_code == 0:
                is_right = await asyncio.to_thread(self._is_right, ended.stdout, case)
                return Outcome.passed if is_right else Outcome.wrong
        return Outcome.crashed

    def _is_right(self, stdout: bytes, case: Case) -> bool:
        return any(
            same_output(stdout, expected, self._tolerance, is_call=bool(case.function))
            for expected in case.expected
        )

    def _program(self, block: CodeBlock, case: Case) -> Program:
        code = block.code.encode(errors="replace")  # a model may sample half a surrogate pair
        stdin = case.stdin.encode(errors="surrogatepass")
        if command := self._commands.get(block.language):
            return Program(command=command, stdin=stdin, files={f"main.{block.language}": code})
        source = code.decode()
        return Program(
            source=call_program(source, case.function) if case.function else source, stdin=stdin
        )


code_reward = CodeReward()
"""All tests of the column `tests` have to pass, in Python."""
