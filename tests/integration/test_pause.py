"""A person at a shell pauses runs of real processes, lets them go on, and scales them."""

from __future__ import annotations

import io
import signal
import threading
import time
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
from integration.run_process import (
    SCRIPTS,
    TINY_YAML,
    RunProcess,
    gate_of,
    open_gate,
    tiny_run,
)
from integration.test_killed_scripts import num_lives
from waiting import wait_until

from areal_sc import GRPOConfig, SFTTrainer, TrainController, load_config
from areal_sc import __main__ as program
from areal_sc.controller.ledger.ledger_account import read_account
from areal_sc.errors import CommandError
from areal_sc.records.metrics_log import History
from areal_sc.run.run_folder import RunFolder
from areal_sc.run.run_status import (
    PauseWish,
    RoleStatus,
    RunStatus,
    read_status,
    take_back,
    write_wish,
)
from areal_sc.run.verdict import State, Verdict, steps_of, verdict

LOOP = SCRIPTS / "own_loop.py"
PAUSED_AT = 2
"""Policy version."""
PAUSE_S = 3.0
SETTINGS = (
    *("rollout.max_staleness=0", "task.num_free_episodes=16", "scheduler.orphan_timeout_s=600"),
)
"""Steps follow one after the other, so a run can be repeated; its episodes are held after two."""


def told(name: str, run_dir: Path, *words: str) -> str:
    """What a command says."""
    with redirect_stdout(io.StringIO()) as said:
        program.main([name, str(run_dir), *words])
    return said.getvalue()


def status(run: RunProcess) -> RunStatus:
    found = read_status(run.run_dir / "status.json")
    assert found is not None
    return found


def wait_until_still(run: RunProcess) -> None:
    def stands_still() -> bool:
        is_of_this_start = status(run).pid == run.pid
        return is_of_this_start and "Nothing is computed" in verdict_of(run).text

    run.wait_until(stands_still, "a standstill")


def verdict_of(run: RunProcess) -> Verdict:
    return verdict(RunFolder(run.run_dir))


def pause_in_third_step(run: RunProcess) -> None:
    """The run stands still, and the groups of the third step are played."""

    def is_held() -> bool:
        rollout = rollout_of(run)
        return rollout is not None and (rollout.version, rollout.num_running) == (2, 4)

    run.wait_until(is_held, "the third step to be held")
    assert "It still ends what goes on: 4 " in told("pause", run.run_dir)
    open_gate(run.run_dir)
    wait_until_still(run)


def rollout_of(run: RunProcess) -> RoleStatus | None:
    """What this start of the script has told of its rollout workers."""
    found = read_status(run.run_dir / "status.json")
    return found.roles.get("rollout") if found is not None and found.pid == run.pid else None


def num_open(run: RunProcess) -> tuple[int, int | None]:
    """Policy version, and groups that are open."""
    rollout = rollout_of(run)
    return (-1, None) if rollout is None else (rollout.version, rollout.num_open)


def num_bytes(run: RunProcess) -> int:
    """Of the ledger, which every change makes longer."""
    return sum(path.stat().st_size for path in (run.run_dir / "ledger").iterdir())


def num_bytes_at_rest(run: RunProcess) -> int:
    """What was decided before a standstill may still be on its way to the disk."""
    sizes = [-1]

    def is_at_rest() -> bool:
        time.sleep(PAUSE_S / 3)
        sizes.append(num_bytes(run))
        return sizes[-1] == sizes[-2]

    run.wait_until(is_at_rest, "an end of its writing")
    return sizes[-1]


def test_a_paused_run_is_ended_by_ctrl_c_and_goes_on_where_it_was(
    tmp_path: Path, tiny_model_folder: Path
) -> None:
    settings = (*SETTINGS, "total_steps=5", "checkpoint.every_steps=50")
    with tiny_run(tmp_path / "run", tiny_model_folder, *settings) as first:
        pause_in_third_step(first)
        before = num_bytes_at_rest(first)
        time.sleep(PAUSE_S)
        assert (num_bytes(first), first.steps()) == (before, [1, 2])
        assert verdict_of(first).state is State.paused
        assert "paused by" in first.output
        with pytest.raises(CommandError, match="the run is paused by"):
            told("pause", first.run_dir)
        first.send(signal.SIGINT)  # the first one: it ends at once, as no step goes on
        assert first.wait(60.0) == 130, first.story()
        assert (first.run_dir / "checkpoints" / "step-000002").is_dir()
    assert "It is paused, and stays so" in told("status", first.run_dir)
    gate_of(tmp_path / "run").write_bytes(b"." * 8)
    with tiny_run(tmp_path / "run", tiny_model_folder, *settings) as second:
        second.wait_until(lambda: "paused by" in second.output, "the start to say so")
        wait_until_still(second)
        assert second.steps() == [1, 2]
        assert "goes on" in told("resume", second.run_dir)
        second.finish()
        names = [record["name"] for record in second.records("event")]
    assert (names.count("paused"), names.count("pause_ended")) == (2, 1)
    summary = second.summary()
    assert (summary["num_rows_trained"], summary["num_rows_trained_twice"]) == (40, 0)
    with pytest.raises(CommandError, match="is not paused: All of its 5 steps are done"):
        told("resume", second.run_dir)


