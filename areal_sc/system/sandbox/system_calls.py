"""A seccomp filter: what a program in a sandbox may not ask of the kernel. Standard library alone.

Refused is what reaches beyond the program: sockets (socket pairs are streams alone, with buffers as
they are), other processes, namespaces and mounts, memory that no limit counts, and parts of the
kernel that programs do not need. Landlock knows nothing of some of these; mistakes in others have
opened namespaces.
"""

from __future__ import annotations

import ctypes
import os
import struct
from errno import ENOSYS, EPERM
from typing import Final

from areal_sc.system.sandbox.kernel import machine

_REFUSED: Final = {
    # name: number on x86_64, on aarch64; -1 where there is none
    "socket": (41, 198),
    "connect": (42, 203),
    "bind": (49, 200),
    "listen": (50, 201),
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "process_madvise": (440, 440),
    "process_mrelease": (448, 448),
    "kcmp": (312, 272),
    "pidfd_open": (434, 434),
    "pidfd_getfd": (438, 438),
    "pidfd_send_signal": (424, 424),
    "setpriority": (141, 140),
    "ioprio_set": (251, 30),
    "sched_setparam": (142, 118),
    "sched_setscheduler": (144, 119),
    "sched_setaffinity": (203, 122),
    "sched_setattr": (314, 274),
    "move_pages": (279, 239),
    "migrate_pages": (256, 238),
    "unshare": (272, 97),
    "setns": (308, 268),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "shmget": (29, 194),
    "shmat": (30, 196),
    "shmctl": (31, 195),
    "semget": (64, 190),
    "semop": (65, 193),
    "semtimedop": (220, 192),
    "semctl": (66, 191),
    "msgget": (68, 186),
    "msgsnd": (69, 189),
    "msgrcv": (70, 188),
    "msgctl": (71, 187),
    "mq_open": (240, 180),
    "mq_unlink": (241, 181),
    "inotify_init": (253, -1),
    "inotify_init1": (294, 26),
    "fanotify_init": (300, 262),
    "keyctl": (250, 219),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
    "io_setup": (206, 0),
    "setsockopt": (54, 208),
    "quotactl": (179, 60),
    "syslog": (103, 116),
    "acct": (163, 89),
}

_UNNOTICED: Final = {
    "chmod": (90, -1),
    "fchmod": (91, 52),
    "fchmodat": (268, 53),
    "fchmodat2": (452, 452),
    "chown": (92, -1),
    "fchown": (93, 55),
    "lchown": (94, -1),
    "fchownat": (260, 54),
    "utime": (132, -1),
    "utimes": (235, -1),
    "futimesat": (261, -1),
    "utimensat": (280, 88),
    "setxattr": (188, 5),
    "lsetxattr": (189, 6),
    "fsetxattr": (190, 7),
    "removexattr": (197, 14),
    "lremovexattr": (198, 15),
    "fremovexattr": (199, 16),
    "setxattrat": (463, 463),
    "removexattrat": (466, 466),
    "file_setattr": (469, 469),
}
"""What Landlock lets everybody do with files that it hides. Copies of files ask for it, so it seems
to be done."""

_SIGNALS: Final = {
    "kill": (62, 129),
    "tkill": (200, 130),
    "tgkill": (234, 131),
    "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240),
}

_AUDIT_ARCH: Final = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_X32: Final = 0x40000000
_NAMESPACES: Final = 0x7E020000
_CLONE: Final = (56, 220)
_CLONE3: Final = (435, 435)
_SOCKETPAIR: Final = (53, 199)
_SENDTO: Final = (44, 206)
_PRLIMIT: Final = (302, 261)
_PRCTL: Final = (157, 167)
_FCNTL: Final = (72, 25)
_IOCTL: Final = (16, 29)
_TRUNCATE: Final = (76, 45)
_PR_SET_DUMPABLE: Final = 4
_PR_SET_SECCOMP: Final = 22
_SECCOMP_MODE_FILTER: Final = 2
_AF_UNIX: Final = 1
_OWNERS_OF_FILES: Final = (8, 15, 1024)
"""F_SETOWN, F_SETOWN_EX: a signal to any process of the same user. F_SETLEASE: others, who open the
file, wait."""
_IOCTLS: Final = (0x5412, 0x8901, 0x8902)
"""TIOCSTI, FIOSETOWN, SIOCSPGRP: what a terminal reads, and signals again."""

_KILL: Final = 0x80000000
_ERRNO: Final = 0x00050000
_ALLOW: Final = 0x7FFF0000
_LD, _AND, _JEQ, _JGE, _JSET, _RET = 0x20, 0x54, 0x15, 0x35, 0x45, 0x06
_ARCH_AT: Final = 4
_ARGUMENTS_AT: Final = 16


_libc = ctypes.CDLL(None, use_errno=True)


class _FilterCode(ctypes.Structure):
    _fields_ = [("len", ctypes.c_ushort), ("filter", ctypes.c_char_p)]


