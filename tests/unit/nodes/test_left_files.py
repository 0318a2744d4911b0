"""Which files in shared memory are deleted after a server or a worker was killed."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
import time
from pathlib import Path

from areal_sc.nodes.worker_processes import delete_left_files
from areal_sc.transport.shards.memory_folder import SHARED_MEMORY

USER = """
import mmap, sys
kept = open(sys.argv[1], "r+b")
with open(sys.argv[2], "r+b") as file:
    mapped = mmap.mmap(file.fileno(), 0)
print("ready", flush=True)
sys.stdin.read()
"""

FILLER = """
import sys, torch
from areal_sc.engines.servers.weights import SharedBuckets
buckets = SharedBuckets()
buckets._fill([("weight", torch.ones(9))], 0)
print("ready", flush=True)
sys.stdin.read()
"""


def test_files_that_nobody_uses_any_more_are_deleted(tmp_path: Path) -> None:
    since_s = time.time() - 1.0
    opened, mapped, left, other = (
        tmp_path / name
        for name in ("sglang_loads_a.shm", "sglang_loads_b.shm", "sglang_loads_c.shm", "mine.shm")
    )
    for path in (opened, mapped, left, other):
        path.write_bytes(bytes(mmap.PAGESIZE))
    arguments = [sys.executable, "-c", USER, str(opened), str(mapped)]
    with subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as user:
        assert user.stdout
        assert user.stdout.readline() == b"ready\n"
        delete_left_files(time.time() + 1000.0, folder=tmp_path)
        assert left.exists(), "it was there before"
        delete_left_files(since_s, folder=tmp_path)
        assert sorted(tmp_path.iterdir()) == sorted([opened, mapped, other])
        user.kill()
    delete_left_files(since_s, folder=tmp_path)
    assert list(tmp_path.iterdir()) == [other]
    (tmp_path / "sglang_loads_d.shm").symlink_to(other)
    delete_left_files(since_s, folder=tmp_path)
    assert other.exists(), "a link is deleted, and not what it names"
    assert not os.path.lexists(tmp_path / "sglang_loads_d.shm")


def test_buckets_of_a_killed_worker_are_deleted() -> None:
    since_s = time.time() - 1.0
    arguments = [sys.executable, "-c", FILLER]
    with subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as worker:
        assert worker.stdout
        assert worker.stdout.readline() == b"ready\n"
        (bucket,) = SHARED_MEMORY.glob(f"torch_{worker.pid}_*")
        delete_left_files(since_s, [worker.pid])
        assert bucket.exists(), "the worker maps it"
        worker.kill()
    delete_left_files(since_s)
    assert bucket.exists(), "it may be another program's"
    delete_left_files(since_s, [worker.pid])
    assert not bucket.exists()
