"""The page in a real browser: each view of a sound, a damaged and an old run, in all widths."""

from __future__ import annotations

import tarfile
from contextlib import closing
from pathlib import Path

import pytest
from integration.browser import CHROMIUM, Tab, browser_tab
from integration.test_page import OLD_RUN, page_of
from ledger_history import History, a_run
from recorded_groups import played, recorder_of, trajectory
from sample_rows import sample

from areal_sc.records.metrics import StepMetrics
from areal_sc.records.metrics_log import MetricsLog
from areal_sc.records.recorded_rows import RecordedRejection
from areal_sc.run.run_folder import RunFolder
from areal_sc.system.disk import Disk
from areal_sc.system.json_lines import JsonLines

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium: tests/browser")

EVIL = "<script>document.title='evil'</script><img src=x onerror='document.title=1'>\u202e\x1b[2J"
NUM_TOKENS = 40


@pytest.fixture
async def runs(tmp_path: Path) -> list[Path]:
    """A run with records, its copy with torn and flipped ones, and one of an earlier areal_sc."""
    for name in ("sound", "damaged"):
        await make_run(RunFolder(tmp_path / name))
    for number, path in enumerate(sorted((tmp_path / "damaged" / "records").iterdir())):
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content[: -5 if number % 2 else None])
    with tarfile.open(OLD_RUN) as archive:
        archive.extractall(tmp_path, filter="data")
    return [tmp_path / name for name in ("sound", "damaged", "tiny")]


async def make_run(folder: RunFolder) -> None:
    with folder:
        folder.open(config_text="actor:\n  dtype: float32\n")
    with closing(MetricsLog(folder.metrics_path, clock=lambda: 1003.0)) as log:
        for step in (1, 2):
            log.on_step(measured(step))
        log.event("workers_restarted", workers=["rollout/0"], cause=EVIL)
    with closing(JsonLines(folder.samples_path)) as lines:
        lines.append(sample(1, group=0, num_tokens=NUM_TOKENS, reward=0.5, answer=EVIL))
    history = History(Disk(), folder.ledger)
    a_run(history)
    await history.journal.close()
    recorder = recorder_of(folder.path)
    rejected = (RecordedRejection("reward_error", EVIL, 1),)
    recorder.add_group(played(0, [trajectory(1, 30)], [trajectory(2, NUM_TOKENS)]))
    recorder.add_group(played(1, [trajectory(3)], rejected=rejected))
    recorder.add_span("episode", 1000.0, 2.0, lane=0, about="0.0.0")
    recorder.add_span("generation", 1000.0, 1.5, lane=0, about="0.0.0", versions=(0, 1))
    recorder.add_span("the reward " + EVIL, 1001.5, 0.5, lane=0, about="0.0.0")
    recorder.add_span("updating weights", 1000.5, 0.25, versions=(1, 1))
    recorder.close()


def measured(step: int) -> StepMetrics:
    return StepMetrics(
        step=step,
        reward=0.5,
        group_staleness_mean=0.0,
        group_staleness_max=0,
        token_staleness_mean=0.0,
        token_staleness_max=0,
        num_rows=8,
        num_generated_tokens=100,
        num_trained_tokens=100,
        step_time_s=2.0,
        wait_s=1.0,
        train_s=0.5,
        sync_s=0.25,
        mean_sequence_length=20.0,
        num_train_workers=1,
        train={},
    )


async def shows(tab: Tab, place: str) -> str:
    """What the page shows at another place, once it has come."""
    await tab.value("document.querySelector('main > *')?.setAttribute('data-old', '')")
    await tab.value(f"location.hash = {place!r}")
    await tab.wait_for("document.querySelector('main > :not([data-old])') !== null")
    assert "evil" not in await tab.value("document.title")
    return str(await tab.value("document.body.innerText"))


async def check_view(tab: Tab, place: str) -> None:
    await shows(tab, place)
    for width, is_dark in ((390, True), (1280, False), (2560, True)):
        await tab.resize(width, is_dark=is_dark)
        await tab.wait_for(f"innerWidth === {width} && document.querySelector('main > *') !== null")
        assert await tab.value("document.documentElement.scrollWidth <= innerWidth"), (place, width)
    # a damaged record is refused, which the console tells as well as the page
    assert [it for it in tab.errors if "/api/runs/1/tokens/" not in it] == [], place


