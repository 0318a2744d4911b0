"""What trackers are told of a run before its first step, with the name that it keeps for them."""

from __future__ import annotations

from collections.abc import Callable
from uuid import UUID, uuid4

import yaml

from areal_sc.config.loading.loader import config_text
from areal_sc.config.schema import GRPOConfig
from areal_sc.records.trackers.base import RunDescription
from areal_sc.run.run_folder import RunFolder


def run_description(
    folder: RunFolder, config: GRPOConfig, warn: Callable[[str], None]
) -> RunDescription:
    """The run as trackers know it; its name for them is in its folder from the first start on.

    Args:
        warn: is called when that name cannot be read, and there is a new one.
    """
    return RunDescription(
        id=_tracker_id(folder, warn),
        name=folder.path.name,
        folder=folder.path,
        project=config.tracker_project,
        settings=yaml.safe_load(config_text(config)),
    )


def _tracker_id(folder: RunFolder, warn: Callable[[str], None]) -> str:
    path = folder.tracker_id_path
    try:
        return UUID(hex=path.read_text()).hex
    except (OSError, ValueError) as error:
        if not isinstance(error, FileNotFoundError):
            warn(f"{path} is damaged ({error}): trackers begin a new run")
    name = uuid4().hex
    folder.write_atomic(path, name.encode())
    return name
