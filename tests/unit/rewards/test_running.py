"""A sandbox that fails is asked again, and its failure is never an end of the program."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from areal_sc.config.sandbox_settings import Isolation, SandboxConfig
from areal_sc.config.schema import GenerationConfig
from areal_sc.errors import RewardError, SandboxError, WorkflowError
from areal_sc.rewards.base import RunCode, Score
from areal_sc.rewards.pool import RewardPool
from areal_sc.rewards.running import CodeRunner
from areal_sc.rewards.shape import RepetitionPenalty
from areal_sc.rewards.weighted import check_signatures
from areal_sc.system.sandbox.program import End, Ended, Limits, Program
from areal_sc.workers.episodes import WorkerEpisodeEngine
from areal_sc.workflows.base import Trajectory

MakeEngine = Callable[[int], WorkerEpisodeEngine]

PRINTED = Ended(end=End.exited, exit_code=0, stdout=b"1", stderr=b"", seconds=0.0)


class FailingSandbox:
    """Fails so often, and then runs whatever it gets."""

    def __init__(self, num_failures: int) -> None:
        self.num_failures = num_failures
        self.ran: list[tuple[Program, Limits]] = []
        self.is_closed = False

    async def run(self, program: Program, limits: Limits) -> Ended:
        self.ran.append((program, limits))
        if len(self.ran) <= self.num_failures:
            raise SandboxError("no place for it")
        return PRINTED

    async def close(self) -> None:
        self.is_closed = True


def runner_of(sandbox: FailingSandbox, monkeypatch: pytest.MonkeyPatch) -> CodeRunner:
    monkeypatch.setattr("areal_sc.rewards.running._PAUSES_S", (0.0, 0.0))
    monkeypatch.setattr("areal_sc.rewards.running.open_sandbox", lambda settings: sandbox)
    return CodeRunner(SandboxConfig())


async def test_it_is_asked_again_and_then_the_failure_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sandbox = FailingSandbox(2)
    run_code = runner_of(sandbox, monkeypatch)
    assert await run_code("print('\ud800')", "é\ud800") is PRINTED
    program = Program(source="print('?')", stdin="é".encode() + b"\xed\xa0\x80")
    assert sandbox.ran == [(program, Limits())] * 3
    own = Program(command=("true",)), Limits(time_s=1.0)
    await run_code(own[0], limits=own[1])
    assert sandbox.ran[-1] == own
    assert not sandbox.is_closed
    await run_code.close()
    assert sandbox.is_closed
    with pytest.raises(SandboxError, match="no place"):
        await runner_of(FailingSandbox(3), monkeypatch)("print(1)")


async def test_no_code_is_a_program_too() -> None:
    run_code = CodeRunner(SandboxConfig())
    ended = await run_code("")
    await run_code.close()
    assert (ended.end, ended.exit_code, ended.stdout) == (End.exited, 0, b"")


async def test_without_isolation_nothing_is_run() -> None:
    run_code = CodeRunner(SandboxConfig(isolation=Isolation.none))
    with pytest.raises(SandboxError, match="not run without isolation"):
        await run_code("print(1)")
    await run_code.close()


async def printed(prompt: dict[str, Any], completion: str, run_code: RunCode) -> Score:
    ended = await run_code(completion)
    return Score(float(ended.stdout), {"exit_code": float(ended.exit_code)})


class Slow:
    async def __call__(self, prompt: Any, completion: str, *, run_code: RunCode) -> float:
        await asyncio.sleep(0.2)  # in the sandbox, say
        return float((await run_code("1")).stdout)


@pytest.fixture
def make_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MakeEngine:
    """Args: num_failures: of the sandbox."""
    return lambda num_failures: engine_of(
        runner_of(FailingSandbox(num_failures), monkeypatch), tmp_path
    )


def engine_of(run_code: CodeRunner, tmp_path: Path) -> WorkerEpisodeEngine:
    pool = RewardPool(
        cast("Any", None),  # no reward here needs a process
        num_processes=1,
        timeout_s=0.1,
        log_path=tmp_path / "reward.log",
        sources=tmp_path,
        run_code=run_code,
    )
    given = {"tokenizer": None, "max_context_tokens": 8, "end_token_ids": ()}
    engine = cast("Any", type("Engine", (), given))
    return WorkerEpisodeEngine(engine, pool, "group", GenerationConfig(), None)


async def test_a_reward_that_asks_for_it_gets_the_sandbox(make_engine: MakeEngine) -> None:
    engine = make_engine(0)
    check_signatures({"printed": printed, "slow": Slow()})
    score = await engine.score(printed, {}, "print(1)")
    assert score == 1.0
    assert score.parts == {"exit_code": 0.0}
    score = await engine.score({"printed": (printed, 0.5), "slow": Slow()}, {}, "print(1)")
    assert score == 1.5
    assert score.parts == {"printed": 1.0, "printed_exit_code": 0.0, "slow": 1.0}
    assert await engine.run_code("print(1)") is PRINTED


async def test_a_score_knows_what_of_it_only_shapes(make_engine: MakeEngine) -> None:
    assert RepetitionPenalty().is_shaping

    async def length(prompt: dict[str, Any], completion: str) -> float:
        return float(len(completion))

    length.is_shaping = True  # type: ignore[attr-defined]
    several = {"printed": printed, "length": (length, -0.25)}
    score = await make_engine(0).score(several, {}, "12")
    assert (score, score.shaping) == (0.5, -0.5)
    zeros = [0.0, 0.0]
    row = Trajectory([1, 2], [False, True], zeros, [-1, 0], [1.0, 1.0], score)
    assert row.shaping == -0.5
    assert replace(row, reward=1.0).shaping == -0.5


async def test_a_reward_whose_sandbox_fails_rejects_its_episode_by_cause(
    make_engine: MakeEngine,
) -> None:
    with pytest.raises(RewardError, match="printed: SandboxError: no place") as failed:
        await make_engine(9).score(printed, {}, "print(1)")
    assert failed.value.error_type == "SandboxError"
    with pytest.raises(SandboxError):
        await make_engine(9).run_code("print(1)")


def test_a_reward_that_runs_code_is_async() -> None:
    def sync(prompt: Any, completion: str, run_code: RunCode) -> float:
        return 1.0

    with pytest.raises(WorkflowError, match=r"'run_code' has to be `async def`"):
        check_signatures(sync)
