"""Rows with pictures against transformers' own forward of one row at a time, of each family."""

from __future__ import annotations

import io
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
from builders import engines_on, picture
from picture_models import FAMILIES, TOWER, own_logprobs, save_picture_model
from PIL import Image

from areal_sc.algorithms.named_loss import CROSS_ENTROPY
from areal_sc.config.parallel_settings import TrainEngineKind
from areal_sc.config.schema import (
    ActorConfig,
    LoraConfig,
    ModelHead,
    OptimizerConfig,
    ParallelConfig,
)
from areal_sc.engines.fsdp.handle import FSDPPPOActor
from areal_sc.engines.fsdp.packed_model import PackedModel
from areal_sc.engines.local.generator import SlotGenerator
from areal_sc.engines.local.model import LocalModel
from areal_sc.engines.local.slots import SlotRequest, SlotTable
from areal_sc.engines.megatron.handle import MegatronPPOActor
from areal_sc.engines.picture_inputs import PictureInputs, freeze_tower
from areal_sc.engines.picture_processor import PictureProcessor, picture_processor
from areal_sc.engines.tokenizer import load_tokenizer
from areal_sc.engines.training.causal_lm import load_causal_lm
from areal_sc.errors import ConfigError, ModelError, WorkflowError
from areal_sc.sizing.machine import Machine
from areal_sc.sizing.model_folder import read_model_shape
from areal_sc.sources.pictures import packed
from areal_sc.token_fields import PICTURES
from areal_sc.transport.packed_rows import PackedRows, RowValues

SHARED = (picture(0),)
ROWS: Sequence[tuple[str, tuple[bytes, ...], str]] = (
    ("hello there", (), "you"),
    ("see <image>!", SHARED, "one"),
    ("see <image>!", SHARED, "another"),
    ("see <image>!", (picture(9),), "one"),  # the same tokens, another picture
    ("a <image> b <image> c <image>", (picture(1, 24, 48), picture(2, 60, 31), picture(3)), "d"),
    ("short", (), "!"),
)
TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {family: save_picture_model(root / family, family) for family in FAMILIES}


def processor_of(folder: Path) -> PictureProcessor:
    found = picture_processor(folder, load_tokenizer(folder))
    assert found is not None
    return found


def encoded(folder: Path, text: str, pictures: Sequence[bytes]) -> list[int]:
    ids = load_tokenizer(folder)(processor_of(folder).expand(text, pictures))["input_ids"]
    return [int(token) for token in ids]


def packed_rows(folder: Path) -> PackedRows:
    prompts = [encoded(folder, text, pictures) for text, pictures, _ in ROWS]
    answers = [encoded(folder, answer, ()) for _, _, answer in ROWS]
    rows = [[*prompt, *answer] for prompt, answer in zip(prompts, answers, strict=True)]
    masks = [
        [False] * len(prompt) + [True] * len(answer)
        for prompt, answer in zip(prompts, answers, strict=True)
    ]
    fields = {
        "input_ids": torch.tensor([*chain(*rows)]).int(),
        "loss_mask": torch.tensor([*chain(*masks)]),
    }
    blobs = [packed(pictures).tobytes() for _, pictures, _ in ROWS]
    values = {PICTURES: RowValues.of_bytes(blobs)}
    return PackedRows(fields, tuple(map(len, rows)), row_fields=values)


def expected_logprobs(model: Any, folder: Path, rows: PackedRows) -> Any:
    ids = torch.split(rows.fields["input_ids"].long(), list(rows.lengths))
    each = [
        own_logprobs(model, folder, row, pictures)
        for row, (_, pictures, _) in zip(ids, ROWS, strict=True)
    ]
    return torch.cat(each) * rows.fields["loss_mask"]


def whole_model(folder: Path, dtype: torch.dtype = torch.float64) -> Any:
    return hf.AutoModelForImageTextToText.from_pretrained(folder, dtype=dtype).eval()


def always_shared(model: PackedModel, device: torch.device) -> float:
    return 1 if model.abilities.shares else float("inf")


