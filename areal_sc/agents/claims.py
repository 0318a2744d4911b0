"""Episodes of a worker that wait for agents outside. No torch.

consumes     claims, rewards and rejections, each with the key of the run
waits for    somebody who claims, as long as it takes; then for the end of the episode
unblocked by `POST /episodes/ID/reward` or `/reject`, the limits, or whoever gives the episode up

    offered -- POST /episodes --> claimed -- reward --> ended: its rows are trained
                                     |-- reject --> agent_rejected
                                     |-- nobody calls for `agents.idle_timeout_s` --> agent_idle
                                     '-- longer than `agents.episode_timeout_s` --> agent_timeout
"""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final

from aiohttp import web

from areal_sc.agents.calls import CallRefused
from areal_sc.agents.http import answer_of, decoded, key_in, read_body, refusing
from areal_sc.agents.keys import SessionKeys, SessionName
from areal_sc.agents.rows import Rewards
from areal_sc.agents.session import Session
from areal_sc.config.agent_settings import AgentsConfig
from areal_sc.errors import AgentError, WorkflowError
from areal_sc.rejection import RejectionKind

EPISODES: Final = "/episodes"
ENDS: Final = ("reward", "reject")
CLAIM_AGAIN_S: Final = 1.0
_MAX_REASON_CHARS: Final = 200
_ID: Final = re.compile(
    r"([a-z][a-z0-9_-]{0,31})\.([0-9]{1,9})\.([0-9a-zA-Z]{1,32})\.([0-9]{1,18})"
)


def id_of(name: SessionName) -> str:
    """How an episode is called in paths."""
    return f"{name.worker.replace('/', '.')}.{name.life}.{name.number}"


def named_by(episode_id: str) -> SessionName:
    """Raises: CallRefused: 404: no episode has this id."""
    if not (found := _ID.fullmatch(episode_id)):
        raise CallRefused(404, "unknown_episode", "no episode has this id")
    role, index, life, number = found.groups()
    return SessionName(f"{role}/{index}", life, int(number))


def check_run_key(keys: SessionKeys, request: web.Request) -> None:
    """Raises: CallRefused: 401: the request does not show the run's key."""
    if not keys.is_run_key(key_in(request)):
        why = "expected the key of the run, which is in agents.json of its folder"
        raise CallRefused(401, "invalid_api_key", why)


def no_episode() -> CallRefused:
    """What a claim is told that finds none."""
    why = "no episode waits for an agent: the run admits no more before it has trained"
    return CallRefused(429, "no_episode", why, retry_after_s=CLAIM_AGAIN_S)


class Offer:
    """An episode that agents outside may claim. Belongs to the loop of its session.

    Args:
        row: of the data, as JSON holds it.
    """

    def __init__(self, name: SessionName, api_key: str, row: Any, session: Session) -> None:
        self.name = name
        self.api_key = api_key
        self.row = row
        self.session = session
        self.claimed = asyncio.Event()
        self._end: asyncio.Future[Rewards] = asyncio.get_running_loop().create_future()

    def finish(self, end: Rewards | AgentError) -> None:
        """Raises: CallRefused: 409: nobody has claimed the episode, or it has ended."""
        if not self.claimed.is_set() or self._end.done():
            raise _has_ended()
        if isinstance(end, AgentError):
            self._end.set_exception(end)
        else:
            self._end.set_result(end)

    async def reward(self, config: AgentsConfig) -> Rewards:
        """What the episode is rewarded with. Raises: AgentError: it is rejected."""
        await self.claimed.wait()
        now = asyncio.get_running_loop().time
        end_s, idle_s = now() + config.episode_timeout_s, config.idle_timeout_s
        while not self._end.done():
            idle_left_s, left_s = idle_s - self.session.quiet_s, end_s - now()
            if left_s <= 0:
                raise AgentError(
                    f"it was claimed, and not rewarded in {config.episode_timeout_s:g} s; raise "
                    "agents.episode_timeout_s",
                    kind=RejectionKind.agent_timeout,
                )
            if idle_left_s <= 0:
                raise AgentError(
                    f"it was claimed, and neither called nor rewarded for {idle_s:g} s; raise "
                    "agents.idle_timeout_s",
                    kind=RejectionKind.agent_idle,
                )
            await asyncio.wait([self._end], timeout=min(left_s, idle_left_s))
        return self._end.result()


