"""What is not deterministic in a controller, gathered so that a simulation can replace it.

Time is not here: controllers ask the event loop for it (`loop.time()`, `asyncio.sleep`), so a
loop with virtual time is enough. Process control is the scheduler's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from areal_sc.ids import random_id
from areal_sc.run.run_owner import RunTerm
from areal_sc.system.disk import Disk
from areal_sc.transport.rpc.transport import Transport, ZmqTransport
from areal_sc.transport.security.curve import CurveClient
from areal_sc.transport.security.keys import RunKeys


@dataclass(frozen=True)
class Runtime:
    """Injected into both controllers; `new_id` names batches, weight groups and incarnations.

    Attributes:
        disk: takes the journal.
        awaited: names of lost workers whose machines are not there yet; how long that takes is
            not the run's to say.
    """

    transport: Transport
    new_id: Callable[[], str] = random_id
    disk: Disk = field(default_factory=Disk)
    awaited: set[str] = field(default_factory=set)

    @classmethod
    def create(cls, keys: RunKeys, term: RunTerm | None = None) -> Runtime:
        """The real one: ZMQ with the run's keys, and random ids.

        Args:
            term: of this process; None: nobody refuses what it does.
        """
        client = CurveClient.of_controller(keys)
        if term is None:
            return cls(transport=ZmqTransport(client=client))
        transport = ZmqTransport(client=client, term=term.number)
        return cls(transport=transport, disk=Disk(term.check))
