"""The account of a run whose processes were killed: the books against each other.

A part of `chaos.py`. `chaos_run.py` says what the books are and who writes them.
"""

from __future__ import annotations

import json
import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

SCRIPT_KINDS: Final = ("controller", "attaching", "segment", "paused")
"""What strikes the script alone; nobody else's work is to be done again for it."""

WORKERS: Final = ("areal:rollout/", "areal:train/", "areal:agent", "areal:forks")
"""How the processes are called that the death of a script must leave alone."""

RECOVERS_WITHIN_S: Final = 60.0
"""Where the books do not tell when the consequences of a kill were over."""


@dataclass
class Kill:
    """A signal that was sent.

    Attributes:
        alive: processes of the run before it, and how they are called.
        is_nested: it followed at once on another one.
    """

    kind: str
    time_s: float
    alive: Mapping[int, str]
    is_nested: bool
    pid: int

    @property
    def is_of_script(self) -> bool:
        return self.kind in SCRIPT_KINDS

    def told(self, books: Books) -> dict[str, Any]:
        """For a line of JSON."""
        return {
            "time": self.time_s,
            "kind": self.kind,
            "pid": self.pid,
            "is_nested": self.is_nested,
            "recovered_s": self.recovered_s(books),
        }

    def recovered_s(self, books: Books) -> float | None:
        """Until a new process did work of that kind; None: none did.

        Of a script: until the end of the first step whose last update began after the signal. An
        update that the ranks ended without a script is not one.
        """
        if self.is_of_script:
            after = (r["time"] for r in books.step_ends if r["began"] > self.time_s)
        else:
            book = {"train": books.trained, "reward": books.rewards}.get(self.kind, books.begun)
            late = (record for record in book if record["time"] > self.time_s)
            after = (record["time"] for record in late if record["pid"] not in self.alive)
        first = next(after, None)
        return None if first is None else first - self.time_s


@dataclass
class Books:
    """What the workers wrote down, in order of time."""

    begun: list[dict[str, Any]] = field(default_factory=list)
    sealed: list[dict[str, Any]] = field(default_factory=list)
    trained: list[dict[str, Any]] = field(default_factory=list)
    rewards: list[dict[str, Any]] = field(default_factory=list)

    @classmethod
    def read(cls, folder: Path) -> Books:
        books = cls()
        for name in ("begun", "sealed", "trained", "rewards"):
            records = getattr(books, name)
            for path in folder.glob(f"{name}-*.jsonl"):
                # the last line of a killed process may be torn
                records += [json.loads(x) for x in path.read_text().split("\n")[:-1]]
            records.sort(key=lambda record: record["time"])
        return books

    @property
    def step_ends(self) -> list[dict[str, Any]]:
        """Records of the last update of each step, repeated ones too."""
        last = max((record["update"] for record in self.trained), default=0)
        return [record for record in self.trained if record["update"] == last]

    def survivors(self) -> dict[int, list[dict[str, Any]]]:
        """The rows that the final model was trained on, by policy version.

        Of a version that was trained in several lineages the newest one counts, and of an update
        that was repeated the last time.
        """
        lineages: dict[int, int] = {}
        for record in self.trained:
            version = record["version"]
            lineages[version] = max(record["lineage"], lineages.get(version, 0))
        last: dict[tuple[int, int, int], list[dict[str, Any]]] = {}
        for record in self.trained:
            if record["lineage"] != lineages[record["version"]]:
                continue
            rows = last.setdefault((record["version"], record["update"], record["rank"]), [])
            if rows and (rows[0]["time"], rows[0]["pid"]) != (record["time"], record["pid"]):
                rows.clear()
            rows.append(record)
        versions: dict[int, list[dict[str, Any]]] = {}
        for (version, _, _), rows in last.items():
            versions.setdefault(version, []).extend(rows)
        return versions


