"""A group whose workers die again and again: whether it is to blame.

Whoever runs beside a group that kills its worker loses its run, too. So a group that was hit a few
times is a *suspect*, and suspects run one after the other: those that are innocent end, and the one
whose worker dies all the same is to blame.
"""

from __future__ import annotations

import asyncio
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import Final

from areal_sc.controller.ledger.group import Group
from areal_sc.errors import WorkerLost
from areal_sc.metadata import PromptReference
from areal_sc.rejection import Rejection, RejectionKind
from areal_sc.workers.calls import GroupAttempt, GroupReply, RejectedEpisodes

DEATHS_OF_A_SUSPECT: Final = 2
"""One death hits all groups of a worker, and running one after the other takes time."""

DEATHS_TO_BLAME: Final = 3
"""Consecutive deaths after which a suspect group is blamed; so many are hardly chance."""


class GroupDeaths:
    """The deaths that one group has met.

    Args:
        prompt: that the group is of.
        suspects: held by the suspect that runs.
    """

    def __init__(self, prompt: PromptReference, suspects: asyncio.Lock) -> None:
        self._prompt = prompt
        self._suspects = suspects
        self._num_deaths = 0

    @property
    def turn(self) -> AbstractAsyncContextManager[None]:
        """The group runs within; a suspect waits until no other one runs."""
        return self._suspects if self._num_deaths >= DEATHS_OF_A_SUSPECT else nullcontext()

    def note(self, death: WorkerLost) -> Rejection | None:
        """The group's worker died while it ran; returns why it is rejected, if it is to blame."""
        self._num_deaths += 1
        if self._num_deaths < DEATHS_OF_A_SUSPECT + DEATHS_TO_BLAME:
            return None
        return Rejection(
            RejectionKind.worker_died,
            f"its worker died {self._num_deaths} times in a row while it ran, {DEATHS_TO_BLAME} of "
            f"them while no other prompt was suspected; the last time: {death}",
            prompt_index=self._prompt.index,
            log=death.log_path or "",
        )


def rejected_reply(group: Group, rejection: Rejection, group_size: int) -> GroupReply:
    """Stands for the reply of a group that is to blame."""
    run = GroupAttempt(group.group_id, group.attempt)
    return GroupReply(run, rejected=(RejectedEpisodes(group_size, rejection),))