async def test_each_view_of_each_run(runs: list[Path], tmp_path: Path) -> None:
    with page_of(*runs) as page:
        async with browser_tab(tmp_path / "browser") as tab:
            await tab.open(page.link)
            await check_view(tab, "#/run")
            for number, run in enumerate(runs):
                rows = page.get(f"/api/runs/{number}/rows")["rows"]
                views = ["time", "rows", f"row?id={rows[0]['offset']}", "groups", "group?group=0"]
                for view in [*views, "fleet"]:
                    sign = "&" if "?" in view else "?"
                    await check_view(tab, f"#/{view}{sign}run={run.name}")


async def test_tokens_are_those_that_were_recorded(runs: list[Path], tmp_path: Path) -> None:
    was = trajectory(2, NUM_TOKENS)
    with page_of(runs[0]) as page:
        async with browser_tab(tmp_path / "browser") as tab:
            await tab.open(page.link)
            (row,) = page.get("/api/runs/0/rows")["rows"]
            await shows(tab, f"#/row?id={row['offset']}")
            box = "document.querySelector('.tokens')"
            await tab.wait_for(f"!!{box}")  # of the row whose reward and length are the sample's
            ids = await tab.value(f"{box}.innerText.trim().split(/\\s+/).map(Number)")
            assert ids == was.input_ids
            classes = await tab.value(f"[...{box}.children].map(it => it.className)")
            for name, is_trained, version in zip(classes, was.loss_mask, was.versions, strict=True):
                assert name == (f"hue{version}" if is_trained else "given")
            await tab.value(f"{box}.focus()")
            for _ in range(7):
                await tab.press("ArrowRight")
            under = await tab.value("document.querySelector('.under').innerText")
            assert f"token 6 of {NUM_TOKENS}, id {was.input_ids[6]}" in under
            assert "sampled by version 3" in under
            assert "#/row" in await tab.value("location.hash"), "the arrow keys are the tokens'"
            shown = await shows(tab, "#/group?group=1")
            assert "<script>document.title='evil'</script>" in shown
            assert "\\u202e\\u001b[2J" in shown
            assert tab.errors == []


async def test_the_time_line_is_zoomed_by_keys(runs: list[Path], tmp_path: Path) -> None:
    with page_of(runs[0]) as page:
        async with browser_tab(tmp_path / "browser") as tab:
            await tab.resize(1280)
            await tab.open(page.link)
            await shows(tab, "#/time")
            await tab.wait_for("document.querySelector('canvas')?.height > 50")
            sums = await tab.value("document.querySelector('table').innerText")
            told = page.get("/api/runs/0/time")
            for process in told["processes"]:
                for count, _ in process["totals"].values():
                    assert f"{process['name']}\t" in sums
                    assert str(count) in sums
            before = await tab.picture()
            await tab.press("5")  # to Fleet and back, by keys
            await tab.wait_for("!document.querySelector('canvas')")
            await tab.press("2")
            await tab.wait_for("document.querySelector('canvas')?.height > 50")
            await tab.press("+")
            await tab.wait_for("/first=/.test(location.hash)")
            words = "Object.fromEntries(new URLSearchParams(location.hash.split('?')[1]))"
            view = await tab.value(words)
            assert float(view["last"]) - float(view["first"]) == pytest.approx(
                (told["end"] - told["begin"] + 1e-3) / 2, rel=1e-3
            )
            assert await tab.picture() != before
            await tab.press("Home")
            await tab.wait_for("!/first=/.test(location.hash)")
            assert tab.errors == []


async def test_of_a_row_that_is_not_known_by_its_numbers_the_page_says_so(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    await make_run(folder)
    with closing(JsonLines(folder.samples_path)) as lines:
        lines.append(sample(2, group=2, num_tokens=NUM_TOKENS, reward=0.5))
        lines.append(sample(2, group=2, num_tokens=NUM_TOKENS + 1, reward=0.5))
    recorder = recorder_of(folder.path)
    recorder.add_group(played(2, [trajectory(4, NUM_TOKENS)], [trajectory(5, NUM_TOKENS)]))
    recorder.close()
    doubts = {0: None, 1: "2 recorded rows of the group have", 2: "this row is not recorded"}
    with page_of(folder.path) as page:
        async with browser_tab(tmp_path / "browser") as tab:
            await tab.open(page.link)
            rows = page.get("/api/runs/0/rows")["rows"]
            by_length = sorted(rows, key=lambda row: (row["num_tokens"], row["group"]))
            for number, doubt in doubts.items():
                await shows(tab, f"#/row?id={by_length[number]['offset']}")
                await tab.wait_for("!!document.querySelector('main > :not([data-old]) .tokens')")
                told = await tab.value("document.querySelector('main .complaint')?.innerText")
                assert told == doubt or (doubt and told.startswith(doubt))
