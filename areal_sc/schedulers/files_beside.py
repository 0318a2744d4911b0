"""The process that has the script's files for nodes that do not see its run folder.

It is started when the first such node joins, so most runs have none, and ends with the script.

consumes     nodes that join; new passes of workers, which void those before; the end of the process
waits for    its address, `START_LIMIT_S` at most
unblocked by the process, which is started again if it dies, at the address that nodes know
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
from contextlib import suppress
from typing import Final

from msgspec import json

from areal_sc.errors import WorkerStartError
from areal_sc.log import log_tail
from areal_sc.run.run_folder import RunFolder
from areal_sc.schedulers.agent_process import agent_environment, start_beside, wait_or_kill
from areal_sc.system.deaths import Deaths
from areal_sc.system.process import exit_text, heard_from
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
        self._process: subprocess.Popen[bytes] | None = None
        self._address = ""
        self._one_starts = threading.Lock()
        self._news = threading.Event()  # of passes, or of the end of the process
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

    def _watch(self, process: subprocess.Popen[bytes]) -> None:
        """Starts it again, if it dies."""
        process.wait()
        with self._one_starts:
            if self._closed.is_set() or self._process is not process:
                return
            logger.error(
                "the process that serves files ended with %s", exit_text(process.returncode)
            )
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

    def _tell(self, process: subprocess.Popen[bytes], news: threading.Event) -> None:
        """Which passes are void: before it serves, and whenever there are more; until its end.

        This thread alone has the standard input: who issues passes does not wait for the process.
        """
        told: dict[str, int] | None = None
        assert process.stdin is not None
        with suppress(BrokenPipeError), process.stdin as words:
            while self._process is process:
                if self._passes.replaced is not told:
                    told = self._passes.replaced
                    words.write(json.encode(told) + b"\n")
                    words.flush()
                news.wait()
                news.clear()

    def _start(self) -> None:
        path, port = self._folder.log_path(_LOG), self._address.rpartition(":")[2] or "0"
        words = str(self._folder.path), self._interface.bind, port
        command = [sys.executable, "-P", "-m", "areal_sc.shipping.server", *words]
        env = os.environ | agent_environment(os.environ)
        process = start_beside(command, path, env, subprocess.PIPE)
        self._process, self._news = process, threading.Event()
        self._passes.on_replaced = self._news.set
        told = process, self._news
        threading.Thread(target=self._tell, args=told, name="void passes", daemon=True).start()
        watch = threading.Thread(target=self._watch, args=(process,), name="files", daemon=True)
        assert process.stdout is not None
        line = heard_from(process.stdout, START_LIMIT_S).decode()
        if not line:
            self._end()
            what = f"the process that serves files did not come up within {START_LIMIT_S:g} s"
            raise WorkerStartError.with_log(what, path, log_tail(path))
        self._address = self._interface.reachable(line)
        watch.start()

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        assert process.stdout is not None
        self._news.set()
        wait_or_kill(process, END_LIMIT_S)
        process.stdout.close()