def account(books: Books, kills: list[Kill], run_dir: Path, num_steps: int) -> dict[str, float]:
    """What became of every row, by the books alone, and how long it took to go on."""
    sealed = {_key(record): record for record in books.sealed}
    histories = books.survivors()
    rows = [record for version in histories.values() for record in version]
    versions_of_group: dict[int, set[int]] = {}
    for record in rows:
        versions_of_group.setdefault(record["group"], set()).add(record["version"])
    times = Counter(_key(record) for record in rows)
    twice = [key for key, n in times.items() if n > 1 or len(versions_of_group[key[0]]) > 1]
    unknown = [record for record in rows if sealed[_key(record)]["hash"] != record["hash"]]
    told = [json.loads(x) for x in (run_dir / "metrics.jsonl").read_text().splitlines()]
    num_expected = {r["step"] - 1: r["num_rows"] for r in told if r["kind"] == "step"}
    usual = statistics.mode(num_expected.values())
    lost = sum(
        max(0, num_expected.get(version, usual) - len(histories.get(version, ())))
        for version in range(num_steps)
    )
    false_zeros = [
        record
        for record in books.sealed
        if record["reward"] == 0.0 and _right_answer(record["text"])
    ]
    events = Counter(record["name"] for record in told if record["kind"] == "event")
    summary = json.loads((run_dir / "summary.json").read_text())
    return {
        "num_kills_in_recovery": sum(kill.is_nested for kill in kills),
        "num_steps": len(histories),
        "num_steps_without_record": num_steps - len(num_expected),
        "rows_trained": len(rows),
        "rows_lost": lost,
        "rows_trained_twice": len(twice),
        "rows_of_other_content": len(unknown),
        "false_zero_rewards": len(false_zeros),
        "accuracy_after": summary["accuracy_after"],
        "num_rows_trained_by_the_run": summary["num_rows_trained"],
        "num_reattached": events["reattached"],
        "num_gone_back": events["resumed"] + events["went_back"],
        "num_lineages": len({record["lineage"] for record in books.trained}),
        "groups_begun_again": len(list(begun_again(books, kills))),
        "workers_restarted_by_script": sum(len(pids) for _, pids in vanished(kills, books)),
    }


def begun_again(books: Books, kills: Sequence[Kill]) -> Iterator[dict[str, Any]]:
    """Groups that were begun again although the worker that had begun them lived on."""
    last_seen: dict[int, float] = {}
    for record in (*books.begun, *books.sealed):
        last_seen[record["pid"]] = max(record["time"], last_seen.get(record["pid"], 0.0))
    for kill in kills:
        for pid in kill.alive:
            last_seen[pid] = max(kill.time_s, last_seen.get(pid, 0.0))
    begun: dict[int, int] = {}  # group -> process
    for record in books.begun:
        group, pid = record["group"], record["pid"]
        if group >= 0 and group in begun and last_seen[begun[group]] >= record["time"]:
            yield record
        begun[group] = pid


def vanished(kills: Sequence[Kill], books: Books) -> Iterator[tuple[Kill, list[int]]]:
    """Workers that ended between a strike at the script and the next one, with no other cause."""
    disturbed_s = 0.0  # until when another kill's consequences may go on
    for kill, after in pairwise(kills):
        if not kill.is_of_script:
            recovered_s = kill.recovered_s(books)
            disturbed_s = max(disturbed_s, kill.time_s + (recovered_s or RECOVERS_WITHIN_S))
        elif kill.time_s > disturbed_s:
            workers = {p for p, name in kill.alive.items() if name.startswith(WORKERS)}
            if gone := sorted(workers - after.alive.keys()):
                yield kill, gone


def recovery_times(kind: str, kills: list[Kill], books: Books) -> dict[str, float]:
    """Of all kills of a kind, and of those that no other kill was close to."""
    all_s: list[float] = []
    alone_s: list[float] = []
    disturbed_s = 0.0
    for number, kill in enumerate(kills):
        recovered_s = kill.recovered_s(books)
        end_s = kill.time_s + (RECOVERS_WITHIN_S if recovered_s is None else recovered_s)
        is_alone = not kill.is_nested and kill.time_s > disturbed_s
        is_alone &= all(after.time_s > end_s for after in kills[number + 1 : number + 2])
        disturbed_s = max(disturbed_s, end_s)
        if kill.kind == kind and recovered_s is not None:
            all_s.append(recovered_s)
            alone_s += [recovered_s] if is_alone else []
    times = {f"{kind}_recovery_worst_s": max(all_s)} if all_s else {}
    if alone_s:
        times[f"{kind}_recovery_alone_median_s"] = statistics.median(alone_s)
        times[f"{kind}_recovery_alone_worst_s"] = max(alone_s)
    return times


def _key(record: Mapping[str, Any]) -> tuple[int, int, int]:
    return record["group"], record["attempt"], record["episode"]


def _right_answer(text: str) -> bool:
    prompt, _, answer = text.partition("=")
    return answer == "".join(sorted(prompt)) + "$"
