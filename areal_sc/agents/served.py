"""What runs inside an agent's process: load the user's function, call it, say what came of it.

The standard library alone, of Python 3.9 or later: `agents.python` names an interpreter that runs
this file by itself, and has no areal_sc.

Requests are lists in JSON, one a line, on a stream socket; replies are signed, see `Replies`:

    ["load", number, reference]     -> ["loaded", number, takes a session, is awaited]
                                     | ["failed", number, failure, ""]
    ["call", number, row, session]  -> ["value", number, reward, output, has left something]
                                     | ["failed", number, failure, output, has left something]
    ["cancel", number]              the call's task is cancelled; its answer says where it waited

where a session is what `SessionAddress` takes, and a failure the attributes of an AgentError. What
an agent alone in its process has left there, tasks, threads or children, would go on with the key
of the next episode. The process ends with the connection, or by SIGKILL.
"""

from __future__ import annotations

import asyncio
import faulthandler
import glob
import importlib
import importlib.util
import inspect
import io
import json
import math
import os
import runpy
import signal
import socket
import sys
import sysconfig
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from typing import Any, Final

_MAX_LINE_BYTES: Final = 256 << 20
_MAX_OUTPUT_CHARS: Final = 16 << 10
_MAX_FRAMES: Final = 6
_MAX_TEXT_CHARS: Final = 2000
_END_GRACE_S: Final = 0.5
"""What ends so soon after an agent's answer was not left by it."""
_OWN_FOLDER: Final = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_LIBRARIES: Final = tuple(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib"))


class SessionAddress:
    """What an agent with a parameter `session` gets: where the model answers, in this episode.

    Attributes:
        base_url: of OpenAI's API, as its clients take it: it ends with `/v1`.
        api_key: the episode's own.
    """

    _clients: dict[Any, Any] = {}  # noqa: RUF012  # one an event loop, for all sessions

    def __init__(self, base_url: str, api_key: str) -> None:
        self.base_url = base_url
        self.api_key = api_key

    @property
    def http_client(self) -> Any:
        """An `AsyncClient` of httpx that all sessions of the running event loop share.

        To make one takes as long as some answers: `AsyncOpenAI(..., http_client=...)` needs none of
        its own then. It has no time limit, no limit of connections, and no proxy. Raises:
        ImportError: there is no httpx. RuntimeError: no event loop runs.
        """
        loop = asyncio.get_running_loop()
        if loop not in self._clients:
            # newer clients are built on httpx2, and take no other
            name = "httpx2" if importlib.util.find_spec("httpx2") else "httpx"
            httpx = importlib.import_module(name)
            for past in [it for it in self._clients if it.is_closed()]:
                del self._clients[past]
            limits = httpx.Limits(max_connections=None, max_keepalive_connections=100)
            self._clients[loop] = httpx.AsyncClient(
                timeout=None, follow_redirects=True, limits=limits, trust_env=False
            )
        return self._clients[loop]

    def variables(self) -> dict[str, str]:
        """The environment variables by which clients find the model."""
        return {
            "OPENAI_BASE_URL": self.base_url,
            "OPENAI_API_KEY": self.api_key,
            "ANTHROPIC_BASE_URL": self.base_url[: -len("/v1")],
            "ANTHROPIC_API_KEY": self.api_key,
        }


class BadReward(Exception):
    """The agent returned no finite number."""


def is_async(agent: Any) -> bool:
    """Whether it is to be awaited."""
    return inspect.iscoroutinefunction(agent) or inspect.iscoroutinefunction(
        getattr(type(agent), "__call__", None)  # noqa: B004  # the method, not callable()
    )


def takes_session(agent: Any) -> bool:
    """Whether it has a parameter of that name."""
    return "session" in inspect.signature(agent).parameters


def load_by_name(reference: Mapping[str, Any]) -> Any:
    """The function of `module:name` or `/a/file.py:name`, with its folder on `sys.path`."""
    location, _, name = reference["target"].rpartition(":")
    folder = reference["search_path"]
    if folder and folder not in sys.path:
        sys.path.insert(0, folder)
    if os.path.isabs(location):
        module_name = os.path.splitext(os.path.basename(location))[0]
        spec = importlib.util.spec_from_file_location(module_name, location)
        if spec is None or spec.loader is None:
            raise ImportError(f"{location} is no file of Python")
        module = importlib.util.module_from_spec(spec)
        sys.modules[module_name] = module  # before the body runs: dataclasses look their module up
        spec.loader.exec_module(module)
    else:
        module = importlib.import_module(location)
    found: Any = module
    for part in name.split("."):
        found = getattr(found, part)
    return found


def serve(
    connection: socket.socket,
    replies: Any,
    load: Callable[[Any], Any] = load_by_name,
    decode: Callable[[Any], Any] = lambda row: row,
) -> None:
    """Serves the worker until the connection ends.

    Args:
        replies: `Replies` of the connection.
        load: from a reference to the agent.
        decode: from a row on the wire to the row.
    """
    sys.stdout = _Output(sys.stdout)
    sys.stderr = _Output(sys.stderr)
    with connection, connection.makefile("rb") as lines:
        _, number, reference = json.loads(lines.readline())
        try:
            agent = load(reference)
            has_session, is_awaited = takes_session(agent), is_async(agent)
        except BaseException as error:  # the user's code: whatever it raises is its answer
            replies.send("failed", number, failure_of(error), "")
            return
        replies.send("loaded", number, has_session, is_awaited)
        is_alone = not (has_session and is_awaited)
        calls = _Calls(agent, decode, replies, has_session=has_session, is_alone=is_alone)
        if is_awaited:
            asyncio.run(_serve_tasks(connection, calls))
        else:
            for line in lines:
                kind, *rest = json.loads(line)
                if kind == "call":
                    replies.send(*calls.answer(*rest))


class _Output(io.TextIOBase):
    """Standard output or error, of which each episode's own part is also kept."""

    episode: ContextVar[list[str] | None] = ContextVar("episode", default=None)
    alone: list[str] | None = None
    """What the only episode has written: its threads know nothing of the context."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        kept = self.episode.get() or _Output.alone
        if kept is not None:
            kept[0] = (kept[0] + text)[-_MAX_OUTPUT_CHARS:]
        return int(self._stream.write(text))

    def flush(self) -> None:
        self._stream.flush()

    def fileno(self) -> int:
        return int(self._stream.fileno())

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return str(self._stream.encoding)

    @property
    def buffer(self) -> Any:
        """What is written here as bytes is in the log alone."""
        return self._stream.buffer


class _Calls:
    """Calls of the agent, and what comes of them."""

    def __init__(
        self,
        agent: Any,
        decode: Callable[[Any], Any],
        replies: Any,
        *,
        has_session: bool,
        is_alone: bool,
    ) -> None:
        self.is_alone = is_alone
        self.replies = replies
        self._agent = agent
        self._decode = decode
        self._has_session = has_session
        self.server: Any = None
        self._threads = set(threading.enumerate())
        self._children = _children()

    def answer(self, number: int, row: Any, session: dict[str, str]) -> list[Any]:
        """The answer of an agent that is not awaited."""
        kept = self._begin(session)
        try:
            kind, told = "value", reward_of(self._call(row, session))
        except BaseException as error:  # the user's code: whatever it raises is its answer
            kind, told = "failed", failure_of(error)
        self.replies.end_if_forked()
        return [kind, number, told, kept[0], self._has_left_any()]

    async def answer_later(self, number: int, row: Any, session: dict[str, str]) -> list[Any]:
        """The answer of an agent that is awaited."""
        kept = self._begin(session)
        executor = ThreadPoolExecutor(thread_name_prefix="asyncio")
        if self.is_alone:
            asyncio.get_running_loop().set_default_executor(executor)
        try:
            kind, told = "value", reward_of(await self._call(row, session))
        except BaseException as error:  # the user's code: whatever it raises is its answer
            kind, told = "failed", failure_of(error)
        self.replies.end_if_forked()
        if not self.is_alone:
            return [kind, number, told, kept[0], False]
        has_left_tasks = await self._end_tasks()
        executor.shutdown(wait=False, cancel_futures=True)
        return [kind, number, told, kept[0], has_left_tasks or self._has_left_any()]

    async def _end_tasks(self) -> bool:
        """Cancels what an agent has begun, as `asyncio.run` does. Returns: some go on."""
        left = asyncio.all_tasks() - {self.server, asyncio.current_task()}
        for task in left:
            task.cancel()
        return bool(left and (await asyncio.wait(left, timeout=_END_GRACE_S))[1])

    def _has_left_any(self) -> bool:
        """Whether threads or children go on that were not there when the agent was loaded."""
        deadline_s = time.monotonic() + _END_GRACE_S
        for thread in set(threading.enumerate()) - self._threads:
            thread.join(max(0.0, deadline_s - time.monotonic()))
            if thread.is_alive():
                return True
        return bool(_children() - self._children)

    def _begin(self, session: dict[str, str]) -> list[str]:
        """Returns: where the text will be that the episode writes."""
        kept = [""]
        _Output.episode.set(kept)
        if self.is_alone:
            _Output.alone = kept
            os.environ.update(SessionAddress(**session).variables())
        return kept

    def _call(self, row: Any, session: dict[str, str]) -> Any:
        further = {"session": SessionAddress(**session)} if self._has_session else {}
        return self._agent(self._decode(row), **further)


async def _serve_tasks(connection: socket.socket, calls: _Calls) -> None:
    reader, writer = await asyncio.open_connection(sock=connection, limit=_MAX_LINE_BYTES)
    calls.server = asyncio.current_task()
    tasks: dict[int, Any] = {}

    async def answer(number: int, row: Any, session: dict[str, str]) -> None:
        writer.write(calls.replies.signed(*await calls.answer_later(number, row, session)))
        del tasks[number]

    while line := await reader.readline():
        kind, number, *rest = json.loads(line)
        if kind == "call":
            tasks[number] = asyncio.ensure_future(answer(number, *rest))
        elif number in tasks:
            tasks[number].cancel()


def _children() -> set[str]:
    """The processes that this one has started, and that have not been waited for."""
    found: set[str] = set()
    for path in glob.glob("/proc/self/task/*/children"):
        try:
            with open(path, encoding="ascii") as file:
                found.update(file.read().split())
        except OSError:  # the thread has ended
            pass
    return found


def reward_of(returned: Any) -> Any:
    """What an agent returned, for JSON: a number, or several by name.

    Raises: BadReward: it is neither, or a number is not finite.
    """
    if isinstance(returned, Mapping):
        return {str(name): _number(value) for name, value in returned.items()}
    return _number(returned)


def _number(value: Any) -> float:
    if isinstance(value, (str, bytes)) or not hasattr(value, "__float__"):
        shown = f"{type(value).__name__} {str(value)[:80]!r}"
        raise BadReward(f"the agent returned {shown}: expected a finite number")
    number = float(value)
    if not math.isfinite(number):
        raise BadReward(f"the agent returned {number}: expected a finite number")
    return number


def failure_of(error: BaseException) -> dict[str, str]:
    """The message and the attributes of the AgentError for an agent that raised this."""
    while getattr(error, "exceptions", None):  # of a group the first one
        error = error.exceptions[0]  # type: ignore[attr-defined]
    if isinstance(error, BadReward):
        return {"message": str(error), "kind": "bad_reward"}
    frames = traceback.extract_tb(error.__traceback__)
    first = next((i for i, frame in enumerate(frames) if not _is_own(frame.filename)), 0)
    frames = traceback.StackSummary.from_list(frames[first:])
    users = [frame for frame in frames if not _is_library(frame.filename)]
    place = f"{os.path.basename(users[-1].filename)}:{users[-1].lineno}" if users else ""
    if isinstance(error, SyntaxError) and error.filename:
        place = f"{os.path.basename(error.filename)}:{error.lineno}"
    try:
        text = str(error)[:_MAX_TEXT_CHARS]
    except BaseException:  # its class is the user's
        text = "its text cannot be had"
    return {
        "message": f"{type(error).__name__}: {text}",
        "kind": "agent_error",
        "error_type": type(error).__name__,
        "place": place,
        "frames": "".join(traceback.format_list(frames[-_MAX_FRAMES:]))[-_MAX_TEXT_CHARS:],
    }


def _is_own(file: str) -> bool:
    return os.path.abspath(file).startswith(os.path.join(_OWN_FOLDER, ""))


def _is_library(file: str) -> bool:
    if file.startswith("<frozen ") or _is_own(file):
        return True
    path = os.path.realpath(file)
    return any(path.startswith(os.path.join(os.path.realpath(it), "")) for it in _LIBRARIES)


def main(arguments: list[str]) -> None:
    """Serves in an interpreter of its own, or tries the import of an agent.

    Args:
        arguments: the number of the socket, that of the signal that asks for stacks, and the file
            of `Replies`; or `--try` and a reference in JSON, whose failure is printed.
    """
    sys.path.pop(0)  # the folder of this file
    if arguments[0] == "--try":
        try:
            takes_session(load_by_name(json.loads(arguments[1])))
        except BaseException as error:  # the user's code may raise anything
            failure = failure_of(error)
            sys.exit(f"{failure['message']} at {failure['place']}")
        return
    fd, number = map(int, arguments[:2])
    os.set_inheritable(fd, False)
    faulthandler.enable()
    faulthandler.register(signal.Signals(number))
    connection = socket.socket(fileno=fd)
    replies = runpy.run_path(arguments[2])["Replies"]
    serve(connection, replies(connection))


if __name__ == "__main__":
    main(sys.argv[1:])