def test_a_loop_of_ones_own_stays_paused_when_it_is_killed_and_goes_on_where_it_was(
    tmp_path: Path, tiny_model_folder: Path
) -> None:
    settings = (*SETTINGS, "total_steps=4")
    with tiny_run(tmp_path / "run", tiny_model_folder, *settings, script=LOOP) as first:
        pause_in_third_step(first)
        first.send(signal.SIGKILL)
        first.wait()
        assert "It is paused, and stays so" in verdict_of(first).text
        gate_of(tmp_path / "run").write_bytes(b"." * 8)
        with tiny_run(tmp_path / "run", tiny_model_folder, *settings, script=LOOP) as second:
            second.wait_until(lambda: num_open(second)[0] == 2, "its workers to be taken over")
            wait_until_still(second)
            time.sleep(PAUSE_S)
            assert "step=" not in second.output
            told("resume", second.run_dir)
            second.finish()
    account = read_account(first.run_dir / "ledger", lambda group: None)
    assert (account.rows_lost, account.trained_again, account.version) == (0, [], 4)
    assert (account.totals["rows_trained"], account.totals["rows_trained_twice"]) == (32, 0)
    assert num_lives(first.run_dir, "train-0") == num_lives(first.run_dir, "rollout-0") == 1
    assert not (first.run_dir / "logs" / "agents.log").exists(), "it has no address for agents"


def test_a_run_is_scaled_from_a_shell(tmp_path: Path, tiny_model_folder: Path) -> None:
    stores = "rollout.store_bytes=6000"  # two of them hold a batch
    held = "task.num_free_episodes=1"  # each worker plays one: the first step is held
    settings = (*SETTINGS, "total_steps=5", "rollout.num_workers=2", stores, held)
    with tiny_run(tmp_path / "run", tiny_model_folder, *settings) as run:

        def states() -> list[str]:
            return [worker.state for worker in status(run).roles["rollout"].workers]

        run.wait_until(lambda: num_open(run) == (0, 4), "the first step to be held")
        with pytest.raises(CommandError, match=r"refused: .* room for a batch"):
            told("scale", run.run_dir, "rollout=1")
        assert "refused: " in told("status", run.run_dir)
        assert "are 3 from now on" in told("scale", run.run_dir, "rollout=3")
        run.wait_until(lambda: states() == ["ready"] * 3, "a third worker")
        told("pause", run.run_dir)  # which workers that come and go do not mind
        assert "are 2 from now on" in told("scale", run.run_dir, "rollout=2")
        run.wait_until(lambda: states() == ["ready"] * 2, "two workers")
        run.wait_until(lambda: not (run.run_dir / ".scale").exists(), "the wish to be deleted")
        told("resume", run.run_dir)
        gate_of(run.run_dir).write_bytes(b"." * 99)
        run.finish()
    changes = [(event["before"], event["num_workers"]) for event in run.events("scaled")]
    assert changes == [(2, 3), (3, 2)]
    assert run.steps() == [1, 2, 3, 4, 5]
    assert run.summary()["num_rows_trained_twice"] == 0


def test_rows_are_trained_alike_with_a_pause_and_without(
    tmp_path: Path, tiny_model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [{"prompt": f"{n:b}=", "completion": f"{n:b}"[::-1]} for n in range(64)]
    plain, paused = (RunFolder(tmp_path / name) for name in ("plain", "paused"))

    def train(folder: RunFolder) -> None:
        words = [f"run_dir={folder.path}", f"actor.path={tiny_model_folder}", "task.gate=none"]
        settings = ["total_steps=40", "actor.optimizer.lr=1e-2", "evaluation.every_steps=0"]
        config = load_config(["--config", str(TINY_YAML), *words, *settings], GRPOConfig)
        SFTTrainer(config).fit(rows, batch_size=8, use_chat_template=False)

    held: list[float] = []

    def hold() -> None:
        try:
            wait_until(lambda: "Nothing is computed" in verdict(paused).text)
            version = steps_of(verdict(paused).status.roles)  # type: ignore[union-attr]
            time.sleep(PAUSE_S)
            assert steps_of(verdict(paused).status.roles) == version  # type: ignore[union-attr]
            held.append(PAUSE_S)
        finally:
            take_back(paused.pause_path)

    train(plain)
    watcher = threading.Thread(target=hold)
    update = TrainController.update_rows

    def update_or_pause(actor: TrainController, *args: Any) -> dict[str, float]:
        if actor.version == PAUSED_AT:
            write_wish(paused.pause_path, PauseWish.of_now())
            wait_until(lambda: verdict(paused).state is State.paused)
            watcher.start()
        return update(actor, *args)

    monkeypatch.setattr(TrainController, "update_rows", update_or_pause)
    train(paused)
    watcher.join()
    assert held, "it was not paused"
    of_plain, of_paused = (History.read(it.metrics_path).steps for it in (plain, paused))
    assert len(of_plain) == len(of_paused) == 40
    for name in ("loss", "grad_norm", "num_tokens"):
        assert [it.train[name] for it in of_plain] == [it.train[name] for it in of_paused]
