"""Agents, as the scheduler of their machine holds them."""

from __future__ import annotations

import subprocess

from areal_sc.agent_files import AgentFile
from areal_sc.process import OtherProcess, start_ticks
from areal_sc.schedulers.agent_process import FoundAgent


def test_the_end_of_a_found_agent_is_known_after_its_successor_has_taken_its_place() -> None:
    with subprocess.Popen(["sleep", "1000"]) as child:
        file = AgentFile("host", child.pid, start_ticks(child.pid), "tcp://nobody:1", "abc")
        process = OtherProcess.find(child.pid, file.start_ticks)
        assert process is not None
        agent = FoundAgent(file, process)
        assert agent.how_it_ended() is None
        agent.kill()
        assert agent.how_it_ended() == "an unknown exit status"
        assert agent.how_it_ended() == "an unknown exit status"
