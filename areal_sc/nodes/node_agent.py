"""The agent of a node: starts, watches and ends the workers there, and owns their shared memory.

    script ── RPC, CURVE ──────────────────────► agent ══ socket pair ══► fork server ──► workers
      controllers: LAUNCH, WATCH,                  ▲                                        │
                   STOP, STACKS                    └────────── one socket pair each ────────┘
                                                          WorkerReport once, then beats

    WorkerOrder ─► WorkerSpec ─► process ─► WorkerReport ─► Beat, Beat, … ─► EndedWorker

One process a node: `nodes.agent`. It has no secret of the run: it makes its own keys, obeys the
owner of the script's, and passes on what the script sends for each worker.

    consumes     calls of the controllers, reports and beats of workers, the ends of processes
    waits for    a call, a worker, or the end
    unblocked by `END_SIGNAL`; the death of its fork server; or no word of a controller for
                 `orphan_timeout_s`. As long as no workers run, it is enough that the script answers
                 when the agent joins again, or, on the script's machine, that the standard input is
                 open. If the script says that the agent was replaced, it ends at once

SIGTERM says that the node is taken away soon, or is sent to all processes of a run that is to end.
So an agent whose workers are in use tells the script, which ends them when it has saved what they
did; the second SIGTERM is the end, and so is the first one where no script is heard.
`SNAPSHOT_SIGNALS` ask for a snapshot. Workers, and what else an agent forks, obey none of
`FOR_SCRIPT`.

An agent deletes the run's shared memory and its keys when the run ends. One whose fork server has
died, while a script has the run's folder, leaves them to its successor, which the scheduler starts,
and which takes over what it finds.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
from collections.abc import Coroutine, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from areal_sc.config.transport_settings import MIN_ROOM_BYTES
from areal_sc.errors import ArealError, WorkerError, WorkerStartError
from areal_sc.ids import random_id
from areal_sc.log import keep_logs_bounded, take_warnings
from areal_sc.nodes import spec
from areal_sc.nodes.joining import Invitation, announce, place_of_this_process
from areal_sc.nodes.node_folder import NodeFolder
from areal_sc.nodes.script_heard import ScriptHeard, Wishes
from areal_sc.nodes.worker_processes import WorkerProcesses, delete_left_files
from areal_sc.run.agent_files import AgentFile
from areal_sc.run.run_folder import RunFolder
from areal_sc.system.file_lock import HeldLock
from areal_sc.system.fork_server import ForkServer
from areal_sc.transport.rpc.server import RpcServer
from areal_sc.transport.security.curve import CurveServer
from areal_sc.transport.security.keys import KeyPair
from areal_sc.transport.security.passes import KnownCallers
from areal_sc.transport.shards.memory_folder import (
    ArenaFolder,
    clean_leftovers,
    folder_on_node,
    memory_root,
)
from areal_sc.transport.sockets.interface import Interface, host_of

logger = logging.getLogger(__name__)


class Agent:
    """Serves until the end.

    Args:
        run_id: names this start of the script.
        controller_key: public key of those who may call it.
        keys: its own.
        fork_server: of this process.
        num_devices: CUDA devices of this node.
        node: its run folder, the script's or one in its place.
        invitation: to the script on another machine; None: the agent tells of itself by its output.
    """

    def __init__(
        self,
        run_id: str,
        controller_key: bytes,
        keys: KeyPair,
        fork_server: ForkServer,
        num_devices: int,
        node: NodeFolder,
        invitation: Invitation | None = None,
    ) -> None:
        self._run_id = run_id
        self._node = node
        self._config = config = node.config
        self._fork_server = fork_server
        self._num_devices = num_devices
        self._folder = RunFolder(config.run_dir)
        self._memory_root = memory_root(
            config.transport.shared_memory,
            self._folder.path,
            folder_on_node(config.node_folder),
            needed_bytes=config.transport.shared_memory_bytes or MIN_ROOM_BYTES,
        )
        self._keys = keys
        # a script that is started again is where this folder says, be it the run's or not
        address_path = self._folder.join_path
        self._invitation = invitation and replace(invitation, address_path=address_path)
        script_host = "" if invitation is None else host_of(invitation.address)
        self._interface = Interface.of(config.transport.bind, script_host)
        self._memory: ArenaFolder | None = None
        self._incarnation = random_id()
        self._server = RpcServer(
            [
                spec.DESCRIBE.served_by(self.describe),
                spec.LAUNCH.served_by(self.launch),
                spec.WATCH.served_by(self.watch),
                spec.STOP.served_by(self.stop),
                spec.STACKS.served_by(self.stacks),
                spec.STOP_RUN.served_by(self.stop_run),
                spec.END.served_by(self.end),
                spec.WELCOME.served_by(self.welcome),
            ],
            node_id="agent",
            incarnation=self._incarnation,
            bind=self._interface.bind,
            security=CurveServer(keys, KnownCallers(controller_key), "agent"),
        )
        term = self._server.newest_term
        self._processes = WorkerProcesses(fork_server, self._folder, term, node.shown)
        self._ended = asyncio.Event()
        self._wishes = Wishes(self._processes.note)
        is_far = invitation is not None
        living = self._processes.living
        self._script = ScriptHeard(config, self._wishes, lambda: bool(living), is_far=is_far)
        self._facts: spec.NodeFacts | None = None
        self._file: AgentFile | None = None
        self._file_lock: HeldLock | None = None  # as long as the process lives

    async def serve(self) -> None:
        """Tells of the node, and returns when all is ended and cleaned up.

        Raises: WorkerStartError: the fork server has died. ConfigError: the node's shared memory
            cannot be used.
        """
        ended = self._ended
        living = self._processes.living
        self._wishes.take_signals(lambda: bool(living) and self._script.is_lately, ended.set)
        limit_s = self._config.orphan_timeout_s
        watch = asyncio.create_task(_set_after(self._fork_server.is_gone, ended))
        logs = asyncio.create_task(
            keep_logs_bounded(self._folder.logs, self._config.max_log_bytes, but="controller")
        )
        try:
            await self._tell_of_node()
            while not ended.is_set() and self._script.needs_node:
                self._fork_server.go_on(limit_s)
                with suppress(TimeoutError):
                    await asyncio.wait_for(ended.wait(), min(1.0, limit_s / 10))
                if self._invitation is not None and await self._script.is_done(self._join):
                    break
            if self._fork_server.is_gone.is_set():
                raise WorkerStartError("the fork server is gone, and all workers with it")
        finally:
            watch.cancel()
            logs.cancel()
            has_successor = self._fork_server.is_gone.is_set() and self._folder.is_taken
            await self._server.close()
            await self._fork_server.close()
            self._clean_up(has_successor=has_successor)
            await self._node.close()

    async def describe(self, _: None) -> spec.NodeDescription:
        """What the node is, and what runs there."""
        self._script.note_contact()
        self._wishes.clear()  # whoever asked for it meant an earlier script
        await self._processes.forked()  # for an earlier script, which can end nobody any more
        assert self._facts is not None
        workers = [
            spec.LivingWorker(
                worker.order, worker.reported.result() if worker.reported.done() else None
            )
            for worker in self._processes.living.values()
        ]
        return spec.NodeDescription(
            self._facts, self._node.script_config, workers, spec.CALLS_FORMAT
        )

    async def welcome(self, welcome: spec.Welcome) -> None:
        """A further start of the script goes on with what runs here."""
        self._script.note_contact()
        self._node.note_welcome(welcome)

    def launch(self, launch: spec.Launch) -> Coroutine[Any, Any, spec.Launched]:
        """Starts workers; they all serve when it returns, or none is left.

        An earlier life of the same worker is killed first.

        Raises: StaleTerm: before they were started a later script has called, which would not know
            of them.
        """
        # its own at this moment; when the coroutine runs, it may be that of a later one
        return self._launch(launch, self._server.newest_term.number)

    async def _launch(self, launch: spec.Launch, term: int) -> spec.Launched:
        self._script.note_contact()
        started = time.monotonic()
        self._processes.note_replaced(launch.replaced)
        shipped = await self._node.bring_first(launch)
        orders = zip(launch.orders, launch.keys, strict=True)
        specs = [(self._worker_spec(order, shipped, term), keys) for order, keys in orders]
        try:
            workers = await self._processes.start(specs, launch.timeout_s)
        except WorkerError as error:
            log_path = self._node.shown(error.log_path or "")
            return spec.Launched([], str(error), log_path, list(error.log_tail))
        logger.info("workers=%d start_s=%.2f", len(workers), time.monotonic() - started)
        return spec.Launched(workers)

    async def watch(self, watch: spec.Watch) -> spec.News:
        """News of the workers of a role, at once when one has ended."""
        self._script.note_contact()
        processes = self._processes
        processes.note_replaced(watch.replaced)
        known = watch.num_ended, watch.num_wishes
        if known == (processes.num_ended, len(self._wishes)):
            with suppress(TimeoutError):
                async with asyncio.timeout(watch.hold_s):
                    await processes.end_noted.wait()
        prefix, now_ns = f"{watch.role}/", time.monotonic_ns()
        return spec.News(
            beats=[
                spec.Beat(
                    worker.order.name,
                    worker.order.incarnation,
                    (now_ns - worker.beat_ns) / 1e9,
                    (now_ns - worker.turn_ns) / 1e9,
                )
                for worker in processes.living.values()
                if worker.order.role == watch.role and worker.reported.done()
            ],
            ended=[e for e in processes.ended_since(watch.num_ended) if e.name.startswith(prefix)],
            num_ended=processes.num_ended,
            wishes=self._wishes.since(watch.num_wishes),
            num_wishes=len(self._wishes),
            warnings=take_warnings(),
        )

    async def stop(self, stop: spec.Stop) -> None:
        """Waits for the end of workers, and kills those that take too long."""
        self._script.note_contact()
        await self._processes.stop(stop.incarnations, stop.grace_s)

    async def stacks(self, names: Sequence[str]) -> list[spec.WorkerStacks]:
        """What workers do that do not get on; nothing of a name that is no worker's."""
        self._script.note_contact()
        return await self._processes.stacks(names)

    async def stop_run(self, _: None) -> bool:
        """The run is to end: its script is told by the next news, or is gone, and all ends here.

        Returns: whether a script is heard.
        """
        self._wishes.add(spec.Wish.stop)
        return self._script.is_lately

    async def end(self, _: None) -> None:
        """The script needs the node no more."""
        self._ended.set()

    async def _tell_of_node(self) -> None:
        """Opens the node's shared memory, and deletes what killed runs have left there."""
        # first, so that what an earlier agent of this run has left stays
        self._memory = ArenaFolder(self._memory_root, self._run_id)
        clean_leftovers(self._memory_root)
        token = self._memory.node_token()
        self._processes.begun_s = self._memory.begun_s
        facts = spec.NodeFacts(
            host=socket.gethostname(),
            token=token,
            num_devices=self._num_devices,
            memory_root=str(self._memory_root),
            address=self._interface.reachable(await self._server.start()),
            incarnation=self._incarnation,
            key=self._keys.public.decode(),
            shares_folder=self._node.is_shared,
            warnings=take_warnings(),
        )
        self._facts = facts
        place = ("", "", 0, 0) if self._invitation is None else place_of_this_process()
        self._file = AgentFile.of_this_process(facts.address, facts.incarnation, facts.key, place)
        self._file_lock = self._file.write(self._folder.path)
        if self._invitation is not None:
            await self._script.meet(self._join, self._ended)
        else:
            announce(facts)

    async def _join(self, limit_s: float) -> None:
        assert self._invitation is not None
        assert self._facts is not None
        self._node.note_welcome(await self._invitation.accept(self._keys, self._facts, limit_s))

    def _worker_spec(
        self, order: spec.WorkerOrder, shipped: spec.Shipped | None, term: int
    ) -> spec.WorkerSpec:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        names = visible.split(",") if visible else list(map(str, range(self._num_devices)))
        devices = ",".join(names[device].strip() for device in order.devices)
        transport = replace(self._config.transport, bind=self._interface.host)
        run = replace(self._config, transport=transport)
        return spec.WorkerSpec(
            order,
            run,
            self._run_id,
            str(self._memory_root),
            devices,
            replaced=self._processes.replaced,
            term=term,
            shipped=shipped,
        )

    def _clean_up(self, *, has_successor: bool) -> None:
        """Deletes what the run leaves, unless another script has its folder by now."""
        try:
            delete_left_files(self._processes.begun_s, self._processes.ended_pids)
            if has_successor:
                return
            if self._memory is not None:
                self._memory.remove()
            # last: until then a script that starts waits for this process to end
            self._folder.remove_keys(self._file)
        except (OSError, ArealError) as error:
            logger.warning("not all was deleted that the run left: %s", error)
        finally:
            if self._file is not None:
                self._file.path(self._folder.path).unlink(missing_ok=True)


async def _set_after(first: asyncio.Event, then: asyncio.Event) -> None:
    await first.wait()
    then.set()
