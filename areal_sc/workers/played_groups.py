"""A group that a rollout worker has played, as it is recorded. No torch."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Final

from areal_sc.records.recorded_rows import RecordedGroup, RecordedRejection
from areal_sc.records.recorder import PlayedGroup
from areal_sc.records.samples import shortened
from areal_sc.rejection import Rejection
from areal_sc.workers.calls import RunGroup
from areal_sc.workflows.base import Trajectory

MAX_PROMPT_CHARS: Final = 2000


def played_group(
    worker: str,
    group: RunGroup,
    prompt: str,
    began: float,
    episodes: Sequence[list[Trajectory] | Rejection],
) -> PlayedGroup:
    """What is recorded of it.

    Args:
        prompt: the row of the dataset, as text.
        began: Unix time in seconds.
        episodes: of the group, in the order of their numbers.
    """
    rejected: dict[str, list[Rejection]] = {}
    for episode in episodes:
        if isinstance(episode, Rejection):
            rejected.setdefault(episode.cause, []).append(episode)
    recorded = RecordedGroup(
        worker=worker,
        group=group.group_id,
        attempt=group.attempt,
        dataset=group.prompt.dataset,
        index=group.prompt.index,
        # what is no Unicode, as a file's name may be, has question marks
        prompt=shortened(prompt, MAX_PROMPT_CHARS).encode(errors="replace").decode(),
        admitted_version=group.admitted_version,
        began=began,
        took_s=time.time() - began,
        rejected=tuple(
            RecordedRejection(cause, same[0].message, len(same)) for cause, same in rejected.items()
        ),
    )
    rows = {number: it for number, it in enumerate(episodes) if not isinstance(it, Rejection)}
    return PlayedGroup(recorded, rows)
