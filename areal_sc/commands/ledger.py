"""`ledger RUN_DIR`: what became of every group of a run, also while the run goes on."""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict
from typing import Final

from areal_sc.commands.arguments import add_run_dir
from areal_sc.controller.ledger.ledger_account import GroupAccount, RunAccount, read_account
from areal_sc.run.run_folder import RunFolder, check_is_folder
from areal_sc.system.json_lines import to_json

COMMAND: Final = dict(
    help="show what became of every group of a run",
    description="Shows for every group of a run by which step its rows were trained, which "
    "worker generated them under which policy versions, or why they were rejected; and in the "
    "end the totals, with rows that were trained twice or lost. The run may go on meanwhile.",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    add_run_dir(parser)
    parser.add_argument(
        "--json",
        action="store_true",
        help="one JSON object a line: those of the groups, then that of the run",
    )


def run(arguments: argparse.Namespace) -> None:
    """Raises: CommandError: there is no such folder. RunFolderError: its journal is damaged."""
    folder = arguments.run_dir.expanduser()
    check_is_folder(folder)

    def show(account: GroupAccount | RunAccount) -> None:
        if arguments.json:
            text = to_json(asdict(account)).decode()
        else:
            text = _of_group(account) if isinstance(account, GroupAccount) else _of_run(account)
        sys.stdout.write(text + "\n")

    account = read_account(RunFolder(folder).ledger, show)
    show(account)
    sys.stdout.flush()


def _of_group(group: GroupAccount) -> str:
    words = [f"group {group.group}: admitted at version {group.admitted_version}"]
    if group.worker:
        words.append(f"run by {group.worker}" + f" (attempt {group.attempt})" * (group.attempt > 0))
    if group.versions:
        first, last = group.versions
        versions = f"version {first}" if first == last else f"versions {first} to {last}"
        words.append(f"{_rows(group.num_rows)} of {versions}")
    match group.outcome:
        case "trained" if group.num_trained == group.num_rows:
            words.append(f"trained by step {group.step}")
        case "trained":
            words.append(f"{_rows(group.num_trained)} trained by step {group.step}")
        case "consumed":
            words.append(f"consumed by step {group.step}, not trained")
        case "rejected":
            words.append(f"rejected: {group.cause}")
        case state:
            words.append(state)
    if group.is_undone:
        words.append(f"undone, with its lineage {group.lineage}")
    return ", ".join(words)


def _of_run(account: RunAccount) -> str:
    totals = account.totals
    rejected = ", ".join(f"{cause} {count}" for cause, count in totals["rejected"].items())
    lines = [
        f"policy version {account.version}",
        f"groups: {totals['admitted']} admitted, {totals['consumed']} consumed, "
        f"{sum(totals['rejected'].values())} rejected" + f" ({rejected})" * bool(rejected),
        f"in flight: {totals['queued']} queued, {totals['running']} running, "
        f"{totals['finished']} finished",
        f"rows: {totals['rows_consumed']} consumed, {totals['rows_trained']} trained, "
        f"{totals['rows_trained_twice']} trained twice, {account.rows_lost} lost",
        f"journal: {account.num_bytes} bytes",
    ]
    for group, step in account.trained_again:
        lines.append(f"rows of group {group} were trained again by step {step}")
    for it in account.lineages if len(account.lineages) > 1 else ():
        line = f"lineage {it.lineage}: from version {it.begun_at} to version {it.version}"
        if it.counts_to < it.version:
            line += f", of which those after version {it.counts_to} were undone"
        lines.append(line)
    if account.num_undone:
        lines.append(f"{account.num_undone} groups were consumed, and then undone")
    if account.num_cut_bytes:
        lines.append(
            f"the last {account.num_cut_bytes} bytes are left out: a record is being written, or "
            "was cut short when the run ended"
        )
    return "\n".join(lines)


def _rows(number: int) -> str:
    return f"{number} row" + "s" * (number != 1)
