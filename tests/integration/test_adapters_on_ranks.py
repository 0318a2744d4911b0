"""Adapters train on every mesh as one float64 process trains them, and go on from each other's."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers as hf
from integration.ranks import (
    ONE_SHARE,
    TWO_SHARES,
    Results,
    difference,
    load_program,
    loaded_weights,
    run_ranks,
    save_model,
)
from integration.test_fsdp_ranks import minibatch_loss
from safetensors.torch import load_file, save_file
from torch.func import functional_call

from areal_sc.config.lora_settings import LoraConfig
from areal_sc.config.schema import ActorConfig
from areal_sc.engines.fsdp.engine import FSDPEngine
from areal_sc.engines.snapshot_model import export_snapshot
from areal_sc.engines.training.snapshot_index import SnapshotIndex

RANK, ALPHA = 3, 6.0
TARGETS = ["q_proj", "k_proj", "o_proj", "mlp.up_proj", "down_proj"]
LEARNING_RATES = (0.5e-3, 1e-3)
MESHES = {
    "one": {},
    "dp2": {"data": 2},
    "tp2": {"tensor": 2},
    "dp2_tp2": {"data": 2, "tensor": 2},
}
RESUMED = {"tp2": ["one"], "dp2_tp2": ["tp2", "dp2"]}
"""Meshes that go on from what others, which ran before, have saved after the first step."""


def adapted(model: Any) -> Iterator[tuple[str, torch.nn.Linear]]:
    for name, module in model.named_modules():
        if any(name.endswith(target) for target in TARGETS):
            yield name, module


def save_adapter(folder: Path, model_folder: str) -> None:
    """As peft would, with B that is not zero."""
    model = hf.AutoModelForCausalLM.from_pretrained(model_folder)
    generator = torch.Generator().manual_seed(5)
    tensors = {}
    for name, module in adapted(model):
        outputs, inputs = module.weight.shape
        for own, shape in (("lora_A", (RANK, inputs)), ("lora_B", (outputs, RANK))):
            values = 0.2 * torch.randn(shape, generator=generator)
            tensors[f"base_model.model.{name}.{own}.weight"] = values
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "target_modules": TARGETS}
    (folder / "adapter_config.json").write_text(json.dumps(settings))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapters")
    sizes = {"vocab_size": 31, "hidden_size": 32, "num_hidden_layers": 2, "head_dim": 8}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 1, "max_position_embeddings": 64}
    config = hf.Qwen3Config(**sizes, **heads, intermediate_size=51, tie_word_embeddings=True)
    save_adapter(folder / "adapter", save_model(folder / "model", config))
    return folder


@pytest.fixture(scope="module")
def results(folder: Path) -> Results:
    """Scenario name -> what each rank left."""
    lora = {"rank": RANK, "alpha": ALPHA, "targets": TARGETS, "path": str(folder / "adapter")}

    def scenario(name: str, mesh: str, **settings: Any) -> dict[str, Any]:
        num_ranks = 1
        for size in MESHES[mesh].values():
            num_ranks *= size
        return {
            "model": str(folder / "model"),
            "world_size": num_ranks,
            "parallel": MESHES[mesh],
            "lora": {**lora, "save_merged": False},
            "steps": [0, 1],
            "logprob_lengths": [[5, 9, 1], [5, 9, 1]],
            "minibatches": TWO_SHARES if "data" in MESHES[mesh] else ONE_SHARE,
            "snapshot_after": 0,
            "snapshot": str(folder / f"by_{name}"),
            "save_hf": str(folder / f"saved_by_{name}"),
            **settings,
        }

    scenarios = {mesh: scenario(mesh, mesh) for mesh in MESHES}
    for mesh, saved in RESUMED.items():
        resumes = [str(folder / f"by_{other}") for other in saved]
        scenarios[mesh] |= {"resumes": resumes, "resumes_step": 1}
    scenarios["tp2"] |= {"activation_checkpointing": "layers", "max_tokens": 21}
    scenarios["merged"] = scenario("merged", "dp2", lora=lora, dtype="bfloat16", cpu_offload=True)
    new = {"rank": RANK, "alpha": ALPHA, "targets": TARGETS}
    scenarios["new"] = scenario("new", "tp2", lora=new, steps=[])
    scenarios["lost"] = scenario("lost", "dp2", lora={**new, "path": str(folder / "nowhere")})
    return run_ranks(folder, scenarios)


@pytest.fixture(scope="module")
def by_hand(folder: Path) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Merged weights and adapter after three steps; float64, autograd through W + (B A) alpha / r.

    It shares nothing with the engine: one row at a time, full logits, torch's AdamW.
    """
    program = load_program()
    model = hf.AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float64).eval()
    base = {name: p.detach() for name, p in model.named_parameters()}
    stored = load_file(folder / "adapter" / "adapter_model.safetensors")
    adapter = {name: values.double().requires_grad_() for name, values in stored.items()}

    def merged() -> dict[str, torch.Tensor]:
        def added(name: str) -> torch.Tensor:
            a, b = (adapter[f"base_model.model.{name}.lora_{own}.weight"] for own in "AB")
            return ALPHA / RANK * (b @ a)

        changed = {f"{n}.weight": base[f"{n}.weight"] + added(n) for n, _ in adapted(model)}
        return base | changed

    optimizer = torch.optim.AdamW(adapter.values(), lr=1.0, eps=1e-6, weight_decay=0.01)
    for step, lr in enumerate(LEARNING_RATES):
        optimizer.param_groups[0]["lr"] = lr
        for index, minibatch in enumerate(ONE_SHARE):
            rows = program.make_minibatch(step, index, minibatch)

            def forward(tokens: torch.Tensor) -> Any:
                return SimpleNamespace(logits=functional_call(model, merged(), (tokens,)).logits)

            optimizer.zero_grad()
            minibatch_loss(forward, rows, None).backward()
            torch.nn.utils.clip_grad_norm_(adapter.values(), 0.5)
            optimizer.step()
    weights = {name: values.detach() for name, values in merged().items()}
    return weights, {name: values.detach() for name, values in adapter.items()}


