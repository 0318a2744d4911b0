"""All that is asked of SGLang and vLLM is there in each supported version.

`tests/server_tables/make_tables.py` made the tables from the servers' sources.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from picture_models import save_picture_model

from areal_sc.config.lora_settings import LoraConfig
from areal_sc.config.parallel_settings import Placement
from areal_sc.config.schema import Dtype, GenerationConfig, RolloutConfig
from areal_sc.engines.servers.client import ServedAdapter, ServerAbilities, ServerClient
from areal_sc.engines.servers.handle import ServerInstance
from areal_sc.engines.servers.pictures import SentPictures
from areal_sc.engines.servers.requests import CompletionRequest
from areal_sc.engines.servers.sglang import arguments as sglang_arguments
from areal_sc.engines.servers.sglang.client import SGLangClient
from areal_sc.engines.servers.vllm import arguments as vllm_arguments
from areal_sc.engines.servers.vllm.client import VLLMClient
from areal_sc.errors import ConfigError, EngineFailed, ProtocolError
from areal_sc.weights.published import BucketLayout, WeightGroup

TABLES = Path(__file__).parents[3] / "server_tables"
REPOSITORY = TABLES.parents[1]

NOT_IN_ALL: Final = {
    ("sglang", "routes", "/begin_weight_update"),
    ("sglang", "routes", "/end_weight_update"),
    ("sglang", "requests", "GenerateReqInput.return_sampling_mask"),
    ("sglang", "requests", "GenerateReqInput.sampling_logprobs_mode"),
    ("sglang", "requests", "GenerateReqInput.return_prompt_token_ids"),
}
"""What a server is asked for before it is used, or asked whether it has; or what it is refused for
if it does not answer it."""


def read_table(name: str) -> tuple[list[str], dict[tuple[str, str], set[str]]]:
    """The versions, and (kind, name) -> those that have it."""
    lines = (TABLES / f"{name}.txt").read_text().splitlines()
    versions = lines[1].removeprefix("versions: ").split()
    table: dict[tuple[str, str], set[str]] = {}
    kind, having = "", set[str]()
    for line in lines[2:]:
        if heading := re.fullmatch(r"(flags|routes|requests) of (.*):", line):
            kind = heading[1]
            having = set(versions if heading[2] == "all" else heading[2].split())
        else:
            for found in line.split():
                table.setdefault((kind, found), set()).update(having)
    return versions, table


def missing(server: str, kind: str, used: Sequence[str]) -> dict[str, list[str]]:
    """Of what is used, and not asked for first: the versions that lack it."""
    versions, table = read_table(server)
    assert used
    lacking = {name: set(versions) - table.get((kind, name), set()) for name in used}
    return {
        name: sorted(those)
        for name, those in lacking.items()
        if those and (server, kind, name) not in NOT_IN_ALL
    }


def numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", version)))


def test_the_tables_are_of_the_supported_versions() -> None:
    project = (REPOSITORY / "pyproject.toml").read_text()
    for server, oldest in (
        ("sglang", sglang_arguments.OLDEST_VERSION),
        ("vllm", vllm_arguments.OLDEST_VERSION),
    ):
        (bounds,) = re.findall(rf'"{server}>=([\d.]+),<([\d.]+)"', project)
        versions, _ = read_table(server)
        assert numbers(versions[0]) == oldest == (*numbers(bounds[0]), 0, 0)[:3]
        assert numbers(versions[-1]) < numbers(bounds[1])


def test_what_is_not_there_is_found() -> None:
    assert list(missing("sglang", "flags", ["model_path", "no_such_flag"])) == ["no_such_flag"]
    assert missing("sglang", "routes", ["/flush_cache", "/ready"])["/ready"][0] == "0.5.11"


@pytest.mark.parametrize("lora", [LoraConfig(4, publish_merged=False), LoraConfig(4, places=3)])
@pytest.mark.parametrize("is_cuda", [True, False])
@pytest.mark.parametrize("server", ["sglang", "vllm"])
def test_flags(
    server: str, is_cuda: bool, lora: LoraConfig, tiny_model_folder: Path, tmp_path: Path
) -> None:
    config = RolloutConfig(
        path=str(tiny_model_folder),
        dtype=Dtype.bfloat16,
        float32_output_layer=True,
        max_context_tokens=64,
        lora=lora,
        placement=Placement.turns,
    )
    of_server = {"sglang": sglang_arguments, "vllm": vllm_arguments}[server]
    instance = ServerInstance(4000, "key", is_cuda)
    if server == "vllm" and lora.is_named and not is_cuda:
        with pytest.raises(ConfigError, match=r"actor.lora.places: expected 1 with .* on a CPU"):
            of_server.server_arguments(config, instance)
        return
    words = of_server.server_arguments(config, instance)
    seeing = save_picture_model(tmp_path / "seeing", "qwen2_5_vl")
    words += of_server.server_arguments(replace(config, path=str(seeing)), instance)
    used = [word[2:].split("=")[0].replace("-", "_") for word in words if word.startswith("--")]
    used = [name.removeprefix("no_") if server == "vllm" else name for name in used]
    assert missing(server, "flags", used) == {}


REQUESTS: Final[dict[tuple[str, str], str]] = {
    ("sglang", "/generate"): "GenerateReqInput",
    ("sglang", "/abort_request"): "AbortReq",
    ("sglang", "/pause_generation"): "PauseGenerationReqInput",
    ("sglang", "/continue_generation"): "ContinueGenerationReqInput",
    ("sglang", "/update_weight_version"): "UpdateWeightVersionReqInput",
    ("sglang", "/update_weights_from_disk"): "UpdateWeightFromDiskReqInput",
    ("sglang", "/update_weights_from_tensor"): "UpdateWeightsFromTensorReqInput",
    ("sglang", "/update_weights_from_distributed"): "UpdateWeightsFromDistributedReqInput",
    ("sglang", "/init_weights_update_group"): "InitWeightsUpdateGroupReqInput",
    ("sglang", "/destroy_weights_update_group"): "DestroyWeightsUpdateGroupReqInput",
    ("sglang", "/begin_weight_update"): "BeginWeightUpdateReqInput",
    ("sglang", "/end_weight_update"): "EndWeightUpdateReqInput",
    ("vllm", "/inference/v1/generate"): "GenerateRequest",
}
"""The class of what is posted; others read their JSON by hand."""


def recording(kind: type[ServerClient], asked: list[tuple[str, Mapping[str, Any]]]) -> Any:
    class Recording(kind):  # type: ignore[valid-type, misc]
        async def request(self, method: str, path: str, body: Any, timeout_s: Any) -> Any:
            asked.append((path.partition("?")[0], body or {}))
            return {
                "success": True,
                "version": "99.0.0",
                "weight_version": "0",
                "max_req_input_len": 10,
                "sampling_mask_max_tokens": 10,
                "tp_size": 1,
                "world_size": 1,
                "data": [{"max_model_len": 10, "root": "model"}],
                "meta_info": {},
                "choices": [{"token_ids": [1], "logprobs": {"content": [{"logprob": 0.0}]}}],
            }

        async def send(self, method: str, path: str, body: Any, timeout_s: Any) -> Any:
            asked.append((path, body or {}))
            return (405 if method == "GET" else 200), b""

    return Recording("http://localhost:1", "key")


@pytest.mark.parametrize("kind", [SGLangClient, VLLMClient])
async def test_routes_and_fields_of_requests(kind: type[ServerClient]) -> None:
    asked: list[tuple[str, Mapping[str, Any]]] = []
    client = recording(kind, asked)
    client.adapter = ServedAdapter("a", 1)
    client.abilities = ServerAbilities("99", "", (), 10, 1, True, 10)
    layout = BucketLayout(("w",), ("float32",), ((2,),))
    group = WeightGroup("g", "127.0.0.1", 1, 2, "nccl")
    sampling = GenerationConfig(max_new_tokens=4, top_p=0.9, top_k=5)
    never = asyncio.get_running_loop().create_future()
    request = CompletionRequest([1], sampling, 4, "length", (2,), None, True, never)
    asking = replace(request, is_truncated=False, adapter="a", asks_prompt=True, num_top=2)
    seeing = replace(asking, asks_prompt=False, pictures=SentPictures([1], 1, ["data:,"]))
    calls = [
        client.check_health(timeout_s=1),
        client.probe(timeout_s=1),
        client.ask_abilities(),
        client.served_weights(),
        client.answer(request, 10),
        client.answer(asking, None),
        client.answer(seeing, None),
        client.abort("r"),
        client.abort_all(),
        client.loaded_adapters(),
        client.load_adapter("a", "folder"),
        client.unload_adapter("a"),
        client.prompt_logprobs([1, 2], "a"),
        client.pause(holds_requests=True),
        client.pause(holds_requests=False),
        client.resume(),
        client.sleep(),
        client.take_weights_memory(),
        client.take_cache_memory(),
        client.set_version(1),
        client.load_from_disk("folder"),
        client.begin_update(),
        client.end_update(),
        client.load_tensors(torch.ones(2), layout, drops_cache=True),
        client.join_group(group, 1),
        client.leave_group("g"),
        client.receive_broadcast("g", layout, drops_cache=True),
    ]
    for call in calls:
        with suppress(ProtocolError, EngineFailed, ConfigError):  # of answers that are made up
            await call
    await client.close()
    server, routes = client.section, {path for path, _ in asked}
    assert len(routes) >= 12
    assert missing(server, "routes", sorted(routes)) == {}
    fields = set[str]()
    for path, body in asked:
        if (class_name := REQUESTS.get((server, path))) is not None:
            fields |= {f"{class_name}.{name}" for name in body}
            fields |= {f"SamplingParams.{name}" for name in body.get("sampling_params", {})}
    assert missing(server, "requests", sorted(fields)) == {}
