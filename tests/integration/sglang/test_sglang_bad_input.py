"""What cannot be, said before anything is generated: what is wrong, and what to change."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import pytest
from integration.sglang.policies import MAX_CONTEXT, SIZES, Policies
from transformers import LlamaConfig

from areal_sc.config.schema import GenerationConfig, RolloutConfig, WeightUpdateConfig
from areal_sc.config.server_settings import ServersConfig, SGLangConfig
from areal_sc.engines.servers.engine import ServerEngine
from areal_sc.engines.servers.process import free_port
from areal_sc.engines.servers.sglang.handle import SGLangEngine
from areal_sc.errors import ConfigError, ModelError, WorkerStartError
from areal_sc.weights.group import layout_of

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(600)]

KEY_VARIABLE = "KEY_OF_SGLANG_SERVERS"

EngineFactory = Callable[..., ServerEngine]
Until = Callable[[Callable[[], bool]], Awaitable[None]]


@pytest.fixture
def make_engine(rollout_config: RolloutConfig, tmp_path: Path) -> EngineFactory:
    """An engine that is not started."""

    def make(**rollout: object) -> ServerEngine:
        config = replace(rollout_config, **rollout)
        return ServerEngine(SGLangEngine(config), log_folder=tmp_path / "logs", name="bad")

    return make


def running_server(engine: ServerEngine) -> ServersConfig:
    """Settings that connect to the server of another engine."""
    assert engine.server.process
    os.environ[KEY_VARIABLE] = engine.server.process.api_key
    return ServersConfig(urls=[engine.server.url], api_key_env=KEY_VARIABLE)


def children() -> set[int]:
    """Process ids of this process's children."""
    tasks = Path("/proc/self/task").iterdir()
    return {int(pid) for task in tasks for pid in (task / "children").read_text().split()}


async def test_sglang_is_not_installed(make_engine: EngineFactory) -> None:
    engine = make_engine(sglang=SGLangConfig(python=sys.executable))
    with pytest.raises(ConfigError, match=r"SGLang is not installed for sglang\.python="):
        await engine.start()
    await engine.close()


async def test_no_such_interpreter(make_engine: EngineFactory) -> None:
    with pytest.raises(ConfigError, match=r"sglang\.python: '/no/python' is no program"):
        make_engine(sglang=SGLangConfig(python="/no/python"))


@pytest.mark.long
async def test_a_server_that_has_lost_a_port_starts_again(
    make_engine: EngineFactory, sglang_config: SGLangConfig, tmp_path: Path, until: Until
) -> None:
    """SGLang chooses ports when it starts, and listens on them much later."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        arguments = {"nccl_port": taken.getsockname()[1]}
        engine = make_engine(sglang=replace(sglang_config, args=arguments))
        starting = asyncio.create_task(engine.start())
        logs = tmp_path / "logs"
        await until(lambda: any("EADDRINUSE" in it.read_text() for it in logs.glob("*.log")))
    await starting
    await engine.close()


async def test_an_argument_that_sglang_does_not_know(
    make_engine: EngineFactory, sglang_config: SGLangConfig, tmp_path: Path
) -> None:
    before = children()
    engine = make_engine(sglang=replace(sglang_config, args={"no_such_argument": 1}))
    with pytest.raises(WorkerStartError, match="ended with exit code 2") as failure:
        await engine.start()
    assert "unrecognized arguments: --no-such-argument" in str(failure.value)
    assert failure.value.log_path
    await engine.close()
    assert children() <= before
    (log,) = (tmp_path / "logs").iterdir()
    assert log.stat().st_mode & 0o077 == 0  # the key is printed in it


async def test_a_model_folder_that_holds_none(
    make_engine: EngineFactory, sglang_config: SGLangConfig, tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match="no such folder"):
        make_engine(path=str(tmp_path / "nowhere"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelError, match=r"no config\.json"):
        make_engine(path=str(tmp_path / "empty"))


async def test_an_unreachable_url(make_engine: EngineFactory) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    engine = make_engine(servers=ServersConfig(urls=[url]))
    with pytest.raises(ConfigError, match=rf"no SGLang server answers at {url}"):
        await engine.start()
    await engine.close()


async def test_a_wrong_key(make_engine: EngineFactory, engine: ServerEngine) -> None:
    other = make_engine(servers=replace(running_server(engine), api_key_env="NO_SUCH_KEY"))
    with pytest.raises(ConfigError, match=r"refused the API key .*servers\.api_key_env"):
        await other.start()
    await other.close()


async def test_a_server_of_another_model(
    make_engine: EngineFactory, engine: ServerEngine, tmp_path: Path
) -> None:
    folder = tmp_path / "other"
    Policies(folder, LlamaConfig(**SIZES))
    other = make_engine(servers=running_server(engine), path=str(folder))
    with pytest.raises(ModelError, match=r"another model.*model_type is 'qwen2', expected 'llama'"):
        await other.start()
    await other.close()


async def test_a_server_of_a_shorter_context(
    make_engine: EngineFactory, engine: ServerEngine
) -> None:
    other = make_engine(servers=running_server(engine), max_context_tokens=MAX_CONTEXT * 2)
    with pytest.raises(ConfigError, match=r"max_context_tokens is 2048: lower it"):
        await other.start()
    await other.close()


async def test_servers_of_others_are_used_and_get_weights_by_folders(
    make_engine: EngineFactory, engine: ServerEngine, policies: Policies, tmp_path: Path
) -> None:
    """They keep running, whichever way the weights come."""
    folder = policies.save(engine.version, tmp_path / "weights")
    update = WeightUpdateConfig(folder=str(tmp_path / "published"))
    other = make_engine(servers=running_server(engine), weight_update=update)
    await other.start()
    answer = await other.generate([5, 6], GenerationConfig(max_new_tokens=10))
    policies.check([5, 6], answer)
    assert set(answer.versions) == {0}  # it had another run's weights, and got the folder's
    await other.update_weights(1, policies.source(0))
    assert (other.version, list((tmp_path / "published").iterdir())) == (1, [])
    await other.update_weights_from_disk(engine.version, folder)
    answer = await other.generate([5, 6], GenerationConfig(max_new_tokens=10))
    policies.check([5, 6], answer)
    assert set(answer.versions) == {engine.version}
    # one that is in no group gets what was broadcast by a folder, which goes again
    bucket, given_up = layout_of(policies.named_tensors(0)), asyncio.Event()

    async def give_up() -> None:
        given_up.set()

    await other.update_weights_from_group(
        77, "unknown", [bucket], again=policies.source(0), give_up=give_up
    )
    assert given_up.is_set()
    answer = await other.generate([5, 6], GenerationConfig(max_new_tokens=10))
    assert set(answer.versions) == {77}
    policies.check([5, 6], replace(answer, versions=[0] * len(answer.versions)))
    assert list((tmp_path / "published").iterdir()) == []
    version = engine.version
    await other.update_weights_from_disk(version, folder)  # as their owner has left them
    await other.close()
    answer = await engine.generate([5, 6], GenerationConfig(max_new_tokens=10))
    policies.check([5, 6], answer)
