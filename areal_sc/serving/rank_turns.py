"""Turns of the ranks: what the requests of several models want, computed together.

    a request's turn among its model's ──► a wish ──► a turn of the ranks ──► its result
                                             │
        scores    of all models that wish for them, in one forward pass
        a step    of all models that wish for one: each has its loss, its optimizer, its step
        a place   for a model that rests, whose wish waits; another one leaves its own
        the rest  one after the other: weights to a folder

The kinds alternate, and each model has at most one wish at a time. So no model waits for more than
one turn of each kind before its own, however much another one asks for.

What changes the ranks is in the journal before they are asked. A server that was killed repeats
these turns in their order, with the models that were in them: ranks that live join or skip what
they have done, and ranks that begin anew make it again.

consumes     wishes
waits for    the ranks, one turn after the other
unblocked by them; what ends the run ends all wishes
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from msgspec.structs import replace

from areal_sc.errors import ArealError
from areal_sc.serving.hosts import (
    RESTING,
    Host,
    LoadWanted,
    SaveWanted,
    ScoreWanted,
    StepWanted,
)
from areal_sc.serving.journal import (
    Entered,
    Failed,
    Left,
    Published,
    ServeJournal,
    Source,
    Stepped,
    Turn,
)
from areal_sc.serving.trained_model import TrainedModel
from areal_sc.serving.wire import RequestRefused

_IDLE_TURNS: Final = 32
"""A model that has wished for nothing for so long leaves its place to any other."""


@dataclass(eq=False)
class _TurnWish:
    model: TrainedModel
    request_id: str
    wanted: Any
    num_tokens: int
    done: asyncio.Future[Any] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )
    num_turns: int = 0  # that it has seen

    @property
    def place(self) -> int:
        assert self.model.place is not None, "models without a place have no turn"
        return self.model.place


class RankTurns:
    """Decides who is next, and asks the ranks.

    Args:
        past: turns of an earlier server, which come first, and numbers of those that failed.
        models: by their ids, also those that are no more.

    Attributes:
        busy_s: time of the ranks by tenant, which models that are computed together share by their
            tokens.
        num_rests: folders that were written for models to rest in, since the journal was.
        is_repeated: the turns of the earlier server are made.
    """

    def __init__(
        self,
        host: Host,
        journal: ServeJournal,
        past: Iterable[Turn | Failed],
        models: Mapping[str, TrainedModel],
    ) -> None:
        self.busy_s = defaultdict[str, float](float)
        self.num_rests = 0
        self.is_repeated = asyncio.Event()
        self._host = host
        self._journal = journal
        turns = list(past)
        failed = {turn.number for turn in turns if isinstance(turn, Failed)}
        self._past: list[Turn] = [
            turn for turn in turns if not isinstance(turn, Failed) and turn.number not in failed
        ]
        self._models = models
        self._number = 1 + max((turn.number for turn in turns), default=-1)
        self._asked: list[_TurnWish] = []
        self._placed: list[TrainedModel] = []  # who has waited longest for a turn first
        self._num_taken = 0  # turns in which ranks compute
        self._one_turn = asyncio.Lock()
        self._entered: dict[str, int] = {}  # by tenant, the last turn that gave it a place
        self._changed = asyncio.Event()
        # the next one first
        self._kinds = deque[Any]([SaveWanted | LoadWanted, ScoreWanted, StepWanted])

    async def ask(
        self,
        model: TrainedModel,
        number: int,
        wanted: ScoreWanted | StepWanted | SaveWanted | LoadWanted,
        num_tokens: int = 0,
    ) -> Any:
        """The result of what request `number` of a model wants; see there.

        Raises: what the ranks raise.
        """
        wish = _TurnWish(model, f"{model.model_id}:{number}", wanted, num_tokens)
        self._asked.append(wish)
        self._changed.set()
        try:
            return await wish.done
        finally:
            self._asked.remove(wish)

    @property
    def _wishes(self) -> list[_TurnWish]:
        return [wish for wish in self._asked if not wish.done.done()]

    @property
    def num_waiting(self) -> Counter[str]:
        """Wishes by tenant."""
        return Counter(wish.model.tenant for wish in self._wishes)

    async def forget(self, model: TrainedModel) -> None:
        """A model is no more: its place is free once the turn that it may be in has ended."""
        model.is_ended = True
        async with self._one_turn:
            self._drop_place(model)
            gone = RequestRefused("model_id: the model is no more")
            self._fail([wish for wish in self._wishes if wish.model is model], gone)

    def take_places(self, models: Sequence[tuple[TrainedModel, int]], version: int) -> int:
        """Models have the places that they had when the ranks were at a version.

        Where they begin anew since, each gets its weights from its source once more.

        Returns: how many versions they are behind those of the turns of the earlier server.
        """
        if self._host.goes_on:
            for model, place in models:
                model.place = place
                self._placed.append(model)
            return 0
        entered = [Entered(0, -1, model.model_id, place, model.source) for model, place in models]
        moved = [replace(turn, version=turn.version - version) for turn in self._past]
        self._past = [*entered, *moved]
        return version

    async def rest_in_place(self) -> None:
        """Each model's source is what its weights are now. Nobody wishes for anything meanwhile."""
        for model in self._placed:
            if model.is_changed:
                await self._rest(model, _resting())
        self.num_rests = 0

    async def _rest(self, model: TrainedModel, folder: str) -> None:
        assert model.place is not None, "a model that rests has rested already"
        rests = SaveWanted(folder, has_optimizer=True)
        await asyncio.to_thread(self._host.save, model.place, model, rests)
        rested = Source(f"{model.file_name}/{folder}", has_optimizer=True, rank=model.source.rank)
        self._take_source(model, rested)
        self.num_rests += 1

    async def run(self) -> None:
        """Takes turns until it is cancelled; an error ends it that is none of a request."""
        while True:
            has_taken = True
            while has_taken:
                async with self._one_turn:
                    has_taken = await (self._repeat() if self._past else self._take())
            if not self._past:
                self.is_repeated.set()
            await self._changed.wait()
            self._changed.clear()

    # Turns of an earlier server

    async def _repeat(self) -> bool:
        """The next one of them; False: it waits for requests that are not at their turn yet."""
        turn = self._past[0]
        by_id = {wish.request_id: wish for wish in self._wishes}
        match turn:
            case Stepped():
                ids = turn.request_ids
            case Left():
                ids = ()
            case _:
                ids = (turn.request_id,) if turn.request_id else ()
        if any(it not in by_id for it in ids):
            return False
        self._past.pop(0)
        wishes = [by_id[it] for it in ids]
        is_past = turn.version < self._host.version
        match turn:
            case Entered():
                # where versions are published, a new model begins at version 0 once more
                is_past = is_past or (self._host.publishes and bool(self._past))
                await self._enter(turn, wishes, is_past=is_past)
            case Left():
                await self._leave(turn)
            case Stepped():
                await self._step(turn, wishes, is_past=is_past)
            case Published():
                await self._save(wishes[0], is_past=is_past)
        return True

    # Turns of this one

    async def _take(self) -> bool:
        """The next turn; False: nobody wishes for one."""
        if not self._wishes:
            return False
        if await self._give_place():
            return True
        ready = [wish for wish in self._wishes if wish.model.place is not None]
        for kind in list(self._kinds):
            self._kinds.rotate(-1)
            if wishes := [wish for wish in ready if isinstance(wish.wanted, kind)]:
                break
        else:
            return False
        self._num_taken += 1
        for wish in self._wishes:
            wish.num_turns += 1
        if kind is ScoreWanted:
            await self._score(wishes)
        elif kind is StepWanted:
            await self._step(self._stepped(wishes), wishes)
        else:
            for wish in wishes:
                await self._serve_alone(wish)
        return True

    async def _give_place(self) -> bool:
        """Gives a model that rests a place, if it wishes for something, and there is one.

        Tenants take turns at this, whose models come in the order of their wishes.
        """
        homeless = [it for it in self._wishes if it.model.place is None]
        taken = {model.place for model in self._placed}
        free = next((it for it in range(self._host.num_places) if it not in taken), None)
        for wish in sorted(homeless, key=lambda it: self._entered.get(it.model.tenant, -1)):
            if free is not None:
                self._entered[wish.model.tenant] = self._number
                await self._load(wish, free)
                return True
            if (leaving := self._leaving(wish)) is not None:
                folder = _resting() if leaving.is_changed else ""
                await self._leave(self._write(Left(*self._next, leaving.model_id, folder)))
                return True
        return False

    def _leaving(self, homeless: _TurnWish) -> TrainedModel | None:
        """Who leaves its place to the model of a wish: of its own tenant, or of one that has more.

        That is the model that has had a turn the longest time ago, and wishes for nothing; where
        all do, and the other one has waited for two turns, one that has had a turn.
        """
        tenant = homeless.model.tenant
        held = Counter(model.tenant for model in self._placed)
        wishing = {wish.model for wish in self._wishes}
        idle = [model for model in self._placed if model not in wishing]
        for model in idle:
            if model.last_turn < self._num_taken - _IDLE_TURNS:
                return model
        has_few = 0 if held[tenant] == 0 else held[tenant] + 1
        theirs = [it for it in self._placed if it.tenant == tenant or held[it.tenant] > has_few]
        if homeless.num_turns >= 2:
            idle += [model for model in self._placed if model.has_had_turn and model in wishing]
        return next((model for model in idle if model in theirs), None)

    async def _load(self, wish: _TurnWish, place: int) -> None:
        """A model gets its weights at a place; a wish for them ends with that."""
        model, is_its = wish.model, isinstance(wish.wanted, LoadWanted)
        source, request_id = model.source, ""
        if is_its:
            source, request_id = wish.wanted.source, wish.request_id
        entered = self._write(Entered(*self._next, model.model_id, place, source, request_id))
        await self._enter(entered, [wish] if is_its else [])

    async def _serve_alone(self, wish: _TurnWish) -> None:
        if isinstance(wish.wanted, LoadWanted):
            await self._load(wish, wish.place)
            return
        if wish.wanted.is_shown and self._host.publishes:
            self._write(Published(*self._next, wish.request_id))
        await self._save(wish)

    @property
    def _next(self) -> tuple[int, int]:
        return self._host.version, self._number

    def _write(self, turn: Any) -> Any:
        self._journal.write(turn)
        self._number += 1
        return turn

    def _stepped(self, wishes: Sequence[_TurnWish]) -> Any:
        ids = tuple(wish.request_id for wish in wishes)
        return self._write(Stepped(*self._next, ids))

    # What a turn does

    def _drop_place(self, model: TrainedModel) -> None:
        model.place = None
        if model in self._placed:
            self._placed.remove(model)

    def _take_source(self, model: TrainedModel, source: Source) -> None:
        model.source, model.is_changed = source, False

    def _note_turn(self, wishes: Iterable[_TurnWish]) -> None:
        for model in (wish.model for wish in wishes):
            model.last_turn, model.has_had_turn = self._num_taken, True
            if model in self._placed:
                self._placed.remove(model)
                self._placed.append(model)

    def _end(self, wish: _TurnWish, result: Any) -> None:
        if not wish.done.done():
            wish.done.set_result(result)

    def _fail(self, wishes: Iterable[_TurnWish], error: Exception) -> None:
        for wish in wishes:
            if not wish.done.done():
                wish.done.set_exception(error)

    async def _on_ranks(self, wishes: Sequence[_TurnWish], call: Callable[[], Any]) -> Any:
        """What the ranks say. Raises: ArealError, RequestRefused: it is told to these wishes."""
        began = time.monotonic()
        try:
            return await asyncio.to_thread(call)
        finally:
            total = sum(wish.num_tokens for wish in wishes)
            for wish in wishes:
                share = wish.num_tokens / total if total else 1 / len(wishes)
                self.busy_s[wish.model.tenant] += (time.monotonic() - began) * share

    async def _enter(
        self, turn: Entered, wishes: Sequence[_TurnWish], *, is_past: bool = False
    ) -> None:
        model = self._models[turn.model_id]
        self._take_source(model, turn.source)
        model.place = turn.place
        model.last_turn, model.has_had_turn = self._num_taken, False
        if model not in self._placed:
            self._placed.append(model)
        asking = [it for it in self._wishes if it.model is model]
        try:
            if not is_past:
                await self._on_ranks(asking, lambda: self._host.enter(turn.place, turn.source))
        except ArealError as error:
            self._journal.write(Failed(turn.number))
            self._drop_place(model)
            self._fail(asking, error)
            return
        for wish in wishes:
            self._end(wish, None)

    async def _leave(self, turn: Left) -> None:
        """The place may have another model since; then the earlier server has written the
        folder."""
        model = self._models[turn.model_id]
        if turn.folder and model.place is not None:
            await self._rest(model, turn.folder)
        self._drop_place(model)

    async def _score(self, wishes: Sequence[_TurnWish]) -> None:
        rows = {wish.place: wish.wanted.rows for wish in wishes}
        try:
            scores = await self._on_ranks(wishes, lambda: self._host.score(rows))
        except ArealError as error:
            self._fail(wishes, error)
            return
        self._note_turn(wishes)
        for wish in wishes:
            self._end(wish, scores[wish.place])

    async def _step(
        self, turn: Stepped, wishes: Sequence[_TurnWish], *, is_past: bool = False
    ) -> None:
        """Where the ranks fail at what several models want, each gets a turn of its own."""
        steps = {wish.place: wish.wanted for wish in wishes}
        metrics: dict[int, dict[str, float]] = {}
        if not is_past:
            try:
                metrics = await self._on_ranks(wishes, lambda: self._host.step(steps))
            except ArealError as error:
                self._journal.write(Failed(turn.number))
                if len(wishes) == 1:
                    self._fail(wishes, error)
                else:
                    for wish in wishes:
                        await self._step(self._stepped([wish]), [wish])
                return
        self._note_turn(wishes)
        for wish in wishes:
            wish.model.is_changed = True
            self._end(wish, metrics.get(wish.place, {"lr": wish.wanted.optimizer.lr}))

    async def _save(self, wish: _TurnWish, *, is_past: bool = False) -> None:
        try:
            if not is_past:
                await self._on_ranks(
                    [wish], lambda: self._host.save(wish.place, wish.model, wish.wanted)
                )
        except ArealError as error:
            self._fail([wish], error)
        else:
            self._note_turn([wish])
            self._end(wish, None)


def _resting() -> str:
    return f"{RESTING}-{secrets.token_hex(8)}"
