"""Limits of containers, as trees of files that the kernel would show."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from areal_sc.system.cgroups import memory_left, num_cores

GIB = 1 << 30
JOB = "system.slice/slurmstepd.scope/job_7"
NO_LIMIT_OF_V1 = 9223372036854771712


def make_tree(root: Path, own: str, files: dict[str, str]) -> Path:
    """Files below `/sys/fs/cgroup`, for a process whose groups are `own`."""
    for name, text in {"proc/self/cgroup": own, **files}.items():
        path = root / (name if name.startswith("proc") else f"sys/fs/cgroup/{name}")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")
    return root


def memory(limit: str | int, used: int, cache: int = 0) -> dict[str, str]:
    stat = f"anon {used - cache}\nfile {cache}\ninactive_file {cache}\nactive_file 0"
    return {"memory.max": str(limit), "memory.current": str(used), "memory.stat": stat}


def below(group: str, files: dict[str, str]) -> dict[str, str]:
    return {f"{group}/{name}": text for name, text in files.items()}


MIXED_CACHE = "file 30\nshmem 10\ninactive_file 11\nactive_file 9\nslab_reclaimable 5"
"""`file` has what lies in /dev/shm, too, which only its writer can give back."""
JOB_LIMITS = {
    **memory(500 * GIB, 300 * GIB),
    **below(JOB, memory(40 * GIB, GIB)),
    **below(f"{JOB}/step_0", memory("max", GIB)),
    **below("system.slice/slurmstepd.scope/job_8", memory(GIB, GIB)),  # somebody else's
}


@pytest.mark.parametrize(
    ("own", "files", "left"),
    [
        ("/", {}, None),
        ("/", memory("max", GIB), None),
        ("/", memory(64 * GIB, 63 * GIB, cache=60 * GIB), 61 * GIB),  # page cache is free
        ("/", memory(100, 50) | {"memory.stat": MIXED_CACHE}, 75),
        ("/", memory(2 * GIB, 3 * GIB), 0),
        # above a soft limit the kernel slows the group down until nothing moves
        ("/", memory("max", GIB) | {"memory.high": str(4 * GIB)}, 3 * GIB),
        (f"/{JOB}/step_0", JOB_LIMITS, 39 * GIB),
        # a container sees its own group as the whole tree, and may be told its path on the host
        ("/docker/4f2a", memory(8 * GIB, GIB), 7 * GIB),
        ("/../../docker/4f2a", memory(8 * GIB, GIB), 7 * GIB),
        (
            "/docker/4f2a/train",
            memory(8 * GIB, GIB) | below("train", memory(4 * GIB, GIB)),
            3 * GIB,
        ),
    ],
)
def test_the_memory_that_all_groups_leave(
    tmp_path: Path, own: str, files: dict[str, str], left: int | None
) -> None:
    assert memory_left(make_tree(tmp_path, f"0::{own}", files)) == left


def test_version_1(tmp_path: Path) -> None:
    job = "memory/slurm/uid_1000/job_7"
    files = {
        "memory/memory.limit_in_bytes": str(NO_LIMIT_OF_V1),
        "memory/memory.usage_in_bytes": str(300 * GIB),
        f"{job}/memory.limit_in_bytes": str(32 * GIB),
        f"{job}/memory.usage_in_bytes": str(30 * GIB),
        f"{job}/memory.stat": f"inactive_file 0\ntotal_inactive_file {20 * GIB}\n"
        f"active_file 0\ntotal_active_file {6 * GIB}",
        "cpu,cpuacct/slurm/cpu.cfs_quota_us": "400000",
        "cpu,cpuacct/slurm/cpu.cfs_period_us": "100000",
        "cpu,cpuacct/slurm/job_7/cpu.cfs_quota_us": "-1",
        "cpu,cpuacct/slurm/job_7/cpu.cfs_period_us": "100000",
    }
    own = "12:memory:/slurm/uid_1000/job_7\n4:cpu,cpuacct:/slurm/job_7\n0::/"
    root = make_tree(tmp_path, own, files)
    assert memory_left(root) == 28 * GIB


@pytest.mark.parametrize(
    ("quota", "cores"),
    [("max 100000", 64), ("200000 100000", 2), ("150000 100000", 2), ("50000 100000", 1)],
)
def test_cores_of_a_quota(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quota: str, cores: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)))
    root = make_tree(tmp_path, "0::/", {"cpu.max": quota})
    assert num_cores(root) == cores


def test_cores_of_nested_quotas(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)))
    files = {f"{JOB}/cpu.max": "800000 100000", f"{JOB}/step_0/cpu.max": "max 100000"}
    root = make_tree(tmp_path, f"0::/{JOB}/step_0", files)
    assert num_cores(root) == 8
    version_1 = {"cpu/cpu.cfs_quota_us": "250000", "cpu/cpu.cfs_period_us": "50000"}
    assert num_cores(make_tree(tmp_path, f"2:cpu:/\n0::/{JOB}", version_1)) == 5
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3})
    assert num_cores(root) == 1
