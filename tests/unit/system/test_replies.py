"""Replies over a real socket pair: what is none of the process's counts for nothing."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator
from typing import NamedTuple

import pytest

from areal_sc.system import replies
from areal_sc.system.replies import Replies, ReplyReader, signed


class Ends(NamedTuple):
    """Both ends of a connection, whose key was sent, and who reads and writes there."""

    owner: socket.socket
    process: socket.socket
    reader: ReplyReader
    replies: Replies

    def read(self) -> list[list[object]]:
        self.reader.feed(self.owner.recv(1 << 20))
        return list(self.reader)


@pytest.fixture
def ends() -> Iterator[Ends]:
    owner, process = socket.socketpair()
    reader = ReplyReader()
    owner.sendall(reader.new_key())
    with owner, process:
        yield Ends(owner, process, reader, Replies(process))


def test_messages_come_as_they_were_sent_in_whatever_pieces(ends: Ends) -> None:
    told = ["value", 7, 0.1 + 0.2, None, "half a \ud83d", {"a": [True]}, "two\nlines"]
    for _ in range(2):
        ends.replies.send(*told)
    found = []
    for byte in ends.owner.recv(1 << 20):
        ends.reader.feed(bytes([byte]))
        found += list(ends.reader)
    assert found == [told, told]
    assert not ends.reader.is_forged


def test_a_message_of_before_the_key_is_read_without_one() -> None:
    reader = ReplyReader()
    reader.feed(signed(["ready", 1]))
    assert list(reader) == [["ready", 1]]
    reader.new_key()
    reader.feed(signed(["ready", 1]))
    assert list(reader) == []
    assert reader.is_forged


@pytest.mark.parametrize(
    "written",
    [
        json.dumps(["value", 1, 1.0]).encode() + b"\n",
        b"\x92\xa5value\xcb?\xf0\0\0\0\0\0\0",  # the same, as msgpack has it
        signed(["value", 1, 1.0]),
        signed(["value", 1, 1.0], b"another key"),
        b"no end of a line",
        b"\n\n\xff\x00" * 1000,
    ],
)
def test_what_others_write_counts_for_nothing(ends: Ends, written: bytes) -> None:
    ends.process.sendall(written)
    ends.replies.send("value", 1, 0.25)
    ends.process.sendall(written)
    ends.replies.send("value", 2, 0.5)
    assert ends.read() == [["value", 1, 0.25], ["value", 2, 0.5]]
    assert ends.reader.is_forged


def test_a_reply_that_was_changed_on_its_way_counts_for_nothing(ends: Ends) -> None:
    line = ends.replies.signed("value", 1, 0.25)
    ends.process.sendall(line.replace(b"0.25", b"1.00"))
    assert ends.read() == []
    assert ends.reader.is_forged


def test_a_line_without_an_end_is_given_up(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replies, "_MAX_LINE_BYTES", 1 << 10)
    ends.reader.feed(bytes(1 << 10))
    assert list(ends.reader) == []
    with pytest.raises(ConnectionResetError):
        ends.reader.feed(b"x")


def test_a_fork_has_no_connection_and_does_not_go_on(ends: Ends) -> None:
    number = ends.process.fileno()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            os.fstat(number)
        except OSError:
            code = 0
        if code:
            os._exit(code)
        ends.replies.end_if_forked()
        os._exit(2)
    assert os.waitpid(pid, 0)[1] == 0
    ends.replies.end_if_forked()
    ends.replies.send("value", 1, 0.25)
    assert ends.read() == [["value", 1, 0.25]]
