"""What a process does with itself on Linux, and how it ended."""

from __future__ import annotations

import ctypes
import json
import logging
import math
import os
import re
import resource
import select
import signal
import socket
import sys
import time
from collections.abc import Iterator, Set
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from types import FrameType
from typing import IO, Final, Self

from areal_sc.errors import ConfigError
from areal_sc.system.waiting import polled

MAX_OPEN_FILES: Final = 1 << 20
"""Linux allows no more by default. A higher limit slows programs that try every descriptor."""

STOP_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
"""End a run: of Ctrl-C, a scheduler, a terminal that is gone, Ctrl-\\."""

SNAPSHOT_SIGNALS: Final = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU)
"""Warn, each on some cluster, that a job's time is over soon: a snapshot, and the run goes on."""

FOR_SCRIPT: Final = (*STOP_SIGNALS, *SNAPSHOT_SIGNALS)
"""Signals that are the script's to answer, also where they are sent to all processes of its run: by
systemd, supervisord, a cluster, or a closed terminal."""

END_SIGNAL: Final = signal.SIGRTMIN
"""By this a script ends its agent. Nobody else sends it."""

_SCRIPT: Final = "AREAL_SC_SCRIPT"
"""Environment variable of all that a script has started: the script's arguments, as the hexadecimal
digits of JSON."""

SAYS: Final = b"areal_sc says: "
"""Begins what a child tells: a `sitecustomize`, say, may print to the same standard output."""

_POLL_S: Final = 0.02
_PR_SET_PDEATHSIG: Final = 1
_MAX_NAME_CHARS: Final = 15

IS_STOPPED: Final = "is stopped (SIGSTOP)"
GONE: Final = "is gone"
_ENDED: Final = ("Z", "X")
_STATES: Final = {
    "T": IS_STOPPED,
    "t": IS_STOPPED,
    "D": "waits in the kernel, most likely for a disk or a device",
    "R": "computes",
    "S": "waits",
}

logger = logging.getLogger(__name__)


class OtherProcess:
    """A process of this machine that is no child of this one, by its id and when it began.

    So a signal reaches no process that has got its id since. (A descriptor of the process would
    say the same, but not every Python can open one.)
    """

    def __init__(self, pid: int, started: int) -> None:
        self.pid = pid
        self._started = started

    @classmethod
    def find(cls, pid: int, started: int) -> Self | None:
        """The process of this id that began then; None: it has ended.

        Args:
            started: as `start_ticks` gives it.
        """
        found = cls(pid, started)
        return None if found.has_ended else found

    @property
    def has_ended(self) -> bool:
        return start_ticks(self.pid) != self._started

    def wait(self, timeout_s: float = math.inf) -> bool:
        """Waits for its end; returns whether it has ended."""
        return polled(lambda: self.has_ended, timeout_s, _POLL_S)

    def send(self, signum: signal.Signals) -> None:
        """Sends a signal; nothing happens if it has ended."""
        with suppress(ProcessLookupError):
            if not self.has_ended:
                os.kill(self.pid, signum)

    def end(self, grace_s: float) -> None:
        """Ends an agent, and kills it if it takes longer. It has ended when this returns."""
        self.send(END_SIGNAL)
        if not self.wait(grace_s):
            self.send(signal.SIGKILL)
            self.wait()


def environment_of_workers() -> dict[str, str]:
    """What tells a process that this script has started it."""
    return {_SCRIPT: json.dumps(sys.argv).encode().hex()}  # schedulers read commas and quotes


def take_arguments_of_script() -> None:
    """Makes `sys.argv` the script's, which this process imports: it may read options at its top."""
    if arguments := os.environ.get(_SCRIPT):
        sys.argv[:] = json.loads(bytes.fromhex(arguments))


@contextmanager
def importing_as_worker() -> Iterator[None]:
    """Within it this process imports the script as a worker does: it can begin no run."""
    os.environ.update(environment_of_workers())
    try:
        yield
    finally:
        del os.environ[_SCRIPT]


def is_in_worker() -> bool:
    """Whether a worker imports the script, or the dry run as one."""
    return _SCRIPT in os.environ


def refuse_in_worker(what: str) -> None:
    """Raises: ConfigError: a worker that imports the script would begin a run of its own."""
    if is_in_worker():
        raise ConfigError(
            f"{what} was called while a worker imported the script: expected it in the script "
            'alone; put what starts the run under `if __name__ == "__main__":`'
        )


def refuse_several_starts() -> None:
    """Raises: ConfigError: a launcher of ranks has started the script once a rank."""
    num = os.environ.get("WORLD_SIZE", "")
    if "RANK" in os.environ and num.isdecimal() and int(num) > 1:
        raise ConfigError(
            f"RANK and WORLD_SIZE={num} are set: torchrun, accelerate launch or another launcher "
            f"has started the script {num} times; expected one start, `python script.py`: the run "
            "starts its ranks itself (actor.parallel). Where this is the only one, unset WORLD_SIZE"
        )


def tell_starter(what: bytes) -> None:
    """Writes a line for `heard_from` to standard output, of which nobody reads more.

    So what is printed from then on goes to standard error: it would fill the pipe, and wait.

    Raises: BrokenPipeError: nobody reads.
    """
    os.write(1, SAYS + what + b"\n")
    os.dup2(2, 1)


def heard_from(output: IO[bytes], timeout_s: float) -> bytes:
    """What a child has told by `tell_starter`; b"": it has ended, or the time is over."""
    text, give_up_s = b"", time.monotonic() + timeout_s
    ready = select.poll()  # with many connections its number is too high for `select.select`
    ready.register(output, select.POLLIN)
    while not (told := re.search(re.escape(SAYS) + rb"(.*)\n", text)):
        left_s = max(0.0, give_up_s - time.monotonic())
        part = os.read(output.fileno(), 1 << 16) if ready.poll(left_s * 1000) else b""
        if not part:
            return b""
        text += part
    return told[1]


