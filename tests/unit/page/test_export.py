"""The page as one file: it asks for nothing, and a run's texts are no markup in it."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections import Counter
from html import unescape
from pathlib import Path
from typing import Any

import pytest
from builders import picture
from msgspec import structs
from recorded_groups import played, recorder_of, trajectory

from areal_sc.page import export
from areal_sc.page.export import STATIC, exported, script
from areal_sc.page.followed_run import FollowedRun
from areal_sc.records.recorder import PlayedGroup
from areal_sc.run.run_folder import RunFolder
from areal_sc.system.json_lines import to_json

TESTS = Path(__file__).parents[2]
MARKUP = "</script><script>alert(1)</script><!--<img src=x onerror=alert(1)>"


@pytest.fixture
def html(tmp_path: Path) -> str:
    with RunFolder(tmp_path / "<b>run") as folder:
        folder.open(config_text="seed: 1\n")
    recorder = recorder_of(folder.path)
    marked = played(0, [trajectory(1)])
    group = structs.replace(marked.group, prompt=MARKUP)
    recorder.add_group(PlayedGroup(group, marked.episodes))
    recorder.close()
    return exported([FollowedRun(folder.path, "<b>run")]).decode()


def test_texts_of_a_run_are_no_markup(html: str) -> None:
    assert html.count("<script") == html.count("</script") == 3
    assert "<b>" not in html
    assert "<img" not in html
    stored = html.partition('id="answers">')[2].partition("</script>")[0]
    rows = json.loads(stored)["/api/runs/0/recorded"]["rows"]
    assert [row["prompt"] for row in rows] == [MARKUP]
    assert json.loads(stored)["/api/runs/0/recorded/0"]["rows"][0]["prompt"] == MARKUP


def test_pictures_of_its_rows_are_in_it_as_far_as_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn = [picture(seed) for seed in range(3)]
    with RunFolder(tmp_path / "run") as folder:
        folder.open(config_text="seed: 1\n")
    recorder = recorder_of(folder.path)
    for number, its in enumerate(([drawn[0]], [drawn[1], drawn[2]], [drawn[2]])):
        recorder.add_group(played(number, [trajectory(number)], pictures=its))
    recorder.close()
    run = FollowedRun(folder.path, "run")
    policy = unescape(re.findall(r'Policy" content="([^"]*)"', exported([run]).decode())[0])
    assert "img-src data:" in policy

    def pictures() -> list[bytes]:
        html = exported([run]).decode()
        stored = json.loads(html.partition('id="answers">')[2].partition("</script>")[0])
        told = {
            it["digest"] for row in stored["/api/runs/0/recorded"]["rows"] for it in row["pictures"]
        }
        its = {path.rpartition("/")[2]: it for path, it in stored.items() if "/pictures/" in path}
        assert its.keys() <= told
        assert all(it.startswith("data:image/png;base64,") for it in its.values())
        return [base64.b64decode(it.partition(",")[2]) for it in its.values()]

    assert sorted(pictures()) == sorted(drawn)
    monkeypatch.setattr(export, "MAX_PICTURE_BYTES", len(drawn[2]) + len(drawn[1]))
    assert sorted(pictures()) == sorted(drawn[1:])


def test_it_may_run_its_own_scripts_and_load_nothing(html: str) -> None:
    policy = unescape(re.findall(r'Content-Security-Policy" content="([^"]*)"', html)[0])
    assert policy.startswith("default-src 'none'; ")
    parts = re.findall(r"<script>(.*?)</script>|<style>(.*?)</style>", html, re.DOTALL)
    parts += [(text, "") for text in re.findall(r'type="module">(.*?)</script>', html, re.DOTALL)]
    assert len(parts) == 3
    for text in map("".join, parts):
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"'sha256-{digest}'" in policy
    assert not re.search(r'(src|href)="', html.replace('href="#', ""))


def test_each_module_stands_once_and_after_what_it_imports() -> None:
    text = script()
    modules = {path.stem for path in STATIC.glob("*.js")} - {"uPlot.iife.min"}
    places = {name: text.index(f"const of_{name} = ") for name in modules}
    assert text.count("\nconst of_") + 1 == len(modules)
    assert not re.search(r"^(import|export) ", text, re.MULTILINE)
    for name in modules:
        for imported in re.findall(r'from "\./(\w+)\.js"', (STATIC / f"{name}.js").read_text()):
            assert places[imported] < places[name]


@pytest.mark.parametrize(("folder", "name"), [(STATIC, "uPlot"), (TESTS / "browser", "axe")])
def test_libraries_are_unmodified(folder: Path, name: str) -> None:
    text = (folder / f"{name}.txt").read_text()
    told = re.findall(r"^([0-9a-f]{64})  (\S+)$", text, re.MULTILINE)
    assert {it for _, it in told} == {it.name for it in folder.glob(f"{name}.*")} - {f"{name}.txt"}
    for digest, it in told:
        assert hashlib.sha256((folder / it).read_bytes()).hexdigest() == digest


def test_no_script_of_the_page_makes_markup_of_texts() -> None:
    ways = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|DOMParser|\beval\b|Function\("
    for path in STATIC.glob("*.js"):
        if path.stem != "uPlot.iife.min":
            assert not re.search(ways, path.read_text()), path.name


def test_a_group_is_charged_once_and_each_listed_row_can_be_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with RunFolder(tmp_path / "run") as folder:
        folder.open(config_text="seed: 1\n")
    recorder = recorder_of(folder.path)
    for number in range(4):
        recorder.add_group(played(number, *[[trajectory(seed)] for seed in range(8)]))
    recorder.close()
    run = FollowedRun(folder.path, "run", tmp_path / "cache")
    num_read = Counter[int]()

    def recorded(group: int) -> dict[str, Any]:
        num_read[group] += 1
        return FollowedRun.recorded(run, group)

    def names(answer: dict[str, Any]) -> list[str]:
        of_row = ("group", "attempt", "episode", "row")
        return ["/".join(str(it[of]) for of in of_row) for it in answer["rows"]]

    def opened(answers: dict[str, Any]) -> list[str]:
        return [path.partition("/tokens/")[2] for path in answers if "/tokens/" in path]

    monkeypatch.setattr(run, "recorded", recorded)
    whole = dict(export._recorded(run, "/api/runs/0"))
    assert names(whole["/api/runs/0/recorded"]) == opened(whole)
    assert len(opened(whole)) == 32
    assert num_read == dict.fromkeys(range(4), 1)
    num_bytes = sum(len(to_json(whole[it])) for it in whole if re.search(r"/\d+$", it))
    monkeypatch.setattr(export, "MAX_TEXT_BYTES", num_bytes // 2)
    half = dict(export._recorded(run, "/api/runs/0"))
    listed = names(half["/api/runs/0/recorded"])
    assert listed == opened(half)
    assert 12 <= len(opened(half)) <= 16
    for name in listed:
        group = half[f"/api/runs/0/recorded/{name.split('/')[0]}"]
        assert name in names(group)