@pytest.mark.parametrize("family", FAMILIES)
def test_logprobs_of_one_micro_batch(
    folders: dict[str, Path], family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = folders[family]
    rows = packed_rows(folder)
    with engines_on(folder) as build, torch.no_grad():
        engine = build(max_tokens_per_micro_batch=2048)
        assert engine._model.abilities.packs == (family != "gemma3")
        found = engine.forward(rows, "logprobs")
        expected = expected_logprobs(whole_model(folder), folder, rows)
        assert torch.allclose(found.double(), expected, atol=TOLERANCE)
        first, other = (torch.split(found, list(rows.lengths))[row][-3:] for row in (1, 3))
        assert not torch.allclose(first, other, atol=1e-3)  # pictures are looked at
        if engine._model.abilities.packs:  # a prompt and its picture are computed once
            monkeypatch.setattr(PackedModel, "min_saved_tokens", always_shared)
            (batch,) = engine._plan([rows], lambda it: it.fields["loss_mask"])
            saved = sum(batch.num_row_tokens) - sum(batch.num_computed_tokens)
            assert saved == rows.lengths[1] - len("one")
            shared = engine.forward(rows, "logprobs")
            assert torch.allclose(shared.double(), expected, atol=TOLERANCE)


@pytest.mark.parametrize("trains_tower", [False, True], ids=["text", "all"])
@pytest.mark.parametrize("family", FAMILIES)
def test_three_updates_and_the_model_that_is_left(
    folders: dict[str, Path], family: str, trains_tower: bool, tmp_path: Path
) -> None:
    folder = folders[family]
    rows = packed_rows(folder)
    reference = whole_model(folder)
    decoder, head = reference.get_decoder(), reference.get_output_embeddings()
    parts = (reference,) if trains_tower else (decoder, head)
    trained = {id(it): it for part in parts for it in part.parameters()}
    adam = torch.optim.AdamW(trained.values(), lr=1e-3, weight_decay=0.0, eps=1e-4)
    optimizer = OptimizerConfig(lr=1e-3, eps=1e-4, max_grad_norm=0.0, total_steps=10)
    with engines_on(folder) as build:
        engine = build(
            max_tokens_per_micro_batch=256, optimizer=optimizer, train_vision_tower=trains_tower
        )
        for step in range(3):
            stats = engine.update([rows], CROSS_ENTROPY, step=step)
            adam.zero_grad()
            loss = -expected_logprobs(reference, folder, rows).sum()
            loss = loss / rows.fields["loss_mask"].sum()
            loss.backward()
            gradients = [it.grad for it in trained.values() if it.grad is not None]
            norm = torch.nn.utils.get_total_norm(gradients)
            assert stats["loss"] == pytest.approx(loss.item(), abs=TOLERANCE)
            assert stats["grad_norm"] == pytest.approx(norm.item(), rel=1e-4)
            adam.step()
        engine.begin_save_hf(tmp_path / "saved").result()
        left = engine.forward(rows, "logprobs")
    saved, first = whole_model(tmp_path / "saved", torch.float32), whole_model(folder)
    with torch.no_grad():
        expected = expected_logprobs(reference, folder, rows)
        assert torch.allclose(left.double(), expected, atol=TOLERANCE)
        again = expected_logprobs(saved, tmp_path / "saved", rows)
        assert torch.allclose(again, left, atol=TOLERANCE)
    before = dict(first.named_parameters())
    for name, values in saved.named_parameters():
        is_tower = not any(it in name for it in ("language_model", "text_model", "lm_head"))
        is_trained = trains_tower or not is_tower
        is_used = reference.get_parameter(name).grad is not None
        assert torch.equal(values, before[name].float()) == (not is_trained or not is_used), name


@pytest.mark.parametrize("family", [it for it in FAMILIES if it != "gemma3"])
def test_generated_tokens(folders: dict[str, Path], family: str) -> None:
    """In passes that cut pictures, in a group, and across new weights."""
    folder = folders[family]
    model, other = whole_model(folder, torch.float32), whole_model(folder, torch.float32)
    with torch.no_grad():
        for values in other.parameters():
            values.add_(0.02 * torch.randn(values.shape, generator=torch.Generator()))
    exact = {0: whole_model(folder), 1: other.double()}
    local = LocalModel(model, processor=processor_of(folder))
    generator = SlotGenerator(local, SlotTable(8, 256, 7, seed=3), 256)
    assert local.pictures is not None
    added = list[tuple[SlotRequest, Sequence[bytes]]]()
    for number, (text, pictures, _) in enumerate([*ROWS, ROWS[4]]):
        prompt = np.array(encoded(folder, text, pictures))
        request = SlotRequest(number, prompt, len(prompt) + 9, "length")
        request.prefix_group = {1: "a", 2: "a", 4: "b", 6: "b"}.get(number)
        if pictures:
            request.pictures = local.pictures.of_row(torch.from_numpy(prompt), pictures)
        generator.table.add(request)
        added.append((request, pictures))
    finished = {}
    while generator.table.has_work:
        if generator.version == 0 and generator.counters["generated_tokens"] > 20:
            named = [(name, it.float()) for name, it in other.state_dict().items()]
            generator.update_weights(1, named)
        for request, completion in generator.step():
            finished[request.request_id] = completion
    assert generator.counters["shared_prompt_tokens"] > 20
    assert {it for answer in finished.values() for it in answer.versions} == {0, 1}
    num_compared = 0
    with torch.no_grad():
        for request, pictures in added:
            answer = finished[request.request_id]
            if local.pictures.processor.token_id in answer.token_ids:
                continue  # the model itself takes it for a picture's in a row that is whole
            num_compared += 1
            ids = torch.tensor([*request.prompt.tolist(), *answer.token_ids])
            by_version = [own_logprobs(exact[it], folder, ids, pictures) for it in (0, 1)]
            places = range(len(request.prompt), len(ids))
            expected = [
                float(by_version[version][place])
                for version, place in zip(answer.versions, places, strict=True)
            ]
            assert answer.logprobs == pytest.approx(expected, abs=TOLERANCE)
    assert num_compared > len(added) // 2


@pytest.mark.parametrize("family", ["idefics3", "gemma3"])  # others' need packages for videos
def test_tokens_are_those_of_the_whole_processor(folders: dict[str, Path], family: str) -> None:
    folder, marker = folders[family], FAMILIES[family].marker
    text, pictures = f"a\n{marker} b {marker}", [picture(1, 24, 48), picture(2, 60, 31)]
    images = [Image.open(io.BytesIO(it)) for it in pictures]
    of_model = {"idefics3": {"image_seq_len": 4}, "gemma3": {"image_seq_length": 4}}
    whole = hf.AutoProcessor.from_pretrained(folder, **of_model[family])
    made = whole(text=[text], images=[images], return_tensors="pt")
    assert encoded(folder, text, pictures) == made["input_ids"][0].tolist()


def test_an_adapter_is_beside_the_text_part_alone(folders: dict[str, Path]) -> None:
    folder = folders["qwen3_vl"]
    rows = packed_rows(folder)
    with engines_on(folder) as build:
        engine = build(max_tokens_per_micro_batch=2048, lora=LoraConfig(rank=2))
        before = engine.forward(rows, "logprobs")
        with torch.no_grad():
            expected = expected_logprobs(whole_model(folder), folder, rows)
        assert torch.allclose(before.double(), expected, atol=TOLERANCE)
        for step in range(2):
            engine.update([rows], CROSS_ENTROPY, step=step)
        named = engine._model.causal_lm.named_parameters()
        adapted = [name for name, it in named if it.requires_grad]
        assert adapted
        assert all("language_model" in name for name in adapted)
        assert torch.allclose(engine.forward(rows, "base_logprobs"), before, atol=TOLERANCE)
        assert engine.forward(rows, "logprobs").sum() > before.sum() + 0.1


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_counted_of_a_tower(folders: dict[str, Path], family: str) -> None:
    folder, model = folders[family], whole_model(folders[family])
    freeze_tower(model)
    frozen = sum(it.numel() for it in model.parameters() if not it.requires_grad)
    trained = sum(it.numel() for it in model.parameters() if it.requires_grad)
    shape = read_model_shape(folder)
    assert shape is not None
    assert (shape.num_tower_parameters, shape.num_parameters) == (frozen, frozen + trained)
    assert shape.tower is not None
    assert (shape.tower.num_layers, shape.tower.hidden) == (3 if family == "qwen3_vl" else 2, 32)
    made = processor_of(folder).processed(picture(1, 24, 48))
    grid = made.pixels.get("image_grid_thw")
    size = made.pixels["pixel_values"].shape
    num_patches = size[0] * (32 // TOWER["patch_size"]) ** 2 if grid is None else grid.prod()
    assert shape.patches_per_token * made.num_tokens == int(num_patches)

    def held(trains_tower: bool, num_ranks: int = 1) -> int:
        parallel = ParallelConfig(data=num_ranks)
        config = ActorConfig(train_vision_tower=trains_tower, parallel=parallel)
        (plan,) = FSDPPPOActor(config).plan_worker(0, shape, ["cpu"], Machine())
        assert plan.memory["host"] > 2 * plan.picture_bytes == 2 << 28
        return plan.held_bytes

    assert held(False) == 4 * frozen + 16 * trained
    assert held(True) == 16 * (frozen + trained)
    assert held(False, num_ranks=2) == pytest.approx(held(False) / 2, abs=32)


def test_what_cannot_be_is_refused_by_name(
    folders: dict[str, Path], tiny_model_folder: Path
) -> None:
    folder = folders["qwen3_vl"]
    why = r"the rows have pictures, and the model in .* reads none"
    with engines_on(tiny_model_folder) as build, pytest.raises(ValueError, match=why):
        build().forward(packed_rows(folder), "logprobs")
    with pytest.raises(ModelError, match="embedded generation does not know: train it by SFT"):
        LocalModel(whole_model(folders["gemma3"]), processor=processor_of(folders["gemma3"]))
    with pytest.raises(ConfigError, match=r"reads pictures; expected actor\.parallel\.tensor=1"):
        FSDPPPOActor(ActorConfig(parallel=ParallelConfig(tensor=2))).check_model(folder)
    tower = {"train_vision_tower": True}
    with pytest.raises(ConfigError, match=r"expected false, as the model in .* reads no pictures"):
        FSDPPPOActor(ActorConfig(**tower)).check_model(tiny_model_folder)
    with pytest.raises(ConfigError, match=r"expected false with an adapter \(actor\.lora\.rank"):
        FSDPPPOActor(ActorConfig(**tower, lora=LoraConfig(rank=2))).check(None)
    with pytest.raises(ModelError, match=r"actor\.engine=megatron does not"):
        MegatronPPOActor(ActorConfig(engine=TrainEngineKind.megatron)).check_model(folder)
    with pytest.raises(ModelError, match="no values are trained with pictures"):
        load_causal_lm(folder, ModelHead.value)
    processor = processor_of(folder)
    with pytest.raises(WorkflowError, match=r"1 markers .* 2 pictures"):
        processor.expand("a <image>", [picture(0), picture(1)])
    ids = torch.tensor(encoded(folder, "a <image>", [picture(0)]))
    inputs = PictureInputs(whole_model(folder), processor)
    assert len(inputs.of_row(ids[:2], [picture(0)]).places) == 0  # a row of text
    with pytest.raises(WorkflowError, match=r"has 8 tokens of pictures, and its 2 .* need 16"):
        inputs.of_row(ids, [picture(0), picture(1)])
    with pytest.raises(WorkflowError, match="have no token between them"):
        inputs.of_row(ids[[3, 3, 3, 3, 3, 3, 3, 3] * 2], [picture(0), picture(1)])
    with pytest.raises(WorkflowError, match="refuses a picture of 400 x 1 pixels"):
        processor.expand("a <image>", [picture(0, 400, 1)])
