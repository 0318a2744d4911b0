"""The border around the user's code: whatever that raises is a cause with its line. No torch.

Rewards, workflows, losses, datasets and trackers may raise anything: `SystemExit` and what else
derives from BaseException, a CancelledError though nobody has cancelled them, an exception whose
text cannot be had. None of it may end a process, an event loop or a run in another name.
Ctrl-C reaches a script's main thread alone: elsewhere a KeyboardInterrupt is the user's code's.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import math
import sysconfig
import traceback
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, Final, TypeVar

from areal_sc.errors import ConfigError, WorkflowError

log = logging.getLogger(__name__)

T = TypeVar("T")

MAX_TEXT_CHARS: Final = 2000
"""Most characters of the message of an exception."""

CANCEL_GRACE_S: Final = 5.0
"""A coroutine that swallows its cancellation for longer is left behind."""

_ASLEEP_LOOK_S: Final = 1.0
"""Between two looks at whether a clock that stands still goes on."""

_MAX_FRAMES: Final = 6
_MAX_TRACEBACK_CHARS: Final = 2000

_OWN_FOLDER: Final = Path(__file__).resolve().parent
_OTHER_FOLDERS: Final = tuple(
    Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "purelib", "platlib")
)


class Raised(Exception):
    """What awaited code of the user raised.

    Attributes:
        error: whatever it was.
        is_late: the code was cancelled at its time limit; the error then knows where it waited.
    """

    def __init__(self, error: BaseException, *, is_late: bool = False) -> None:
        super().__init__(describe(error))
        self.error = error
        self.is_late = is_late


class EpisodeClock:
    """The time of episodes' limits, in seconds: it stands still while their engine is asleep."""

    def __init__(self) -> None:
        self._behind_s = 0.0
        self._stopped_at_s: float | None = None

    @property
    def now_s(self) -> float:
        """From any beginning."""
        if self._stopped_at_s is not None:
            return self._stopped_at_s
        return asyncio.get_running_loop().time() - self._behind_s

    def stop(self) -> None:
        """Stands still from now on, if it does not already."""
        self._stopped_at_s = self.now_s

    def go_on(self) -> None:
        """Ends `stop`."""
        self._behind_s = asyncio.get_running_loop().time() - self.now_s
        self._stopped_at_s = None

    async def wait(self, work: asyncio.Future[Any], limit_s: float) -> None:
        """Returns when the work is done, or after so much of this time."""
        end_s = self.now_s + limit_s
        while not work.done() and (left_s := end_s - self.now_s) > 0:
            is_stopped = self._stopped_at_s is not None
            await asyncio.wait([work], timeout=max(left_s, _ASLEEP_LOOK_S * is_stopped))


async def await_user_code(
    code: Callable[[], Awaitable[T]],
    limit_s: float = math.inf,
    clock: EpisodeClock | None = None,
) -> T:
    """Awaits code of the user, which runs in a task of its own.

    So there is no doubt about a cancellation: that of the caller's task is real, and the code's
    own is what the user's code did.

    Raises: Raised: the code raised, or took longer than the limit.
    """

    async def run() -> T | Raised:
        try:
            return await code()
        except BaseException as error:  # the user's code may raise anything
            return Raised(error)

    task = asyncio.create_task(run())
    is_late = True
    try:
        await (clock or EpisodeClock()).wait(task, limit_s)
        is_late = not task.done()
    finally:
        if not task.done():
            task.cancel()
            await asyncio.wait([task], timeout=CANCEL_GRACE_S)
    outcome: T | Raised = Raised(TimeoutError("it goes on after its cancellation"))
    if task.done():
        # one that cancelled itself before it returned is cancelled
        outcome = Raised(asyncio.CancelledError()) if task.cancelled() else task.result()
    if is_late:
        raise Raised(outcome.error if isinstance(outcome, Raised) else TimeoutError(), is_late=True)
    if isinstance(outcome, Raised):
        raise outcome
    return outcome


def run_worker_loop(main: Coroutine[Any, Any, None]) -> None:
    """Runs `main` like `asyncio.run`, but only the end of `main` ends the event loop.

    A task that the user's code has made and that raises SystemExit or KeyboardInterrupt would end
    it, too. Who awaits the task gets the exception.
    """
    with asyncio.Runner() as runner:
        serving = runner.get_loop().create_task(main)

        async def wait() -> None:
            await serving

        while not serving.done():
            try:
                runner.run(wait())
            except (SystemExit, KeyboardInterrupt) as error:
                if serving.done():
                    _ = serving.cancelled() or serving.exception()  # it is raised here
                    raise
                log.warning("a task of the user's code raised %s; the worker goes on", error)


@contextmanager
def user_code(what: str) -> Iterator[None]:
    """The border around code that is not awaited, in a worker.

    Args: what: begins the message.
    Raises: WorkflowError: the block raised.
    """
    try:
        yield
    except WorkflowError:
        raise
    except BaseException as error:  # the user's code may raise anything
        raise WorkflowError(f"{what} raised {blame(error)}") from error


