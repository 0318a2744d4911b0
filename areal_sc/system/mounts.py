"""What kind of file system a path is on."""

from __future__ import annotations

from pathlib import Path
from typing import Final

_MOUNTS: Final = Path("/proc/self/mountinfo")
_NETWORK: Final = frozenset(
    (
        *("afs", "beegfs", "ceph", "cifs", "gfs2", "glusterfs", "gpfs", "lustre", "nfs", "nfs4"),
        *("ocfs2", "orangefs", "panfs", "pvfs2", "smb3", "smbfs", "wekafs"),
        *("fuse.ceph-fuse", "fuse.glusterfs", "fuse.gpfs", "fuse.juicefs", "fuse.s3fs"),
        *("fuse.sshfs", "fuse.dfuse", "fuse.goofys", "fuse.rclone"),
    )
)
"""Types of file systems that several machines have in common."""


def network_file_system(path: Path, mounts: Path = _MOUNTS) -> str:
    """Its type; "": the path is on a disk, or in the memory, of this machine.

    Args:
        path: it need not exist.
        mounts: what the kernel says of all mounts.
    """
    parts = path.expanduser().resolve().parts
    longest, found = 0, ""
    for line in mounts.read_text(errors="surrogateescape").splitlines():
        before, _, after = line.partition(" - ")
        point = Path(_unescaped(before.split(" ")[4])).parts
        # of two at one point the later one hides the other
        if point == parts[: len(point)] and len(point) >= longest:
            longest, found = len(point), after.split(" ")[0]
    return found if found in _NETWORK else ""


def _unescaped(text: str) -> str:
    for code in ("040", "011", "012", "134"):
        text = text.replace(f"\\{code}", chr(int(code, 8)))
    return text
