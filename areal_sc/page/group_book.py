"""What became of every group of a run, and the life of one: from the ledger's journal.

The ledger numbers a step by the version that it begins from; the page by the one that it makes, as
`metrics.jsonl` does.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Set
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from areal_sc.controller.ledger.group_lives import read_lives
from areal_sc.controller.ledger.ledger_account import GroupAccount, RunAccount, read_account
from areal_sc.errors import RunFolderError
from areal_sc.page.row_index import Fate
from areal_sc.page.stamps import Stamp, stamp_of
from areal_sc.system.disk import Disk

MAX_GROUPS: Final = 500
"""Groups of one answer."""

_REST: Final = 10.0
"""A journal that grows is read again after so many times as long as its reading took."""


@dataclass(frozen=True)
class GroupQuery:
    """Which groups are asked for; "" and None: any.

    Attributes:
        outcome: see `GroupAccount`; also `undone`.
        cause: of a rejection.
        worker: the one that ran it last.
        step: the one that consumed it.
    """

    outcome: str = ""
    cause: str = ""
    worker: str = ""
    step: int | None = None
    group: int | None = None

    def fits(self, account: GroupAccount) -> bool:
        outcome = "undone" if account.is_undone else account.outcome
        return (
            self.outcome in ("", outcome)
            and self.cause in ("", account.cause)
            and self.worker in ("", account.worker)
            and self.step in (None, _made_version(account.step))
            and self.group in (None, account.group)
        )


class GroupBook:
    """Reads the journal of a run when it is asked for, at most so often as that is cheap.

    Attributes:
        num_readings: how often it was read.
    """

    def __init__(self, ledger: Path) -> None:
        self._ledger = ledger
        self._read_of: Stamp | None = None
        self._read_again_at = 0.0
        self._groups: list[GroupAccount] = []
        self._account: RunAccount | None = None
        self._failure = ""
        self.num_readings = 0

    def stamp(self) -> Stamp:
        """Changes when there is something new, and it is time to read it."""
        if self._read_of is not None and time.monotonic() < self._read_again_at:
            return self._read_of
        return stamp_of(self._ledger)

    def found(self, query: GroupQuery, at: int = 0, limit: int = 100) -> dict[str, Any]:
        """Some groups, the newest first, and the totals of the run.

        Args:
            at: place to go on from, among the groups that fit.
        Returns: `groups`; `next`, where to go on (None: nowhere); `num_fitting`; `outcomes`,
            `causes` and `workers` with their numbers of groups; `account`, of the whole run (None:
            the journal cannot be read to its end); `damage`.
        """
        self.follow()
        fitting = [account for account in self._groups if query.fits(account)]
        end = max(at, 0) + max(1, min(limit, MAX_GROUPS))
        outcomes = Counter("undone" if it.is_undone else it.outcome for it in self._groups)
        return {
            "groups": [_told(account) for account in fitting[max(at, 0) : end]],
            "next": end if end < len(fitting) else None,
            "num_fitting": len(fitting),
            "outcomes": outcomes,
            "causes": Counter(it.cause for it in self._groups if it.cause),
            "workers": Counter(it.worker for it in self._groups if it.worker),
            "account": None if self._account is None else asdict(self._account),
            "damage": [self._failure] if self._failure else [],
        }

    def fates(self) -> dict[tuple[int, int], Fate]:
        """(group, attempt) -> what became of it at the last reading: last attempts of groups."""
        # oldest first, and what was undone before what came in its place
        accounts = sorted(self._groups, key=lambda it: (not it.is_undone, it.lineage))
        return {
            (it.group, it.attempt): Fate(
                "undone" if it.is_undone else it.outcome, _made_version(it.step), it.cause
            )
            for it in accounts
        }

    def lives(self, groups: Set[int]) -> dict[int, dict[str, Any]]:
        """Group -> its `account`, and its `events` in order, of those groups that there are.

        Raises: RunFolderError: the journal cannot be read.
        """
        self.follow()
        accounts = {it.group: it for it in self._groups if it.group in groups}
        lives = read_lives(self._ledger, Disk(), accounts.keys()) if accounts else {}
        return {
            group: {"account": _told(account), "events": lives[group].events}
            for group, account in accounts.items()
        }

    def follow(self) -> None:
        """Reads the journal, if there is something new and it is time."""
        stamp = self.stamp()
        if stamp == self._read_of:
            return
        began = time.monotonic()
        self.num_readings += 1
        groups: list[GroupAccount] = []
        self._account, self._failure = None, ""
        try:
            self._account = read_account(self._ledger, groups.append)
        except RunFolderError as error:
            self._failure = str(error)
        except OSError as error:
            self._failure = f"{self._ledger} cannot be read: {error.strerror}"
        self._groups = sorted(groups, key=lambda it: it.group, reverse=True)
        self._read_of = stamp
        ended = time.monotonic()
        self._read_again_at = ended + _REST * (ended - began)


def _made_version(step: int) -> int | None:
    return None if step < 0 else step + 1


def _told(account: GroupAccount) -> dict[str, Any]:
    return {**asdict(account), "step": _made_version(account.step)}
