"""A scheduler of the user's own: what it raises is told with its line, and ends nothing else."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import pytest

from areal_sc.config.schema import SchedulerConfig
from areal_sc.errors import ConfigError, SchedulerSilent, WorkerStartError
from areal_sc.schedulers.factory import make_scheduler

OWN = """
import asyncio
from areal_sc.errors import WorkerStartError

class Mine:
    def __init__(self, config, folder):
        pass

    async def nodes(self):
        call = asyncio.ensure_future(asyncio.sleep(60))
        call.cancel()
        await call

    async def ended_nodes(self):
        raise SystemExit(3)

    def close(self):
        raise SystemExit(4)

    async def renew(self, node, incarnation):
        raise WorkerStartError(f"{node} does not come up")
"""


async def test_what_it_raises_is_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "mine.py").write_text(OWN)
    (tmp_path / "parses.py").write_text("import argparse\nargparse.ArgumentParser().error('no')\n")
    scheduler = make_scheduler(SchedulerConfig(type="mine:Mine", run_dir=str(tmp_path / "run")))
    expected = "mine:Mine: nodes raised CancelledError at mine.py:12"
    with pytest.raises(SchedulerSilent, match=re.escape(expected)):
        await scheduler.nodes()
    with pytest.raises(SchedulerSilent, match=r"ended_nodes raised SystemExit: 3 at mine\.py:15"):
        await scheduler.ended_nodes()
    with pytest.raises(WorkerStartError, match="node-1 does not come up"):
        await scheduler.renew("node-1", "")  # type: ignore[arg-type]
    task = asyncio.create_task(scheduler.nodes())
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    scheduler.close()
    assert "SystemExit: 4" in caplog.text
    (tmp_path / "exits.py").write_text("import sys\ndef mine(config, folder): sys.exit(5)\n")
    with pytest.raises(ConfigError, match=r"exits:mine raised SystemExit: 5 at exits\.py:2"):
        make_scheduler(SchedulerConfig(type="exits:mine", run_dir=str(tmp_path / "run")))
    with pytest.raises(ConfigError, match=r"SystemExit: 2 at parses\.py:2"):
        make_scheduler(SchedulerConfig(type="parses:Mine", run_dir=str(tmp_path / "run")))
