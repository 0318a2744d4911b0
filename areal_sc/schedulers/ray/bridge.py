"""The process that asks Ray for the script: `python -m areal_sc.schedulers.ray.bridge`.

Lines of JSON on its standard input and output: first the settings, and `hosts` or why the cluster
is `refused`; then questions, each a call of a method of `Bridge`, and answers with their `number`;
and of each agent that has `ended`, how. It ends with its standard input.

consumes     questions of the script; what Ray tells of actors
waits for    Ray, in one thread a question, as long as that takes: the script has limits
unblocked by Ray; the end of the standard input; the end of the cluster, with which it ends
"""

from __future__ import annotations

import logging
import os
import re
import socket
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, Final

import ray
from msgspec import json
from ray.exceptions import (
    ActorDiedError,
    ActorUnavailableError,
    GetTimeoutError,
    RayActorError,
    RayError,
)
from ray.experimental.internal_kv import _internal_kv_get
from ray.util import get_placement_group, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from areal_sc.config.slurm_settings import RayConfig
from areal_sc.schedulers.ray.actors import (
    AgentActor,
    Keeper,
    agents_of,
    groups_of,
    keeper_of,
    kill,
    release,
)
from areal_sc.system.waiting import polled
from areal_sc.transport.security.sealed import seal

REACH_LIMIT_S: Final = 5.0
"""Until a connection is made, or refused."""
HEAR_EVERY_S: Final = 2.0
CALL_LIMIT_S: Final = 8.0
"""An actor that lives answers in milliseconds, and has `end` in at most so long."""
PLACE_LIMIT_S: Final = 5.0
"""A placement group for which there is room is there by then."""
SIZES: Final = ("GPU", "CPU")
"""What a node has, the more telling first."""
AUTOSCALES: Final = (b"__autoscaler_v2_enabled", b"__autoscaler")
"""Key and namespace under which Ray says that nodes come when they are asked for."""
NAMESPACE: Final = "areal_sc"
"""Of the actors that hold the nodes."""
_LOOK_S: Final = 0.1
_VERSIONS: Final = re.compile(r"Ray: (\S+)\s+Python: (\S+)")


class Refused(Exception):
    """The cluster does not take this script, or has no nodes for it now; says why."""


