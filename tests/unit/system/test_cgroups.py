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


def test_no_limit(tmp_path: Path) -> None:
    assert memory_left(tmp_path) is None, "nothing is there"
    root = make_tree(tmp_path, "0::/", memory("max", GIB))
    assert memory_left(root) is None


def test_page_cache_is_free(tmp_path: Path) -> None:
    root = make_tree(tmp_path, "0::/", memory(64 * GIB, 63 * GIB, cache=60 * GIB))
    assert memory_left(root) == 61 * GIB


def test_each_kind_of_cache_counts_and_shared_memory_does_not(tmp_path: Path) -> None:
    """`file` has what lies in /dev/shm, too, which only its writer can give back."""
    stat = "file 30\nshmem 10\ninactive_file 11\nactive_file 9\nslab_reclaimable 5"
    root = make_tree(tmp_path, "0::/", memory(100, 50) | {"memory.stat": stat})
    assert memory_left(root) == 75


def test_nothing_is_left_where_more_is_used_than_allowed(tmp_path: Path) -> None:
    root = make_tree(tmp_path, "0::/", memory(2 * GIB, 3 * GIB))
    assert memory_left(root) == 0


def test_the_least_of_all_groups_above(tmp_path: Path) -> None:
    files = {
        **memory(500 * GIB, 300 * GIB),
        **below(JOB, memory(40 * GIB, GIB)),
        **below(f"{JOB}/step_0", memory("max", GIB)),
        **below("system.slice/slurmstepd.scope/job_8", memory(GIB, GIB)),  # somebody else's
    }
    root = make_tree(tmp_path, f"0::/{JOB}/step_0", files)
    assert memory_left(root) == 39 * GIB


def test_a_soft_limit_is_one(tmp_path: Path) -> None:
    """Above it the kernel slows the group down until nothing moves."""
    root = make_tree(tmp_path, "0::/", memory("max", GIB) | {"memory.high": str(4 * GIB)})
    assert memory_left(root) == 3 * GIB


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


@pytest.mark.parametrize("own", ["/docker/4f2a", "/", "/../../docker/4f2a"])
def test_a_container_sees_its_own_group_as_the_whole_tree(tmp_path: Path, own: str) -> None:
    """It may be told the path that this group has on the host."""
    root = make_tree(tmp_path, f"0::{own}", memory(8 * GIB, GIB))
    assert memory_left(root) == 7 * GIB


def test_a_group_within_a_container_that_is_told_paths_of_the_host(tmp_path: Path) -> None:
    files = memory(8 * GIB, GIB) | below("train", memory(4 * GIB, GIB))
    root = make_tree(tmp_path, "0::/docker/4f2a/train", files)
    assert memory_left(root) == 3 * GIB


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
