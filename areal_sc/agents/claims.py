"""Episodes of a worker that wait for agents outside. No torch.

consumes     claims, rewards and rejections, each with the key of the run
waits for    somebody who claims, as long as it takes; then for the end of the episode
unblocked by `POST /episodes/ID/reward` or `/reject`, the limits, or whoever gives the episode up

    offered -- POST /episodes --> claimed -- confirmed --> open -- reward --> its rows are trained
       ^                             |                      |-- reject --> agent_rejected
       |                             |                      |-- idle_timeout_s --> agent_idle
       '-------- UNCONFIRMED_S ------'                      '-- episode_timeout_s --> agent_timeout

The answer to a claim may be lost on its way. So the claim is confirmed by the process of the run's
address, once it has sent the answer, or by the first use of the episode. An episode whose claim was
not confirmed is offered again under another name and key.

Where a journal can be had, it is written down who has claimed an episode, and how it ended: so both
outlive the worker, as the calls do.
"""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Any, Final

from aiohttp import web

from areal_sc.agents.calls import CallRefused
from areal_sc.agents.http import answer_of, decoded, key_in, read_body, refusing
from areal_sc.agents.journal import Claimed, EpisodeEnd, Record
from areal_sc.agents.keys import SessionKeys, SessionName
from areal_sc.agents.rows import Rewards
from areal_sc.agents.session import Session, given_up
from areal_sc.config.agent_settings import AgentsConfig
from areal_sc.errors import AgentError, WorkflowError
from areal_sc.rejection import RejectionKind
from areal_sc.user_code import EpisodeClock

