"""Agents, as the scheduler of their machine holds them."""

from __future__ import annotations

import os
import signal
import subprocess

import pytest

from areal_sc.schedulers.agent_process import LocalAgent
from areal_sc.system.process import OtherProcess, start_ticks


def test_the_end_of_a_found_agent_is_known_after_its_successor_has_taken_its_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also by a Python that was built without descriptors of processes."""
    monkeypatch.delattr(os, "pidfd_open", raising=False)
    monkeypatch.delattr(signal, "pidfd_send_signal", raising=False)
    with subprocess.Popen(["sleep", "1000"]) as child:
        started = start_ticks(child.pid)
        process = OtherProcess.find(child.pid, started)
        assert process is not None
        agent = LocalAgent(process)
        assert agent.how_it_ended() is None
        assert OtherProcess.find(child.pid, started - 1) is None, "its id was given again"
        agent.kill()
        assert agent.how_it_ended() == "an unknown exit status"
        assert agent.how_it_ended() == "an unknown exit status"
