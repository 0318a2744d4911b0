"""Which layers there are, what each needs, and how one is proved to work. No torch.

A layer works if a program in it can read a file of Python's and neither a file of this process, nor
open a socket: it is tried, not guessed from versions.
"""

from __future__ import annotations

from typing import Final

LAYERS: Final = {
    "namespaces": "user namespaces, or root that may mount",
    "landlock": "Linux 5.13 or later with Landlock on",
}
"""Layer, the strongest first -> what it needs."""

BIND_NOW: Final = "LD_BIND_NOW"
"""Variable with which the warm server starts: it binds symbols once, not in each of its forks."""

CHECK: Final = """
import colorsys, socket
faults = []
try:
    open({secret!r}).read()
    faults.append("it reads a file of the run")
except OSError:
    pass
try:
    socket.socket()
    faults.append("it opens sockets")
except OSError:
    pass
print("; ".join(faults) or "works")
"""
"""A program that prints `works`, or what the layer lets through."""


def way_out(reasons: dict[str, str]) -> str:
    """Why no layer works, and what to do. Args: reasons: of each layer that was tried."""
    tried = "; ".join(
        f"{layer}: {why} (it needs {LAYERS[layer]})" for layer, why in reasons.items()
    )
    return (
        f"no isolation works here, so code that a model wrote is not run: {tried}. Expected one of "
        "them: allow user namespaces (sysctl user.max_user_namespaces, or the container's seccomp "
        "profile), or run on a kernel with Landlock, or name a sandbox of your own in "
        "rollout.sandbox.runner"
    )
