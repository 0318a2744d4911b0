"""The steps of a run as columns of numbers, and its evaluations and events."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from areal_sc.page.followed_lines import FollowedLines
from areal_sc.records.metrics_log import History

COUNTERS = "counters"

Column = list[float | str | None]


class MetricColumns:
    """Follows `metrics.jsonl`.

    Attributes:
        epoch: grows when steps that were told are gone: the run went back, or its file was
            replaced. Then all columns are to be asked for anew.
        history: what the records tell. A step that cannot be shown is not in it.
        columns: name -> one value a step; None where it has none. Numbers of a section are called
            `train/NAME`, `workflow/NAME`, `counters/NAME`, `rejected_episodes/CAUSE`.
        events: in order; `num_abandoned` of one that went back is the number of steps that
            no longer count.
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
        self.columns: dict[str, Column] = {}
        self.events: list[dict[str, Any]] = []

    @property
    def num_steps(self) -> int:
        return len(self.history.steps)

    @property
    def damage(self) -> list[str]:
        """What cannot be read, in sentences."""
        return self._lines.damage

    def follow(self) -> None:
        """Reads what is new."""
        for _, _, record in self._lines.read_new():
            if self._num_begun != self._lines.num_begun:
                self._begin_again()
            self._add(record)
        if self._num_begun != self._lines.num_begun:  # the file is gone, or empty
            self._begin_again()

    def _add(self, record: dict[str, Any]) -> None:
        before = self.num_steps
        try:
            self.history.add(record)
            if self.num_steps > before:
                numbers = _flat(self.history.steps[-1].to_record())
                numbers["time"] = record.get("time")
                self._append(numbers)
                return
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            del self.history.steps[before:]
            self._lines.note_bad(f"is left out, as it is no record of a run's metrics: {error}")
            return
        if record["kind"] == "event":
            num_abandoned = before - self.num_steps
            if num_abandoned:
                self.epoch += 1
                for column in self.columns.values():
                    del column[self.num_steps :]
                record = {**record, "num_abandoned": num_abandoned}
            self.events.append({**record, "after_step": self._last_step()})

    def _append(self, numbers: Mapping[str, Any]) -> None:
        index = self.num_steps - 1
        for name, value in numbers.items():
            column = self.columns.get(name)
            if column is None:
                column = self.columns[name] = [None] * index
            column.append(value)
        for column in self.columns.values():
            if len(column) == index:
                column.append(None)

    def _last_step(self) -> int:
        return self.history.steps[-1].step if self.history.steps else 0

    def since(self, epoch: int, first: int, *, with_counters: bool) -> dict[str, Any]:
        """What a page that knows `first` steps of an epoch does not know."""
        first = min(max(first, 0), self.num_steps) if epoch == self.epoch else 0
        return {
            "epoch": self.epoch,
            "first": first,
            "num_steps": self.num_steps,
            "columns": {
                name: column[first:]
                for name, column in self.columns.items()
                if with_counters or not name.startswith(f"{COUNTERS}/")
            },
            "evaluations": [result.to_record() for result in self.history.evaluations],
            "events": self.events,
            "damage": self.damage,
        }


def _flat(record: Mapping[str, Any]) -> dict[str, Any]:
    """Numbers and words by name, those of a section by `SECTION/NAME`."""
    flat: dict[str, Any] = {}
    for name, value in record.items():
        if isinstance(value, Mapping):
            flat |= {f"{name}/{key}": it for key, it in value.items() if _is_shown(it)}
        elif _is_shown(value):
            flat[name] = value
    return flat


def _is_shown(value: Any) -> bool:
    return value is None or isinstance(value, int | float | str)
