"""What changed between the settings of a run and those it is resumed with."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import yaml

from areal_sc.config.fields import (
    IN_CODE,
    is_section,
    known_keys,
    schema_fields,
    shared_settings,
)
from areal_sc.config.loading.removed_settings import (
    FORMER_DEFAULTS,
    REMOVED,
    ROOM_FOR_REPEATS,
    actors,
    moved_to,
)
from areal_sc.config.schema import FURTHER_MODELS, GRPOConfig
from areal_sc.config.server_settings import ServerProgramConfig, ServersConfig
from areal_sc.errors import RunFolderError

FIXED = {
    "seed": "steps that are trained again would see other prompts",
    "actor.path": "the snapshot holds the weights of another model",
    "actor.dtype": "steps that are trained again would give other weights",
    **dict.fromkeys(
        ("actor.lora.rank", "actor.lora.alpha", "actor.lora.targets", "actor.lora.places"),
        "the snapshot holds another adapter, or none",
    ),
    "critic.path": "the snapshot holds the values of another critic, or none",
    "rollout.train_batch_groups": "admission counts in batches of this many groups",
    "rollout.group_size": "groups that are waiting have another number of answers",
}
"""Settings that a resumed run keeps, and why."""

FREE = (
    "run_dir",
    "resume",
    "overwrite",
    "dry_run",
    "total_steps",
    "evaluation",
    "trackers",
    "tracker_project",
    "records",
    "checkpoint",
    "scheduler",
    "transport",
    "actor.num_threads",
    "actor.lora.publish_merged",
    "rollout.num_threads",
    "weight_update",
    *(
        key
        for key, kind in known_keys(GRPOConfig).items()
        if is_section(kind) and issubclass(kind, ServersConfig | ServerProgramConfig)
    ),
)
"""Settings and sections that may change without a word: they do not touch what is learned."""

_FREE_ONCE = ("samples", "rollout.samples", *ROOM_FOR_REPEATS)
"""The same of an older areal_sc."""

_KEYS = frozenset(known_keys(GRPOConfig, also_shared=True))
_ELSEWHERE = shared_settings(GRPOConfig, may_differ=False)
_CONSTANTS = dict(FORMER_DEFAULTS) | {
    key: found.default
    for key, found, _ in schema_fields(GRPOConfig, also_without=True)
    if IN_CODE in found.metadata
}

_PRESENT_BY = {
    **dict.fromkeys(FURTHER_MODELS, "path"),
    "actor.lora": "rank",
}
"""Section -> the setting by which a run has what it is about."""

_UNREADABLE = (
    "the run's config.yaml cannot be read; move it out of the folder, and the same command goes on "
    "with its own settings"
)

ABSENT = "(not set)"
"""Stands for the value on a side that does not have the setting."""


def config_differences(old_text: str, new_text: str) -> dict[str, str]:
    """Setting -> `old -> new`, where two configurations given as YAML differ, in the new's order.

    Settings that there are no more are left out.

    Raises: RunFolderError: a text is not a YAML mapping.
    """
    old, new = settings_of(old_text), settings_of(new_text)
    gone = removed_of(old)
    keys = [*new, *(key for key in old if key not in gone)]
    pairs = {key: (old.get(key, ABSENT), new.get(key, ABSENT)) for key in keys}
    return {
        key: f"{before} -> {after}" for key, (before, after) in pairs.items() if before != after
    }


def removed_of(settings: Mapping[str, Any]) -> dict[str, bool]:
    """Setting that there is no more -> whether it said what holds now, too.

    Args: settings: of a run that an older areal_sc began.
    """
    places = {key: moved_to(key, _ELSEWHERE) or actors(key) for key in settings}
    return {
        key: settings[key] in (settings.get(place, ABSENT), _CONSTANTS.get(key, ABSENT))
        for key, place in places.items()
        if _is_in(key, REMOVED) or (key not in _KEYS and place)
    }


def settings_of(text: str) -> dict[str, Any]:
    """Setting, by its whole name -> value, of a configuration given as YAML.

    Raises: RunFolderError: the text is not a YAML mapping.
    """
    settings = dict(_leaves(_parse(text)))
    for key in [key for key in settings if key.endswith(".revision")]:  # a part of the path now
        revision, place = settings.pop(key), f"{key.removesuffix('.revision')}.path"
        if revision and place in settings:
            settings[place] = f"{settings[place]}@{revision}"
    for section, name in _PRESENT_BY.items():  # what is not there has no settings
        if not settings.get(f"{section}.{name}"):
            for key in [key for key in settings if key.startswith(f"{section}.")]:
                del settings[key]
    return settings


def check_resumable(old_text: str, new_text: str) -> list[str]:
    """Checks that a run begun with one configuration can go on with another.

    Returns: the changed settings that deserve a warning.
    Raises: RunFolderError: settings changed that cannot; lists them and the reasons.
    """
    differences = config_differences(old_text, new_text)
    refused = [
        f"\n  {key}: {change} ({FIXED[key]})" for key, change in differences.items() if key in FIXED
    ]
    if refused:
        raise RunFolderError(
            f"the run cannot be resumed, because settings changed that cannot:{''.join(refused)}\n"
            "set them back, or start another run (another run_dir, or --overwrite)"
        )
    warnings = [f"{key}: {change}" for key, change in differences.items() if not _is_in(key, FREE)]
    present = settings_of(old_text)
    removed = [
        f"{key}={present[key]}"
        for key, is_same in removed_of(dict(_leaves(_parse(old_text)))).items()
        if key in present and not (is_same or _is_in(key, (*FREE, *_FREE_ONCE)))
    ]
    if removed:
        warnings.append(
            f"settings that there are no more, and that count no more: {', '.join(removed)}"
        )
    return warnings


def _is_in(key: str, places: Iterable[str]) -> bool:
    """Whether a setting is one of these, or of a section among them."""
    return any(f"{key}.".startswith(f"{place}.") for place in places)


def _parse(text: str) -> dict[str, Any]:
    try:
        content = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError) as error:  # the second: of a date that is none
        raise RunFolderError(f"{_UNREADABLE}: {error}") from error
    if not isinstance(content, dict):
        raise RunFolderError(f"{_UNREADABLE}: it is not a mapping")
    return content


def _leaves(section: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in section.items():
        if isinstance(value, dict) and value:
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
