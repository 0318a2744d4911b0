"""A real SGLang server on a CPU, started once for most tests of this folder.

All tests, and the servers, live on one event loop: that of the session.
"""

from __future__ import annotations

import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest
import pytest_asyncio
import torch
import waiting
from integration.sglang.policies import MAX_CONTEXT, Generating, Policies
from integration.sglang.running_answers import generating_on

from areal_sc.config.schema import Device, Dtype, RolloutConfig, WeightUpdateConfig
from areal_sc.config.server_settings import ServersConfig, SGLangConfig
from areal_sc.engines.servers.engine import ServerEngine
from areal_sc.engines.servers.sglang.handle import SGLangEngine

REPOSITORY = Path(__file__).parents[3]
INSTALL = REPOSITORY / "tests" / "sglang_server" / "install.sh"
PYTHON = REPOSITORY / ".venv-sglang" / "bin" / "python"

INSTALL_TIMEOUT_S = 900.0
BUCKET_BYTES = 100_000
"""A third of the largest parameter: several buckets, one of them a large tensor alone."""


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def sglang_python() -> Path:
    """The interpreter of an environment that has SGLang; installed if it is not there."""
    subprocess.run([str(INSTALL)], check=True, timeout=INSTALL_TIMEOUT_S)
    return PYTHON


@pytest.fixture(scope="session")
def policies(tmp_path_factory: pytest.TempPathFactory) -> Policies:
    return Policies(tmp_path_factory.mktemp("policy"))


@pytest.fixture(scope="session")
def rollout_config(policies: Policies, sglang_config: SGLangConfig) -> RolloutConfig:
    return RolloutConfig(
        path=str(policies.folder),
        dtype=Dtype.float32,
        device=Device.cpu,
        max_running_sequences=64,
        max_context_tokens=MAX_CONTEXT,
        seed=0,
        servers=ServersConfig(stop_timeout_s=2.0),
        sglang=sglang_config,
        # an update that fails must not make the tests wait for long
        weight_update=WeightUpdateConfig(bucket_bytes=BUCKET_BYTES, step_timeout_s=60.0),
    )


@pytest.fixture(scope="session")
def sglang_config(sglang_python: Path) -> SGLangConfig:
    return SGLangConfig(python=str(sglang_python))


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def engine(
    rollout_config: RolloutConfig,
    tmp_path_factory: pytest.TempPathFactory,
) -> AsyncIterator[ServerEngine]:
    """A test leaves it serving, and not paused."""
    logs = tmp_path_factory.mktemp("sglang_logs")
    engine = ServerEngine(SGLangEngine(rollout_config), log_folder=logs, name="rollout-0")
    await engine.start()
    yield engine
    await engine.close()


@pytest_asyncio.fixture(loop_scope="session")
async def doomed(rollout_config: RolloutConfig, tmp_path: Path) -> AsyncIterator[ServerEngine]:
    """A server of the test's own, which may end."""
    engine = ServerEngine(SGLangEngine(rollout_config), log_folder=tmp_path, name="doomed")
    await engine.start()
    yield engine
    await engine.close()


@pytest.fixture
def until() -> Callable[[Callable[[], bool]], Awaitable[None]]:
    """Waits for a condition."""
    return waiting.until


@pytest.fixture
def generating(engine: ServerEngine) -> Generating:
    return _generating_on(engine)


@pytest.fixture
def generating_there(doomed: ServerEngine) -> Generating:
    return _generating_on(doomed)


def _generating_on(engine: ServerEngine) -> Generating:
    async def num_running() -> int:
        path = "/v1/loads?include=core"
        answer = await engine.server.client.request("GET", path, None, 30.0)
        return sum(load["num_running_reqs"] for load in answer["loads"])

    return generating_on(num_running)
