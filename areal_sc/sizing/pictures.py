"""The fields that rollout workers add to all rows by themselves, from `config.json` alone."""

from __future__ import annotations

from msgspec.structs import replace

from areal_sc.config.schema import RolloutConfig
from areal_sc.hub import local_model
from areal_sc.sizing.model_folder import reads_pictures
from areal_sc.sizing.routed_experts import routes_field
from areal_sc.token_fields import PICTURES, Declared, TensorMetadata

MAX_ROW_BYTES = 1 << 22
"""Of the pictures of a row: each group that is generated has room for so many."""

KEPT_BYTES = 1 << 28
"""What a process keeps of the pictures that it has seen last: so much of their pixels, and so much
of their features."""


def fields_of_rows(
    own: Declared, of_engine: Declared, *, pictures_of_rows: bool
) -> dict[str, TensorMetadata]:
    """The fields that a workflow's rows have beyond those of all.

    Args:
        own: those of the workflow.
        of_engine: see `engine_fields`.
        pictures_of_rows: see `Workflow`.
    """
    found = {**own, **of_engine}
    if pictures_of_rows and PICTURES in found:
        found[PICTURES] = replace(found[PICTURES], per_row=True, per_group=False)
    return found


def engine_fields(config: RolloutConfig) -> dict[str, TensorMetadata]:
    """The routes of tokens, and the pictures of a group where the model reads any.

    Raises: ModelError: see `routes_field`.
    """
    fields = routes_field(config)
    if reads_pictures(local_model(config.path)):
        fields[PICTURES] = TensorMetadata((None,), "uint8", per_group=True, max_bytes=MAX_ROW_BYTES)
    return fields
