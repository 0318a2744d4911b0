"""When a worker is silent, and when it is lost for it; see `node_workers`."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Sequence
from typing import Final

from areal_sc.config.schema import SchedulerConfig
from areal_sc.fleet.agent_restarts import MAX_MISSED
from areal_sc.fleet.member import Member
from areal_sc.fleet.worker_life import Heard, Missed, Tell
from areal_sc.nodes.beats import BLOCKED_WARNING_S
from areal_sc.nodes.spec import Beat
from areal_sc.run.run_folder import RunFolder
from areal_sc.schedulers.base import Node

logger = logging.getLogger(__name__)

MANY_MISSED: Final = 2


class Silence:
    """Judges the workers of a role on a node."""

    def __init__(self, config: SchedulerConfig, role: str, node: Node, tell: Tell) -> None:
        self._config = config
        self._role = role
        self._node = node
        self._tell = tell

    def of_turn(self, member: Member, beat: Beat) -> str | None:
        """Why a worker is lost whose event loop does not turn; None: it is not."""
        # a beat tells of the turn that the one before has asked for
        asked_s = beat.turn_age_s - self._config.heartbeat_interval_s
        blocked_s, limit_s = asked_s - beat.beat_age_s, self._config.hung_after_s
        what = (
            f"event loop has not turned for {blocked_s:.0f} s, most likely because of a blocking "
            "call in a workflow"
        )
        if blocked_s > limit_s:
            return f"hangs: its {what} (its log says where)"
        is_blocked = blocked_s > BLOCKED_WARNING_S
        if is_blocked and not member.is_blocked:
            logger.warning(
                "worker=%s %s (its log %s says where); it is lost after %g s",
                member.name,
                what,
                RunFolder(self._config.run_dir).log_path(member.name),
                limit_s,
            )
        member.is_blocked = is_blocked
        return None

    def of_beats(self, living: Sequence[Member]) -> Iterator[tuple[Member, str]]:
        """Finds workers that are lost because their heartbeats are missing, and says why; also
        notes which ones fall silent, or are heard again."""
        interval_s = self._config.heartbeat_interval_s
        now_s = asyncio.get_running_loop().time()
        for member in living:
            is_late = member.beat_s < now_s - MANY_MISSED * interval_s
            if member.is_silent != (is_late or member.is_blocked):
                event = Heard if member.is_silent else Missed
                self._tell(event(member.life.unit, member.worker.incarnation))
        lost = [member for member in living if member.beat_s < now_s - MAX_MISSED * interval_s]
        is_any_heard = len(lost) < len(living)
        # other roles have a watch of their own
        others = f"other {self._role} workers" if is_any_heard else f"no {self._role} worker"
        for member in lost:
            yield (
                member,
                f"missed {MAX_MISSED} heartbeats of {interval_s:g} s "
                f"({others} on {self._node.name} can be heard)",
            )
