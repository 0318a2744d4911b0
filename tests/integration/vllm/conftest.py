"""A real vLLM server on a CPU, started once for most tests of this folder.

The tests, and the fixtures that they ask for, are those of SGLang wherever both behave alike.
"""

from __future__ import annotations

import re
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
from areal_sc.config.server_settings import ServersConfig, VLLMConfig
from areal_sc.engines.servers.engine import ServerEngine
from areal_sc.engines.servers.vllm.handle import VLLMEngine

REPOSITORY = Path(__file__).parents[3]
INSTALL = REPOSITORY / "tests" / "vllm_server" / "install.sh"
PYTHON = REPOSITORY / ".venv-vllm" / "bin" / "python"

INSTALL_TIMEOUT_S = 900.0
BUCKET_BYTES = 100_000
"""Less than the largest parameter: several buckets, one of them a large tensor alone."""

_RUNNING = re.compile(rb"^vllm:num_requests_running\{.*\} (\S+)$", re.MULTILINE)
_MADE = re.compile(rb"^vllm:generation_tokens_total\{.*\} (\S+)$", re.MULTILINE)


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def policies(tmp_path_factory: pytest.TempPathFactory) -> Policies:
    return Policies(tmp_path_factory.mktemp("policy"))


@pytest.fixture(scope="session")
def vllm_python() -> Path:
    """The interpreter of an environment that has vLLM; installed if it is not there."""
    subprocess.run([str(INSTALL)], check=True, timeout=INSTALL_TIMEOUT_S)
    return PYTHON


@pytest.fixture(scope="session")
def rollout_config(policies: Policies, vllm_python: Path) -> RolloutConfig:
    return RolloutConfig(
        path=str(policies.folder),
        dtype=Dtype.float32,
        device=Device.cpu,
        max_running_sequences=64,
        max_context_tokens=MAX_CONTEXT,
        seed=0,
        servers=ServersConfig(stop_timeout_s=2.0),
        vllm=VLLMConfig(python=str(vllm_python)),
        # an update that fails must not make the tests wait for long
        weight_update=WeightUpdateConfig(bucket_bytes=BUCKET_BYTES, step_timeout_s=60.0),
    )


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def engine(
    rollout_config: RolloutConfig, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[ServerEngine]:
    """A test leaves it serving, and not paused."""
    logs = tmp_path_factory.mktemp("vllm_logs")
    engine = ServerEngine(VLLMEngine(rollout_config), log_folder=logs, name="rollout-0")
    await engine.start()
    yield engine
    await engine.close()


@pytest_asyncio.fixture(loop_scope="session")
async def doomed(rollout_config: RolloutConfig, tmp_path: Path) -> AsyncIterator[ServerEngine]:
    """A server of the test's own, which may end."""
    engine = ServerEngine(VLLMEngine(rollout_config), log_folder=tmp_path, name="doomed")
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
    """A request counts as running from its prefill on, so tokens are counted, too."""
    first_seen: dict[float, float] = {}  # number of running requests -> tokens made by then

    async def num_running() -> float:
        _, text = await engine.server.client.send("GET", "/metrics", None, 30.0)
        running, made = (
            sum(float(value) for value in pattern.findall(text)) for pattern in (_RUNNING, _MADE)
        )
        # each step makes one token of each
        return running if made >= first_seen.setdefault(running, made) + 2 * running else 0

    return generating_on(num_running)
