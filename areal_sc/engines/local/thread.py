"""The thread that computes, so that the event loop is never blocked by the model.

    event loop                                thread
    generate, call, ...                       between two steps: runs what was posted
      post a command, wait for its future ->  step: one forward pass for all running requests
      futures are set, streams told        <- one wake-up a step with what is new to somebody

Consumes: commands, in order. Waits for: a command, when nothing runs or it is paused. Unblocked
by: every posted command. Ends: on `close`, or when a step raises or does not end; then all pending
and later calls raise that error.
"""

from __future__ import annotations

import asyncio
import faulthandler
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import torch

from areal_sc.engines.base import Completion, OnTokens
from areal_sc.engines.local.generator import Finished, SlotGenerator
from areal_sc.engines.local.slots import SlotRequest
from areal_sc.errors import ArealError, WorkerError

logger = logging.getLogger(__name__)

_CLOSE_TIMEOUT_S = 30.0  # a step in progress is not interrupted
_IDLE_CHECK_S = 5.0
_STDERR = 2
_LOOKS_PER_LIMIT = 4  # so a pause of the whole process is not taken for a step that hangs

Command = Callable[[], None]


class GenerationThread:
    """Steps a generator for as long as it has work; all public methods are the event loop's.

    Args:
        generator: changed by the thread alone once it is started.
        num_threads: of torch, in this thread.
        step_limit_s: of one step.
    """

    def __init__(self, generator: SlotGenerator, num_threads: int, step_limit_s: float) -> None:
        self._step_limit_s = step_limit_s
        self._watch: asyncio.Task[None] | None = None
        self._generator = generator
        self._num_threads = num_threads
        # event loop's side
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._completions: dict[int, asyncio.Future[Completion]] = {}
        self._on_tokens: dict[int, OnTokens] = {}
        self._replies: set[asyncio.Future[None]] = set()
        self._unposted: list[Command] = []
        self._failure: ArealError | None = None
        # shared: appended by the event loop, taken by the thread
        self._commands: deque[Command] = deque()
        self._wake = threading.Event()
        self._step = 0  # its number, while one runs
        # thread's side
        self._num_steps = 0
        self._is_paused = False
        self._is_closing = False
        self._when_empty: list[Command] = []

    async def start(self) -> None:
        """Starts the thread; the running event loop is the one that all calls come from."""
        assert self._thread is None, "start() is called once"
        self._loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._run, name="generation", daemon=True)
        self._thread.start()
        self._watch = asyncio.create_task(self._watch_steps(), name="watch over generation")

    async def close(self) -> None:
        """Ends the thread after the step in progress; pending and later calls raise WorkerError."""
        if self._failure is None:
            self._fail(WorkerError("the generation engine is closed"))
        if self._thread is None:
            return
        assert self._watch is not None
        self._watch.cancel()
        self._commands.append(self._set_closing)
        self._wake.set()
        await asyncio.to_thread(self._thread.join, _CLOSE_TIMEOUT_S)
        if self._thread.is_alive():
            logger.warning("close: a step is still running after %.0f s", _CLOSE_TIMEOUT_S)

    async def pause(self) -> None:
        """Returns when no step runs; running requests stay where they are until `resume`."""
        await self.call(lambda: self._set_paused(True))

    async def resume(self) -> None:
        """Steps go on."""
        await self.call(lambda: self._set_paused(False))

    async def complete(self, request: SlotRequest, on_tokens: OnTokens | None = None) -> Completion:
        """The request's completion. Cancelling the task frees its place at once.

        Args:
            on_tokens: takes its tokens after each step, and never raises.
        Raises: WorkerError: it has failed, is closed, or was not started; also while it waits.
            ModelError: with its adapter the model gives no numbers.
        """
        request.is_streamed = on_tokens is not None
        self._post(lambda: self._generator.table.add(request))
        future: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        self._completions[request.request_id] = future
        if on_tokens is not None:
            self._on_tokens[request.request_id] = on_tokens
        try:
            return await future
        except asyncio.CancelledError:
            # not known any more: it had just finished
            if self._completions.pop(request.request_id, None) is not None:
                self._post(lambda: self._cancel(request))
            raise
        finally:
            self._on_tokens.pop(request.request_id, None)

    async def call(self, action: Command, *, when_empty: bool = False) -> None:
        """Runs `action` between two steps and raises what it raised.

        Args:
            when_empty: no request starts until it has run, and it runs when the last one ends.
        """
        reply: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def command() -> None:
            error = None
            try:
                action()
            except ArealError as failure:
                error = failure
            self._to_loop(_settle, reply, None, error)

        def command_when_empty() -> None:
            self._generator.table.is_admitting = False
            self._when_empty.append(command)

        self._post(command_when_empty if when_empty else command)
        self._replies.add(reply)
        reply.add_done_callback(self._replies.discard)
        await reply

    def _post(self, command: Command) -> None:
        """Posts with all else of this turn of the event loop, so that a group joins together.

        Raises: WorkerError: nothing runs that would do it.
        """
        if self._failure is not None:
            raise self._failure
        if self._loop is None:
            raise WorkerError("the generation engine has not been started")
        if not self._unposted:
            self._loop.call_soon(self._flush)
        self._unposted.append(command)

    def _flush(self) -> None:
        self._commands.extend(self._unposted)
        self._unposted.clear()
        self._wake.set()

    def _deliver(self, finished: Finished, streamed: Iterable[tuple[int, int]]) -> None:
        for request_id, token in streamed:
            if on_tokens := self._on_tokens.get(request_id):
                on_tokens((token,))
        for request, completion in finished:
            if future := self._completions.pop(request.request_id, None):
                error = completion if isinstance(completion, ArealError) else None
                _settle(future, completion, error)

    def _fail(self, error: ArealError) -> None:
        """Ends all pending calls; later ones raise the same error."""
        self._failure = error
        pending: list[asyncio.Future[Any]] = [*self._completions.values(), *self._replies]
        self._completions.clear()
        for future in pending:
            _settle(future, None, error)

    async def _watch_steps(self) -> None:
        """A step that does not end is a failure of the engine; the stacks go to the log."""
        step = num_looks = 0
        while num_looks < _LOOKS_PER_LIMIT:
            await asyncio.sleep(self._step_limit_s / _LOOKS_PER_LIMIT)
            num_looks = num_looks + 1 if self._step == step != 0 else 0
            step = self._step
            if self._failure is not None:
                return
        logger.error("a step of generation hangs; the stacks of all threads follow")
        faulthandler.dump_traceback(_STDERR)
        what = f"has not ended for {self._step_limit_s:g} s"
        self._fail(WorkerError(f"a step of generation {what}"))

    def _run(self) -> None:
        """The thread: commands, then a step, until it is closed."""
        torch.set_num_threads(self._num_threads)
        try:
            while not self._is_closing:
                self._wake.clear()
                while self._commands:
                    self._commands.popleft()()
                if self._is_closing:
                    return
                self._run_when_empty()
                if self._generator.table.has_work and not self._stands_still:
                    self._num_steps += 1
                    self._step = self._num_steps
                    finished = self._generator.step()
                    self._step = 0
                    streamed = self._generator.table.take_streamed()
                    if finished or streamed:
                        self._to_loop(self._deliver, finished, streamed)
                else:
                    self._wake.wait(_IDLE_CHECK_S)
        except Exception as error:  # the thread's main: every failure must reach the callers
            logger.exception("generation failed at policy version %d", self._generator.version)
            failure = WorkerError(f"generation failed: {type(error).__name__}: {error}")
            failure.__cause__ = error
            self._to_loop(self._fail, failure)

    def _run_when_empty(self) -> None:
        table = self._generator.table
        # while it stands still nothing would ever end
        if self._when_empty and (table.num_running == 0 or self._stands_still):
            for command in self._when_empty:
                command()
            self._when_empty.clear()
            table.is_admitting = True

    @property
    def _stands_still(self) -> bool:
        return self._is_paused or self._generator.is_asleep

    def _cancel(self, request: SlotRequest) -> None:
        if not request.is_finished:  # else its completion is on the way to nobody
            self._generator.cancel(request)

    def _to_loop(self, callback: Callable[..., None], *args: Any) -> None:
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(callback, *args)
        except RuntimeError:
            # the event loop was closed without close(): nobody waits any more
            self._is_closing = True

    def _set_paused(self, is_paused: bool) -> None:
        self._is_paused = is_paused

    def _set_closing(self) -> None:
        self._is_closing = True


def _settle(future: asyncio.Future[Any], result: Any, error: ArealError | None = None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(result)
    else:
        future.set_exception(error)
