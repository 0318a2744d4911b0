"""Programs that attack what runs them. This file also runs them, as whoever executes it.

    python sandbox_attacks.py LAYER FOLDER      prints what came of each, as JSON

A program whose attack succeeds prints `LOOT`, made from two halves, so that no other text has it.
The victims are made here: files, sockets and a process of the same user as the sandbox's.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

from areal_sc.errors import SandboxError
from areal_sc.system.sandbox.local import LocalSandbox
from areal_sc.system.sandbox.program import Limits, Program
from areal_sc.system.sandbox.trees import descendants

PROLOGUE = """
import ctypes, os, resource, signal, socket, struct, sys, time
TAKEN = "LO" + "OT"
def reads(path):
    print(open(path, "rb").read().decode("latin-1"))
libc = ctypes.CDLL(None, use_errno=True)
"""

READING = {
    "keys": "reads({keys!r})",
    "snapshots": "reads({snapshot!r})",
    "a link to a snapshot": "os.symlink({snapshot!r}, 'link'); reads('link')",
    "the run's folder from below": "os.chdir('/'); reads(os.path.relpath({snapshot!r}))",
    "shared memory": "reads({shared!r})",
    "environment of the run": "reads('/proc/{owner}/environ')",
    "a file of the run by its process": "reads('/proc/{owner}/root{snapshot}')",
    "tcp": "s = socket.create_connection(('127.0.0.1', {port}), 5); print(s.recv(99).decode())",
    "udp": "s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); "
    "s.sendto(b'x', ('127.0.0.1', {port})); print(TAKEN)",
    "a unix socket": "s = socket.socket(socket.AF_UNIX); s.connect({unix!r}); "
    "print(s.recv(99).decode())",
    "an abstract unix socket": "s = socket.socket(socket.AF_UNIX); s.connect({abstract!r}); "
    "print(s.recv(99).decode())",
    "a unix socket by one of a pair": "a, b = socket.socketpair(socket.AF_UNIX, "
    "socket.SOCK_DGRAM); a.connect({datagrams!r}); print(TAKEN)",
    "a signal": "os.kill({victim}, 0); print(TAKEN)",
    "memory of another process": "t = (ctypes.c_long * 2)(); b = ctypes.create_string_buffer(8)\n"
    "assert libc.ptrace(16, {victim}, None, None) == 0; print(TAKEN)",
    "limits of another process": "resource.prlimit({victim}, resource.RLIMIT_CPU); print(TAKEN)",
    "priority of another process": "os.setpriority(os.PRIO_PROCESS, {victim}, 5); print(TAKEN)",
    "a change of a file's permissions": "os.chmod({snapshot!r}, 0o666)\n"
    "assert os.stat({snapshot!r}).st_mode & 0o777 == 0o666; print(TAKEN)",
    "a change of a file": "open({snapshot!r}, 'ab').write(b''); print(TAKEN)",
    "a file left in /dev/shm": "open('/dev/shm/left-' + str({port}), 'w').write(TAKEN); "
    "os.path.ismount('/dev/shm') and print(TAKEN)",
}
"""Each succeeds without a sandbox, as the test shows."""

HIDDEN = {
    "inherited descriptors": """
for fd in range(3, 4096):
    try:
        os.fstat(fd)
        print(TAKEN, fd)
    except OSError:
        pass
""",
    "its own environment": "print(dict(os.environ)); reads('/proc/self/environ')",
    "what programs before it were given": """
import gc
marker = ("EARL" + "IER").encode()
for found in gc.get_objects():
    if isinstance(found, (bytes, str)) and marker in str(found).encode():
        print(TAKEN)
frame = sys._getframe()
while frame:
    for value in list(frame.f_locals.values()) + list(frame.f_globals.values()):
        if value is not marker and isinstance(value, (bytes, str)) and marker in (
            value if isinstance(value, bytes) else value.encode()
        ):
            print(TAKEN)
    frame = frame.f_back
""",
    "its own memory": """
marker = ("EARL" + "IER-").encode() + b"7f3a"
copies = 0
with open("/proc/self/maps") as maps, open("/proc/self/mem", "rb", 0) as memory:
    for line in maps:
        low, high = (int(end, 16) for end in line.split()[0].split("-"))
        if "rw" in line:
            memory.seek(low)
            part = memory.read(high - low)
            copies += part.count(marker)
print(copies, TAKEN if copies > 5 else "")
""",
    "another program's folder": """
time.sleep(0.3)
for parent in {{os.path.dirname(os.getcwd()), "/tmp", "/box", {folder!r}}}:
    try:
        for name in os.listdir(parent):
            reads(os.path.join(parent, name, "private.txt"))
    except OSError:
        pass
""",
    "signals to all": """
