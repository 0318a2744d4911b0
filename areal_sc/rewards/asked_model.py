"""A model's HTTP server, which is asked until it gives an answer that can be read. No torch."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable, Mapping
from typing import Any, Final, TypedDict, TypeVar

import aiohttp

from areal_sc.errors import NeverWorks, WorkflowError

Answer = TypeVar("Answer")

_AGAIN: Final = frozenset((408, 409, 425, 429, 500, 502, 503, 504))
"""Statuses after which the same request may succeed."""
_NEVER: Final = frozenset((401, 403, 404, 405))
"""Where these are the first answers, the key, the address or the model is wrong."""

_FIRST_PAUSE_S: Final = 0.5
_LONGEST_PAUSE_S: Final = 20.0
_MAX_ANSWER_BYTES: Final = 256 << 20


class NoAnswer(Exception):
    """One try gave no answer; the next one may."""


class Asking(TypedDict, total=False):
    """How a model is asked; see `AskedModel`."""

    api_key_variable: str
    timeout_s: float
    tries: int
    at_once: int


class AskedModel:
    """Posts JSON to an address until an answer can be read.

    Args:
        name: of the model and its address, for messages.
        failure: what is raised when all tries have failed.
        api_key_variable: environment variable of the worker that holds the key; "": no key.
        timeout_s: of one try.
        tries: of one answer, > 0; the pauses between them grow.
        at_once: requests of one worker at a time, > 0.
    Raises: ValueError: an argument is out of bounds.
    """

    def __init__(
        self,
        name: str,
        failure: type[WorkflowError],
        *,
        api_key_variable: str = "",
        timeout_s: float = 60.0,
        tries: int = 4,
        at_once: int = 32,
    ) -> None:
        if timeout_s <= 0 or min(tries, at_once) < 1:
            raise ValueError(
                f"timeout_s={timeout_s}, tries={tries}, at_once={at_once}: expected them above 0"
            )
        self._name = name
        self._failure = failure
        self._key_variable = api_key_variable
        self._timeout = aiohttp.ClientTimeout(total=timeout_s)
        self._tries = tries
        self._places = asyncio.Semaphore(at_once)
        self._has_served = False

    async def ask(
        self,
        address: str,
        body: Mapping[str, Any],
        read: Callable[[Any], Answer],
        *,
        is_probe: bool = False,
    ) -> Answer:
        """What `read` makes of the JSON of an answer.

        Args:
            read: raises `NoAnswer`, or what one raises whose keys, items or types are others, where
                there is none.
            is_probe: a server that refuses this request would refuse all others.
        Raises: `failure`: no try gave an answer, or the server refuses. NeverWorks: the key's
            variable is not set, or the address has never served this key or model.
        """
        reason = ""
        async with self._places, aiohttp.ClientSession(timeout=self._timeout) as session:
            for number in range(self._tries):
                if number:
                    await asyncio.sleep(min(_FIRST_PAUSE_S * 2 ** (number - 1), _LONGEST_PAUSE_S))
                try:
                    return read(await self._reply(session, address, body, is_probe=is_probe))
                except (aiohttp.ClientError, TimeoutError, NoAnswer) as error:
                    reason = str(error) or type(error).__name__
                except (ValueError, KeyError, IndexError, TypeError) as error:
                    reason = f"it cannot be read: {error!r:.200}"
        raise self._failure(f"{self._name}: no answer in {self._tries} tries: {reason}")

    async def _reply(
        self,
        session: aiohttp.ClientSession,
        address: str,
        body: Mapping[str, Any],
        *,
        is_probe: bool,
    ) -> Any:
        headers = {}
        if self._key_variable:
            key = os.environ.get(self._key_variable)
            if not key:
                raise NeverWorks(
                    f"{self._name}: the environment variable {self._key_variable}, which holds its "
                    "key, is not set in the worker"
                )
            headers["Authorization"] = f"Bearer {key}"
        async with session.post(address, json=body, headers=headers) as answer:
            try:
                text = (await answer.content.readexactly(_MAX_ANSWER_BYTES)).decode("latin-1")
            except asyncio.IncompleteReadError as end:  # as it should be: the answer is shorter
                text = end.partial.decode(errors="replace")
        if answer.status in _AGAIN:
            raise NoAnswer(f"status {answer.status}: {text:.200}")
        if answer.status != 200:
            never = is_probe or (answer.status in _NEVER and not self._has_served)
            raise (NeverWorks if never else self._failure)(
                f"{self._name}: status {answer.status}: {text:.200}"
            )
        self._has_served = True
        return json.loads(text)