class SystemCallFilter:
    """A filter that is made once, and put on many processes.

    Args:
        hides_files: Landlock does so, not a mount namespace: what Landlock lets through is caught.
        own_signals_alone: the kernel keeps no signals in: a process has them for itself alone.
        truncates: files are cut by name. Before Landlock 3, that reaches every file.
    """

    def __init__(
        self, *, hides_files: bool, own_signals_alone: bool = False, truncates: bool = True
    ) -> None:
        self._own_signals_alone = own_signals_alone
        self._code = _prologue()
        self._refuse(_CLONE3, ENOSYS)  # its flags are out of a filter's sight; libc then clones
        for numbers in _REFUSED.values():
            self._refuse(numbers, EPERM)
        if hides_files:
            for numbers in _UNNOTICED.values():
                self._refuse(numbers, 0)
        if not truncates:
            self._refuse(_TRUNCATE, EPERM)
        deny = _ins(_RET, _ERRNO | EPERM)
        self._when(_CLONE, 0, _ins(_JSET, _NAMESPACES, 0, 1) + deny)
        self._when(_SOCKETPAIR, 0, _ins(_JEQ, _AF_UNIX, 1, 0) + deny)
        self._when(_SOCKETPAIR, 1, _ins(_AND, 0xF) + _ins(_JEQ, 1, 1, 0) + deny)
        self._when(_PRLIMIT, 0, _ins(_JEQ, 0, 1, 0) + deny)
        shows = _ins(_LD, _ARGUMENTS_AT + 8) + _ins(_JEQ, 1, 1, 0)
        self._when(_PRCTL, 0, _ins(_JEQ, _PR_SET_DUMPABLE, 0, 3) + shows + deny)
        for half in (0, 4):  # an address may be given to the socket of a pair
            self._when(_SENDTO, 4, _ins(_JEQ, 0, 1, 0) + deny, half)
        for command in _OWNERS_OF_FILES:
            self._when(_FCNTL, 1, _ins(_JEQ, command, 0, 1) + deny)
        for command in _IOCTLS:
            self._when(_IOCTL, 1, _ins(_JEQ, command, 0, 1) + deny)

    def install(self) -> None:
        """On this process and its descendants, for good. It needs `drop_capabilities` before."""
        code = list(self._code)
        if self._own_signals_alone:
            deny = _ins(_JEQ, os.getpid(), 1, 0) + _ins(_RET, _ERRNO | EPERM)
            for numbers in _SIGNALS.values():
                code += _checked(numbers, 0, deny)
        _install(code)

    def _refuse(self, numbers: tuple[int, int], errno: int) -> None:
        if (number := _here(numbers)) >= 0:
            self._code += _ins(_JEQ, number, 0, 1) + _ins(_RET, _ERRNO | errno)

    def _when(
        self, numbers: tuple[int, int], argument: int, check: list[bytes], half: int = 0
    ) -> None:
        self._code += _checked(numbers, argument, check, half)


def refuse_network() -> None:
    """On this process and its descendants, for good: no socket but unix ones and pairs."""
    deny = _ins(_JEQ, _AF_UNIX, 1, 0) + _ins(_RET, _ERRNO | EPERM)
    rings = _ins(_JEQ, _here(_REFUSED["io_uring_setup"]), 0, 1) + _ins(_RET, _ERRNO | EPERM)
    _install([*_prologue(), *rings, *_checked(_REFUSED["socket"], 0, deny)])


def _prologue() -> list[bytes]:
    """Loads the number of the call; those of other architectures, and of x32, are refused."""
    code = _ins(_LD, _ARCH_AT) + _ins(_JEQ, _AUDIT_ARCH[machine()], 1, 0) + _ins(_RET, _KILL)
    code += _ins(_LD, 0)
    if machine() == "x86_64":
        code += _ins(_JGE, _X32, 0, 1) + _ins(_RET, _ERRNO | ENOSYS)
    return code


def _checked(
    numbers: tuple[int, int], argument: int, check: list[bytes], half: int = 0
) -> list[bytes]:
    """The check of one argument of a system call, which falls through if it has no answer."""
    body = [*_ins(_LD, _ARGUMENTS_AT + 8 * argument + half), *check, *_ins(_LD, 0)]
    return [*_ins(_JEQ, _here(numbers), 0, len(body)), *body]


def _here(numbers: tuple[int, int]) -> int:
    return numbers[machine() == "aarch64"]


def _install(code: list[bytes]) -> None:
    code = [*code, *_ins(_RET, _ALLOW)]
    program = _FilterCode(len(code), b"".join(code))
    if _libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.byref(program), 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"seccomp: {os.strerror(ctypes.get_errno())}")


def _ins(code: int, value: int, if_true: int = 0, if_false: int = 0) -> list[bytes]:
    """One instruction of BPF, in the order of this machine, which is little-endian."""
    return [struct.pack("=HBBI", code, if_true, if_false, value)]
