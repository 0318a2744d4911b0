"""What the rounds of a benchmark gave; numpy and torch are not needed, as in the roles."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

PROBE_S = 0.002


def percentiles(seconds: Sequence[float]) -> dict[str, float]:
    """{"p50_s", "p99_s"} of at least two latencies."""
    cuts = statistics.quantiles(seconds, n=100, method="inclusive")
    return {"p50_s": cuts[49], "p99_s": cuts[98]}


class LagProbe:
    """Measures by how much a short timer of the loop is late, and what was computed meanwhile."""

    def __init__(self) -> None:
        self.late_s: list[float] = []
        self.busy_s: list[float] = []

    def clear(self) -> None:
        self.late_s.clear()
        self.busy_s.clear()

    async def run(self) -> None:
        while True:
            began_s, busy_s = time.perf_counter(), time.thread_time()
            await asyncio.sleep(PROBE_S)
            self.late_s.append(time.perf_counter() - began_s - PROBE_S)
            self.busy_s.append(time.thread_time() - busy_s)


class Samples:
    """Values of several sides, one each round.

    A table is named by what it holds, its columns by cases (sizes, payloads), its rows by sides.
    """

    def __init__(self) -> None:
        self._tables: dict[str, dict[str, dict[str, list[float]]]] = {}

    def add(self, table: str, case: str, side: str, value: float) -> None:
        cases = self._tables.setdefault(table, {})
        cases.setdefault(case, defaultdict(list))[side].append(value)

    def cases(self, table: str) -> list[str]:
        return list(self._tables.get(table, {}))

    def median(self, table: str, case: str, side: str) -> float:
        return statistics.median(self._tables[table][case][side])

    def ratio(self, table: str, case: str, one: str, other: str) -> float:
        """`one` over `other`, median of the ratios of the rounds."""
        values = self._tables[table][case]
        pairs = zip(values[one], values[other], strict=True)
        return statistics.median(mine / theirs for mine, theirs in pairs)

    def has(self, table: str, case: str, side: str) -> bool:
        return bool(self._tables.get(table, {}).get(case, {}).get(side))

    def tables(
        self, labels: Mapping[str, str]
    ) -> Iterable[tuple[str, list[str], list[list[object]]]]:
        """Title, columns and rows of each table, medians of the rounds.

        Args:
            labels: of sides; others are shown by their own name.
        """
        for title, cases in self._tables.items():
            sides = dict.fromkeys(side for values in cases.values() for side in values)
            rows: list[list[object]] = [
                [
                    labels.get(side, side),
                    *(statistics.median(v[side]) if v.get(side) else "-" for v in cases.values()),
                ]
                for side in sides
            ]
            yield title, ["side", *cases], rows
