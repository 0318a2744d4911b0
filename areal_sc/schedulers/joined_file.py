"""Agents on other machines that have joined a script, as the run's folder tells its next start.

    .joined    what the newest agent of each place has told

An agent that sees the folder has a file of its own in it, with a lock that says whether it lives.
Of any other one this is all that is known: whether it lives is asked.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Final

from msgspec import MsgspecError, json

from areal_sc.errors import RunFolderError, WaitTimeout
from areal_sc.run_folder import RunFolder
from areal_sc.schedulers.found_agents import find_agents, tell_to_end
from areal_sc.transport.security.keys import RunKeys
from areal_sc.workers.spec import Joining

_LOOK_S: Final = 0.5


def note_joined(folder: RunFolder, agents: Sequence[Joining]) -> None:
    """Raises: RunFolderError: it cannot be written. StaleTerm."""
    folder.write_atomic(folder.joined_path, json.encode(agents))


def read_joined(folder: RunFolder) -> list[Joining]:
    """Those that an earlier start of the script has noted; they may have ended.

    Raises: RunFolderError: the file is damaged.
    """
    try:
        return json.decode(folder.joined_path.read_bytes(), type=list[Joining])
    except FileNotFoundError:
        return []
    except (OSError, MsgspecError) as error:
        raise RunFolderError(
            f"{folder.joined_path} cannot be read, which says where agents of the run are: "
            f"{error}; delete it: they end by themselves after scheduler.orphan_timeout_s"
        ) from error


def end_joined(folder: RunFolder, limit_s: float) -> list[str]:
    """Ends agents that no script has any more; the folder tells of none then.

    Returns: their machines, of those that were there.
    Raises: RunFolderError: the file is damaged. TransportError: there are no keys to reach them
        with. WaitTimeout: they do not end in time.
    """
    noted = read_joined(folder)
    if not noted:
        return []
    keys = RunKeys.read(folder.keys_path)
    living = find_agents(noted, keys, None)
    there = [agent.joining.node for agent in living]
    tell_to_end(living, keys, None)
    give_up_s = time.monotonic() + limit_s
    while left := find_agents([agent.joining for agent in living], keys, None):
        if time.monotonic() > give_up_s:
            where = ", ".join(f"process {it.joining.pid} on {it.joining.node}" for it in left)
            raise WaitTimeout(f"agents of the run in {folder.path} do not end: {where}")
        time.sleep(_LOOK_S)
    for path in (folder.joined_path, folder.join_path):
        path.unlink(missing_ok=True)
    folder.remove_keys()
    return there