class Bridge:
    """What can be asked of the cluster; each method on a thread of its own.

    Args:
        settings: `scheduler.ray`.
        prefix: what the names of all that the run has in the cluster begin with.
        output: descriptor of the file that the script reads.
    Raises: Refused.
    """

    def __init__(self, settings: RayConfig, prefix: str, output: int) -> None:
        self._prefix = prefix
        self._output = output
        self._one_writes = threading.Lock()
        self._one_keeps = threading.Lock()
        self._is_released = False
        _connect(settings)
        self._keeper = self._make_keeper()
        threading.Thread(target=self._be_heard, daemon=True).start()
        self.tell({"hosts": [node["NodeManagerAddress"] for node in _living_nodes()]})

    def tell(self, what: Mapping[str, Any]) -> None:
        with self._one_writes:
            os.write(self._output, json.encode(what) + b"\n")

    def answer(self, question: Mapping[str, Any]) -> None:
        """Runs a method, and tells what it returned, or why it failed."""
        number = question.get("number")
        try:
            told = {"value": getattr(self, question["what"])(**question["arguments"])}
        except Exception as error:  # the border to Ray, which raises anything
            logging.exception("%s failed", question["what"])
            told = {"failure": _words(error)}
        if number is not None:
            self.tell({"number": number, **told})

    def count(self, group: str, nodes: int, resources: dict[str, float]) -> dict[str, Any]:
        """How many nodes the run has, or gets; `lack`: the cluster does not have them."""
        known = groups_of(self._prefix).get(group)
        if known is not None:
            return {"count": len(known["bundles"]), "lack": ""}
        bundles, lack = _bundles(nodes, resources)
        return {"count": len(bundles), "lack": lack}

    def place(
        self, group: str, nodes: int, resources: dict[str, float], kept: Sequence[str]
    ) -> list[str]:
        """The machines of the run that are there: names of places in its placement group.

        Args:
            group: name of the placement group; it is made, in place of another one of the run.
            kept: agents that are the run's; what there is of others is ended.
        """
        keep = {f"{self._prefix}{name}" for name in kept}
        for name in set(agents_of(self._prefix)) - keep:
            kill(name)
        known = groups_of(self._prefix)
        for name in known.keys() - {group}:
            remove_placement_group(get_placement_group(name))
        if group not in known:
            bundles, lack = _bundles(nodes, resources)
            if lack:
                raise Refused(lack)
            placement_group(bundles, strategy="STRICT_SPREAD", name=group, lifetime="detached")
        polled(lambda: groups_of(self._prefix)[group]["state"] == "CREATED", PLACE_LIMIT_S, _LOOK_S)
        state = groups_of(self._prefix)[group]
        hosts = {node["NodeID"]: node["NodeManagerAddress"] for node in _living_nodes()}
        return [
            f"{hosts[node]}-{index}-{node[:8]}"
            for index, node in state["bundles_to_node_id"].items()
            if node in hosts
        ]

    def start(self, name: str, group: str, machine: str, invitation: str, **arguments: Any) -> None:
        """Starts an agent in its place, and watches it."""
        index = _index_of(machine)
        bundle = dict(groups_of(self._prefix)[group]["bundles"][index])
        strategy = PlacementGroupSchedulingStrategy(
            get_placement_group(group), placement_group_bundle_index=index
        )
        try:
            actor = (
                ray.remote(AgentActor)
                .options(
                    name=f"{self._prefix}{name}",
                    lifetime="detached",
                    scheduling_strategy=strategy,
                    num_cpus=bundle.pop("CPU", 0),
                    num_gpus=bundle.pop("GPU", 0),
                    memory=bundle.pop("memory", None),
                    resources=bundle,
                )
                .remote()
            )
            key = ray.get(actor.start.remote(**arguments))
            if key:
                ray.get(actor.introduce.remote(seal(invitation.encode(), key)))
        except Exception as error:  # Ray raises anything
            logging.exception("%s does not start", name)
            self._tell_end(name, _end_of_actor(error, machine))
        else:
            self.watch(name)

    def watch(self, name: str) -> None:
        """Tells when an agent has ended; blocks until then."""
        machine = name.rpartition("#")[0]
        while True:
            try:
                how, tail = ray.get(ray.get_actor(f"{self._prefix}{name}").wait.remote())
                return self._tell_end(name, how, tail)
            except ActorUnavailableError:
                time.sleep(1.0)
            except (RayActorError, ValueError) as error:  # the second: there is none of that name
                return self._tell_end(name, _end_of_actor(error, machine))

    def end(self, name: str, grace_s: float) -> bool:
        """Does what `AgentElsewhere.end` says; there is no actor of that name any more."""
        try:
            actor = ray.get_actor(f"{self._prefix}{name}")
            ray.get(actor.end.remote(grace_s), timeout=grace_s + CALL_LIMIT_S)
            has_ended = True
        except (GetTimeoutError, ActorUnavailableError):
            has_ended = False
        except (RayActorError, ValueError):
            has_ended = True
        kill(f"{self._prefix}{name}")
        return has_ended and _is_there(name.rpartition("#")[0])

    def release(self) -> None:
        """Deletes all that the run has in the cluster."""
        with self._one_keeps:
            self._is_released = True
        release(self._prefix)

    def _tell_end(self, name: str, how: str, tail: str = "") -> None:
        self.tell({"ended": name, "how": how, "tail": tail})

    def _make_keeper(self) -> Any:
        return (
            ray.remote(Keeper)
            .options(
                name=keeper_of(self._prefix),
                lifetime="detached",
                get_if_exists=True,
                max_restarts=-1,
                num_cpus=0,
            )
            .remote(self._prefix)
        )

    def _be_heard(self) -> None:
        while not self._is_released:
            try:
                ray.get(self._keeper.hear.remote(), timeout=CALL_LIMIT_S)
            except Exception as error:  # Ray raises anything
                logging.warning("the keeper does not answer: %s", _words(error))
                if isinstance(error, ActorDiedError):  # the script was silent for too long, say
                    with suppress(RayError, ValueError), self._one_keeps:
                        if not self._is_released:  # else that was its end
                            self._keeper = self._make_keeper()
            time.sleep(HEAR_EVERY_S)


