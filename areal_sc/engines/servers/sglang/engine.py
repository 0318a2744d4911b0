"""Generation by SGLang servers."""

from __future__ import annotations

import re
from pathlib import Path

from areal_sc.config.schema import RolloutConfig
from areal_sc.engines.servers.engine import ServerEngine
from areal_sc.engines.servers.kind import ServerPlace
from areal_sc.engines.servers.sglang.arguments import server_arguments
from areal_sc.engines.servers.sglang.client import SGLangClient
from areal_sc.engines.servers.sglang.handle import SGLangEngine


class SGLang:
    """SGLang as a kind of server."""

    name = "SGLang"
    section = SGLangEngine.section
    module = "sglang.launch_server"
    scheduler_title = "scheduler"
    # in which a server's processes tell each other how busy they are
    left_files = re.compile(r" (/dev/shm/sglang_loads_\S+\.shm)$", re.MULTILINE)

    arguments = staticmethod(server_arguments)

    def environment(self, place: ServerPlace) -> dict[str, str]:
        # A server's context may exceed what the model was made for; no token is ever placed there.
        environment = {"SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1"}
        if not place.is_cuda:
            environment["SGLANG_USE_CPU_ENGINE"] = "1"
        return environment

    def connect(self, url: str, api_key: str, control_timeout_s: float) -> SGLangClient:
        return SGLangClient(url, api_key, control_timeout_s)


class SGLangServerEngine(ServerEngine):
    """`GenerationEngine` over one or several SGLang servers; arguments as in `ServerEngine`."""

    def __init__(self, config: RolloutConfig, *, log_folder: Path, name: str) -> None:
        super().__init__(SGLang(), SGLangEngine(config), log_folder=log_folder, name=name)
