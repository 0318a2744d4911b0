"""The steps of a run as columns of numbers, and its evaluations and events."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import msgspec

from areal_sc.page.followed_lines import FollowedLines
from areal_sc.records.metrics import StepMetrics
from areal_sc.records.metrics_log import History
from areal_sc.records.spans import RecordedSpan, script_spans

_SECTIONS: Final = ("workflow", "train", "rejected_episodes")
_LEFT_OUT: Final = "counters"


class MetricColumns:
    """Follows `metrics.jsonl`.

    Attributes:
        epoch: grows when steps that were told are gone: the run went back, or its file was
            replaced. Then all columns are to be asked for anew.
        history: what the records tell. A step that cannot be shown is not in it.
        spans: what the script did when, in steps that no longer count, too; another list once the
            file was replaced.
        events: in order, each with `after_step`; `num_abandoned` of one that went back is the
            number of steps that no longer count.
    """

    def __init__(self, path: Path) -> None:
        self._lines = FollowedLines(path, msgspec.json.Decoder(dict[str, Any]).decode)
        self._num_begun = 0
        self.epoch = 0
        self._begin_again()

    def _begin_again(self) -> None:
        self._num_begun = self._lines.num_begun
        self.epoch += 1
        self.history = History()
        self.events: list[dict[str, Any]] = []
        self.spans: list[RecordedSpan] = []
        self._times: list[float | None] = []

    @property
    def num_steps(self) -> int:
        return len(self.history.steps)

    def follow(self) -> None:
        """Reads what is new."""
        for record in self._lines.read_new():
            if self._num_begun != self._lines.num_begun:
                self._begin_again()
            self._add(record)
        if self._num_begun != self._lines.num_begun:  # the file is gone, or empty
            self._begin_again()

    def _add(self, record: dict[str, Any]) -> None:
        before = self.num_steps
        with suppress(ValueError):  # of a record without a time, say
            self.spans += script_spans(record)
        try:
            self.history.add(record)
            if self.num_steps > before:
                self.history.steps[-1].to_record()  # raises where something is no number
                self._times.append(record.get("time"))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            del self.history.steps[before:]
            self._lines.note_bad(f"is left out, as it is no record of a run's metrics: {error}")
            return
        if record["kind"] == "event":
            num_abandoned = before - self.num_steps
            if num_abandoned:
                self.epoch += 1
                del self._times[self.num_steps :]
                record = {**record, "num_abandoned": num_abandoned}
            last = self.history.steps[-1].step if self.history.steps else 0
            self.events.append({**record, "after_step": last})

    def since(self, epoch: int, first: int) -> dict[str, Any]:
        """What a page that knows `first` steps of an epoch does not know.

        Returns: `epoch`; `first`, of the steps that are told, from 0; `num_steps`; `columns`, name
            -> one value for each of these steps, None where it has none; `evaluations`; `events`;
            `damage`. The numbers of a section are called `train/NAME`, `workflow/NAME`,
            `rejected_episodes/CAUSE`.
        """
        first = min(max(first, 0), self.num_steps) if epoch == self.epoch else 0
        return {
            "epoch": self.epoch,
            "first": first,
            "num_steps": self.num_steps,
            "columns": {"time": self._times[first:], **_columns(self.history.steps[first:])},
            "evaluations": [result.to_record() for result in self.history.evaluations],
            "events": self.events,
            "damage": self._lines.damage,
        }


def _columns(steps: Sequence[StepMetrics]) -> dict[str, list[Any]]:
    if not steps:
        return {}
    names = steps[0].to_record().keys() - {*_SECTIONS, _LEFT_OUT}
    columns = {name: [getattr(step, name) for step in steps] for name in names}
    for section in _SECTIONS:
        numbers: list[Mapping[str, Any]] = [getattr(step, section) for step in steps]
        for name in dict.fromkeys(name for of_step in numbers for name in of_step):
            columns[f"{section}/{name}"] = [of_step.get(name) for of_step in numbers]
    return columns
