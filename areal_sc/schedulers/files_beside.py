"""The process that has the script's files for nodes that do not see its run folder.

It is started when the first such node joins, so most runs have none, and ends with the script.

consumes     nodes that join; new passes of workers, which void those before; the end of the process
waits for    its address, `START_LIMIT_S` at most
unblocked by the process, which is started again if it dies, at the address that nodes know
"""

from __future__ import annotations

import logging
import threading
from typing import Final

from msgspec import json

from areal_sc.errors import WorkerStartError
from areal_sc.run.run_folder import RunFolder
from areal_sc.schedulers.agent_process import ProcessBeside
from areal_sc.system.deaths import Deaths
from areal_sc.transport.security.passes import Passes
from areal_sc.transport.sockets.interface import Interface

START_LIMIT_S: Final = 60.0
END_LIMIT_S: Final = 5.0
MAX_DEATHS: Final = 5
_LOG: Final = "files"

logger = logging.getLogger(__name__)


class FilesBeside:
    """The process, as the script has it; used from several threads.

    Args:
        folder: of the run; the keys are in it when a node asks.
        interface: where nodes reach it.
        passes: of the run's workers.
    """

    def __init__(self, folder: RunFolder, interface: Interface, passes: Passes) -> None:
        self._folder = folder
        self._interface = interface
        self._passes = passes
        self._process: ProcessBeside | None = None
        self._address = ""
        self._one_starts = threading.Lock()
        self._closed = threading.Event()
        self._deaths = Deaths(MAX_DEATHS)

    def address(self) -> str:
        """Where it serves; starts it, if it does not. Blocks.

        Raises: WorkerStartError: it does not come up.
        """
        with self._one_starts:
            if self._closed.is_set():
                raise WorkerStartError("no files are served: the scheduler is closed")
            if self._process is None:
                self._start()
            return self._address

    def close(self) -> None:
        """Nobody needs files any more."""
        with self._one_starts:
            self._closed.set()
            self._end()

    def _watch(self, process: ProcessBeside) -> None:
        """Starts it again, if it dies."""
        how = process.how_it_ended()
        with self._one_starts:
            if self._closed.is_set() or self._process is not process:
                return
            logger.error("the process that serves files ended with %s", how)
            self._end()
            pause_s = self._deaths.note_death()
        while pause_s is not None and not self._closed.wait(pause_s):
            try:
                self.address()
                return
            except WorkerStartError as error:  # another process has its port, say
                logger.error("%s", error)
                pause_s = self._deaths.note_death()
        if pause_s is None:
            logger.error("files are served no more: nodes that share no folder wait in vain")

    def _start(self) -> None:
        path, port = self._folder.log_path(_LOG), self._address.rpartition(":")[2] or "0"
        words = str(self._folder.path), self._interface.bind, port
        process = self._process = ProcessBeside(path, "areal_sc.shipping.server", *words)

        def tell() -> None:
            """Which passes are void: before it serves, and whenever there are more."""
            process.tell(json.encode(self._passes.replaced))

        self._passes.on_replaced = tell
        tell()
        watch = threading.Thread(target=self._watch, args=(process,), name="files", daemon=True)
        try:
            line = process.heard("the process that serves files", START_LIMIT_S)
        except WorkerStartError:
            self._process = None
            raise
        self._address = self._interface.reachable(line.decode())
        watch.start()

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.end(END_LIMIT_S)
