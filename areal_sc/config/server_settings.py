"""Inference servers beside or behind a rollout worker."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from areal_sc.config.fields import in_code, setting

_RUN_ALREADY = ("urls!=: these servers run already",)
_STARTED = ("servers.urls!=: these servers run already",)


@dataclass
class ServersConfig:
    """The inference servers, one a rollout worker: started and owned by it, or running already.

    Attributes:
        control_timeout_s: limit of a pause, a resume, a question.
        stop_timeout_s: between asking a server to end and killing it; less than half of the
            `shutdown_timeout_s` of its worker.
        probe_interval_s: between two looks at a server.
        hung_after_s: an idle server that is silent for so long is lost.
        busy_limit_s: one that is silent for so long, busy or not, is lost.
    """

    tp_size: int = setting(1, "tensor parallel: GPUs a server", ge=1, idle=_RUN_ALREADY)
    environment: dict[str, str] = setting(
        dict, "further environment variables of the servers", idle=_RUN_ALREADY
    )
    urls: list[str] = setting(list, "servers that run already, one a worker; none is started then")
    api_key_env: str = setting(
        "", "environment variable with the key of the servers in urls", idle=("urls=",)
    )
    start_timeout_s: float = setting(
        900.0, "limit until a server has read its model, or one in urls answers again", gt=0
    )
    control_timeout_s: float = in_code(60.0)
    stop_timeout_s: float = in_code(3.0)
    probe_interval_s: float = in_code(1.0)
    hung_after_s: float = in_code(7.0)
    busy_limit_s: float = in_code(120.0)


@dataclass
class ServerProgramConfig:
    """The program of the inference servers of one kind."""

    python: str = setting("", "interpreter of its environment; empty: this one", idle=_STARTED)
    args: dict[str, Any] = setting(
        dict, "its arguments, by its own names: {mem_fraction_static: 0.6}", idle=_STARTED
    )


@dataclass
class SGLangConfig(ServerProgramConfig):
    """SGLang's program."""


@dataclass
class VLLMConfig(ServerProgramConfig):
    """vLLM's program."""
