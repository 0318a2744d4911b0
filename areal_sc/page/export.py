"""The page as one file: its scripts, its styles, and the answers that its server would give.

Scripts of the page are modules that import each other. In one file each is a function that gives
what the module exports; imported ones come first.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Iterator, Sequence
from functools import cache
from html import escape
from pathlib import Path
from typing import Any, Final

from areal_sc.page.followed_run import READ_S, FollowedRun
from areal_sc.page.group_book import GroupQuery
from areal_sc.page.row_search import recorded_query
from areal_sc.sources.pictures import CONTENT_TYPES
from areal_sc.system.json_lines import to_json

STATIC: Final = Path(__file__).with_name("static")
NUM_ROWS: Final = 200
"""The newest rows of a run that are in the file, with the lives of their groups."""
MAX_TEXT_BYTES: Final = 8 << 20
"""Texts of a run's rows in the file, with their tokens; what is behind is left out."""
MAX_PICTURE_BYTES: Final = 8 << 20
"""Pictures of these rows in the file, the newest ones."""
NUM_GROUPS: Final = 200
TIME_PIXELS: Final = 4000
"""The time line is so wide in the file; spans narrower than a pixel are left out."""

_IMPORT: Final = re.compile(r'^import (\{[^}]*\}) from "\./(\w+)\.js";$', re.MULTILINE)
_EXPORT: Final = re.compile(r"^export (?=(?:async function|function|const) (\w+))", re.MULTILINE)


def exported(runs: Sequence[FollowedRun]) -> bytes:
    """The HTML file."""
    plot, page = _text("uPlot.iife.min.js"), script()
    styles = _text("uPlot.min.css") + _text("style.css")
    sources = " ".join(f"'sha256-{_digest(text)}'" for text in (plot, page))
    policy = (
        f"default-src 'none'; script-src {sources}; style-src 'sha256-{_digest(styles)}'; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )
    answers = to_json(dict(_answers(runs))).decode().replace("<", "\\u003c")
    return f"""<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<meta http-equiv="Content-Security-Policy" content="{escape(policy, quote=True)}">
<title>{escape(", ".join(run.name for run in runs))}</title>
<style>{styles}</style>
<script>{plot}</script>
<body>
<script type="application/json" id="answers">{answers}</script>
<script type="module">{page}</script>
</body>
</html>
""".encode()


def script() -> str:
    """All modules of the page as one."""
    told: list[str] = []
    functions: list[str] = []

    def tell(module: str) -> None:
        if module in told:
            return
        told.append(module)
        text = _text(f"{module}.js")
        for _, imported in _IMPORT.findall(text):
            tell(imported)
        names = ", ".join(_EXPORT.findall(text))
        body = _EXPORT.sub("", _IMPORT.sub(r"const \1 = of_\2;", text))
        functions.append(f"const of_{module} = (() => {{\n{body}\nreturn {{ {names} }};\n}})();\n")

    tell("app")
    return "".join(functions)


def _answers(runs: Sequence[FollowedRun]) -> Iterator[tuple[str, Any]]:
    """Path of a request -> its answer."""
    yield "/api/runs", [run.about() for run in runs]
    for number, run in enumerate(runs):
        base = f"/api/runs/{number}"
        yield f"{base}/steps", run.steps()
        yield f"{base}/health", run.health()
        yield f"{base}/time", run.time_line(width=TIME_PIXELS)
        fleet = run.fleet()
        yield f"{base}/fleet", fleet
        yield f"{base}/held", run.held()
        for log in fleet["logs"]:
            yield f"{base}/logs/{log['name']}", {"text": run.log(log["name"])}
        groups = run.groups(GroupQuery(), 0, NUM_GROUPS)
        yield f"{base}/groups", {**groups, "next": None}
        recorded = dict(_recorded(run, base))
        yield from recorded.items()
        shown = {group["group"] for group in groups["groups"]}
        shown |= {row["group"] for row in recorded[f"{base}/recorded"]["rows"]}
        for group, life in run.lives(shown).items():
            yield f"{base}/groups/{group}", life
            if (path := f"{base}/recorded/{group}") not in recorded:
                yield path, {**run.recorded(group), "rows": []}


def _recorded(run: FollowedRun, base: str) -> Iterator[tuple[str, Any]]:
    """The newest recorded rows with their groups and tokens, as many as there is room for."""
    while not run.read_rows(READ_S)["is_whole"]:
        pass
    found = run.recorded_rows(recorded_query({}), 0, NUM_ROWS)
    recorded = cache(run.recorded)
    room, told, kept = MAX_TEXT_BYTES, set[int](), []
    for row in found["rows"]:
        group, name = row["group"], (row["attempt"], row["episode"], row["row"])
        its: dict[str, Any] = {}
        if group not in told:
            its[f"{base}/recorded/{group}"] = recorded(group)
        if row["episode"] >= 0:
            path = f"{base}/tokens/{group}/{'/'.join(map(str, name))}"
            its[path] = run.tokens(group, *name)
        if (num_bytes := len(to_json(its))) <= room:
            room -= num_bytes
            told.add(group)
            kept.append(row)
            yield from its.items()
    yield from _pictures(run, base, kept)
    yield f"{base}/recorded", {**found, "rows": kept, "next": None}
    yield f"{base}/reading", {"is_whole": True, "num_changes": found["num_changes"]}
    yield f"{base}/prompts", {**run.prompts("", "worst", 0, NUM_GROUPS), "next": None}


def _pictures(
    run: FollowedRun, base: str, rows: Sequence[dict[str, Any]]
) -> Iterator[tuple[str, str]]:
    """The addresses, which hold them, of the pictures of rows."""
    room = MAX_PICTURE_BYTES
    for digest in dict.fromkeys(it["digest"] for row in rows for it in row["pictures"]):
        found = run.picture(digest)
        if found is None or found[0].kind not in CONTENT_TYPES or len(found[1]) > room:
            continue
        room -= len(found[1])
        content = base64.b64encode(found[1]).decode()
        yield f"{base}/pictures/{digest}", f"data:{CONTENT_TYPES[found[0].kind]};base64,{content}"


def _text(name: str) -> str:
    return (STATIC / name).read_text(encoding="utf-8")


def _digest(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
