"""The rows of a group's episodes, as they are sealed: their fields, and their metadata."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from areal_sc.metadata import RowMetadata
from areal_sc.token_fields import TRAJECTORY_FIELDS, TensorMetadata
from areal_sc.transport.packed_rows import PackedRows
from areal_sc.workers.calls import RunGroup
from areal_sc.workers.evaluated import version_spans
from areal_sc.workflows.base import Trajectory


def fields_of(
    rows: Sequence[Trajectory], declared: Mapping[str, TensorMetadata]
) -> dict[str, torch.Tensor]:
    """Each field of checked rows: [T] over all of them, on the CPU.

    Args:
        declared: the workflow's own fields. One of several numbers a token has a column for each.
    """
    fields = {
        name: torch.from_numpy(np.concatenate([getattr(row, name) for row in rows]))
        for name in TRAJECTORY_FIELDS
    }
    for name, field in declared.items():
        values = np.concatenate([_of_tokens(row, name, field) for row in rows])
        columns = values.reshape(len(values), field.num_values).T
        for column, flat in zip(field.columns(name), columns, strict=True):
            fields[column] = torch.from_numpy(np.ascontiguousarray(flat))
    return fields


def dtypes_of(declared: Mapping[str, TensorMetadata]) -> dict[str, str]:
    """The names of the dtypes of what `fields_of` gives, in the same order."""
    columns = {name: it.dtype for own, it in declared.items() for name in it.columns(own)}
    return {**TRAJECTORY_FIELDS, **columns}


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
    whole = {name: it.numpy() for name, it in packed.joined().fields.items()}
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
        )
        for number, episode in episodes.items()
        for place, row in enumerate(episode)
    )


def _of_tokens(row: Trajectory, name: str, field: TensorMetadata) -> Any:
    """[T, *shape] of a checked row."""
    values = row.fields[name]
    return np.broadcast_to(values, (len(row.input_ids), *field.shape)) if field.per_row else values