class Claims:
    """The offers of one life of a worker.

    Args:
        session_of: finds an open session, or raises CallRefused.
    """

    def __init__(self, keys: SessionKeys, session_of: Callable[[SessionName], Session]) -> None:
        self._keys = keys
        self._session_of = session_of
        self._offers = dict[SessionName, Offer]()  # the oldest first

    def add_routes(self, router: web.UrlDispatcher) -> None:
        """Serves claims, too."""
        router.add_post(EPISODES, refusing(self._claim))
        for end in ENDS:
            router.add_post(f"{EPISODES}/{{id}}/{end}", refusing(getattr(self, f"_{end}")))

    async def wait(self, offer: Offer, config: AgentsConfig) -> Rewards:
        """Offers an episode until it ends, see `Offer.reward`."""
        self._offers[offer.name] = offer
        try:
            return await offer.reward(config)
        finally:
            del self._offers[offer.name]

    async def _claim(self, request: web.Request) -> web.StreamResponse:
        check_run_key(self._keys, request)
        offer = next((it for it in self._offers.values() if not it.claimed.is_set()), None)
        if offer is None:
            raise no_episode()
        offer.session.note_activity()
        offer.claimed.set()
        return answer_of({"id": id_of(offer.name), "api_key": offer.api_key, "row": offer.row})

    async def _reward(self, request: web.Request) -> web.StreamResponse:
        offer, body = await self._ended_by(request, "reward")
        reward = _reward_in(body)
        try:
            offer.session.check_reward(reward)
        except WorkflowError as error:
            raise CallRefused(400, "invalid_reward", str(error)) from error
        offer.finish(reward)
        return answer_of({"id": id_of(offer.name)})

    async def _reject(self, request: web.Request) -> web.StreamResponse:
        offer, body = await self._ended_by(request, "reason")
        reason = body.get("reason", "")
        if not isinstance(reason, str):
            raise CallRefused(400, "invalid_reason", f"reason: expected text, got {reason!r:.80}")
        told = reason[:_MAX_REASON_CHARS] or "no reason was told"
        offer.finish(AgentError(f"rejected: {told}", kind=RejectionKind.agent_rejected))
        return answer_of({"id": id_of(offer.name)})

    async def _ended_by(self, request: web.Request, field: str) -> tuple[Offer, dict[str, Any]]:
        """The episode that a request is about, and its body, whose only field is known."""
        check_run_key(self._keys, request)
        name = named_by(request.match_info["id"])
        body = decoded(await read_body(request) or b"{}")
        if unknown := sorted(body.keys() - {field}):
            raise CallRefused(400, "unknown_field", f"expected {field} alone, got {unknown!r:.200}")
        if (offer := self._offers.get(name)) is None:
            self._session_of(name)  # which says how it ended
            raise _has_ended()
        return offer, body


def _has_ended() -> CallRefused:
    why = "the episode is not claimed, or has been rewarded or rejected"
    return CallRefused(409, "session_ended", why)


def _reward_in(body: dict[str, Any]) -> Rewards:
    """Raises: CallRefused: 400: it is neither a finite number nor several by name."""
    told = body.get("reward")
    if isinstance(told, dict) and told:
        return {name: _number(value) for name, value in told.items()}
    return _number(told)


def _number(told: Any) -> float:
    with suppress(TypeError, ValueError, OverflowError):
        if not isinstance(told, str | bool) and math.isfinite(number := float(told)):
            return number
    raise CallRefused(
        400,
        "invalid_reward",
        f"reward: expected a finite number, or one for each model, got {told!r:.80}",
    )
