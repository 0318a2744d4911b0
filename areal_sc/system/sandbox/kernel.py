"""What a sandbox asks of Linux, for which Python has no names. The standard library alone.

Namespaces and mounts: unshare(2), mount(2), pivot_root(2), mount_setattr(2). Files: landlock(7).
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import platform
import socket
import struct
from collections.abc import Iterable
from contextlib import suppress
from typing import Final

CLONE_NEWNS: Final = 0x00020000
CLONE_NEWIPC: Final = 0x08000000
CLONE_NEWUSER: Final = 0x10000000
CLONE_NEWPID: Final = 0x20000000
CLONE_NEWNET: Final = 0x40000000

MS_RDONLY: Final = 1
MS_NOSUID: Final = 2
MS_NODEV: Final = 4
MS_NOEXEC: Final = 8
MS_BIND: Final = 4096
MS_REC: Final = 16384
MS_PRIVATE: Final = 1 << 18

_MNT_DETACH: Final = 2
_PIVOT_ROOT: Final = {"x86_64": 155, "aarch64": 41}
_MOUNT_SETATTR: Final = 442
_CLOSE_RANGE: Final = 436
_AT_RECURSIVE: Final = 0x8000
_READ_ONLY_NOSUID_NODEV: Final = 1 | 2 | 4

_PR_SET_PDEATHSIG: Final = 1
_PR_SET_DUMPABLE: Final = 4
_PR_SET_KEEPCAPS: Final = 8
_PR_SET_CHILD_SUBREAPER: Final = 36
_PR_SET_NO_NEW_PRIVS: Final = 38
_PR_CAPBSET_DROP: Final = 24
_NUM_CAPABILITIES: Final = 64
_PR_CAP_AMBIENT: Final = 47
_PR_CAP_AMBIENT_RAISE: Final = 2
_CAPSET: Final = {"x86_64": 126, "aarch64": 91}
_CAPABILITIES_VERSION_3: Final = 0x20080522

CAP_DAC_READ_SEARCH: Final = 2
"""Reads files and folders whatever their permissions say."""

_SEALS: Final = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE

_SIOCSIFFLAGS: Final = 0x8914
_IFF_UP: Final = 1

_LANDLOCK_CREATE_RULESET: Final = 444
_LANDLOCK_ADD_RULE: Final = 445
_LANDLOCK_RESTRICT_SELF: Final = 446
_ASK_VERSION: Final = 1
_PATH_BENEATH: Final = 1
_EXECUTE, _READ_FILE, _READ_DIR = 1 << 0, 1 << 2, 1 << 3
_WRITE_FILE, _TRUNCATE, _IOCTL_DEV = 1 << 1, 1 << 14, 1 << 15
_ON_FILES: Final = _EXECUTE | _READ_FILE | _WRITE_FILE | _TRUNCATE | _IOCTL_DEV

READS: Final = _EXECUTE | _READ_FILE | _READ_DIR
DEVICE: Final = _READ_FILE | _WRITE_FILE
LISTS: Final = _READ_DIR
ALL: Final = (1 << 16) - 1
"""Every right over files."""

_libc = ctypes.CDLL(None, use_errno=True)


def machine() -> str:
    """`x86_64` or `aarch64`. Raises: OSError: it is another one, whose numbers are not known."""
    name = platform.machine()
    if name not in _PIVOT_ROOT:
        raise OSError(f"a sandbox is not known on {name} processors")
    return name


def _call(name: str, number: int, *arguments: int | bytes | None) -> int:
    words = (ctypes.c_long(word) if isinstance(word, int) else word for word in arguments)
    done = int(_libc.syscall(ctypes.c_long(number), *words))
    if done < 0:
        raise OSError(ctypes.get_errno(), f"{name}: {os.strerror(ctypes.get_errno())}")
    return done


def _checked(name: str, done: int) -> None:
    if done != 0:
        raise OSError(ctypes.get_errno(), f"{name}: {os.strerror(ctypes.get_errno())}")


def _prctl(name: str, *arguments: int) -> None:
    _checked(name, _libc.prctl(*map(ctypes.c_ulong, (*arguments, *[0] * (5 - len(arguments))))))


def unshare(flags: int) -> None:
    _checked("unshare", _libc.unshare(flags))


def mount(source: str, target: str, kind: str, flags: int, options: str = "") -> None:
    done = _libc.mount(
        source.encode(), target.encode(), kind.encode(), ctypes.c_ulong(flags), options.encode()
    )
    _checked(f"mount of {kind or source} at {target}", done)


def make_read_only(path: str, *, below_too: bool = True) -> None:
    """In a mount, and in those below it, nothing is written; devices and set-uid do not work."""
    attributes = struct.pack("QQQQ", _READ_ONLY_NOSUID_NODEV, 0, 0, 0)
    what = (-100, path.encode(), _AT_RECURSIVE * below_too, attributes, len(attributes))
    _call(f"mount_setattr of {path}", _MOUNT_SETATTR, *what)


def change_root(new: str, old: str) -> None:
    """Makes the mount `new` this process's root; what was its root is then at `old` in it."""
    _call("pivot_root", _PIVOT_ROOT[machine()], new.encode(), f"{new}{old}".encode())
    os.chdir("/")


def detach(path: str) -> None:
    _checked(f"umount of {path}", _libc.umount2(path.encode(), _MNT_DETACH))