def _connect(settings: RayConfig) -> None:
    """Raises: Refused."""
    address = settings.address
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if address != "auto":
        try:
            socket.create_connection((host.strip("[]"), int(port)), REACH_LIMIT_S).close()
        except (OSError, ValueError, OverflowError) as error:
            raise Refused(f"there is no Ray cluster: {error}") from error
    try:
        ray.init(
            address,
            namespace=NAMESPACE,
            runtime_env=settings.runtime_env or None,
            log_to_driver=False,
            logging_level=logging.WARNING,
        )
    except Exception as error:  # Ray raises anything
        logging.exception("no connection to %s", address)
        versions = _VERSIONS.findall(str(error))
        if len(versions) == 2:
            (its_ray, its_python), (own_ray, own_python) = versions
            raise Refused(
                f"expected Python {its_python} with Ray {its_ray}, which the cluster has, got "
                f"Python {own_python} with Ray {own_ray}, which the script has"
            ) from error
        raise Refused(_words(error)) from error


def _living_nodes() -> list[dict[str, Any]]:
    return [node for node in ray.nodes() if node["Alive"]]


def _is_there(machine: str) -> bool:
    """Whether the node of a place lives, as Ray knows."""
    short = machine.rpartition("-")[2]
    return any(node["NodeID"].startswith(short) for node in _living_nodes())


def _index_of(machine: str) -> int:
    return int(machine.rsplit("-", 2)[1])


def _bundles(count: int, resources: dict[str, float]) -> tuple[list[dict[str, float]], str]:
    """What is asked of each node, and what the cluster lacks for it; "": nothing.

    An autoscaler may bring what is not there yet.
    """
    nodes = _living_nodes()
    if resources:
        num = sum(_has(it["Resources"], resources) for it in nodes)
        bundles, what = [resources] * max(1, count or num), _shown(resources)
    else:
        sizes = (tuple(it["Resources"].get(name, 0.0) for name in SIZES) for it in nodes)
        fit = sorted(filter(any, sizes), reverse=True)
        wanted = [dict(zip(SIZES, size, strict=True)) for size in fit or [(0.0, 1.0)]]
        num, bundles, what = len(fit), wanted[: count or None], "CPUs or GPUs"
        bundles += bundles[-1:] * (count - len(bundles))
    if num >= len(bundles) or _internal_kv_get(AUTOSCALES[0], namespace=AUTOSCALES[1]) == b"1":
        return [{name: it for name, it in its.items() if it} for its in bundles], ""
    have = "; ".join(f"{it['NodeManagerAddress']} has {_shown(it['Resources'])}" for it in nodes)
    return [], f"expected at least {len(bundles)} Ray nodes with {what}, got {num}: {have}"


def _has(its: Mapping[str, float], resources: Mapping[str, float]) -> bool:
    return all(its.get(name, 0.0) >= value for name, value in resources.items())


def _shown(resources: Mapping[str, float]) -> str:
    """Without what each node has, such as its own name."""
    mine = {name: it for name, it in resources.items() if not name.startswith(("node:", "object"))}
    return json.encode(mine).decode()


def _end_of_actor(error: Exception, machine: str) -> str:
    """Words that follow "ended with"."""
    if isinstance(error, RayActorError | ValueError) and not _is_there(machine):
        return "the loss of its Ray node"
    return f"the end of its Ray actor: {_words(error)}"


def _words(error: Exception) -> str:
    """Ray quotes whole tracebacks: their beginning and their end."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return "; ".join(dict.fromkeys([type(error).__name__, *lines[:2], *lines[-1:]]))


def main() -> None:
    """Ends with the standard input, whatever Ray does."""
    output = os.dup(1)
    os.dup2(2, 1)  # what Ray prints is no answer
    logging.basicConfig(format="%(asctime)s %(message)s")
    first = json.decode(sys.stdin.buffer.readline())
    settings = RayConfig(**first["settings"])
    try:
        bridge = Bridge(settings, first["prefix"], output)
    except Refused as error:
        os.write(output, json.encode({"refused": str(error)}) + b"\n")
        os._exit(1)
    for line in sys.stdin.buffer:
        question = json.decode(line)
        threading.Thread(target=bridge.answer, args=(question,), daemon=True).start()
    os._exit(0)


if __name__ == "__main__":
    main()
