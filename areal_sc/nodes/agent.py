"""The agent of a node as a process, whose work is that of `node_agent`.

There is one on each node. On this machine it is started as

    python -m areal_sc.nodes.agent <run id> <SchedulerConfig as JSON>

with the script's public key on its standard input. When it listens, it writes its `NodeFacts` to
its standard output, one line of JSON, or a string that says why the node cannot be used. On any
other machine the address follows at which it tells them to the script, and after the key the secret
to do so.

The fork server must be single-threaded, and ZMQ has threads: so it is a process of its own, forked
before anything else happens. Processes die with whoever forked them, and a fork server whose agent
is stopped ends by itself. So whatever becomes of the agent, no worker is left.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import Sequence
from typing import Final

from msgspec import json

from areal_sc.config.schema import SchedulerConfig
from areal_sc.errors import ArealError, ConfigError
from areal_sc.log import setup_logging
from areal_sc.nodes.joining import STARTER_VARIABLE, Invitation, announce, read_introduction
from areal_sc.nodes.node_agent import Agent
from areal_sc.nodes.node_folder import NodeFolder, sees_folder
from areal_sc.run.run_folder import RunFolder
from areal_sc.sizing.machine import count_cuda_devices
from areal_sc.system.fork_server import ForkServer
from areal_sc.system.process import (
    allow_open_files,
    die_with,
    leave_signals_to_script,
    name_process,
)
from areal_sc.transport.security.keys import KeyPair

logger = logging.getLogger(__name__)

PRELOAD: Final = (
    "torch",
    "transformers",
    "transformers.models.qwen2.modeling_qwen2",
    "transformers.models.auto.modeling_auto",
    "areal_sc.workers.entry",
    "areal_sc.workers.train_worker",
    "areal_sc.workers.rollout_worker",
    "areal_sc.engines.fsdp.engine",
    "areal_sc.engines.local.engine",
    "areal_sc.workers.entry:prepare_model_loading",
)
"""What the fork server does to make workers start fast, where there are no CUDA devices."""


def main(
    argv: Sequence[str] | None = None,
    *,
    target: str = "areal_sc.workers.entry:run_worker",
    preload: Sequence[str] = PRELOAD,
) -> int:
    """An agent as a process.

    Args:
        target, preload: of its workers, see `ForkServer`.
    """
    run_id, settings, *address = sys.argv[1:] if argv is None else argv
    config = json.decode(settings, type=SchedulerConfig)
    if starter := os.environ.get(STARTER_VARIABLE):
        die_with(int(starter))
    leave_signals_to_script()
    setup_logging("agent")
    name_process("agent")
    allow_open_files()
    num_devices = count_cuda_devices()
    fork_server = ForkServer(target, () if num_devices else preload)
    keys, invitation = KeyPair.create(), None
    try:
        script_key, secret, nonce = read_introduction(keys)
        if address:
            address_path = RunFolder(config.run_dir).join_path
            invitation = Invitation(address[0], address_path, script_key, secret)
        try:
            node = _folder_of(config, run_id, nonce)
            agent = Agent(run_id, script_key, keys, fork_server, num_devices, node, invitation)
            asyncio.run(agent.serve())
        except ConfigError as error:
            if invitation is not None:
                asyncio.run(invitation.accept(keys, str(error)))
            else:
                announce(str(error))
            raise
    except ArealError as error:
        logger.error("the agent ended: %s", error)
        return error.exit_code
    return 0


def _folder_of(config: SchedulerConfig, run_id: str, nonce: str) -> NodeFolder:
    if sees_folder(config, nonce):
        return NodeFolder(config)
    from areal_sc.shipping.node_side import FolderInPlace

    return FolderInPlace(config, run_id)


if __name__ == "__main__":
    sys.exit(main())
