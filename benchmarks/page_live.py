"""A page that is left open beside a run: how late it shows what is new, and what it holds.

steps   a step is written to metrics.jsonl every second, and the page's first view shows it
rows    a group is given to the recorder every second, as a worker does, and the list of rows shows
        it: the recorder writes once a second
memory  of the server and of the tab, first after the warm-up, and last: both may not grow with time
        alone, so the run writes as many steps and rows in each half, and the views change

The tab is Chromium's of the distribution; without it the benchmark ends with exit code 2.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

import psutil
import report
from integration.browser import CHROMIUM, Tab, browser_tab
from page_runs import add_group, measured, tokenizer
from recorded_groups import recorder_of

from areal_sc.records.metrics_log import MetricsLog
from areal_sc.run.run_folder import RunFolder

STEP_SHOWN = (
    "[...document.querySelectorAll('.tile')].some(it => "
    "it.querySelector('.name').innerText === 'step' && "
    "it.querySelector('.value').innerText.split(' ')[0].replace(',', '') === '{}')"
)
ROW_SHOWN = "document.querySelector('.row a')?.hash.includes('name={}.0.')"
VIEWS = ("#/time", "#/fleet", "#/rows?text=ten")


def main() -> None:
    parser = report.make_parser(__doc__)
    parser.add_argument("--minutes", type=float, default=60.0)
    arguments = report.parse(parser, minutes=0.2)
    if CHROMIUM is None:
        parser.error("Chromium is not here; tests/browser/install.sh installs it")
    with TemporaryDirectory(prefix="areal-sc-benchmark-") as folder:
        metrics = measured_in(Path(folder), 60 * arguments.minutes)
    report.print_metrics("A page that is left open", {"minutes": arguments.minutes}, metrics)
    report.write(metrics, arguments.json)


def measured_in(folder: Path, seconds: float) -> dict[str, float]:
    with RunFolder(folder / "run") as run:
        run.open(config_text="seed: 1\n")
    (run.path / "model").mkdir()
    tokenizer().save(str(run.path / "model" / "tokenizer.json"))
    command = [sys.executable, "-m", "areal_sc", "page", str(run.path)]
    environment = os.environ | {"XDG_CACHE_HOME": str(folder / "cache")}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as server:
        try:
            assert server.stdout is not None
            link = server.stdout.readline().split()[-1]
            process = psutil.Process(server.pid)
            return asyncio.run(_opened(folder / "browser", link, run, process, seconds))
        finally:
            server.terminate()


async def _opened(
    profile: Path, link: str, run: RunFolder, server: psutil.Process, seconds: float
) -> dict[str, float]:
    async with browser_tab(profile) as tab:
        await tab.open(link)
        return await _watched(tab, run, server, seconds)


async def _watched(
    tab: Tab, run: RunFolder, server: psutil.Process, seconds: float
) -> dict[str, float]:
    late: dict[str, list[float]] = {"step": [], "row": []}
    held: list[tuple[float, float]] = []  # by server and tab
    ends, number = time.monotonic() + seconds, 0
    with (
        closing(MetricsLog(run.metrics_path)) as log,
        closing(recorder_of(run.path)) as recorder,
    ):
        while time.monotonic() < ends or number < 4:
            for name, view in (("step", "#/run"), ("row", "#/rows")):
                number += 1
                await tab.value(f"location.hash = {view!r}")
                await asyncio.sleep(1.0)
                began = time.monotonic()
                if name == "step":
                    log.on_step(measured(number))
                else:
                    add_group(recorder, number)
                shown = STEP_SHOWN if name == "step" else ROW_SHOWN
                await tab.wait_for(shown.format(number))
                late[name].append(time.monotonic() - began)
            await tab.value(f"location.hash = {VIEWS[number // 2 % len(VIEWS)]!r}")
            await asyncio.sleep(1.0)
            await tab.call("HeapProfiler.collectGarbage")
            heap = await tab.call("Runtime.getHeapUsage")
            held.append((server.memory_info().rss, heap["usedSize"]))
    part = max(1, len(held) // 4)  # the first one warms up
    before, after = held[part : 2 * part] or held, held[-part:]
    of_server, of_tab = (
        sum(it[which] for it in after) / sum(it[which] for it in before) * len(before) / len(after)
        for which in (0, 1)
    )
    return {
        **{f"{name}_median_s": sorted(its)[len(its) // 2] for name, its in late.items()},
        **{f"{name}_worst_s": max(its) for name, its in late.items()},
        "server_growth": of_server,
        "tab_growth": of_tab,
        "server_last_bytes": held[-1][0],
        "tab_last_bytes": held[-1][1],
    }


if __name__ == "__main__":
    main()
