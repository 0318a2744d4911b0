"""The example of a training loop of one's own: it runs, is interrupted, and goes on."""

from __future__ import annotations

import ast
import signal
from pathlib import Path

from integration.run_process import REPOSITORY, SCRIPTS, tiny_run

SCRIPT = REPOSITORY / "examples" / "own_loop.py"
ROWS_A_STEP = 8


def test_a_loop_of_ones_own_is_measured_evaluated_and_resumed(
    tmp_path: Path, tiny_model_folder: Path
) -> None:
    settings = (
        *("checkpoint.every_steps=2", "evaluation.every_steps=2"),
        "scheduler.orphan_timeout_s=600",  # what is left at the end would stay so long
    )
    endless, run_dir = "total_steps=100000", tmp_path / "run"
    with tiny_run(run_dir, tiny_model_folder, endless, *settings, script=SCRIPT) as stopped:
        stopped.wait_until(lambda: stopped.events("snapshot"), "a snapshot")
        stopped.send_to_foreground(signal.SIGINT)
        assert stopped.wait() == 130, stopped.story()
        assert "phase=training stopped=" in stopped.output
        told = stopped.output.partition("stopped by Ctrl-C")[2]
        assert f"newest snapshot: {run_dir}/checkpoints/step-" in told
        assert f"{SCRIPT} --config" in told
        stopped.wait_until_gone()
    last = int(max(path.name for path in (run_dir / "checkpoints").glob("step-*")).split("-")[1])
    rest = f"total_steps={last + 3}"
    with tiny_run(run_dir, tiny_model_folder, rest, *settings, script=SCRIPT) as resumed:
        resumed.finish()
        resumed.wait_until_gone()
        assert f"resumed after step {last}" in resumed.output
        assert "only a `Run` reads" not in resumed.output
        assert resumed.steps()[-3:] == [last + 1, last + 2, last + 3]
        evaluations = [(r["name"], r["step"]) for r in resumed.records("evaluation")]
        summary = resumed.summary()
    assert evaluations[0] == ("before", 0)
    newest = (last + 2) // 2 * 2  # the stop's own snapshot may be of an odd step
    assert evaluations[-3:] == [("periodic", newest), ("after", last + 3), ("greedy", last + 3)]
    assert summary["num_steps"] == last + 3
    assert summary["num_rows_trained"] == (last + 3) * ROWS_A_STEP
    assert summary["num_rows_trained_twice"] == 0
    for record in resumed.records("step"):
        assert record["train"].keys() >= {"loss", "grad_norm"}
        has_signal = record["train"]["num_effective_tokens"] > 0
        assert ({"proximal_kl", "behavior_kl"} <= record["train"].keys()) == has_signal
        assert 0 < record["wait_s"] + record["train_s"] + record["sync_s"] <= record["step_time_s"]
        assert record["workflow"]["accuracy"] == record["accuracy"]
        assert record["counters"]["store_bytes"] > 0
    for name in ("learning_curve.png", "model/model.safetensors", "config.yaml"):
        assert (run_dir / name).is_file()


def test_a_loop_without_a_run_refuses_to_resume(tmp_path: Path, tiny_model_folder: Path) -> None:
    script = SCRIPTS / "own_loop.py"
    with tiny_run(tmp_path / "run", tiny_model_folder, "--resume", script=script) as run:
        assert run.wait() == 3, run.story()
        assert "a loop without a `Run` starts from nothing and cannot resume" in run.output


def test_the_loop_fits_on_a_screen() -> None:
    (main,) = (
        node
        for node in ast.parse(SCRIPT.read_text()).body
        if isinstance(node, ast.FunctionDef) and node.name == "main"
    )
    assert main.end_lineno is not None
    assert main.end_lineno - main.lineno + 1 <= 30
