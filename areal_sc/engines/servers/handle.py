"""What is known of an engine with servers before anything is started, whatever their kind."""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, ClassVar, Final
from urllib.parse import urlsplit

from areal_sc.config.schema import Device, GRPOConfig, RolloutConfig, WeightUpdateMethod
from areal_sc.config.server_settings import ServerProgramConfig, ServersConfig
from areal_sc.engines.handle_base import GeneratorHandle, with_local_model
from areal_sc.errors import ConfigError
from areal_sc.sizing.machine import Machine
from areal_sc.sizing.model_folder import ModelShape
from areal_sc.sizing.worker_plan import DTYPE_BYTES, HOST, RunPlan, WorkerPlan, format_bytes

if TYPE_CHECKING:
    from areal_sc.engines.servers.client import ServerClient


LOOPBACK: Final = "127.0.0.1"
"""Where servers listen: their workers are beside them."""


_STEPS = 100
"""A share is proposed in hundredths."""


@dataclass(frozen=True)
class ServerInstance:
    """What the settings do not say of a server.

    Attributes:
        port: that it listens on.
        api_key: that its clients must show.
        is_cuda: it computes on GPUs, else on the CPU.
    """

    port: int
    api_key: str
    is_cuda: bool


@dataclass(frozen=True)
class ServersHandle(GeneratorHandle):
    """Generation by servers of a kind, one of which each worker starts or connects to.

    A kind is a subclass, a `ServerClient`, and the memory of one rank.

    Attributes:
        name: of the kind, for messages.
        section: name of their program's settings, in the run's and in `rollout`.
        module: that `python -m` runs as their main program.
        client_class: `module:name` of their `ServerClient`.
        scheduler_title: part of the titles of those of their processes that compute.
        session_files: pattern of the names of files in shared memory that their processes map, and
            leave when they are killed together.
        support_setting: that limits the tokens of a truncated distribution.
        share_argument: name of the argument that sets a server's share of a GPU, for parameters and
            KV cache together.
        default_share: about what the program takes by itself.
        picture_families: the models that it gives the pictures of prompts to, by `model_type`.
    """

    name: ClassVar[str]
    section: ClassVar[str]
    module: ClassVar[str]
    client_class: ClassVar[str]
    scheduler_title: ClassVar[str]
    session_files: ClassVar[str]
    support_setting: ClassVar[str]
    share_argument: ClassVar[str]
    default_share: ClassVar[float]
    picture_families: ClassVar[Sequence[str]]
    worker_class: ClassVar[str] = "areal_sc.engines.servers.engine:ServerEngine"

    def build(self, log_folder: Path = Path("logs"), name: str = "rollout") -> Any:
        handle = replace(self, config=with_local_model(self.with_context().config))
        return resolve_name(self.worker_class)(handle, log_folder=log_folder, name=name)

    def connect(self, url: str, api_key: str) -> ServerClient:
        """Imports torch."""
        client: ServerClient = resolve_name(self.client_class)(
            url,
            api_key,
            self.servers.control_timeout_s,
            self.config.weight_update.step_timeout_s,
        )
        return client

    def arguments(self, instance: ServerInstance) -> list[str]:
        """The command line of one server's main program."""
        raise NotImplementedError

    def environment(self, instance: ServerInstance) -> dict[str, str]:
        """Variables that one server needs."""
        return {}

    @property
    def servers(self) -> ServersConfig:
        """The settings of the servers of this config's worker, or of all workers together."""
        return self.config.servers

    @property
    def program(self) -> ServerProgramConfig:
        """The settings of their program."""
        program: ServerProgramConfig = getattr(self.config, self.section)
        return program

    @property
    def devices(self) -> tuple[Device, int]:
        if self.servers.urls:
            return Device.cpu, 0
        return self.config.device, self.servers.tp_size

    @property
    def takes_free_memory(self) -> bool:
        device, num_devices = self.devices
        return num_devices > 0 and device != Device.cpu

    @property
    def start_timeout_s(self) -> float:
        return self.servers.start_timeout_s

    def of_worker(self, index: int) -> RolloutConfig:
        """Each worker has one of the `urls`.

        Raises: ConfigError: there are more of them, or fewer, than workers.
        """
        config, urls = super().of_worker(index), self.servers.urls
        if urls:
            if len(urls) != config.num_workers:
                raise ConfigError(
                    f"rollout.num_workers: expected {len(urls)}, one for each of servers.urls, "
                    f"got {config.num_workers}"
                )
            config.servers = replace(self.servers, urls=[urls[index]])
        return config

    def check_scaling(self) -> None:
        super().check_scaling()
        if self.servers.urls:
            raise ConfigError(
                "servers.urls names the servers of each worker, so that the number of rollout "
                "workers cannot change; leave it empty"
            )

    def check(self, run: GRPOConfig) -> None:
        if run.rollout.random_init:
            raise ConfigError(
                "actor.random_init: expected false with servers, which load weights from the "
                "model's folder, got true; write a model there once (transformers: "
                "AutoModelForCausalLM.from_config(config).save_pretrained(folder)), or use "
                "rollout.engine=local"
            )
        self.check_servers()
        self.of_worker(0)
        if self.servers.urls and self.config.lora.is_published_alone:
            raise ConfigError(
                "actor.lora.publish_merged: expected true with servers.urls (an adapter "
                "alone goes only to servers that the run itself has started), got false"
            )
        if self.servers.urls and run.weight_update.method == WeightUpdateMethod.pull:
            raise ConfigError(
                "weight_update.method: expected disk or collective with servers.urls "
                "(pulled weights go as pickles, and only to servers that the run itself has "
                "started), got pull"
            )

    def check_turns(self, *, has_cuda: bool, is_here: bool) -> None:
        if self.servers.urls:
            raise ConfigError(
                "servers.urls: expected none with placement=turns, since servers give "
                "their memory up only where the run has started them for that"
            )
        if not has_cuda:
            raise ConfigError(
                f"placement: expected another one than turns with {self.name} on a CPU, where it "
                "cannot give its memory up; rollout.engine=local can"
            )

    def check_servers(self) -> None:
        """Raises ConfigError for settings of servers that cannot be; starts nothing."""
        python = self.program.python
        if self.servers.urls:
            self._check_urls()
        elif python and shutil.which(python) is None:
            raise ConfigError(
                f"{self.section}.python: {python!r} is no program; name the interpreter of the "
                "environment that the servers' program is installed in"
            )

    def _check_urls(self) -> None:
        urls = self.servers.urls
        for url in urls:
            parts = urlsplit(url)
            if parts.scheme not in ("http", "https") or not parts.hostname or not _has_port(url):
                raise ConfigError(f"servers.urls: expected http://host:port, got {url!r}")
        if len({url.rstrip("/") for url in urls}) != len(urls):
            raise ConfigError(f"servers.urls names a server twice: {', '.join(urls)}")

    def plan_worker(
        self, index: int, shape: ModelShape, devices: Sequence[str], machine: Machine
    ) -> list[WorkerPlan]:
        # with servers, the worker itself computes nothing
        worker = self.plan_process(index, "cpu")
        if self.servers.urls:
            return [worker]
        num_ranks = self.servers.tp_size
        places = ["cpu"] * num_ranks if devices[0] == "cpu" else devices
        return [
            worker,
            *(
                self.plan_rank(index * num_ranks + rank, shape, places[rank], machine)
                for rank in range(num_ranks)
            ),
        ]

    def plan_rank(self, index: int, shape: ModelShape, device: str, machine: Machine) -> WorkerPlan:
        """The memory of one rank of a server."""
        is_cuda = device != "cpu"
        words = self.arguments(ServerInstance(0, "", is_cuda=is_cuda))
        given = dict(word.removeprefix("--").split("=", 1) for word in words if "=" in word)

        def bytes_of_rank(num_values: int | None) -> int:
            num_bytes = DTYPE_BYTES[self.config.dtype] * (num_values or 0)
            return -(-num_bytes // self.servers.tp_size)

        parameter_bytes = bytes_of_rank(shape.num_parameters)

        def left() -> int | None:
            memory = (
                machine.cuda_memory_bytes[int(device.removeprefix("cuda:"))] if is_cuda else None
            )
            if memory is None:
                return None
            return self._kv_bytes_left(given, device, memory, parameter_bytes)

        kv_bytes = self.kv_cache_bytes(given, bytes_of_rank(shape.kv_values_per_token), left)
        return WorkerPlan(
            "server", index, device, parameter_bytes=parameter_bytes, kv_bytes=kv_bytes
        )

    def kv_cache_bytes(
        self, given: Mapping[str, str], token_bytes: int, left: Callable[[], int | None]
    ) -> int:
        """What one rank of a server takes for its KV cache.

        Args:
            given: the server's arguments.
            token_bytes: that one token takes.
            left: by the parameters, of the server's share of its GPU; None: not known.
        """
        raise NotImplementedError

    def way_out(self, plan: RunPlan) -> str | None:
        """Which share would fit, as `GeneratorHandle.way_out`."""
        if plan.takes_turns:  # it is not the server that has too little room
            return None
        shares = [_largest_share(plan, place) for place in plan.short_places]
        known = [share for share in shares if share is not None]
        if not known:
            return None
        setting = self._setting_of(self.share_argument)
        return f"{setting} may be at most {min(known):g} beside all else on that device"

    def _kv_bytes_left(
        self, given: Mapping[str, str], device: str, memory: int, parameter_bytes: int
    ) -> int:
        """What is left of the server's share beside the parameters.

        Args: memory: of the device, in bytes.
        Raises: ConfigError: it is no share, or does not even hold the parameters.
        """
        text = given.get(self.share_argument, str(self.default_share))
        setting, share = self._setting_of(self.share_argument), math.nan
        with suppress(ValueError):
            share = float(text)
        if not 0 < share < 1:
            raise ConfigError(f"{setting}: expected a number above 0 and below 1, got {text}")
        left = int(share * memory) - parameter_bytes
        if left >= 0:
            return left
        raise ConfigError(
            f"{setting}: {share:g} of what is free on {device} "
            f"({format_bytes(memory)}) does not hold the parameters of a server "
            f"({format_bytes(parameter_bytes)}), and it has to hold the KV cache, too; "
            "set a larger share or servers.tp_size; or let more ranks train, which need less each"
        )

    def _setting_of(self, argument: str) -> str:
        return f"{self.section}.args.{argument.replace('-', '_')}"

    def _count(self, given: Mapping[str, str], argument: str, least: int) -> int:
        """Raises: ConfigError: an argument of the servers is no count."""
        text = given[argument]
        if text.isdecimal() and int(text) >= least:
            return int(text)
        above = " above 0" if least else ""
        raise ConfigError(f"{self._setting_of(argument)}: expected a count{above}, got {text}")


def with_path(folder: Path) -> str:
    """The variable PYTHONPATH of a server that imports from this folder, too."""
    return os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])


def _has_port(url: str) -> bool:
    """Whether the port of a URL is one; none is the scheme's."""
    try:
        return urlsplit(url).port != 0
    except ValueError:
        return False


def _largest_share(plan: RunPlan, place: str) -> float | None:
    """The share that each server on a device may take, all else staying.

    None: there are none, or not even their parameters have room.
    """
    memory = plan.available_bytes.get(place)
    servers = [w for w in plan.workers if w.role == "server" and w.device == place]
    if place == HOST or not servers or memory is None:
        return None
    used = sum(server.memory[place] for server in servers)
    free = memory - (plan.needed_bytes[place] - used)
    steps = min(_STEPS // len(servers), _STEPS - 1)
    if steps * free < _STEPS * max(server.parameter_bytes for server in servers):
        return None
    return steps / _STEPS