EPISODES: Final = "/episodes"
ENDS: Final = ("reward", "reject")
CONFIRM: Final = "confirm"
CLAIM_S: Final = 10.0
"""A worker has so long for the answer to a claim, and so has the client to take it."""
UNCONFIRMED_S: Final = 2 * CLAIM_S
CLAIM_AGAIN_S: Final = 1.0
_MAX_REASON_CHARS: Final = 200
_ID: Final = re.compile(
    r"([a-z][a-z0-9_-]{0,31})\.(0|[1-9][0-9]{0,8})\.([0-9a-zA-Z]{1,32})\.(0|[1-9][0-9]{0,8})"
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
        written: what has become of it in an earlier life of the worker.
    """

    def __init__(
        self, name: SessionName, row: Any, session: Session, written: Sequence[Record] = ()
    ) -> None:
        self.name = name
        self.row = row
        self.session = session
        self._claimed = asyncio.Event()
        self._confirmed = asyncio.Event()
        self._claim_key = ""
        self._claim_ends_s = 0.0
        self._end: asyncio.Future[Rewards] = asyncio.get_running_loop().create_future()
        for record in written:
            if isinstance(record, Claimed):
                self._note_claim(record)
            elif isinstance(record, EpisodeEnd):
                self._note_end(record)

    def can_be_claimed(self, claim_key: str) -> bool:
        """Whether a claim with this Idempotency-Key, "" for none, may have the episode."""
        return not self._claimed.is_set() or self.was_claimed_by(claim_key)

    def was_claimed_by(self, claim_key: str) -> bool:
        """Whether this repeats the claim that has the episode."""
        return claim_key != "" and claim_key == self._claim_key and not self._end.done()

    def claim(self, claim_key: str) -> None:
        """Gives the episode away, until `UNCONFIRMED_S` are over or `confirm` is called."""
        self.session.journal.begin(id_of(self.name))
        self._write_claim(Claimed(claim_key))

    def _write_claim(self, claimed: Claimed) -> None:
        self.session.journal.add(claimed)
        self._note_claim(claimed)

    def _note_claim(self, claimed: Claimed) -> None:
        self._claim_key = claimed.key
        self._claim_ends_s = asyncio.get_running_loop().time() + UNCONFIRMED_S
        self.session.note_activity()
        self._claimed.set()
        if claimed.is_confirmed:
            self._confirmed.set()

    def confirm(self) -> None:
        """Whoever has claimed it knows of it."""
        if self._claimed.is_set() and not self._confirmed.is_set():
            self._write_claim(Claimed(self._claim_key, is_confirmed=True))

    async def is_taken(self) -> bool:
        """Waits for a claim, and returns whether it was confirmed in time; if not, it is void."""
        now = asyncio.get_running_loop().time
        await self._claimed.wait()
        while not self._confirmed.is_set() and (left_s := self._claim_ends_s - now()) > 0:
            with suppress(TimeoutError):
                async with asyncio.timeout(left_s):
                    await self._confirmed.wait()
        if not self._confirmed.is_set():
            self._claimed.clear()
            self._claim_key = ""
            self.session.journal.end()
        return self._confirmed.is_set()

    def finish(self, end: EpisodeEnd) -> None:
        """Raises: CallRefused: 409: nobody has claimed the episode, or it has ended."""
        if not self._claimed.is_set() or self._end.done():
            raise _has_ended()
        self.session.journal.add(end)
        self._note_end(end)

    def _note_end(self, end: EpisodeEnd) -> None:
        if end.reward is None:
            told = f"rejected: {end.reason}"
            self._end.set_exception(AgentError(told, kind=RejectionKind.agent_rejected))
        else:
            self._end.set_result(end.reward)

    async def reward(self, config: AgentsConfig, clock: EpisodeClock) -> Rewards:
        """What an episode that is taken is rewarded with. Raises: AgentError: it is rejected."""
        end_s, idle_s = clock.now_s + config.episode_timeout_s, config.idle_timeout_s
        while not self._end.done():
            idle_left_s, left_s = idle_s - self.session.quiet_s, end_s - clock.now_s
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
            await clock.wait(self._end, min(left_s, idle_left_s))
        return self._end.result()


class Claims:
    """The offers of one life of a worker.

    Args:
        session_of: finds an open session, maybe after a moment, or raises CallRefused.
        rename: gives an open session another name; the one before has ended.
        clock: of the limits of episodes.
    """

    def __init__(
        self,
        keys: SessionKeys,
        session_of: Callable[[SessionName], Awaitable[Session]],
        rename: Callable[[SessionName], SessionName],
        clock: EpisodeClock,
    ) -> None:
        self._keys = keys
        self._session_of = session_of
        self._rename = rename
        self._clock = clock
        self._offers = dict[SessionName, Offer]()  # the oldest first

    def add_routes(self, router: web.UrlDispatcher) -> None:
        """Serves claims, too."""
        router.add_post(EPISODES, refusing(self._claim))
        for end in ENDS:
            router.add_post(f"{EPISODES}/{{id}}/{end}", refusing(getattr(self, f"_{end}")))
        router.add_post(f"{EPISODES}/{{id}}/{CONFIRM}", refusing(self._confirm))

    def confirm(self, name: SessionName) -> None:
        """The session is used, so whoever has claimed it knows of it."""
        if (offer := self._offers.get(name)) is not None:
            offer.confirm()

    async def wait(self, offer: Offer, config: AgentsConfig) -> Rewards:
        """Offers an episode until it ends, see `Offer.reward`."""
        self._offers[offer.name] = offer
        try:
            while not await offer.is_taken():
                del self._offers[offer.name]
                offer.name = self._rename(offer.name)
                self._offers[offer.name] = offer
            return await offer.reward(config, self._clock)
        except BaseException as error:
            why = given_up(error, offer.session.journal)
            offer.session.end(why)  # the session stays open for a moment
            raise
        finally:
            del self._offers[offer.name]

    async def _claim(self, request: web.Request) -> web.StreamResponse:
        check_run_key(self._keys, request)
        claim_key = request.headers.get("Idempotency-Key", "")
        fit = [it for it in self._offers.values() if it.can_be_claimed(claim_key)]
        if not fit:
            raise no_episode()
        offer = next((it for it in fit if it.was_claimed_by(claim_key)), fit[0])
        offer.claim(claim_key)
        key = self._keys.key_of(offer.name)
        return answer_of({"id": id_of(offer.name), "api_key": key, "row": offer.row})

    async def _confirm(self, request: web.Request) -> web.StreamResponse:
        return answer_of({"id": id_of((await self._named_in(request)).name)})

    async def _reward(self, request: web.Request) -> web.StreamResponse:
        offer, body = await self._ended_by(request, "reward")
        reward = _reward_in(body)
        try:
            offer.session.check_reward(reward)
        except WorkflowError as error:
            raise CallRefused(400, "invalid_reward", str(error)) from error
        offer.finish(EpisodeEnd(reward))
        return answer_of({"id": id_of(offer.name)})

    async def _reject(self, request: web.Request) -> web.StreamResponse:
        offer, body = await self._ended_by(request, "reason")
        reason = body.get("reason", "")
        if not isinstance(reason, str):
            raise CallRefused(400, "invalid_reason", f"reason: expected text, got {reason!r:.80}")
        offer.finish(EpisodeEnd(None, reason[:_MAX_REASON_CHARS] or "no reason was told"))
        return answer_of({"id": id_of(offer.name)})

    async def _ended_by(self, request: web.Request, field: str) -> tuple[Offer, dict[str, Any]]:
        """The episode that a request is about, and its body, whose only field is known."""
        check_run_key(self._keys, request)
        body = decoded(await read_body(request) or b"{}")
        if unknown := sorted(body.keys() - {field}):
            raise CallRefused(400, "unknown_field", f"expected {field} alone, got {unknown!r:.200}")
        return await self._named_in(request), body

    async def _named_in(self, request: web.Request) -> Offer:
        """The episode of a path, which is confirmed by that.

        Raises: CallRefused: 401, 404, 409 or 410: without the run's key, or not offered.
        """
        check_run_key(self._keys, request)
        name = named_by(request.match_info["id"])
        session = await self._session_of(name)  # it says how it ended
        if (offer := self._offers.get(name)) is None:
            session.check_open()
            raise _has_ended()
        offer.confirm()
        return offer


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
