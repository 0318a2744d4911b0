"""Agents outside go on though worker and script are killed between their turns."""

from __future__ import annotations

from pathlib import Path

from integration.outside_kills import BOOKED, SETTINGS, OutsideKills, end_turns
from integration.run_process import tiny_run
from transformers import AutoTokenizer


def test_sessions_outlive_worker_and_script(tmp_path: Path, chat_model: Path) -> None:
    """benchmarks/session_kills.py has 100 kills."""
    memory = tmp_path / "memory"
    end_turns(chat_model, "=")
    settings = *SETTINGS, "total_steps=1", f"transport.shared_memory={memory}"
    kills = OutsideKills(
        lambda: tiny_run(tmp_path / "run", chat_model, *settings, script=BOOKED),
        num_turns=4,
        says="a",
        memory=memory,
    )
    run = kills.play(1, iter(["worker", "script", "both"]))
    kills.check(run, AutoTokenizer.from_pretrained(chat_model))
