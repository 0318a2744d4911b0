"""What scripts and controllers know of SGLang servers.

SGLang takes a share of each GPU for parameters and KV cache together, `mem_fraction_static`,
whatever it needs. It is a share of the memory that is free when a server starts. Trainers start
before, so it is a share of what they leave. The rest is for what both need in a step.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Final

from areal_sc.engines.servers.handle import ServerInstance, ServersHandle, with_path
from areal_sc.engines.servers.sglang.arguments import server_arguments
from areal_sc.errors import ConfigError

_FINDS_SAVER: Final = (
    "import sys, importlib.util as u; sys.exit(u.find_spec('torch_memory_saver') is None)"
)
_LOOK_S: Final = 60.0


@dataclass(frozen=True)
class SGLangEngine(ServersHandle):
    """Generation by SGLang servers, which a worker starts or connects to: `config.sglang`."""

    name: ClassVar[str] = "SGLang"
    section: ClassVar[str] = "sglang"
    module: ClassVar[str] = "areal_sc_in_sglang"
    client_class: ClassVar[str] = "areal_sc.engines.servers.sglang.client:SGLangClient"
    scheduler_title: ClassVar[str] = "scheduler"
    support_setting: ClassVar[str] = "sglang.args.sampling_mask_max_tokens"
    # SGLang reserves more than that on small cards
    share_argument: ClassVar[str] = "mem-fraction-static"
    default_share: ClassVar[float] = 0.88
    picture_families: ClassVar[Sequence[str]] = ("qwen2_5_vl", "qwen3_vl")
    # in which a server's processes tell each other how busy they are
    session_files: ClassVar[str] = "sglang_loads_*.shm"
    left_files: ClassVar[str] = session_files

    def arguments(self, instance: ServerInstance) -> list[str]:
        return server_arguments(self.config, instance)

    def environment(self, instance: ServerInstance) -> dict[str, str]:
        # A server's context may exceed what the model was made for; no token is ever placed there.
        environment = {
            "PYTHONPATH": with_path(Path(__file__).with_name("in_server")),
            "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",
            # What a tower makes of pictures is kept across weight updates, and whatever they bring.
            "SGLANG_VLM_CACHE_SIZE_MB": "0",
        }
        if not instance.is_cuda:
            environment["SGLANG_USE_CPU_ENGINE"] = "1"
        return environment

    def check_turns(self, *, has_cuda: bool, is_here: bool) -> None:
        super().check_turns(has_cuda=has_cuda, is_here=is_here)
        python = self.program.python or sys.executable
        look = [python, "-c", _FINDS_SAVER]
        if is_here and subprocess.run(look, check=False, timeout=_LOOK_S).returncode:
            raise ConfigError(
                "placement: expected torch_memory_saver in the environment of SGLang "
                f"({python}), which gives its memory up by it with placement=turns; "
                "pip install torch-memory-saver there, or set placement=beside"
            )

    def kv_cache_bytes(
        self, given: Mapping[str, str], token_bytes: int, left: Callable[[], int | None]
    ) -> int:
        free, name = left(), "max-total-tokens"
        asked = self._count(given, name, least=1) * token_bytes if name in given else None
        return min((num for num in (asked, free) if num is not None), default=0)