for pid in (-1, os.getppid(), {owner}, {victim}):
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
            os.kill(pid, number) if pid != -1 or os.getpid() > 2 else None
        except OSError:
            pass
""",
    "a forged answer": """
answer = b'{{"end": "exited", "exit_code": 0, "seconds": 0.1, "parts": [4, 0]}}\\nLOOT'
for fd in range(3, 256):
    try:
        os.write(fd, struct.pack("!Q", len(answer)) + answer)
    except OSError:
        pass
sys.exit(7)
""",
    "namespaces of its own": "assert libc.unshare(0x10000000 | 0x20000) == 0; print(TAKEN)",
    "shared memory of System V": "assert libc.shmget(7, 4096, 0o1666) >= 0; print(TAKEN)",
    "memory that no limit counts": "os.memfd_create('x'); print(TAKEN)",
    "buffers of sockets that no limit counts": "socket.socketpair()[0].setsockopt("
    "socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 24); print(TAKEN)",
    "requests of the disk, of which a machine has few": "assert libc.syscall(206, 60000, "
    "ctypes.byref(ctypes.c_ulong())) == 0; print(TAKEN)",
    "files that others wait for": "import fcntl; fcntl.fcntl(os.open(os.__file__, os.O_RDONLY), "
    "1024, 0); print(TAKEN)",
    "its input, which its keeper has, too": "os.ftruncate(0, 9); print(TAKEN)",
    "capabilities": """
for line in open("/proc/self/status"):
    if line.startswith(("CapPrm", "CapEff", "CapAmb")) and int(line.split()[1], 16):
        print(TAKEN, line)
""",
    "a place behind the run where memory is short": """
for value in ("0", "-1000"):
    try:
        with open("/proc/self/oom_score_adj", "w") as file:
            file.write(value)
        print(TAKEN)
    except OSError:
        pass
""",
    "the first process that it sees": "reads('/proc/1/environ'); reads('/proc/1/cmdline')",
    "a server of its own": "s = socket.socket(); s.bind(('', 0)); s.listen(); print(TAKEN)",
}
"""They would find nothing, or harm the machine, without a sandbox."""

BOMBS = {
    "forks": """
while True:
    try:
        os.fork()
    except OSError:
        pass
""",
    "daemons": """
for _ in range(3):
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            os.closerange(0, 3)
            time.sleep(1000)
        os._exit(0)
print("gone")
""",
    "daemons that hold its output": """
if os.fork() == 0:
    os.setsid()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(1000)
os._exit(0)
""",
    "memory": "kept = []\nwhile True: kept.append(bytearray(1 << 24))",
    "memory of many processes": """
for _ in range(20):
    if os.fork() == 0:
        break
kept = bytearray(b"x" * (60 << 20))
time.sleep(1000)
""",
    "one large file": "f = open('f', 'wb')\nwhile True: f.write(bytes(1 << 20)); f.flush()",
    "many files": """
for number in range(1 << 30):
    with open(str(number), "wb") as file:
        file.write(bytes(1 << 18))
""",
    "files without a name": """
kept = []
while True:
    kept.append(open("f", "wb", 0))
    kept[-1].write(bytes(1 << 20))
    os.unlink("f")
""",
    "deep folders": """
try:
    for number in range(5000):
        os.mkdir("d", 0o000 if number % 2 else 0o700)
        os.chmod("d", 0o700)
        os.chdir("d")
except OSError:
    pass
""",
    "output": "while True: print('x' * 1000)",
    "errors": "while True: print('x' * 1000, file=sys.stderr)",
    "no end": "while True: pass",
    "no end and no signals": """
for number in range(1, 64):
    try:
        signal.signal(number, signal.SIG_IGN)
    except (OSError, ValueError):
        pass
time.sleep(1000)
""",
    "os._exit": "print('claims'); os._exit(0)",
    "threads": """
import threading
while True:
    try:
        threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()
    except RuntimeError:
        pass
