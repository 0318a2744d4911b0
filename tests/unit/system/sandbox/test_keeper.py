"""What a keeper tells of a program that it could not begin."""

from __future__ import annotations

import marshal
import os
import socket
from collections.abc import Callable

from areal_sc.system.sandbox.keeper import keep
from areal_sc.system.sandbox.layers import Namespaces
from areal_sc.system.sandbox.program import LENGTH, Limits, packed


class DyingLayer(Namespaces):
    """Its process ends well, but before the program begins."""

    def begin(self, file_bytes: int) -> None:
        pass

    def start(self, become: Callable[[], None]) -> int:
        self._first = os.fork()
        if self._first == 0:
            os._exit(0)
        return self._first

    def exit_code(self, status: int) -> int:
        return os.waitstatus_to_exitcode(status)


def test_a_process_that_ends_before_the_program_is_no_verdict() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        request = {"source": "print(1)", "command": (), "files": {}, "stdin": b""}
        ours.sendall(packed({**request, "limits": vars(Limits())}))
        keep(theirs, DyingLayer(()))
        theirs.close()
        with ours.makefile("rb") as answer:
            told = answer.read()
    assert "before the program began" in marshal.loads(told[LENGTH.size :])["failed"]