def named(name: str, expected: str) -> Any:
    """What `package.module:name` means to the caller, also beside a script.

    Args: expected: how a message begins.
    Raises: ConfigError: there is nothing of that name.
    """
    if ":" not in name:
        raise ConfigError(f"{expected}, got {name!r}")
    try:
        return resolve_name(name)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # the user's code may raise anything
        raise ConfigError(f"{expected}, got {name!r}: {blame(error)}") from error


def folder_of_module(path: str, what: str, expected: str) -> str:
    """The folder from which an import path is imported.

    Args: what, expected: begin the message.
    Raises: ConfigError: there is no such module.
    """
    package = path.partition(":")[0].partition(".")[0]
    try:
        found = find_spec(package)
    except ValueError:  # it is "", or the script itself
        found = None
    if found is None:
        raise ConfigError(
            f"{what}: expected {expected}, in a file beside the script or in an installed "
            f"package, got {path!r}: there is no module {package!r}"
        )
    locations = [*(found.submodule_search_locations or ()), *filter(None, [found.origin])]
    return str(Path(locations[0]).absolute().parent)


def user_function(
    name: str, argument: str, settings: Mapping[str, Any], *, what: str, expected: str
) -> Callable[[Any], Any]:
    """The function of an import path, which takes this argument, with these settings.

    Args: what, expected: begin and end the message.
    Returns: raises a WorkflowError with its line, whatever the function raises.
    Raises: ConfigError: there is no such function, or it takes others.
    """
    try:
        with user_code("its import"):
            found: Callable[..., Any] = resolve_name(name)
        inspect.signature(found).bind(argument, **settings)
    except (WorkflowError, ValueError, TypeError) as error:
        raise ConfigError(f"{what} {name!r}: {error}; expected {expected}") from error

    def call(given: Any) -> Any:
        with user_code(f"{what} {name!r}"):
            return found(given, **settings)

    return call


def first_of(error: BaseException) -> BaseException:
    """The first exception of a group, of groups of groups too; else the exception itself."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def causes_of(error: BaseException) -> list[BaseException]:
    """The error, and the explicit causes below it; `raise error from error` is its own."""
    found: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None and all(cause is not it for it in found):
        found.append(cause)
        cause = cause.__cause__
    return found


def text_of(value: object, how: Callable[[Any], str] = str) -> str:
    """The `str`, or `repr`, of an object whose class may be the user's."""
    try:
        return how(value)
    except BaseException as error:  # the user's code may raise anything
        return f"(its text cannot be had: {how.__name__} raised {type(error).__name__})"


def describe(error: BaseException) -> str:
    """`ValueError: the message`, shortened."""
    return f"{type(error).__name__}: {text_of(error)[:MAX_TEXT_CHARS]}".removesuffix(": ")


def blame(error: BaseException) -> str:
    """`ValueError: the message at file.py:line`, where the user's code has to do with it."""
    is_users = isinstance(error, SyntaxError) or _users(error)
    return f"{describe(error)} at {place_of(error)}" if is_users else describe(error)


def last_frames(error: BaseException) -> str:
    """The last frames of a traceback as Python formats them, from the user's code on."""
    frames = _frames(error)
    return "".join(traceback.format_list(frames[-_MAX_FRAMES:]))[-_MAX_TRACEBACK_CHARS:]


def place_of(error: BaseException) -> str:
    """`file.py:line` where the user's code was when the error arose; "" without a traceback.

    That is the last frame which is not in a library, if there is one. Of a file that cannot be
    parsed it is the line which cannot.
    """
    if isinstance(error, SyntaxError) and error.filename:
        return f"{Path(error.filename).name}:{error.lineno}"
    frames = _users(error) or _frames(error)
    if not frames:
        return ""
    frame = frames[-1]
    return f"{Path(frame.filename).name}:{frame.lineno}"


def _users(error: BaseException) -> list[traceback.FrameSummary]:
    """Frames that are in no library, of the error or else of the first cause that has some.

    Python's "coroutine raised StopIteration" has none of its own.
    """
    for cause in causes_of(error):
        if frames := [frame for frame in _frames(cause) if not is_library(frame.filename)]:
            return frames
    return []


def _frames(error: BaseException) -> list[traceback.FrameSummary]:
    """Without those of this package that led to the user's code."""
    frames = traceback.extract_tb(error.__traceback__)
    first = next((i for i, f in enumerate(frames) if not _is_own(f.filename)), 0)
    return list(frames[first:])


def _is_own(file: str) -> bool:
    return Path(file).resolve().is_relative_to(_OWN_FOLDER)


def is_library(file: str) -> bool:
    """Whether a file is none of the user's code."""
    path = Path(file).resolve()
    if file.startswith("<frozen ") or _is_own(file):
        return True
    return any(path.is_relative_to(folder) for folder in _OTHER_FOLDERS)
