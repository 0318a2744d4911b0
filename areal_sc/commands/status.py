"""`status RUN_DIR`: how a run is, from any machine that sees its folder."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.table import Table
from rich.text import Text

from areal_sc.commands.arguments import add_run_dir
from areal_sc.quantities import short_duration
from areal_sc.run.run_folder import RunFolder
from areal_sc.run.run_status import RunStatus
from areal_sc.run.verdict import State, Verdict, steps_of, verdict
from areal_sc.system.json_lines import to_json

MAX_WORKERS: Final = 24
_STYLES: Final = {
    **dict.fromkeys((State.healthy, State.finished), "green"),
    **dict.fromkeys((State.waiting, State.paused), "yellow"),
}

COMMAND: Final = dict(
    help="show how a run is: who lives, what it does, and what it waits for",
    description="Shows how a run is: who lives, its step, who waits for what since when, the "
    "last restart and its cause, and how old each fact is. It reads the run folder only, so it "
    "works on any machine that sees the folder.",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    add_run_dir(parser)
    parser.add_argument("--json", action="store_true", help="one JSON object")


def run(arguments: argparse.Namespace) -> None:
    """Raises: CommandError: it is not the folder of a run."""
    now, folder = time.time(), RunFolder(arguments.run_dir)
    found = verdict(folder, now)
    snapshots = folder.snapshots()
    newest = snapshots[-1] if snapshots else None
    if arguments.json:
        told = asdict(found) | {"snapshot": newest and str(newest), "now": now}
        sys.stdout.write(to_json(told).decode() + "\n")
        return
    console = Console()
    console.print(Text.assemble((found.state, _STYLES.get(found.state, "red")), ": ", found.text))
    facts = Table.grid(padding=(0, 2))
    facts.add_column(style="bold", no_wrap=True)
    facts.add_column(overflow="fold")
    for name, text in _facts(found, newest, folder.agents_path, now):
        facts.add_row(name, Text(text))
    console.print(facts)
    if found.status is not None:
        _show_workers(console, found.status, now, have_ended=found.have_workers_ended)


def _facts(
    found: Verdict, newest: Path | None, agents_path: Path, now: float
) -> Iterator[tuple[str, str]]:
    def ago(at: float) -> str:
        return f"{short_duration(max(0.0, now - at))} ago"

    status = found.status
    if found.damage:
        yield "damaged", found.damage
    if status is not None:
        step, total = steps_of(status.roles)
        looked = min((role.looked for role in status.roles.values()), default=status.written)
        of = f" of {total}" if total else ""
        lineages = [role.lineage for role in status.roles.values() if role.lineage is not None]
        lineage = f", lineage {max(lineages)}" if lineages else ""
        yield "step", f"{step}{of}, policy version {step}{lineage}, as of {ago(looked)}"
        for phase in status.phases[-2:]:
            done = f": {phase.done} of {phase.total} {phase.unit}" if phase.total else ""
            yield "phase", f"{phase.name}{done}, begun {ago(phase.since)}"
        for said in status.roles.values():
            for wait in said.waits:
                since = short_duration(max(0.0, now - wait.since))
                yield "waits", f"{wait.who}: {wait.what}, since {since}"
            if said.num_open is not None:
                yield "groups", f"{said.num_open} open, {said.num_finished} finished"
            if said.agents_url:
                yield "agents", f"{said.agents_url}, by the key in {agents_path}"
        for tenant in status.tenants:
            yield (
                f"tenant {tenant.name}",
                f"{tenant.num_models} models, {tenant.num_resting} of them rest; "
                f"{tenant.num_waiting} requests wait, {tenant.num_answered} answered; "
                f"{short_duration(tenant.busy_s)} of the ranks",
            )
        if (answer := status.wishes.scale) is not None:
            outcome = f"refused: {answer.refusal}" if answer.refusal else "followed"
            yield "scale", f"{answer.num_workers} rollout workers, {outcome}"
        restarts = [role.restart for role in status.roles.values() if role.restart is not None]
        if restarts:
            last = max(restarts, key=lambda restart: restart.began)
            back = "not back yet"
            if last.ended is not None:
                back = f"back after {short_duration(last.ended - last.began)}"
            yield "restart", f"{last.unit}, {ago(last.began)}, {back}: {last.cause}"
    if newest is not None:
        yield "snapshot", f"{newest.name}, {ago(newest.stat().st_mtime)}"
    if status is not None:
        yield (
            "script",
            f"process {status.pid} on {status.host}, term {status.term}, started "
            f"{ago(status.began)}, wrote {ago(status.written)}",
        )
        agents = {a.incarnation: a for role in status.roles.values() for a in role.agents}
        for agent in agents.values():
            pid = found.agents.get(agent.incarnation, "not known")
            yield "agent", f"process {pid} on {agent.host}, heard {ago(agent.heard)}"


def _show_workers(console: Console, status: RunStatus, now: float, *, have_ended: bool) -> None:
    workers = [worker for role in status.roles.values() for worker in role.workers]
    if not workers:
        return
    shown = sorted(workers, key=lambda it: (it.state == "ready", -it.restarts))[:MAX_WORKERS]
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in ("worker", "state"):
        table.add_column(name, overflow="fold")
    for name in ("pid", "restarts", "heard"):
        table.add_column(name, justify="right", no_wrap=True)
    for name in ("host", "incarnation"):
        table.add_column(name, overflow="fold")
    for worker in shown:
        heard = short_duration(max(0.0, now - worker.heard))
        state = "ended" if have_ended else worker.state
        texts = (worker.name, state, f"{worker.pid}", f"{worker.restarts}", heard)
        table.add_row(*map(Text, (*texts, worker.host, worker.incarnation)))
    console.print(table)
    if len(shown) < len(workers):
        console.print(f"and {len(workers) - len(shown)} more; --json has all")
