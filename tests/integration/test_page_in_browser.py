"""The page in a real browser: each view of a sound, a damaged and an old run, in all widths."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import tarfile
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
from builders import picture
from integration.browser import CHROMIUM, Tab, browser_tab
from integration.run_process import LIMIT_S, RunProcess, open_gate, tiny_run
from integration.test_page import OLD_RUN, Page, page_of
from msgspec import structs
from page_runs import CODE, EVIL, damage, make_run, row
from recorded_groups import answered, played, recorder_of, trajectory

from areal_sc.controller.ledger.ledger_account import read_account
from areal_sc.page.export import exported
from areal_sc.page.followed_run import FollowedRun
from areal_sc.records.metrics_log import MetricsLog
from areal_sc.records.reading import Row, rows, trained_rows
from areal_sc.records.recorder import PlayedGroup
from areal_sc.run.run_folder import RunFolder

pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium: tests/browser"),
    pytest.mark.asyncio(loop_scope="module"),
]

NUM_TOKENS = 40
KILLING_ROW = str({"prompt": EVIL, "answer": EVIL})
LONG = "Straße " * 260_000
"""An answer of 2 MB."""
KILLING, DATA_ROW = 5, 50
"""A group that kills its worker, and its row of the dataset."""
SEEING = 33
"""A group whose prompt has two pictures."""
WIDTHS = ((390, True), (1280, False), (2560, True))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """A run of an agent, its copy with torn and flipped records, one of an earlier areal_sc."""
    path = tmp_path_factory.mktemp("runs")
    for name in ("sound", "damaged"):
        await make_run(RunFolder(path / name))
    damage(path / "damaged" / "records")
    recorder = recorder_of(path / "sound")
    recorder.add_group(played(30, [trajectory(2, NUM_TOKENS)], [trajectory(1, 30)]))
    recorder.add_group(played(31, [row(("Long?", -1), (LONG, 1))]))
    recorder.add_group(played(32, [row(("Bytes?", -1), (b"\xff\xfe", 1))]))
    drawn = [picture(1, 41, 40), picture(2, 31, 30, "JPEG")]
    recorder.add_group(played(SEEING, [trajectory(4)], [trajectory(5)], pictures=drawn))
    recorder.add_group(killer(KILLING))
    recorder.close()
    with closing(MetricsLog(RunFolder(path / "sound").metrics_path, clock=lambda: 1001.5)) as log:
        for duration_s in (0.5, 0.123456789):
            told = {"duration_s": duration_s, "num_groups": 3, "cause": "SIGKILL"}
            log.event("workers_restarted", workers=["rollout/0"], **told)
    with tarfile.open(OLD_RUN) as archive:
        archive.extractall(path, filter="data")
    return [path / name for name in ("sound", "damaged", "tiny")]


def killer(number: int) -> PlayedGroup:
    """The beginning of an attempt that killed its worker."""
    group = played(number).group
    return PlayedGroup(structs.replace(group, attempt=1, index=DATA_ROW, prompt=KILLING_ROW), {})


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def browser(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Tab]:
    async with browser_tab(tmp_path_factory.mktemp("browser")) as tab:
        yield tab


@pytest.fixture(scope="module")
def page(runs: list[Path]) -> Iterator[Page]:
    with page_of(*runs) as page:
        yield page


@pytest_asyncio.fixture(loop_scope="module")
async def tab(browser: Tab, page: Page) -> Tab:
    """A tab that has just opened the page."""
    await browser.resize(1280)
    await browser.open(page.link)
    browser.errors.clear()
    return browser


async def shows(tab: Tab, place: str) -> str:
    """What the page shows at another place, once it has come."""
    # an earlier view may come until the page has heard of the place, but for a file: it is at once
    old = "document.querySelector('main > *')?.setAttribute('data-old', '')"
    await tab.value(
        f"new Promise(heard => {{ {old};"
        "addEventListener('hashchange', () => {"
        f"if (!document.getElementById('answers')) {old}; heard()"
        "}, {once: true});"
        f"location.hash === {place!r} ? dispatchEvent(new HashChangeEvent('hashchange'))"
        f" : location.hash = {place!r}"
        "}).then(() => null)"
    )
    await tab.wait_for("document.querySelector('main > :not([data-old])') !== null")
    assert "evil" not in await tab.value("document.title")
    # a row has no text before a frame has found it near what is seen
    for _ in range(2):
        await tab.value("new Promise(drawn => requestAnimationFrame(() => drawn(true)))")
    return str(await tab.value("document.body.innerText"))


async def check_view(
    tab: Tab, place: str, widths: Sequence[tuple[int, bool]] = ((1280, False),)
) -> None:
    await shows(tab, place)
    for width, is_dark in widths:
        await tab.resize(width, is_dark=is_dark)
        await tab.wait_for(f"innerWidth === {width} && document.querySelector('main > *') !== null")
        # charts follow the width in the next frame
        await tab.wait_for("document.documentElement.scrollWidth <= innerWidth")
    # a damaged record is refused, which the console tells as well as the page
    assert [it for it in tab.errors if "/api/runs/1/tokens/" not in it] == [], place


def views_of(page: Page, number: int, run: Path) -> list[str]:
    """The address of each view of a run."""
    recorded = page.get(f"/api/runs/{number}/recorded?sort=time")["rows"]
    views = ["time", "prompts", "rows", "groups", "fleet"]
    of_prompts = page.get(f"/api/runs/{number}/prompts")["prompts"]
    views += [prompt_link(of_prompts[-1])] if of_prompts else []
    views += [f"row?name={name_of(recorded[0])}"] if recorded else []
    views += [f"group?group={page.get(f'/api/runs/{number}/groups')['groups'][-1]['group']}"]
    return ["#/run", *(f"#/{it}{'&' if '?' in it else '?'}run={run.name}" for it in views)]


def prompt_link(it: Any) -> str:
    return f"prompt?set={it['set']}&dataset={it['dataset']}&index={it['index']}"


def name_of(it: Any) -> str:
    return f"{it['group']}.{it['attempt']}.{it['episode']}.{it['row']}"


async def test_each_view_of_each_run(runs: list[Path], page: Page, tab: Tab) -> None:
    for number, run in enumerate(runs[:3]):
        for view in views_of(page, number, run):
            await check_view(tab, view, WIDTHS)


@pytest.mark.parametrize("is_dark", [False, True])
async def test_people_who_see_or_steer_it_otherwise_can_use_it(
    runs: list[Path], page: Page, tab: Tab, is_dark: bool
) -> None:
    await tab.resize(1280 if is_dark else 390, is_dark=is_dark)
    for view in views_of(page, 0, runs[0]):
        await shows(tab, view)
        # in the dark everything is the same but the colours
        assert await tab.complaints(*["color-contrast"] * is_dark) == [], view


async def test_every_control_is_reached_by_tab_and_is_seen_to_be(
    runs: list[Path], page: Page, tab: Tab
) -> None:
    controls = "a[href], button, select, input, summary, [tabindex='0']"
    for view in ("#/rows", "#/row?name=0.0.0.1", "#/fleet", "#/time"):
        await shows(tab, view)
        await tab.value("document.activeElement.blur()")
        number = await tab.value(
            f"[...document.querySelectorAll({controls!r})].filter(it => it.checkVisibility())"
            ".map((it, n) => it.dataset.control = n).length"
        )
        reached = set()
        for _ in range(number + 2):
            await tab.press("Tab")
            at, outline = await tab.value(
                "[document.activeElement.dataset.control ?? '', "
                "getComputedStyle(document.activeElement).outlineStyle]"
            )
            reached.add(at)
            assert outline != "none" or at == "", view
        assert {str(it) for it in range(number)} <= reached, view


async def test_rows_by_keys_alone(runs: list[Path], page: Page, tab: Tab) -> None:
    await shows(tab, "#/run")
    await tab.press("3")
    await tab.wait_for("document.querySelectorAll('.row').length > 2")
    await tab.press("/", *"ten letters, 2", "Enter")
    await tab.wait_for("/text=ten/.test(location.hash)")
    await tab.wait_for("document.querySelectorAll('.row').length === 1")
    assert await tab.value("document.querySelector('mark').innerText") == "ten letters, 2"
    await tab.value("document.activeElement.blur()")
    await tab.press("j", "Enter")
    await tab.wait_for("location.hash.includes('name=2.0.0.0')")
    await tab.wait_for("/Group 2, answer 1/.test(document.body.innerText)")  # it hears keys now
    await tab.press("Escape")
    await tab.wait_for("document.querySelectorAll('.row').length === 1")
    await shows(tab, "#/row?name=2.0.0.0")
    await tab.press("j")
    await tab.wait_for("location.hash.includes('name=2.0.0.1')")
    await tab.wait_for("/Group 2, answer 1/.test(document.body.innerText)")
    await tab.press("p")
    await tab.wait_for("/dataset=0&index=7/.test(location.hash)")
    assert tab.errors == []


async def test_numbers_of_rows_are_those_of_the_files(
    runs: list[Path], page: Page, tab: Tab
) -> None:
    await check_numbers(tab, runs[0])


async def check_numbers(tab: Tab, run: Path) -> None:
    """The newest rows that the page lists are those that were recorded."""
    of = {f"{it.group}.{it.attempt}.{it.episode}.{it.row}": it for it in rows(run)}
    await shows(tab, f"#/rows?run={run.name}&sort=-time")
    cards = await tab.value(
        "[...document.querySelectorAll('.row')].filter(it => it.querySelector('.numbers'))"
        ".map(it => [new URLSearchParams(it.querySelector('a').hash.split('?')[1]).get('name'), "
        "...[...it.querySelectorAll('.numbers > span')].map(it => it.textContent)])"
    )
    assert len(cards) == min(len(of), 50)
    for name, *numbers in cards:
        check_row(of[name], numbers)


def check_row(it: Row, numbers: list[str]) -> None:
    told = dict(text.split(" ", 1) for text in numbers)
    assert float(told["reward"]) == pytest.approx(it.reward, rel=1e-3)
    assert told["tokens"].replace(",", "") == str(len(it.input_ids))
    sampled = it.versions[it.loss_mask]
    first, last = int(sampled[0]), int(sampled[-1])
    assert told["version"] == (f"{first}" if first == last else f"{first} to {last}")
    for metric, value in it.metrics.items():
        assert float(told[metric].replace(",", "")) == pytest.approx(value, rel=1e-3)


async def test_turns_and_branches_of_an_agent(runs: list[Path], page: Page, tab: Tab) -> None:
    shown = await shows(tab, "#/row?name=1.0.0.1")
    assert "<script>document.title='evil'</script>" in shown
    assert "\\u202e\\u001b[2J" in shown
    assert "Rejected answers: 1, reward_error:" in shown
    (first, second) = [it for it in rows(runs[0]) if (it.group, it.episode) == (1, 0)]
    turns = await tab.value("[...document.querySelectorAll('.turn h2')].map(h => h.innerText)")
    assert [it.split(" tokens given")[0] for it in turns] == [
        f"counter, turn {number} of 3 {call.num_given}"
        for number, call in enumerate(second.calls, 1)
    ]
    assert "trained in another row" in turns[0]
    assert turns[0].endswith("calls python")
    said = "its => its.map(it => it.textContent)"
    heads, texts = await tab.value(
        "(shown => [shown('.turn h3'), shown('.turn pre:not(.raw pre)')])"
        f"(name => ({said})([...document.querySelectorAll(name)]))"
    )
    assert [it.split(" within")[0] for it in heads] == [
        *("user", "answer", "calls python", "result"),
        *("answer", "user", "answer"),
    ]
    evil = EVIL.replace("\u202e", "\\u202e").replace("\x1b", "\\u001b")
    code = json.dumps({"code": CODE})
    question, *others = texts
    assert question == f"How many letters has strawberry? {evil}"
    assert others == ["I count.", code, f"10 {evil}", "Wait: is that right?", "Yes.", "Ten."]
    whole = await tab.value("document.querySelectorAll('.turn .raw pre')[1].textContent")
    assert whole.startswith("I count.\n<tool_call>")
    await tab.value("document.querySelectorAll('.turn > summary')[1].focus()")
    await tab.press("Enter")
    assert await tab.value("document.querySelectorAll('.turn')[1].open") is False
    table = await tab.value("document.querySelector('[aria-label=branches]').innerText")
    parts = zip(first.input_ids, second.input_ids, strict=False)
    shared = next(number for number, (a, b) in enumerate(parts) if a != b)
    assert f"1.1\t{shared}\t{len(first.input_ids)}\t1" in table
    assert first.calls[0] == second.calls[0]
    begun = first.calls[0]
    assert shared == begun.num_given + begun.num_sampled + first.calls[1].num_given
    parting = "document.querySelectorAll('.turn')[1].querySelector('.parting a')"
    place = await tab.value(f"{parting}.hash")
    beside = await tab.value("document.querySelectorAll('.beside .answer').length")
    assert beside == 3
    assert f"token={shared}" in place
    await shows(tab, place)
    under = await tab.value("document.querySelector('.under').innerText")
    assert f"token {shared} of {len(first.input_ids)}, id {first.input_ids[shared]}" in under


async def test_without_a_tokenizer_messages_are_shown(
    runs: list[Path], tmp_path: Path, browser: Tab
) -> None:
    (tmp_path / "run").mkdir()
    for name in ("records", "ledger", "run.json", ".run.json", "config.yaml", "metrics.jsonl"):
        (tmp_path / "run" / name).symlink_to(runs[0] / name)
    with page_of(tmp_path / "run") as page:
        await browser.open(page.link)
        browser.errors.clear()
        sought = await shows(browser, "#/rows")
        filtered = await shows(browser, "#/run")
        assert "not on this machine" in sought
        assert f"sought in {tmp_path / 'run'}, {tmp_path / 'run' / 'model'}" in sought
        assert "settings" in filtered
        await browser.value(
            "document.querySelector('[data-name=settings]').open = true;"
            "(it => { it.value = 'DTYPE'; it.dispatchEvent(new Event('input')) })"
            "(document.querySelector('[name=settings]'))"
        )
        table = await browser.value("document.querySelector('[aria-label=settings]').innerText")
        assert table == "setting\tvalue\nactor.dtype\tfloat32"
        shown = await shows(browser, "#/row?name=1.0.0.1")
    assert "Wait: is that right?" in shown
    assert "calls python" in shown
    assert "all of it as its tokens have it" not in shown
    assert browser.errors == []


async def test_which_prompt_fails_since_when_and_what_is_written_for_it(
    tmp_path: Path, browser: Tab
) -> None:
    """In three clicks: the view by prompt, the order, the prompt."""
    run_dir = tmp_path / "run"
    await make_run(RunFolder(run_dir))
    recorder = recorder_of(run_dir)
    for step in range(0, 32, 2):
        for index, reward in ((0, 1.0), (1, float(step < 20))):
            said = f"{step // 2} is {'right' if reward else 'wrong'} {EVIL}"
            answer = row((f"What is {index}?", -1), (said, step), reward=reward)
            recorder.add_answer(answered(index, [answer], step=step, began=1000.0 + step))
    recorder.close()
    with page_of(run_dir) as page:
        await browser.open(page.link)
        browser.errors.clear()
        await shows(browser, "#/run")
        tabs = "[...document.querySelectorAll('header a')]"
        await browser.value(f"{tabs}.find(it => it.innerText === 'Prompts').click()")
        await browser.wait_for("document.querySelector('[name=sort]') !== null")
        await browser.value("document.querySelector('main > *').setAttribute('data-old', '')")
        await browser.value(
            "(it => {it.value = 'falling'; it.dispatchEvent(new Event('change'))})"
            "(document.querySelector('[name=sort]'))"
        )
        first = "document.querySelector('main > :not([data-old]) .prompt-row')"
        await browser.wait_for(f"{first}?.innerText.includes('falls by 1 since version 20')")
        told = await browser.value(f"{first}.innerText")
        assert "held out, row 1" in told
        assert "15 is wrong <script>" in told
        await browser.value(f"{first}.querySelector('a').click()")
        await browser.wait_for("document.querySelectorAll('.answer mark').length > 1")
        sides = "[...document.querySelectorAll('.answer')].map(it => "
        marks = "[...it.querySelectorAll('mark')].map(it => it.innerText).join(''))"
        earlier, later = await browser.value(sides + marks)
        assert set(earlier) <= set("0right")
        assert set(later) <= set("15wrong")
        texts = await browser.value(sides + "it.querySelector('pre').innerText)")
        begins = [it.partition("document")[0] for it in texts]
        assert begins == ["0 is right <script>", "15 is wrong <script>"]
        await browser.value("document.querySelector('.answer a').click()")
        await browser.wait_for("document.querySelector('.tokens') !== null")
        said = await browser.value("document.querySelector('h2').innerText")
        assert "periodic, step 0: prompt 1, answer 1" in said
        assert browser.errors == []


async def test_tokens_are_those_that_were_recorded(runs: list[Path], page: Page, tab: Tab) -> None:
    was = trajectory(2, NUM_TOKENS)
    await shows(tab, "#/row?name=30.0.0.0")
    box = "document.querySelector('.tokens')"
    classes = await tab.value(f"[...{box}.children].map(it => it.className)")
    for name, is_trained, version in zip(classes, was.loss_mask, was.versions, strict=True):
        assert name == (f"hue{version}" if is_trained else "given")
    await tab.value(f"{box}.focus()")
    for number, (token, version) in enumerate(zip(was.input_ids, was.versions, strict=True)):
        await tab.press("ArrowRight")
        under = await tab.value("document.querySelector('.under').innerText")
        assert f"token {number} of {NUM_TOKENS}, id {token}" in under
        if was.loss_mask[number]:
            assert f"sampled by version {version}" in under
            logprob = float(re.findall(r"log-probability (\S+),", under)[0])
            assert logprob == pytest.approx(was.behavior_logprobs[number], rel=2e-3, abs=1e-4)
    assert "name=30" in await tab.value("location.hash"), "the arrow keys are the tokens'"
    assert tab.errors == []


async def test_what_the_trainer_says_of_tokens(runs: list[Path], page: Page, tab: Tab) -> None:
    (was,) = [it for it in rows(runs[0]) if (it.group, it.episode, it.row) == (0, 0, 1)]
    (of_trainer,) = [its for it, its in trained_rows(runs[0]) if (it.episode, it.row) == (0, 1)]
    await shows(tab, "#/row?name=0.0.0.1")
    box = "document.querySelector('.tokens')"
    places = was.loss_mask.nonzero()[0].tolist()
    ends = {
        "gap of trainer and sampler": [-0.5, -0.1, -0.02, -0.005, 0.005, 0.02, 0.1, 0.5],
        "advantage": [-2, -1, -0.3, -0.001, 0.001, 0.3, 1, 2],
    }
    values = dict(zip(ends, (of_trainer.gaps, of_trainer.advantages), strict=True))
    for color, its in ends.items():
        await tab.value(
            "(it => {it.value = '" + color + "'; it.dispatchEvent(new Event('change'))})"
            "(document.querySelector('[name=colour]'))"
        )
        classes = await tab.value(f"[...{box}.children].map(it => it.className)")
        assert set(classes) - {f"d{n}" for n in range(9)} == {"given"}
        for place, value in zip(places, values[color], strict=True):
            expected = "given" if np.isnan(value) else f"d{np.searchsorted(its, value, 'right')}"
            assert classes[place] == expected
    for place, gap in list(zip(places, of_trainer.gaps, strict=True))[:3]:
        pointed = (
            f"{box}.children[{place}].dispatchEvent(new Event('pointerover', {{bubbles: true}}))"
        )
        await tab.value(pointed)
        under = await tab.value("document.querySelector('.under').innerText")
        if np.isnan(gap):
            assert "step 5 sent it through no forward" in under
            continue
        (found,) = re.findall(r"less sampler (\S+) nats,", under)
        assert float(found) == pytest.approx(gap, rel=1e-3)
        assert "trained by step 5, minibatch 1" in under
    shown = await shows(tab, "#/row?name=30.0.0.0")
    assert "recorded of every 16th group" in shown
    assert tab.errors == []


async def test_of_a_very_long_answer_a_part_is_shown(
    runs: list[Path], page: Page, tab: Tab
) -> None:
    shown = await shows(tab, "#/row?name=31.0.0.0")
    assert "show all 1,820,000 characters" in shown
    assert "tokens 0 to 9,999 of 2,080,005" in shown
    later = "[...document.querySelectorAll('button')].find(it => it.innerText === 'later tokens')"
    await tab.value(f"{later}.click()")
    await tab.wait_for("document.body.innerText.includes('tokens 10,000 to 19,999 of')")
    assert await tab.value("document.querySelectorAll('.tokens > span').length") == 10_000
    await shows(tab, "#/rows?text=%EF%BF%BD")  # what is no UTF-8
    await tab.wait_for(r"/\b1 found in \d+ rows/.test(document.body.innerText)")
    assert tab.errors == []


async def test_an_exported_file_shows_rows_and_tokens(
    runs: list[Path], tmp_path: Path, browser: Tab
) -> None:
    file = tmp_path / "page.html"
    file.write_bytes(exported([FollowedRun(run, run.name, tmp_path) for run in runs[:3]]))
    await browser.open(f"file://{file}")
    browser.errors.clear()
    await check_numbers(browser, runs[0])
    for view in ("rows?run=sound", "row?name=1.0.0.1", "group?group=0", "rows?run=tiny", "fleet"):
        shown = await shows(browser, f"#/{view}")
        assert "not in the exported file" not in shown, view
        for link in ("this prompt over the run", "rows of step", "groups of the same step"):
            assert link not in shown, "it would filter"
    await shows(browser, "#/row?name=0.0.0.1")
    classes = await browser.value("[...document.querySelector('.tokens').children].length")
    assert classes == len(
        next(it for it in rows(runs[0]) if (it.group, it.row) == (0, 1)).input_ids
    )
    assert "gap of trainer" in await browser.value(
        "document.querySelector('[name=colour]').innerText"
    )
    await shows(browser, "#/row?name=31.0.0.0")  # of 2 MB
    later = "[...document.querySelectorAll('button')].find(it => it.innerText === 'later tokens')"
    await browser.value(f"{later}.click()")
    await browser.wait_for("/is not in the exported file/.test(document.body.innerText)")
    assert browser.errors == []


async def test_pictures_are_beside_their_rows(
    runs: list[Path], page: Page, tab: Tab, tmp_path: Path
) -> None:
    sizes = "[...document.querySelectorAll('.pictures img')].map(it => it.naturalWidth).join()"
    view = f"#/row?run=sound&name={SEEING}.0.1.0"
    text = await shows(tab, view)
    assert "picture 1: PNG, 41 x 40" in text
    assert "picture 2: JPEG, 31 x 30" in text
    await tab.wait_for(f"{sizes} === '41,31'")
    await shows(tab, f"#/rows?run=sound&group={SEEING}")
    await tab.wait_for(f"{sizes} === '41,31,41,31'")
    exported_to = tmp_path / "run.html"
    exported_to.write_bytes(exported([FollowedRun(runs[0], "sound")]))
    await tab.open(exported_to.as_uri())
    await shows(tab, view)
    await tab.wait_for(f"{sizes} === '41,31'")
    assert tab.errors == []


async def test_what_a_run_answers_is_shown_in_a_view_that_is_made_anew(
    runs: list[Path], browser: Tab
) -> None:
    with page_of(runs[0], options=["--control"]) as page:
        await browser.open(page.link)
        await shows(browser, "#/fleet")
        await browser.value("document.querySelector('main > *').setAttribute('data-old', '')")
        pause = "[...document.querySelectorAll('button')].find(it => it.innerText === 'pause')"
        await browser.value(f"{pause}.click()")
        said = "document.querySelector('main > :not([data-old]) [role=status]')?.innerText"
        await browser.wait_for(f"{said}?.includes('no run goes on')")
        await shows(browser, "#/groups")
        assert "no run goes on" in await shows(browser, "#/fleet")
    assert all("409" in it for it in browser.errors), browser.errors
    browser.errors.clear()


async def test_the_time_line_is_zoomed_by_keys(runs: list[Path], page: Page, tab: Tab) -> None:
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


async def test_what_is_slow_says_that_it_loads(runs: list[Path], page: Page, tab: Tab) -> None:
    await shows(tab, "#/groups")
    held = "window.held = []; window.asked = fetch; window.fetch = (...its) => new Promise("
    await tab.value(held + "go => held.push(() => go(asked(...its)))); 1")
    await tab.value("location.hash = '#/rows'")
    await tab.wait_for("document.querySelector('header .loading').innerText === 'loading …'")
    assert "admitted at" in await tab.value("document.querySelector('main').innerText")
    await tab.value("window.fetch = asked; held.forEach(go => go())")
    await tab.wait_for("document.querySelectorAll('.row').length > 2")
    assert await tab.value("document.querySelector('header .loading').innerText") == ""
    assert tab.errors == []


async def test_the_keys_are_shown(runs: list[Path], page: Page, tab: Tab) -> None:
    await shows(tab, "#/rows")
    await tab.press("?", "?")
    assert await tab.value("document.querySelectorAll('dialog[open]').length") == 1
    assert "zoom and move the time line" in await tab.value(
        "document.querySelector('dialog').innerText"
    )
    await tab.value("document.querySelector('dialog button').click()")
    await tab.wait_for("!document.querySelector('dialog')")
    assert tab.errors == []


async def test_what_kills_a_worker_is_seen(runs: list[Path], page: Page, tab: Tab) -> None:
    shown = await shows(tab, f"#/group?group={KILLING}")
    assert f"Row {DATA_ROW} of the data" in shown
    assert shown.count(KILLING_ROW) == 2
    assert f"group {KILLING}, attempt 2 unfinished" in shown
    await shows(tab, "#/groups")
    line = f"document.querySelector('[aria-label=groups] a[href*=\"index={DATA_ROW}\"]')"
    told = await tab.value(f"{line}.closest('tr').innerText")
    assert "document.title='evil'" in told
    shown = await shows(tab, "#/rows?outcome=unfinished")
    assert "right: <script>" in shown
    shown = await shows(tab, "#/run?hidden=damaged|tiny|doubtful")
    assert "workers rollout/0, duration 0.123 s to 0.5 s, groups 3, cause SIGKILL" in shown
    await shows(tab, "#/time")
    await tab.wait_for("document.querySelector('canvas')?.height > 50")
    found = await tab.value(
        "(canvas => { const box = canvas.getBoundingClientRect(), under = "
        "document.querySelector('.under'); for (let y = 24; y < box.height; y += 4)"
        "for (let x = 97; x < box.width; x += 2) { canvas.dispatchEvent(new PointerEvent("
        "'pointermove', {clientX: box.x + x, clientY: box.y + y}));"
        "if (under.innerText.includes('died')) return under.innerText }"
        "})(document.querySelector('canvas'))"
    )
    assert found.startswith("rollout/0 died: SIGKILL; back after 0.5 s, 3 groups ran again")
    seen = "(it => it.top >= 0 && it.bottom <= innerHeight)(%s.getBoundingClientRect())"
    await tab.value("scrollTo(0, document.body.scrollHeight / 3)")
    assert await tab.value(seen % "document.querySelector('.under')")
    told = await tab.value(
        "import('/static/dom.js').then(it => [59.9, 1259.6, 7199, 359999].map(it.duration))"
    )
    assert told == ["59.9 s", "21 min 0 s", "2 h 0 min", "100 h 0 min"]
    assert tab.errors == []


async def test_a_run_that_goes_on_is_killed_and_goes_on(
    tmp_path: Path, tiny_model_folder: Path, tab: Tab
) -> None:
    """All views beside one run: live, dead with torn files, resumed, and finished."""
    # two steps, and for each opening of the gate two more: it cannot end before it is killed
    settings = ("task.num_free_episodes=16", "total_steps=16", "checkpoint.every_steps=1")
    run_dir = tmp_path / "run"
    with tiny_run(run_dir, tiny_model_folder, *settings) as run:
        run.wait_for_step(1)
        with page_of(run_dir) as page:
            await tab.open(page.link)
            await shows(tab, "#/rows")
            before = await tab.value("document.querySelectorAll('.row').length")
            open_gate(run_dir)
            await tab.wait_for(f"document.querySelectorAll('.row').length > {before}")
            await shows(tab, "#/run")
            open_gate(run_dir)
            await tab.wait_for(
                "document.querySelector('.tile .number').innerText === "
                "String(document.querySelector('.tile .number').title)"
            )
            await check_fleet(tab, run)
            await check_each_view(tab, page, run_dir)
            run.wait_for_step(6)  # the last one before the gate opens again
            await check_numbers_of_steps(tab, run)
            os.kill(run.pid, signal.SIGKILL)
            run.kill_all()
            tear(run_dir)
            shown = await shows(tab, "#/run")
            assert "the last 9 bytes are left out" in shown
            assert "dead" in shown
            await check_each_view(tab, page, run_dir)
            with tiny_run(run_dir, tiny_model_folder, *settings) as resumed:
                resumed.wait_until(lambda: resumed.events("resumed"), "its resumption")
                for _ in range(16):
                    open_gate(run_dir)
                resumed.finish()
                shown = await shows(tab, "#/run")
                assert "finished" in shown
                assert "resumed" in shown
                await check_each_view(tab, page, run_dir)
                await check_numbers_of_steps(tab, resumed)
                await check_numbers(tab, run_dir)
                await check_lineage(tab, run_dir)


def tear(run_dir: Path) -> None:
    """The ends of files, as a machine that has crashed may leave them."""
    with (run_dir / "metrics.jsonl").open("ab") as file:
        file.write(b'{"kind": ')
    for path in (run_dir / "records").iterdir():
        with path.open("ab") as file:
            file.write(path.read_bytes()[:100])


async def check_each_view(tab: Tab, page: Page, run_dir: Path) -> None:
    for view in views_of(page, 0, run_dir):
        await check_view(tab, view)


async def check_numbers_of_steps(tab: Tab, run: RunProcess) -> None:
    await shows(tab, "#/run")
    step = run.records("step")[-1]
    tiles = "[...document.querySelectorAll('.tile')].map(it => it.innerText.split('\\n'))"
    told = {name: value for name, value, *_ in await tab.value(tiles)}
    assert told["step"].split(" ")[0] == str(step["step"])
    assert float(told["reward"]) == pytest.approx(step["reward"], rel=1e-3)


async def check_fleet(tab: Tab, run: RunProcess) -> None:
    await shows(tab, "#/fleet")
    await tab.wait_for("document.body.innerText.includes('rollout/0')")
    ends = time.monotonic() + LIMIT_S
    while True:
        table = await tab.value("document.querySelector('[aria-label=workers]').innerText")
        status = json.loads((run.run_dir / "status.json").read_text())
        workers = [worker for role in status["roles"].values() for worker in role["workers"]]
        assert {worker["name"] for worker in workers} == {"train/0", "rollout/0"}
        if all(
            f"{worker['name']}\t{worker['state']}" in table and str(worker["pid"]) in table
            for worker in workers
        ):
            return
        # the state has changed, and is shown soon
        assert time.monotonic() < ends, (table, workers)
        await asyncio.sleep(0.1)


async def check_lineage(tab: Tab, run_dir: Path) -> None:
    account = read_account(RunFolder(run_dir).ledger, lambda it: None)
    shown = await shows(tab, "#/groups")
    assert f"policy version\n{account.version}\n" in shown
    assert f"consumed\n{account.totals['consumed']}\n" in shown
    assert f"rows trained\n{account.totals['rows_trained']} of" in shown.replace("  ", " ")