def map_only(uid: int, gid: int) -> None:
    """A new user namespace gets this user and group, as what they are outside, and no other."""
    for name, content in (
        ("setgroups", "deny"),
        ("uid_map", f"{uid} {uid} 1"),
        ("gid_map", f"{gid} {gid} 1"),
    ):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(content)


def forbid_gains() -> None:
    """No program that this process executes has more rights than it has, set-uid ones neither."""
    _prctl("PR_SET_NO_NEW_PRIVS", _PR_SET_NO_NEW_PRIVS, 1)


def drop_capabilities(kept: int = 0) -> None:
    """Takes them from this process and what it executes; no program that it starts gains one.

    Args:
        kept: 0, or the number of one that stays.
    """
    forbid_gains()
    header, bits = struct.pack("II", _CAPABILITIES_VERSION_3, 0), 1 << kept if kept else 0
    _call("capset", _CAPSET[machine()], header, struct.pack("6I", bits, bits, bits, 0, 0, 0))
    if kept:
        _prctl("PR_CAP_AMBIENT", _PR_CAP_AMBIENT, _PR_CAP_AMBIENT_RAISE, kept)


def keep_capabilities(kept: Iterable[int]) -> None:
    """This process of root, and all that it executes, has no other capability than these."""
    kept = set(kept)
    for number in range(_NUM_CAPABILITIES):
        if number not in kept:
            with suppress(OSError):  # this kernel has fewer
                _prctl("PR_CAPBSET_DROP", _PR_CAPBSET_DROP, number)
    bits = sum(1 << number for number in kept)
    header, words = struct.pack("II", _CAPABILITIES_VERSION_3, 0), (bits & 0xFFFFFFFF, bits >> 32)
    data = b"".join(struct.pack("3I", word, word, 0) for word in words)
    _call("capset", _CAPSET[machine()], header, data)


def become_user(uid: int, gid: int) -> None:
    """Root becomes a user for good, in no further group; `drop_capabilities` has to follow."""
    _prctl("PR_SET_KEEPCAPS", _PR_SET_KEEPCAPS, 1)
    os.setgroups([])
    os.setresgid(gid, gid, gid)
    os.setresuid(uid, uid, uid)


def raise_loopback() -> None:
    """A new network namespace answers itself under 127.0.0.1."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        fcntl.ioctl(asked, _SIOCSIFFLAGS, struct.pack("16sH22x", b"lo", _IFF_UP))


def die_with_parent() -> None:
    _prctl("PR_SET_PDEATHSIG", _PR_SET_PDEATHSIG, 9)


def become_subreaper() -> None:
    _prctl("PR_SET_CHILD_SUBREAPER", _PR_SET_CHILD_SUBREAPER, 1)


def hide_memory() -> None:
    """No process of the same user looks into this one, or writes there."""
    _prctl("PR_SET_DUMPABLE", _PR_SET_DUMPABLE, 0)


def show_memory() -> None:
    """Takes `hide_memory`, and what becoming another user does, back."""
    _prctl("PR_SET_DUMPABLE", _PR_SET_DUMPABLE, 1)


def sealed_file(content: bytes) -> int:
    """A descriptor, which programs inherit, of a file that nobody can change."""
    fd = os.memfd_create("sealed", os.MFD_ALLOW_SEALING)
    with open(fd, "wb", closefd=False) as file:
        file.write(content)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
    os.lseek(fd, 0, os.SEEK_SET)
    return fd


def close_from(first_fd: int) -> None:
    """Closes this descriptor and all above it."""
    _call("close_range", _CLOSE_RANGE, first_fd, 0xFFFFFFFF, 0)


def landlock_version() -> int:
    """The kernel's; 0: it has none, or it is off."""
    try:
        return _call("landlock", _LANDLOCK_CREATE_RULESET, None, 0, _ASK_VERSION)
    except OSError:
        return 0


def allow_only(allowed: Iterable[tuple[str, int]], *, is_offline: bool = True) -> None:
    """Landlock: from now on this process and its descendants touch these paths alone.

    No process outside gets a signal of theirs, as far as the kernel knows of that (version 6).
    It needs `drop_capabilities` or root before.

    Args:
        allowed: path, and `READS`, `DEVICE`, `ALL` or a part; what cannot be found is left out.
        is_offline: no TCP (version 4), and no abstract unix sockets of others (version 6).
    """
    version = landlock_version()
    files = (1 << {1: 13, 2: 14, 3: 15, 4: 15}.get(version, 16)) - 1
    attributes = struct.pack("QQQ", files, *((0b11, 0b11) if is_offline else (0, 0b10)))
    size = 8 if version < 4 else 16 if version < 6 else 24
    ruleset = _call("landlock", _LANDLOCK_CREATE_RULESET, attributes[:size], size, 0)
    for path, rights in allowed:
        try:
            fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
        except (FileNotFoundError, PermissionError):
            continue
        if not os.path.isdir(path):
            rights &= _ON_FILES
        rule = struct.pack("=Qi", rights & files, fd)
        _call(f"landlock of {path}", _LANDLOCK_ADD_RULE, ruleset, _PATH_BENEATH, rule, 0)
        os.close(fd)
    _call("landlock", _LANDLOCK_RESTRICT_SELF, ruleset, 0)
    os.close(ruleset)