@pytest.mark.parametrize("mesh", MESHES)
def test_two_steps_give_the_adapter_of_one_float64_process(
    mesh: str, results: Results, by_hand: Any, folder: Path
) -> None:
    merged, adapter = by_hand
    for rank in results[mesh]:
        assert difference(rank["weights"], merged) <= 1e-5
        for other in RESUMED.get(mesh, []):
            assert difference(rank[str(folder / f"by_{other}")], merged) <= 1e-5
    saved = load_file(folder / f"saved_by_{mesh}" / "adapter_model.safetensors")
    assert difference(saved, adapter) <= 1e-5
    before = load_file(folder / "adapter" / "adapter_model.safetensors")
    moved = {name: float((saved[name] - before[name]).abs().max()) for name in before}
    assert min(moved.values()) > 1e-3  # there was something to get wrong


def test_published_weights_are_those_of_the_model_and_no_others(
    results: Results, by_hand: Any, folder: Path
) -> None:
    base = loaded_weights(folder / "model")
    for name in ("one", "dp2_tp2", "merged"):
        published = results[name][0]["weights"]
        assert published.keys() == base.keys()
        for key, values in base.items():
            is_adapted = any(key.endswith(f"{target}.weight") for target in TARGETS)
            assert torch.equal(published[key], values.to(published[key].dtype)) is not is_adapted
    merged = results["merged"][0]["weights"]
    assert {values.dtype for values in merged.values()} == {torch.bfloat16}
    assert difference(merged, by_hand[0]) < 0.02
    assert difference(loaded_weights(folder / "saved_by_merged"), merged) == 0


def test_a_snapshot_holds_the_adapter_alone_and_is_exported_in_both_forms(
    results: Results, by_hand: Any, folder: Path
) -> None:
    snapshot = folder / "by_dp2_tp2"
    shapes = SnapshotIndex.read(snapshot).shapes
    assert shapes
    assert all(name.endswith(("lora_A", "lora_B")) for name in shapes)
    lora = LoraConfig(rank=RANK, alpha=ALPHA, targets=TARGETS)
    config = ActorConfig(path=str(folder / "model"), device="cpu", lora=lora)
    export_snapshot(config, snapshot, folder / "alone", adapter_alone=True)
    export_snapshot(config, snapshot, folder / "whole")
    alone = load_file(folder / "alone" / "adapter_model.safetensors")
    whole, base = (loaded_weights(folder / name) for name in ("whole", "model"))
    for name in base:
        added = torch.zeros(())
        key = f"base_model.model.{name.removesuffix('.weight')}.lora_A.weight"
        if key in alone:
            added = ALPHA / RANK * (alone[key.replace("lora_A", "lora_B")] @ alone[key])
        assert torch.allclose(whole[name], base[name] + added, atol=1e-6), name


def test_a_new_adapter_is_the_same_on_all_meshes_and_changes_nothing(
    results: Results, folder: Path
) -> None:
    base = loaded_weights(folder / "model")
    assert difference(results["new"][0]["weights"], base) == 0
    lora = LoraConfig(rank=RANK, alpha=ALPHA, targets=TARGETS)
    engine = FSDPEngine(ActorConfig(path=str(folder / "model"), device="cpu", lora=lora, seed=0))
    engine.initialize()
    alone = dict(engine._model.causal_lm.named_parameters())
    engine.close()
    cut = [rank["parts"] for rank in results["new"]]
    name = "model.layers.1.self_attn.o_proj.lora_A"  # cut along its inputs
    assert torch.equal(torch.cat([parts[name] for parts in cut], 1), alone[name])
    name = "model.layers.1.self_attn.q_proj.lora_A"
    assert all(torch.equal(parts[name], alone[name]) for parts in cut)
    assert 0.9 < float(alone[name].detach().abs().max()) * 32**0.5 <= 1  # as peft draws it


def test_an_adapter_that_rank_0_cannot_read_ends_all_ranks(results: Results) -> None:
    for rank in results["lost"]:
        assert "ModelError: actor.lora.path=" in rank["error"]
        assert "cannot read adapter_config.json" in rank["error"]
