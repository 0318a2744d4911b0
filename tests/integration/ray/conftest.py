"""A real Ray cluster: its nodes are hosts of their own on this machine, which is the head."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from integration.slurm.conftest import Cluster, place_of_its_own, started
from waiting import wait_until

OBSERVER = Path(__file__).with_name("observer.py")


@dataclass
class RayHosts:
    """Attributes: address: of the cluster. root: folder of its files."""

    hosts: Cluster
    address: str
    root: Path
    observer: subprocess.Popen[str]
    _one_asks: threading.Lock = field(default_factory=threading.Lock)

    def ask(self, question: str) -> Any:
        """Of `observer.py`."""
        with self._one_asks:
            assert self.observer.stdin is not None
            assert self.observer.stdout is not None
            self.observer.stdin.write(f"{question}\n")
            self.observer.stdin.flush()
            return json.loads(self.observer.stdout.readline())

    @contextmanager
    def without(self, node: str) -> Iterator[None]:
        """The host loses its power; afterwards it is a node of the cluster again."""
        self.hosts.host("kill", node)
        try:
            yield
        finally:
            self.boot(node)

    def boot(self, node: str) -> None:
        """Returns when the host is a node of the cluster again."""
        self.hosts.host("boot", node)
        wait_until(lambda: self.ask("nodes").count(node) == 1)

    def left_overs(self) -> list[str]:
        """What runs have left: in Ray, and on its nodes."""
        return [*self.ask("state"), *self.hosts.left_overs()]


@pytest.fixture(scope="session")
def ray_hosts() -> Iterator[RayHosts]:
    if os.geteuid() != 0:
        pytest.skip("hosts of their own need root")
    with ExitStack() as stack:
        number, root = place_of_its_own(stack)
        # a cluster that somebody else has started here may have left a token, which the head takes
        for hosts in started(number, root, RAY=sys.executable, RAY_AUTH_MODE="disabled"):
            address = f"{hosts.network}1:{27600 + 10 * number}"
            words = [sys.executable, str(OBSERVER), address]
            pipe = subprocess.PIPE
            with subprocess.Popen(words, stdin=pipe, stdout=pipe, text=True) as observer:
                yield RayHosts(hosts, address, root, observer)
