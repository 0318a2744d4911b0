"""What servers are sent of pictures, and the prompt that they say they have read."""

from __future__ import annotations

import base64
import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from builders import picture
from picture_models import FAMILIES, save_picture_model
from PIL import Image

from areal_sc.config.schema import Device, GenerationConfig, RolloutConfig
from areal_sc.engines.picture_processor import picture_processor
from areal_sc.engines.servers.client import ServerClient
from areal_sc.engines.servers.engine import ServerEngine
from areal_sc.engines.servers.handle import ServersHandle
from areal_sc.engines.servers.pictures import PictureSender
from areal_sc.engines.servers.requests import CompletionRequest
from areal_sc.engines.servers.sglang.client import SGLangClient
from areal_sc.engines.servers.sglang.handle import SGLangEngine
from areal_sc.engines.servers.vllm.client import VLLMClient
from areal_sc.engines.servers.vllm.handle import VLLMEngine
from areal_sc.engines.tokenizer import load_tokenizer
from areal_sc.errors import ModelError, NeverWorks, WorkflowError
from areal_sc.workflows.pictures import encode_text_with

A, B = picture(0, 60, 90), picture(1, 24, 48, "JPEG")
SAMPLING = GenerationConfig(max_new_tokens=4)


def turned(mode: str) -> bytes:
    """A picture that lies on its side, and has something behind its colours."""
    image, content = Image.open(io.BytesIO(picture(3, 20, 40))).convert(mode), io.BytesIO()
    exif = Image.Exif()
    exif[0x0112] = 6
    image.putalpha(90)
    image.save(content, "PNG", exif=exif)
    return content.getvalue()


@pytest.mark.parametrize("family", [it for it in FAMILIES if it != "gemma3"])
def test_a_prompt_with_one_marker_a_picture(family: str, tmp_path: Path) -> None:
    folder = save_picture_model(tmp_path, family)
    tokenizer = load_tokenizer(folder)
    processor = picture_processor(folder, tokenizer)
    assert processor is not None
    pictures = [A, B, turned("RGBA")]
    prompt = encode_text_with(pictures, processor, tokenizer, "a <image> b <image><image>")
    sent = PictureSender(processor, tokenizer).sent(prompt, pictures)
    text = "a <image> b <image><image>".replace("<image>", processor._plain)
    assert sent.prompt == tokenizer.encode(text, add_special_tokens=False)
    assert sent.marker == processor.token_id
    for url, given in zip(sent.urls, pictures, strict=True):
        png = base64.b64decode(url.partition(",")[2])
        assert Image.open(io.BytesIO(png)).mode == "RGB"
        made, expected = processor.processed(png).pixels, processor.processed(given).pixels
        assert all(torch.equal(made[name], expected[name]) for name in expected)
    assert sent.behind([7, 8]) == [*sent.prompt, 7, 8]
    with pytest.raises(WorkflowError, match="1 tokens behind the pictures"):
        sent.behind([7, processor.token_id])
    with pytest.raises(WorkflowError, match=r"has not the .* tokens of its picture 3"):
        PictureSender(processor, tokenizer).sent(prompt, [*pictures, A])


def request(prompt: list[int], sender: PictureSender, **more: Any) -> CompletionRequest:
    sent = sender.sent(prompt, [A])
    return CompletionRequest(prompt, SAMPLING, 4, "length", (), False, pictures=sent, **more)


@pytest.mark.parametrize("kind", [SGLangClient, VLLMClient])
async def test_bodies_and_the_prompt_that_was_read(
    kind: type[ServerClient], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save_picture_model(tmp_path, "qwen2_5_vl")
    tokenizer = load_tokenizer(folder)
    processor = picture_processor(folder, tokenizer)
    assert processor is not None
    prompt = encode_text_with([A], processor, tokenizer, "see <image>!")
    asked = request(prompt, PictureSender(processor, tokenizer), token_ids=[9])
    sent = asked.pictures
    assert sent is not None
    bodies, told = list[Any](), list[int]()

    async def answer(method: str, path: str, body: Any, timeout_s: Any) -> Any:
        bodies.append(body)
        spans = [{"version": "1", "start": 0, "end": 1}]
        entry = {"token_id": 7, "logprob": -1.0}
        choice = {"finish_reason": "stop", "token_ids": [7], "logprobs": {"content": [entry]}}
        meta = {
            "finish_reason": {"type": "stop"},
            "output_token_logprobs": [[-1.0, 7, None]],
            "weight_versions": spans,
        }
        told_ids = {"prompt_token_ids": told} if told else {}
        return {"meta_info": meta, "choices": [{**choice, "weight_versions": spans}], **told_ids}

    client = kind("http://localhost:1", "key")
    monkeypatch.setattr(client, "request", answer)
    try:
        with pytest.raises(NeverWorks, match="and the server does not tell its own"):
            await client.answer(asked, None)
        told += [*prompt, 8]
        with pytest.raises(NeverWorks, match=rf"has read {len(prompt) + 1} others"):
            await client.answer(asked, None)
        told[-1] = 9
        assert (await client.answer(asked, None)).token_ids == [7]
        told.clear()
        assert (await client.answer(replace(asked, pictures=None), None)).token_ids == [7]
    finally:
        await client.close()
    ids = [*sent.prompt, 9]
    if kind is SGLangClient:
        found = bodies[0]["input_ids"], bodies[0]["image_data"]
        assert found == (ids, sent.urls)
        assert bodies[0]["return_prompt_token_ids"] is True
    else:
        parts = [{"type": "image_url", "url": sent.urls[0]}]
        assert (bodies[0]["token_ids"], bodies[0]["content_parts"]) == (ids, parts)
        assert bodies[0]["return_token_ids"] is True
    assert not {"image_data", "content_parts"} & bodies[-1].keys()


@pytest.mark.parametrize("kind", [SGLangEngine, VLLMEngine])
def test_families_that_a_server_is_not_given_pictures_for(
    kind: type[ServersHandle], tmp_path: Path
) -> None:
    config = RolloutConfig(path=str(save_picture_model(tmp_path, "gemma3")), device=Device.cpu)
    with pytest.raises(ModelError, match=r"gemma3 reads pictures, and .* qwen2_5_vl"):
        ServerEngine(kind(replace(config, max_context_tokens=64)), log_folder=tmp_path, name="r")
