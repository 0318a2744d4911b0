"""What file system a path is on."""

from __future__ import annotations

from pathlib import Path

import pytest

from areal_sc.system.mounts import network_file_system

MOUNTS = r"""
22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw
23 22 0:5 / /home rw shared:2 - nfs4 server:/home rw
24 23 0:6 / /home/me/local rw - xfs /dev/sdb1 rw
25 22 0:7 / /a\040b rw shared:3 master:1 - lustre mgs:/fs rw
26 22 0:8 / /dev/shm rw - tmpfs tmpfs rw
27 22 0:9 / /over rw - nfs server:/x rw
28 27 0:10 / /over rw - tmpfs tmpfs rw
"""


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        *(("/", ""), ("/tmp/x", ""), ("/home", "nfs4"), ("/home/me/runs/1", "nfs4")),
        *(("/homes/me", ""), ("/home/me/local/x", ""), ("/a b/c", "lustre"), ("/over/x", "")),
    ],
)
def test_the_innermost_mount_counts(tmp_path: Path, path: str, kind: str) -> None:
    mounts = tmp_path / "mountinfo"
    mounts.write_text(MOUNTS.lstrip())
    assert network_file_system(Path(path), mounts) == kind


def test_the_memory_of_this_machine_is_no_network() -> None:
    assert network_file_system(Path("/dev/shm")) == ""
