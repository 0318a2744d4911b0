"""What a node is for, and which CUDA devices of a machine each worker gets."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

from areal_sc.errors import ConfigError


class Purpose(StrEnum):
    """What a node is for: workers of all roles; all but those that generate; these alone."""

    any = "any"
    train = "train"
    rollout = "rollout"

    def takes(self, role: str) -> bool:
        """Whether workers of the role may run there."""
        return self is Purpose.any or (self is Purpose.rollout) == (role == Purpose.rollout)


class DevicePlacement:
    """Which workers use which CUDA devices: free devices first, then shared ones.

    Args:
        num_devices: of the machine, numbered as its agent sees them.
        machine: its name, for messages.
    """

    def __init__(self, num_devices: int, machine: str) -> None:
        self._machine = machine
        self._users: list[list[str]] = [[] for _ in range(num_devices)]

    def place(self, role: str, index: int, count: int) -> list[int]:
        """Gives a worker `count` devices, ascending, instead of those that it had before.

        Devices that the worker's own role does not use yet come first, then those with few users.
        Raises: ConfigError: it needs more than there are.
        """
        if count > len(self._users):
            raise ConfigError(
                f"{role}/{index} needs {count} CUDA devices, and {self._machine} has "
                f"{len(self._users)}; a worker with a server takes tp_size of them"
            )
        self.release(f"{role}/{index}")

        def reluctance(device: int) -> tuple[bool, int, int]:
            users = self._users[device]
            return any(user.startswith(f"{role}/") for user in users), len(users), device

        chosen = sorted(sorted(range(len(self._users)), key=reluctance)[:count])
        for device in chosen:
            self._users[device].append(f"{role}/{index}")
        return chosen

    def take_devices(self, name: str, devices: Sequence[int]) -> None:
        """The worker `role/index` has these devices, whoever has chosen them."""
        self.release(name)
        for device in devices:
            self._users[device].append(name)

    def release(self, name: str) -> None:
        """The worker `role/index` is gone; no error if it had none."""
        for users in self._users:
            if name in users:
                users.remove(name)