def _stat_fields(stat: Path) -> list[str]:
    """What a `stat` of /proc says behind the name, which may be any bytes."""
    return stat.read_bytes().rpartition(b")")[2].decode().split()


def start_ticks(pid: int) -> int:
    """When a process began, in clock ticks since the machine did; -1: it has ended."""
    try:
        fields = _stat_fields(Path(f"/proc/{pid}/stat"))
        has_ended = fields[0] in _ENDED  # its parent has not asked how, and may never do so
        return -1 if has_ended else int(fields[19])
    except (OSError, ValueError, IndexError):
        return -1


def process_age_s() -> float:
    """Seconds since this process was started."""
    uptime_s = float(Path("/proc/uptime").read_text().split()[0])
    return uptime_s - start_ticks(os.getpid()) / os.sysconf("SC_CLK_TCK")


def exit_text(code: int) -> str:
    """`exit code 1` or `signal 9 (SIGKILL)`, from an exit code as `subprocess` gives it."""
    return f"exit code {code}" if code >= 0 else f"signal {-code} ({signal.Signals(-code).name})"


def name_of_stop(number: signal.Signals) -> str:
    """One of `STOP_SIGNALS`, as people know it."""
    return "Ctrl-C" if number == signal.SIGINT else number.name


def machine_id() -> str:
    """Names this machine since its last start, and what of it shares its process ids.

    Containers may have the host name or the boot id in common.
    """
    boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{socket.gethostname()} {boot_id} {os.readlink('/proc/self/ns/pid')}"


def outlive_parent() -> None:
    """Takes `die_with` back, for a process that notices the end of its parent and cleans up."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, 0, 0, 0, 0)


def num_killed_for_memory() -> int:
    """Processes of this machine that the kernel has killed since its start, for lack of memory."""
    with suppress(OSError, ValueError):
        for line in Path("/proc/vmstat").read_text().splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return 0


def children_of(parent_pid: int) -> list[int]:
    """Process ids of a process's children; those that it has to reap are among them."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            if int(_stat_fields(stat)[1]) == parent_pid:
                found.append(int(stat.parent.name))
    return found


def bury_left(known: Set[int]) -> set[int]:
    """Reaps children that ended long ago: what a subreaper gets, nobody else waits for.

    Args: known: what the call before returned.
    Returns: children that have ended since, and that whoever has started them may wait for.
    """
    ended = set()
    for pid in children_of(os.getpid()):
        with suppress(ChildProcessError):  # it has been waited for meanwhile
            if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
                continue
            if pid in known:
                os.waitpid(pid, 0)
            else:
                ended.add(pid)
    return ended


def is_stopped(pid: int) -> bool:
    """Whether a process stands still, by SIGSTOP, Ctrl-Z or a debugger."""
    return process_state(pid) == IS_STOPPED


def name_process(name: str) -> None:
    """What `ps -e` and `top` show for this process; of a long name they show the end."""
    Path("/proc/self/comm").write_text(f"areal:{name}"[-_MAX_NAME_CHARS:])


def die_with(parent_pid: int) -> None:
    """SIGKILL for this process when its parent dies, or at once if it already has."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent_pid:  # it died before the request was made
        os._exit(1)


def be_deaf(number: int, frame: FrameType | None) -> None:
    """Handler of a signal that a process does not obey, but programs that it starts.

    Those would inherit `SIG_IGN`.
    """


def leave_signals_to_script() -> None:
    """This process of a run obeys none of `FOR_SCRIPT`: it ends when its script, or agent, does."""
    for number in FOR_SCRIPT:
        signal.signal(number, be_deaf)


def _around_fork(how: int, *, is_fork: bool = False) -> None:
    """What user code forks can be ended from its first moment: `multiprocessing` sends SIGTERM.

    And it ends by a limit of CPU time that it sets itself.

    Args:
        how: SIGTERM is blocked, or no more.
    """
    if signal.getsignal(signal.SIGTERM) is be_deaf:
        if is_fork:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            signal.signal(signal.SIGXCPU, signal.SIG_DFL)
        signal.pthread_sigmask(how, [signal.SIGTERM])


os.register_at_fork(
    before=partial(_around_fork, signal.SIG_BLOCK),
    after_in_parent=partial(_around_fork, signal.SIG_UNBLOCK),
    after_in_child=partial(_around_fork, signal.SIG_UNBLOCK, is_fork=True),
)


def process_state(pid: int) -> str:
    """What a process, or the busiest of its threads, does, in words that follow "its process"."""
    letters = set()
    with suppress(OSError):
        for stat in Path(f"/proc/{pid}/task").glob("*/stat"):
            letters.add(_stat_fields(stat)[0])
    return next((does for letter, does in _STATES.items() if letter in letters), GONE)


def allow_open_files() -> None:
    """Raises the limit of open files and sockets, also for later children, to the hard limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        except (OSError, ValueError) as error:  # forbidden, in a sandbox say
            logger.warning("the limit of open files stays at %d: %s", soft, error)


def open_files_advice() -> str:
    """What to do where too many files are open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return (
        f"this process and each worker may have {soft} files and sockets open at one time, and the "
        f"hard limit is {hard} (ulimit -Hn); raise it (`nofile` in /etc/security/limits.conf, "
        "docker run --ulimit nofile=65536), or use fewer workers"
    )
