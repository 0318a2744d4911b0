"""What changed between the settings of a run and those it is resumed with."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import yaml

from areal_sc.errors import RunFolderError

FIXED = {
    "seed": "steps that are trained again would see other prompts",
    "actor.path": "the snapshot holds the weights of another model",
    "actor.revision": "the snapshot holds the weights of another model",
    "actor.dtype": "steps that are trained again would give other weights",
    "rollout.train_batch_groups": "admission counts in batches of this many groups",
    "rollout.group_size": "groups that are waiting have another number of answers",
}
"""Settings that a resumed run keeps, and why."""

FREE = (
    "run_dir",
    "resume",
    "overwrite",
    "total_steps",
    "rollout.total_steps",
    "evaluation",
    "trackers",
    "tracker_project",
    "checkpoint",
    "scheduler",
    "transport",
    "actor.num_threads",
    "rollout.num_threads",
    "rollout.sglang",
    "sglang",
    "weight_update",
    "actor.weight_update",
    "rollout.weight_update",
)
"""Settings and sections that may change without a word: they do not touch what is learned."""

ABSENT = "(not set)"


@dataclass(frozen=True)
class Difference:
    """One setting with two values; `ABSENT` where a side does not have it."""

    key: str
    old: Any
    new: Any

    def __str__(self) -> str:
        return f"{self.key}: {self.old} -> {self.new}"


def config_differences(old_text: str, new_text: str) -> list[Difference]:
    """The settings that differ between two configurations given as YAML, in the order of the new.

    Raises: RunFolderError: a text is not a YAML mapping.
    """
    old, new = (dict(_leaves(_parse(text))) for text in (old_text, new_text))
    return [
        Difference(key, old.get(key, ABSENT), new.get(key, ABSENT))
        for key in dict.fromkeys([*new, *old])
        if old.get(key, ABSENT) != new.get(key, ABSENT)
    ]


def check_resumable(old_text: str, new_text: str) -> list[str]:
    """Checks that a run begun with one configuration can go on with another.

    Returns: the changed settings that deserve a warning.
    Raises: RunFolderError: settings changed that cannot; lists them and the reasons.
    """
    differences = config_differences(old_text, new_text)
    refused = [change for change in differences if change.key in FIXED]
    if refused:
        listed = "".join(f"\n  {change} ({FIXED[change.key]})" for change in refused)
        raise RunFolderError(
            f"the run cannot be resumed, because settings changed that cannot:{listed}\n"
            "set them back, or start another run (another run_dir, or --overwrite)"
        )
    return [str(change) for change in differences if not _is_free(change.key)]


def _is_free(key: str) -> bool:
    return any(key == free or key.startswith(f"{free}.") for free in FREE)


def _parse(text: str) -> dict[str, Any]:
    try:
        content = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise RunFolderError(f"the run's config.yaml cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise RunFolderError("the run's config.yaml cannot be read: it is not a mapping")
    return content


def _leaves(section: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in section.items():
        if isinstance(value, dict) and value:
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
