"""What a controller says to an agent, for tests that have no controller."""

from __future__ import annotations

from collections.abc import Sequence

from areal_sc.nodes.spec import Launch, NodeFacts, WorkerOrder
from areal_sc.transport.rpc.client import RpcClient
from areal_sc.transport.rpc.transport import ZmqTransport
from areal_sc.transport.security.passes import Passes


def connect_agent(transport: ZmqTransport, facts: NodeFacts) -> RpcClient:
    return transport.connect(facts.address, "agent", facts.incarnation, server_key=facts.key)


def launch_of(passes: Passes, orders: Sequence[WorkerOrder], timeout_s: float) -> Launch:
    keys = [passes.issue(order.name, order.caller) for order in orders]
    return Launch(list(orders), keys, timeout_s, passes.replaced)
