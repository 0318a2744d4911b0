"""The page's server: files of the page, and views of runs as JSON.

consumes     HTTP requests of browsers, and the run folders
waits for    nothing but the disk: views are made on threads
unblocked by itself: as long as a browser listens to `/api/changes`, it looks twice a second which
             parts of which runs have changed, and says so; the browser then asks for what it shows

    /                                   the page; `?key=`
    /static/NAME                        its files
    /api/runs                           names, folders, settings, notes
    /api/runs/N/steps                   columns of numbers; `?epoch=&first=`
    /api/runs/N/health                  what is wrong with the learning
    /api/runs/N/groups                  from the ledger; `?outcome=&cause=&worker=&step=&at=`
    /api/runs/N/groups/GROUP            the life of one
    /api/runs/N/reading                 reads recorded rows for a second; how far that is
    /api/runs/N/recorded                recorded rows; `?text=&sort=&at=&limit=&reward=0..1` ...
    /api/runs/N/recorded.jsonl          the same with all of their texts, a row a line
    /api/runs/N/prompts                 what they tell by prompt; `?set=&sort=&at=&limit=`
    /api/runs/N/prompts/DATASET/INDEX   the tries of one; `?set=`
    /api/runs/N/recorded/GROUP          recorded rows of one, without their tokens
    /api/runs/N/pictures/DIGEST         a picture of recorded rows, as it was compressed
    /api/runs/N/tokens/GROUP/ATTEMPT/EPISODE/ROW   turns and tokens of one; `?first=`
    /api/runs/N/time                    what each process did when; `?first=&last=&width=`
    /api/runs/N/trace                   the same as a trace for Perfetto
    /api/runs/N/fleet                   state, workers, logs
    /api/runs/N/held                    policy version of each rollout worker
    /api/runs/N/logs/NAME               the end of a log
    /api/runs/N/control                 POST: pauses, resumes, scales or stops it; with `--control`
    /api/changes                        server-sent events
"""

from __future__ import annotations

import asyncio
import math
import re
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import msgspec
from aiohttp import web

from areal_sc.errors import ArealError
from areal_sc.page.access import HEADERS, Access, Handler, answer, refusal
from areal_sc.page.followed_run import READ_S, FollowedRun
from areal_sc.page.group_book import GroupQuery
from areal_sc.page.prompt_book import TRAINED
from areal_sc.page.row_search import recorded_query
from areal_sc.page.stamps import Stamp
from areal_sc.sources.pictures import CONTENT_TYPES
from areal_sc.system.json_lines import UNDECODABLE, to_json

STATIC: Final = Path(__file__).with_name("static")
LOOK_S: Final = 0.5
"""Time between two looks at the run folders."""
_BEAT_LOOKS: Final = 30
"""A browser that hears nothing for longer asks anew; so something is sent every so many looks."""
_COMPRESSED_BYTES: Final = 1 << 16


class _Control(msgspec.Struct):
    """What a browser wants of a run; `num_workers` of a scaled one."""

    what: Literal["pause", "resume", "scale", "stop"]
    num_workers: Annotated[int, msgspec.Meta(ge=1, le=1 << 20)] | None = None


View = Callable[[FollowedRun, web.Request], Any]