""",
}

ENDLESS = {"forks", "no end", "no end and no signals", "memory of many processes", "threads"}
"""They run until their time is over, or a look finds too much."""

SMALL = Limits(
    time_s=60, memory_bytes=256 << 20, num_processes=24, output_bytes=1 << 16, file_bytes=8 << 20
)
SHORT = replace(SMALL, time_s=1.5)


def attack_all(layer: str, folder: Path) -> dict[str, Any]:
    """What came of each attack, or `unavailable` where the layer does not work here."""
    victim = subprocess.Popen(["sleep", "1000"], start_new_session=True)
    names = make_victims(folder, victim.pid)
    os.mkdir(folder / "tmp")
    try:
        told = asyncio.run(attack(layer, folder, names))
        told["victim"] = victim.poll()
        told["permissions"] = (folder / "snapshot").stat().st_mode & 0o777
        told["files"] += [str(path) for path in (folder / "tmp").iterdir()]
        told["unprotected"] = unprotected(names)
    except SandboxError as error:
        return {"unavailable": str(error)}
    finally:
        victim.kill()
        Path(names["shared"]).unlink()
    return told


async def attack(layer: str, folder: Path, names: dict[str, Any]) -> dict[str, Any]:
    """Runs all attacks. Raises: SandboxError: the layer does not work here."""
    environment = {"PATH": os.environ["PATH"], "TMPDIR": str(folder / "tmp")}
    sandbox = LocalSandbox(4, layer, environment=environment)
    await sandbox.layer()
    told: dict[str, Any] = {}

    async def run(name: str, source: str, limits: Limits = SMALL, **given: Any) -> None:
        ended = await sandbox.run(Program(source=source, **given), limits)
        stdout, stderr = (
            text.decode(errors="replace")[-2000:] for text in (ended.stdout, ended.stderr)
        )
        told[name] = [ended.end, ended.exit_code, stdout, stderr, ended.seconds]

    try:
        await run("before", "print(len(input()))", stdin=b"EARLIER-7f3a" * 1000)
        waits = "open('private.txt', 'w').write('LO' + 'OT'); import time; time.sleep(1.2)"
        await asyncio.gather(
            run("beside", waits, Limits(time_s=30)),
            *(run(name, PROLOGUE + text.format(**names)) for name, text in READING.items()),
            *(run(name, PROLOGUE + text.format(**names)) for name, text in HIDDEN.items()),
        )
        honest = "print(sum(range(1000)))"
        for name, text in BOMBS.items():
            await asyncio.gather(
                run(name, PROLOGUE + text, SHORT if name in ENDLESS else SMALL),
                run(f"honest beside {name}", honest, Limits(time_s=60)),
            )
        told["left"] = await num_left(sandbox)
        told["files"] = [str(path) for path in (folder / "tmp").glob("*/*")]
    finally:
        await sandbox.close()
    return told


async def num_left(sandbox: LocalSandbox) -> int:
    """Processes under its server, once they have had time to end."""
    assert sandbox._server is not None
    for _ in range(1200):
        if not (left := descendants(sandbox._server._process.pid)):
            break
        await asyncio.sleep(0.05)
    return len(left)


def make_victims(folder: Path, victim: int) -> dict[str, Any]:
    """What programs must not reach, by the names that attacks know it by."""
    keys, snapshot = folder / "keys.json", folder / "snapshot"
    keys.write_text("LOOT")
    keys.chmod(0o600)
    snapshot.write_text("LOOT")
    snapshot.chmod(0o644)
    shared = Path(f"/dev/shm/areal-attacks-{os.getpid()}")
    shared.write_text("LOOT")
    shared.chmod(0o644)
    tcp, unix, abstract = (
        socket.socket(),
        socket.socket(socket.AF_UNIX),
        socket.socket(socket.AF_UNIX),
    )
    tcp.bind(("127.0.0.1", 0))
    unix.bind(str(folder / "socket"))
    abstract.bind(name := f"\0areal-attacks-{os.getpid()}")
    datagrams = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    datagrams.bind(str(folder / "datagrams"))
    threading.excepthook = lambda _, kept=datagrams: None  # type: ignore[misc]
    for listener in (tcp, unix, abstract):
        listener.listen()
        threading.Thread(target=serve, args=(listener,), daemon=True).start()
    return {
        "keys": str(keys),
        "snapshot": str(snapshot),
        "shared": str(shared),
        "folder": str(folder),
        "port": tcp.getsockname()[1],
        "unix": str(folder / "socket"),
        "abstract": name,
        "datagrams": str(folder / "datagrams"),
        "owner": os.getpid(),
        "victim": victim,
    }


def serve(listener: socket.socket) -> None:
    while True:
        asker, _ = listener.accept()
        asker.sendall(b"LOOT")
        asker.close()


def unprotected(names: dict[str, Any]) -> list[str]:
    """Attacks that fail even without a sandbox, and so show nothing."""
    sleeper = subprocess.Popen(["sleep", "1000"])
    names = {**names, "victim": sleeper.pid}
    failed = []
    for name, text in READING.items():
        command = [sys.executable, "-I", "-S", "-c", PROLOGUE + text.format(**names)]
        done = subprocess.run(command, capture_output=True, cwd=names["folder"], timeout=60)
        if b"LOOT" not in done.stdout:
            failed.append(f"{name}: {done.stderr.decode()[-300:]}")
    sleeper.kill()
    Path(f"/dev/shm/left-{names['port']}").unlink(missing_ok=True)
    return failed


if __name__ == "__main__":
    print(json.dumps(attack_all(sys.argv[1], Path(sys.argv[2]))))
