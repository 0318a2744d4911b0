"""A process that looks into a Ray cluster: `python observer.py ADDRESS`, an answer a line of input.

state            names of the actors that live, and of the placement groups
nodes            names of the hosts that are nodes of it
python VERSION   the cluster says from now on that it was started with that one
"""

from __future__ import annotations

import json
import os
import sys

import ray
from ray._private.ray_constants import KV_NAMESPACE_CLUSTER
from ray._private.worker import global_worker
from ray.util import list_named_actors
from ray.util.placement_group import placement_group_table

KEY = b"CLUSTER_METADATA"


def state() -> list[str]:
    actors = [actor["name"] for actor in list_named_actors(all_namespaces=True)]
    groups = (it for it in placement_group_table().values() if it["state"] != "REMOVED")
    return [*actors, *(it["name"] for it in groups)]


def pretend(version: str) -> str:
    """Returns: the version before."""
    gcs = global_worker.gcs_client
    metadata = json.loads(gcs.internal_kv_get(KEY, namespace=KV_NAMESPACE_CLUSTER))
    before = str(metadata["python_version"])
    content = json.dumps(metadata | {"python_version": version}).encode()
    gcs.internal_kv_put(KEY, content, overwrite=True, namespace=KV_NAMESPACE_CLUSTER)
    return before


def nodes() -> list[str]:
    return [node["NodeManagerHostname"] for node in ray.nodes() if node["Alive"]]


ANSWERS = {"state": state, "nodes": nodes, "python": pretend}


def main() -> None:
    output = os.dup(1)
    os.dup2(2, 1)  # Ray says of a node that it is lost
    ray.init(sys.argv[1], log_to_driver=False)
    for line in sys.stdin:
        what, *words = line.split()
        os.write(output, json.dumps(ANSWERS[what](*words)).encode() + b"\n")


if __name__ == "__main__":
    main()