class PageServer:
    """Serves runs to those whom `access` lets in.

    Args:
        can_control: they may also pause, resume, scale and stop the runs.
    """

    def __init__(
        self, runs: Sequence[FollowedRun], access: Access, *, can_control: bool = False
    ) -> None:
        self._runs = runs
        self._can_control = can_control
        self._asked = set[Path]()  # runs, while a command on them goes on
        self._commands = set[asyncio.subprocess.Process]()
        self._is_ending = asyncio.Event()
        app = web.Application(middlewares=[access.middleware, _errors_told])
        app.router.add_get("/", self._index)
        app.router.add_get("/static/{name}", self._static)
        app.router.add_get("/api/runs", self._about)
        app.router.add_get("/api/changes", self._changes)
        views: dict[str, View] = {
            "steps": _steps,
            "health": lambda run, request: run.health(),
            "groups": _groups,
            "groups/{group}": _group,
            "reading": lambda run, request: run.read_rows(READ_S),
            "recorded": _recorded,
            "prompts": _prompts,
            "prompts/{dataset}/{index}": _prompt,
            "recorded/{group}": lambda run, request: run.recorded(_whole_number(request, "group")),
            "tokens/{group}/{attempt}/{episode}/{row}": _tokens,
            "time": _time,
            "trace": lambda run, request: run.trace(),
            "fleet": lambda run, request: run.fleet(),
            "held": lambda run, request: run.held(),
            "logs/{name}": _log,
        }
        for path, view in views.items():
            app.router.add_get(f"/api/runs/{{run}}/{path}", self._shown(view))
        app.router.add_get("/api/runs/{run}/recorded.jsonl", self._recorded_lines)
        app.router.add_get("/api/runs/{run}/pictures/{digest}", self._picture)
        if can_control:
            app.router.add_post("/api/runs/{run}/control", self._control)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)

    async def start(self, bind: str, port: int) -> int:
        """Listens; returns the port.

        Raises: OSError: the address cannot be had.
        """
        await self._runner.setup()
        await web.TCPSite(self._runner, bind, port).start()
        found: int = self._runner.addresses[0][1]
        return found

    async def close(self) -> None:
        """Ends all answers, and commands; what these have asked a run for stays so."""
        self._is_ending.set()
        self._end_commands()
        await self._runner.cleanup()

    async def _index(self, request: web.Request) -> web.StreamResponse:
        return web.FileResponse(STATIC / "index.html")

    async def _static(self, request: web.Request) -> web.StreamResponse:
        name = request.match_info["name"]
        if name not in {path.name for path in STATIC.iterdir() if path.is_file()}:
            return refusal(404, "the page has no such file")
        return web.FileResponse(STATIC / name)

    async def _about(self, request: web.Request) -> web.StreamResponse:
        told = await asyncio.to_thread(lambda: [run.about() for run in self._runs])
        return answer([{**run, "can_control": self._can_control} for run in told])

    def _run(self, request: web.Request) -> FollowedRun:
        number = _whole_number(request, "run")
        if not 0 <= number < len(self._runs):
            raise web.HTTPNotFound(reason=f"the page shows {len(self._runs)} runs, from 0 on")
        return self._runs[number]

    async def _control(self, request: web.Request) -> web.StreamResponse:
        """Runs a command of `areal_sc`, and gives what it says."""
        run = self._run(request)
        if "Origin" not in request.headers:  # which every browser sends; `Access` has compared it
            return refusal(403, "a request that changes a run has to name its origin")
        try:
            wanted = msgspec.json.decode(await request.read(), type=_Control)
        except UNDECODABLE as error:
            raise ValueError(f"control: {error}") from error
        path = run.folder.path
        words = [wanted.what, str(path)]
        if wanted.what == "scale":
            if wanted.num_workers is None:
                raise ValueError("control: scale: expected num_workers, from 1 on")
            words.append(f"rollout={wanted.num_workers}")
        if path in self._asked:  # a second `stop` would end the run at once
            return refusal(409, "an earlier request to this run goes on; wait for its answer")
        self._asked.add(path)
        try:
            return await self._said(words)
        finally:
            self._asked.remove(path)

    def _end_commands(self) -> None:
        for process in self._commands:
            with suppress(ProcessLookupError):  # it has just ended
                process.kill()

    async def _said(self, words: Sequence[str]) -> web.StreamResponse:
        """What a command of `areal_sc` says."""
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "areal_sc", *words),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        self._commands.add(process)
        if self._is_ending.is_set():
            self._end_commands()
        try:
            said, _ = await process.communicate()
        finally:
            self._commands.remove(process)
        text = said.decode(errors="replace").strip()
        return refusal(409, text) if process.returncode else answer({"text": text})

    async def _recorded_lines(self, request: web.Request) -> web.StreamResponse:
        run, query = self._run(request), recorded_query(request.query)
        parts = await asyncio.to_thread(run.every_recorded_row, query)

        def lines() -> bytes | None:
            rows = next(parts, None)
            return None if rows is None else b"".join(to_json(row) + b"\n" for row in rows)

        content = await asyncio.to_thread(lines)
        name = re.sub(r"[^\w.-]", "_", run.name, flags=re.ASCII)
        headers = {
            "Content-Type": "application/jsonl",
            "Content-Disposition": f'attachment; filename="{name}.jsonl"',
        }
        response = web.StreamResponse(headers=headers)
        response.headers.update(HEADERS)
        await response.prepare(request)
        with suppress(ConnectionResetError):  # the browser has gone
            while content is not None:
                await response.write(content)
                content = await asyncio.to_thread(lines)
        return response

    async def _picture(self, request: web.Request) -> web.StreamResponse:
        run = self._run(request)
        found = await asyncio.to_thread(run.picture, request.match_info["digest"])
        kind = CONTENT_TYPES.get(found[0].kind) if found else None
        if found is None or kind is None:
            return refusal(404, f"{run.name} has no such picture")
        return web.Response(body=found[1], content_type=kind)

    def _shown(self, view: View) -> Handler:
        async def show(request: web.Request) -> web.StreamResponse:
            run = self._run(request)

            def made() -> bytes | None:
                found = view(run, request)
                return found if found is None or isinstance(found, bytes) else to_json(found)

            body = await asyncio.to_thread(made)
            if body is None:
                return refusal(404, f"{run.name} has nothing of that number or name")
            response = web.Response(body=body, content_type="application/json")
            if len(body) > _COMPRESSED_BYTES:
                response.enable_compression()
            return response

        return show

    async def _changes(self, request: web.Request) -> web.StreamResponse:
        """Each event: number of a run -> its parts that have changed."""
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        response.headers.update(HEADERS)
        await response.prepare(request)
        known = await self._stamps()
        looks = 0
        with suppress(ConnectionResetError):  # the browser has gone
            await response.write(b": hello\n\n")
            while not self._is_ending.is_set():
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._is_ending.wait(), LOOK_S)
                now = await self._stamps()
                changed = {
                    number: [part for part, value in new.items() if value != old[part]]
                    for number, (old, new) in enumerate(zip(known, now, strict=True))
                }
                changed = {number: parts for number, parts in changed.items() if parts}
                known, looks = now, looks + 1
                if changed:
                    await response.write(b"data: " + to_json(changed) + b"\n\n")
                elif looks % _BEAT_LOOKS == 0:
                    await response.write(b": still here\n\n")
        return response

    async def _stamps(self) -> list[dict[str, Stamp]]:
        return await asyncio.to_thread(lambda: [run.stamps() for run in self._runs])


