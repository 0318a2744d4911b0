"""The rows of a group's episodes, as they are sealed: their fields, and their metadata."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from areal_sc.metadata import Columns, RowMetadata, ShardMetadata
from areal_sc.rewards.base import PART_PREFIX
from areal_sc.token_fields import TRAJECTORY_FIELDS, Declared
from areal_sc.transport.packed_rows import PackedRows
from areal_sc.workers.calls import RunGroup
from areal_sc.workers.evaluated import version_spans
from areal_sc.workflows.base import Trajectory


def values_of(
    rows: Sequence[Trajectory], declared: Declared, *, are_shared: bool = False
) -> dict[str, list[Any]]:
    """Each field of checked rows: [n, *shape] of each, n tokens, the n of its value, or 1.

    Args:
        declared: the workflow's own fields.
        are_shared: what all rows of a group share is meant, and else all that is not.
    """
    names = () if are_shared else TRAJECTORY_FIELDS
    values = {name: [getattr(row, name) for row in rows] for name in names}
    for name, field in declared.items():
        if field.per_group == are_shared:
            is_one = not (field.per_token or field.has_own_length)
            values[name] = [row.fields[name][None if is_one else ...] for row in rows]
    return values


def columns_of(
    declared: Declared, shards: tuple[ShardMetadata, ...], shared: ShardMetadata | None
) -> tuple[Columns, ...]:
    """The columns of rows of a group.

    Args:
        shards: with what `values_of` gives.
        shared: with what they share; None: nothing.
    """
    own = {name: it.type_name for name, it in declared.items() if not it.per_group}
    columns = (Columns({**TRAJECTORY_FIELDS, **own}, shards),)
    if shared is None:
        return columns
    of_group = {name: it.type_name for name, it in declared.items() if it.per_group}
    return (*columns, Columns(of_group, (shared,)))


def problem_of_shared(
    episode: Sequence[Trajectory], others: Sequence[Trajectory], declared: Declared
) -> str:
    """Which value the rows of a group do not share; "" if they share all that they are to.

    Args:
        episode: checked rows that have just ended.
        others: of the group, that have ended before.
    """
    rows = (*others[:1], *episode)
    for name in (name for name, field in declared.items() if field.per_group):
        first = rows[0].fields[name]
        if not all(np.array_equal(row.fields[name], first) for row in rows):
            return (
                f"field {name!r} is one that all rows of a group share (per_group), and another "
                "row has given another value"
            )
    return ""


def rows_of(
    packed: PackedRows, metrics: Sequence[Mapping[str, float]], declared: Declared
) -> list[Trajectory]:
    """Sealed rows as the worker had them before: the inverse of `values_of` and `metadata_of`.

    Only what the episode has told for people, its output and its calls, is not there any more.

    Args:
        metrics: of each row.
    """
    assert packed.metadata is not None
    whole = {name: it.numpy() for name, it in packed.fields.items()}
    with_rows = {name: it.of_rows for name, it in packed.row_fields.items()}
    rows: list[Trajectory] = []
    for row, start, own_metrics in zip(packed.metadata, packed.starts, metrics, strict=True):
        own = {name: it[start : start + row.sequence_length] for name, it in whole.items()}
        values: Mapping[str, Any] = {name: own[name].copy() for name in TRAJECTORY_FIELDS}
        of_rows = {name: it[len(rows)].numpy() for name, it in with_rows.items()}
        fields = {name: (own | of_rows)[name].copy() for name in declared}
        rows.append(
            Trajectory(
                **values,
                reward=row.reward,
                metrics=dict(own_metrics),
                fields=fields,
                returns=row.returns,
                shaping=row.shaping,
                weights={name: weight for name, _, weight in row.reward_parts},
            )
        )
    return rows


def metadata_of(
    group: RunGroup, episodes: Mapping[int, Sequence[Trajectory]]
) -> tuple[RowMetadata, ...]:
    """What a controller knows of the rows of all episodes, which are given by their numbers."""
    return tuple(
        RowMetadata(
            group_id=group.group_id,
            attempt=group.attempt,
            sequence_length=len(row.input_ids),
            reward=float(row.reward),
            admitted_version=group.admitted_version,
            version_spans=version_spans(row),
            episode=number,
            row=place,
            returns=tuple((float(value), int(size)) for value, size in row.returns),
            shaping=float(row.shaping),
            reward_parts=_reward_parts(row),
            prompt_length=int(np.append(row.loss_mask, True).argmax()),
        )
        for number, episode in episodes.items()
        for place, row in enumerate(episode)
    )


def _reward_parts(row: Trajectory) -> tuple[tuple[str, float, float], ...]:
    """(name, value, weight) of each part of its reward."""
    names = (name for name in row.metrics if name.startswith(PART_PREFIX))
    own = ((name.removeprefix(PART_PREFIX), float(row.metrics[name])) for name in names)
    return tuple((name, value, float(row.weights.get(name, 0.0))) for name, value in own)
