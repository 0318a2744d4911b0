from __future__ import annotations

from pathlib import Path

import pytest

from areal_sc.run import agent_files
from areal_sc.run.agent_files import AgentFile, living_agents


def test_an_agent_that_ends_while_it_is_looked_at_does_not_live(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = (
        AgentFile.of_this_process(f"tcp://127.0.0.1:{port}", f"{port}") for port in (1, 2)
    )
    locks = [agent.write(tmp_path) for agent in (first, second)]
    assert {agent.incarnation for agent in living_agents(tmp_path)} == {"1", "2"}

    def ends(path: Path) -> bool:
        if path == second.path(tmp_path):
            path.unlink()
        return True

    monkeypatch.setattr(agent_files, "is_locked", ends)
    assert living_agents(tmp_path) == [first]
    for lock in locks:
        lock.close()
