"""The rows of a group's episodes, as they are sealed: their fields, and their metadata."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from areal_sc.metadata import Columns, RowMetadata, ShardMetadata
from areal_sc.rewards.base import PART_PREFIX
from areal_sc.token_fields import TRAJECTORY_FIELDS, Declared
from areal_sc.transport.packed_rows import PackedRows
from areal_sc.workers.calls import RunGroup
from areal_sc.workers.evaluated import version_spans
from areal_sc.workflows.base import Trajectory


def fields_of(rows: Sequence[Trajectory], declared: Declared) -> dict[str, torch.Tensor]:
    """Each field of checked rows: [T, *shape] over all of them, on the CPU.

    Of a field of rows it is what they give, one after the other. What groups share is not among
    them, see `shared_fields_of`.

    Args:
        declared: the workflow's own fields.
    """
    places = _places_of(rows, declared).items()
    return {name: torch.from_numpy(np.concatenate(its)) for name, its in places}


def lengths_of(rows: Sequence[Trajectory], declared: Declared) -> dict[str, tuple[int, ...]]:
    """How many places each row has in each of the fields that `fields_of` gives."""
    return {name: tuple(map(len, its)) for name, its in _places_of(rows, declared).items()}


def shared_fields_of(row: Trajectory, declared: Declared) -> dict[str, torch.Tensor]:
    """What all rows of the group share, of one of them; a shard of one row has it."""
    of_group = ((name, field) for name, field in declared.items() if field.per_group)
    own = {name: row.fields[name][None if not it.has_own_length else ...] for name, it in of_group}
    return {name: torch.from_numpy(np.array(values)) for name, values in own.items()}


def columns_of(
    declared: Declared, shards: tuple[ShardMetadata, ...], shared: ShardMetadata | None
) -> tuple[Columns, ...]:
    """The columns of rows of a group.

    Args:
        shards: with what `fields_of` gives.
        shared: with what `shared_fields_of` gives; None: nothing.
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
    """Sealed rows as the worker had them before: the inverse of `fields_of` and `metadata_of`.

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
        )
        for number, episode in episodes.items()
        for place, row in enumerate(episode)
    )


def _reward_parts(row: Trajectory) -> tuple[tuple[str, float, float], ...]:
    """(name, value, weight) of each part of its reward."""
    names = (name for name in row.metrics if name.startswith(PART_PREFIX))
    own = ((name.removeprefix(PART_PREFIX), float(row.metrics[name])) for name in names)
    return tuple((name, value, float(row.weights.get(name, 0.0))) for name, value in own)


def _places_of(rows: Sequence[Trajectory], declared: Declared) -> dict[str, list[Any]]:
    """[n, *shape] of each row: n tokens, the n of its value, or 1."""
    places = {name: [getattr(row, name) for row in rows] for name in TRAJECTORY_FIELDS}
    for name, field in declared.items():
        if not field.per_group:
            is_one = field.per_row and not field.has_own_length
            places[name] = [row.fields[name][None if is_one else ...] for row in rows]
    return places
