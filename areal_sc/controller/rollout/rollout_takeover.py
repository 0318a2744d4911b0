"""Rollout workers that an earlier start of the script has left: what they hold and do.

    a worker      runs the group's attempt, or keeps its reply     the run is taken over
    has ...       rows that the ledger needs                       they stay
                  finished episodes of open groups                 the next attempt gets them
                  runs, rows and replies that nobody needs         are given up, and swept
    has not ...   a run, or rows, that the ledger counts on        the group runs again

Nothing here changes what a further start would find, but for what nobody needs: so a death in the
middle of it is like one before it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from areal_sc.controller.ledger.group import Group, GroupState
from areal_sc.controller.ledger.ledger import Ledger
from areal_sc.controller.rollout.kept_episodes import KeptEpisodes
from areal_sc.controller.rollout.worker_set import NO_VERSION, RolloutWorkerState
from areal_sc.fleet.fleet import Fleet
from areal_sc.fleet.member import Member
from areal_sc.workers import calls
from areal_sc.workers.calls import DESCRIBE_ROLLOUT, GroupAttempt, RolloutDescription

logger = logging.getLogger(__name__)


@dataclass
class FoundRuns:
    """What is left of an earlier start.

    Attributes:
        owners: runs of queued and running groups -> who runs them, or keeps their reply.
        lost: runs whose rows the ledger needs, and which are gone.
        num_workers: that live.
        num_again: groups that run again, as who ran them, or held their rows, is gone.
    """

    owners: dict[GroupAttempt, RolloutWorkerState] = field(default_factory=dict)
    lost: list[GroupAttempt] = field(default_factory=list)
    num_workers: int = 0
    num_again: int = 0

    def reconcile(self, ledger: Ledger) -> list[tuple[Group, RolloutWorkerState]]:
        """Groups whose runs are to be joined, and where; the other open ones are queued then."""
        joined = []
        for group in list(ledger.unconsumed()):
            owner = self.owners.get(GroupAttempt(group.group_id, group.attempt))
            if owner is not None:
                if group.state is GroupState.queued:
                    ledger.start(group.group_id, owner.name)
                joined.append((group, owner))
            elif group.state is GroupState.running:
                ledger.requeue(group.group_id, "its worker is gone")
                self.num_again += 1
        return joined


async def find_runs(
    states: Sequence[RolloutWorkerState], fleet: Fleet, ledger: Ledger, kept: KeptEpisodes
) -> FoundRuns:
    """Asks the workers, and brings what is known of their stores and weights up to date."""
    open_states = (GroupState.queued, GroupState.running)
    wanted = {
        GroupAttempt(group.group_id, group.attempt)
        for group in ledger.unconsumed()
        if group.state in open_states
    }
    found = FoundRuns()
    shards = _shards_by_worker(ledger)
    for state in states:
        state.store.expect(shards.pop((state.name, state.member.worker.address), {}))
    found.lost += {run for held in shards.values() for run in held.values()}
    groups = tuple(sorted({run.group_id for run in wanted}))
    described = await _described(states, fleet, wanted, groups)
    new = [state.member for state in states if state.member not in described]
    adopted = await fleet.call_living(calls.ADOPTED_SHARDS, groups, new)
    for state in states:
        description, held = described.get(state.member), adopted.get(state.member)
        if not state.life.is_up:
            continue  # it has died, and its next life tells what it holds
        if description is not None:
            _take_over(state, description, wanted, ledger, found, kept)
        elif held is not None:
            runs = kept.note_held(state.name, state.member.worker.address, held)
            found.lost += state.store.note_adopted(runs)
            state.version = state.built_with if ledger.version == 0 else NO_VERSION
    return found


def _take_over(
    state: RolloutWorkerState,
    description: RolloutDescription,
    wanted: set[GroupAttempt],
    ledger: Ledger,
    found: FoundRuns,
    kept: KeptEpisodes,
) -> None:
    found.num_workers += 1
    present = {*description.going, *(ended.run for ended in description.ended)}
    taken = (wanted & present) - found.owners.keys()
    of_group: dict[int, list[str]] = {run.group_id: [] for run in taken}
    others = []
    for it in description.shards:  # the reply of a run will say which of its group's it names
        if it.episode is not None and it.episode.run.group_id in of_group:
            of_group[it.episode.run.group_id].append(it.shard_id)
        else:
            others.append(it)
    runs = kept.note_held(state.name, state.member.worker.address, others)
    found.lost += state.store.note_adopted(runs)
    for run in taken:
        state.store.begin(run, of_group[run.group_id])
        found.owners[run] = state
    state.version = NO_VERSION
    if description.policy is None:  # as it was built; every lineage begins from that model
        state.version = state.built_with if ledger.version == 0 else NO_VERSION
    elif description.policy[0] == ledger.lineage:
        state.version = description.policy[1]


async def _described(
    states: Sequence[RolloutWorkerState],
    fleet: Fleet,
    wanted: set[GroupAttempt],
    groups: tuple[int, ...],
) -> Mapping[Member, RolloutDescription]:
    """What the workers of before say, once they run only what is wanted. The lost are left out."""
    members = [state.member for state in states if state.member.is_adopted]
    described = await fleet.call_living(DESCRIBE_ROLLOUT, groups, members)
    strays = [
        (member, run)
        for member, description in described.items()
        for run in description.going
        if run not in wanted
    ]
    for member, run in strays:
        logger.info("worker=%s gives up group=%d, which nobody needs", member.name, run.group_id)
    await asyncio.gather(
        *(fleet.call_living(calls.GIVE_UP_GROUP, run, [member]) for member, run in strays)
    )
    await fleet.call_living(calls.RESUME, None, members)
    return await fleet.call_living(DESCRIBE_ROLLOUT, groups, members) if strays else described


def _shards_by_worker(ledger: Ledger) -> dict[tuple[str, str], dict[str, GroupAttempt]]:
    """The shards that the ledger needs, by name and address of the worker that holds them.

    A new life at another address cannot serve them under the old one.
    """
    held: dict[tuple[str, str], dict[str, GroupAttempt]] = {}
    for group in (*ledger.unconsumed(), *ledger.kept_groups(ledger.version)):
        for shard in group.batch.shards if group.batch else ():
            run = GroupAttempt(group.group_id, group.attempt)
            held.setdefault((shard.node_id, shard.node_addr), {})[shard.shard_id] = run
    return held
