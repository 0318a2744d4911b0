"""How an agent tells the script of its node.

On the script's machine it reads the script's first words, and writes its own to it. On another node
it joins by a call. A script that is started again, elsewhere maybe, notes its address in the run's
folder. So agents whose job was submitted by an earlier start find it there.
"""

from __future__ import annotations

import asyncio
import os
import select
import socket
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from msgspec import json

from areal_sc.errors import NotPermitted, TransportError, WorkerStartError
from areal_sc.nodes.spec import JOIN, Joining, NodeFacts, Welcome
from areal_sc.run.agent_files import Place
from areal_sc.system.process import tell_starter
from areal_sc.transport.rpc.codec import ANY_INCARNATION
from areal_sc.transport.rpc.transport import ZmqTransport
from areal_sc.transport.security.curve import CurveClient
from areal_sc.transport.security.keys import KeyPair
from areal_sc.transport.security.sealed import unseal

JOIN_LIMIT_S: Final = 30.0
"""A new agent waits so long for a script, or for `orphan_timeout_s` if that is less."""
_RETRY_S: Final = 0.5
_MAX_ADDRESS_CHARS: Final = 256
START_VARIABLE: Final = "AREAL_SC_START"
"""Environment variable: what the scheduler calls this start of an agent, if it is not SLURM."""
STARTER_VARIABLE: Final = "AREAL_SC_STARTER"
"""Environment variable: id of the process that has started the agent, whose words others can read.
The agent dies with it, tells it a public key, and is introduced by what is sealed for that."""
INTRODUCTION_LIMIT_S: Final = 30.0
_MAX_LINE_BYTES: Final = 256
_MAX_SEALED_BYTES: Final = 512


def read_introduction(own: KeyPair) -> tuple[bytes, str, str]:
    """Public key of the script; for an agent that joins, the secret to do so, and the run's nonce.

    They are the first line of the standard input.

    Args:
        own: keys of the agent, for which the line may be sealed.
    Raises: WorkerStartError: it does not come. TransportError: it is sealed for others.
    """
    is_sealed = STARTER_VARIABLE in os.environ
    if is_sealed:
        tell_starter(own.public)
    line, fd, most = b"", 0, _MAX_SEALED_BYTES if is_sealed else _MAX_LINE_BYTES
    while not line.endswith(b"\n") and len(line) < most:
        is_there, _, _ = select.select([fd], [], [], INTRODUCTION_LIMIT_S)
        part = os.read(fd, most) if is_there else b""
        if not part:
            raise WorkerStartError("the standard input does not say whose agent this is")
        line += part
    if is_sealed:
        line = unseal(line.strip(), own)
    key, secret, nonce = [*line.decode("ascii", "replace").split(), "", "", ""][:3]
    return key.encode("ascii", "replace"), secret, nonce


def announce(what: NodeFacts | str) -> None:
    """Tells a script on this machine of the node, or why it cannot be used.

    Raises: WorkerStartError: the script has ended.
    """
    try:
        tell_starter(json.encode(what))
    except BrokenPipeError as error:
        raise WorkerStartError("nobody needs the agent: the script has ended") from error


@dataclass(frozen=True, repr=False)
class Invitation:
    """What an agent needs to join.

    Attributes:
        first_address: where the script took calls of JOIN when the job was submitted.
        address_path: file that says where it does now.
        script_key: its public key.
        secret: that of the invitation, which is good for one agent on each of its nodes.
    """

    first_address: str
    address_path: Path
    script_key: bytes
    secret: str

    @property
    def address(self) -> str:
        """Where the script takes calls of JOIN, as far as this machine can know."""
        return read_address(self.address_path) or self.first_address

    async def accept(
        self, own: KeyPair, what: NodeFacts | str, limit_s: float = JOIN_LIMIT_S
    ) -> Welcome:
        """Tells the script of this node, or why it cannot be used.

        Args:
            own: keys of the agent.
            limit_s: how long a script that does not answer is waited for.
        Raises: TransportError: the script is not there any more. NotPermitted: another agent has
            joined in this place, or has taken it since, or the script has not invited any.
        """
        job, node, restart, step = place_of_this_process()
        joining = Joining(
            job=job,
            node=node,
            restart=restart,
            step=step,
            pid=os.getpid(),
            facts=what,
            agent_key=own.public.decode("ascii"),
            secret=self.secret,
        )
        give_up_s = time.monotonic() + limit_s
        while True:
            transport = ZmqTransport(client=CurveClient(own, self.script_key))
            left_s = max(_RETRY_S, give_up_s - time.monotonic())
            try:
                script = transport.connect(self.address, "scheduler", ANY_INCARNATION)
                return await script.call(JOIN, joining, timeout_s=left_s)
            except NotPermitted:
                raise
            except TransportError:
                if time.monotonic() + _RETRY_S > give_up_s:
                    raise
            finally:
                await transport.close()
            await asyncio.sleep(_RETRY_S)


def read_address(path: Path) -> str:
    """Where the script of a run takes calls, as its folder tells; "": it does not."""
    with suppress(OSError, UnicodeDecodeError):
        address = path.read_text()
        if address.startswith("tcp://") and len(address) <= _MAX_ADDRESS_CHARS:
            return address
    return ""


def place_of_this_process() -> Place:
    """What SLURM has started it in."""
    node = os.environ.get("SLURMD_NODENAME") or socket.gethostname()
    job = os.environ.get(START_VARIABLE) or os.environ.get("SLURM_JOB_ID", "")
    counts = (os.environ.get(it, "") for it in ("SLURM_RESTART_COUNT", "SLURM_STEP_ID"))
    restart, step = (int(count) if count.isdecimal() else 0 for count in counts)
    return job, node, restart, step
