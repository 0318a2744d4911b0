"""The rows of a group's episodes, as they are sealed: their fields, and their metadata."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from areal_sc.metadata import RowMetadata
from areal_sc.rewards.base import PART_PREFIX
from areal_sc.token_fields import TRAJECTORY_FIELDS, TensorMetadata
from areal_sc.transport.packed_rows import PackedRows
from areal_sc.workers.calls import RunGroup
from areal_sc.workers.evaluated import version_spans
from areal_sc.workflows.base import Trajectory


def fields_of(
    rows: Sequence[Trajectory], declared: Mapping[str, TensorMetadata]
) -> dict[str, torch.Tensor]:
    """Each field of checked rows: [T, *shape] over all of them, on the CPU.

    Args:
        declared: the workflow's own fields.
    """
    fields = {
        name: torch.from_numpy(np.concatenate([getattr(row, name) for row in rows]))
        for name in TRAJECTORY_FIELDS
    }
    for name, field in declared.items():
        values = [_of_tokens(row, name, field) for row in rows]
        fields[name] = torch.from_numpy(np.concatenate(values))
    return fields


def dtypes_of(declared: Mapping[str, TensorMetadata]) -> dict[str, str]:
    """The names of the types of what `fields_of` gives, in the same order."""
    return {**TRAJECTORY_FIELDS, **{name: it.type_name for name, it in declared.items()}}


def rows_of(
    packed: PackedRows,
    metrics: Sequence[Mapping[str, float]],
    declared: Mapping[str, TensorMetadata],
) -> list[Trajectory]:
    """Sealed rows as the worker had them before: the inverse of `fields_of` and `metadata_of`.

    Only what the episode has told for people, its output and its calls, is not there any more.

    Args:
        metrics: of each row.
    """
    assert packed.metadata is not None
    whole = {name: it.numpy() for name, it in packed.fields.items()}
    rows = []
    for row, start, own_metrics in zip(packed.metadata, packed.starts, metrics, strict=True):
        own = {name: it[start : start + row.sequence_length] for name, it in whole.items()}
        values: Mapping[str, Any] = {name: own[name].copy() for name in TRAJECTORY_FIELDS}
        fields = {name: own[name][0 if it.per_row else ...].copy() for name, it in declared.items()}
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


def _of_tokens(row: Trajectory, name: str, field: TensorMetadata) -> Any:
    """[T, *shape] of a checked row."""
    values = row.fields[name]
    return np.broadcast_to(values, (len(row.input_ids), *field.shape)) if field.per_row else values