@web.middleware
async def _errors_told(request: web.Request, handler: Handler) -> web.StreamResponse:
    """What cannot be read, and wrong words, are the answer."""
    try:
        return await handler(request)
    except web.HTTPException as error:
        return refusal(error.status, error.reason)
    except ValueError as error:
        return refusal(400, str(error))
    except (ArealError, OSError) as error:
        return refusal(503, str(error))


def _steps(run: FollowedRun, request: web.Request) -> Any:
    return run.steps(_number(request, "epoch", 0), _number(request, "first", 0))


def _recorded(run: FollowedRun, request: web.Request) -> Any:
    query = recorded_query(request.query)
    return run.recorded_rows(query, _number(request, "at", 0), _number(request, "limit", 50))


def _prompts(run: FollowedRun, request: web.Request) -> Any:
    of_set, sort = request.query.get("set", ""), request.query.get("sort") or "worst"
    return run.prompts(of_set, sort, _number(request, "at", 0), _number(request, "limit", 50))


def _prompt(run: FollowedRun, request: web.Request) -> Any:
    dataset, index = (_whole_number(request, name) for name in ("dataset", "index"))
    return run.prompt(request.query.get("set") or TRAINED, dataset, index)


def _groups(run: FollowedRun, request: web.Request) -> Any:
    words = request.query
    query = GroupQuery(
        outcome=words.get("outcome", ""),
        cause=words.get("cause", ""),
        worker=words.get("worker", ""),
        step=_number(request, "step", None),
        group=_number(request, "group", None),
    )
    return run.groups(query, _number(request, "at", 0), _number(request, "limit", 100))


def _group(run: FollowedRun, request: web.Request) -> Any:
    group = _whole_number(request, "group")
    return run.lives({group}).get(group)


def _tokens(run: FollowedRun, request: web.Request) -> Any:
    names = ("group", "attempt", "episode", "row")
    group, attempt, episode, row = (_whole_number(request, name) for name in names)
    return run.tokens(group, attempt, episode, row, _number(request, "first", 0))


def _time(run: FollowedRun, request: web.Request) -> Any:
    first, last = (_number(request, name, None, float) for name in ("first", "last"))
    return run.time_line(first, last, _number(request, "width", 2000))


def _log(run: FollowedRun, request: web.Request) -> Any:
    text = run.log(request.match_info["name"])
    return None if text is None else {"text": text}


def _number(
    request: web.Request, name: str, default: Any, kind: type[int] | type[float] = int
) -> Any:
    text = request.query.get(name, "")
    if not text:
        return default
    with suppress(ValueError):
        if math.isfinite(number := kind(text)):
            return number
    what = "a whole number" if kind is int else "a number"
    raise ValueError(f"{name}: expected {what}, got {text!r}")


def _whole_number(request: web.Request, name: str) -> int:
    text = request.match_info[name]
    if not text.removeprefix("-").isdecimal() or len(text) > 18:
        raise ValueError(f"expected a whole number in the address, got {text[:80]!r}")
    return int(text)
