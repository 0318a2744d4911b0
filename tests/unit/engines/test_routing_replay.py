"""From embedded generation to a training rank: tokens go through the same experts."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
from builders import engines_on, packed_rows
from local_engines import running
from unit.engines.families import FAMILIES

from areal_sc.algorithms.named_loss import loss_of
from areal_sc.config.ppo_settings import PPOConfig
from areal_sc.config.schema import GenerationConfig
from areal_sc.engines.base import Completion
from areal_sc.engines.local.generator import SlotGenerator
from areal_sc.engines.local.model import LocalModel
from areal_sc.engines.local.slots import SlotRequest, SlotTable
from areal_sc.engines.routers import Routers
from areal_sc.errors import ModelError
from areal_sc.transport.packed_rows import PackedRows
from areal_sc.workers.episodes import WorkerEpisodeEngine
from areal_sc.workflows.transcript import Transcript

SIZES: dict[str, Any] = {
    "vocab_size": 40,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
MAX_CONTEXT = 96


def made(config: Any) -> Any:
    torch.manual_seed(0)
    model = hf.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.15 * torch.randn_like(parameter))
    return model


def saved(folder: Path, config: Any) -> Path:
    made(config).save_pretrained(folder)
    (folder / "tokenizer_config.json").write_text("{}")
    return folder


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = hf.Qwen3MoeConfig(**SIZES, **EXPERTS, mlp_only_layers=[1])
    return saved(tmp_path_factory.mktemp("models") / "experts", config)


def generator_of(model: Any, *, records_routes: bool = True) -> SlotGenerator:
    local = LocalModel(model, records_routes=records_routes)
    field = local.routers.sizes.field if local.routers else None
    table = SlotTable(8, MAX_CONTEXT, 24, seed=5, routes=field)
    return SlotGenerator(local, table, MAX_CONTEXT)


def choose_otherwise(router: Any) -> None:
    """Lets a Qwen3-MoE's router choose one other expert in about a tenth of all tokens.

    It gives that expert the weight which it has in the router's own scores.
    """

    def forward(hidden: torch.Tensor) -> tuple[torch.Tensor, ...]:
        logits = hidden @ router.weight.T
        scores = logits.softmax(-1, dtype=torch.float)
        odd = (hidden[:, 0] * 1000).floor().long()
        is_odd = (odd % 8 == 0)[:, None]  # it may have chosen that expert by itself
        moved = torch.nn.functional.one_hot(odd // 8 % scores.shape[-1], scores.shape[-1])
        chosen = torch.topk(scores + is_odd * moved, router.top_k, dim=-1).indices
        weights = scores.gather(1, chosen)
        if router.norm_topk_prob:
            weights = weights / weights.sum(-1, keepdim=True)
        return logits, weights.to(logits.dtype), chosen

    router.forward = forward


def sampled(model: Any, *, records_routes: bool = True) -> list[tuple[SlotRequest, Completion]]:
    """Answers of 40 to 45 tokens to prompts in groups of two, which share their prefill."""
    generator = generator_of(model, records_routes=records_routes)
    random = np.random.default_rng(0)
    for group in range(6):
        prompt = random.integers(0, 40, 7 + 5 * group)
        for number in (2 * group, 2 * group + 1):
            length = len(prompt) + 40 + group
            request = SlotRequest(number, prompt, length, "length", prefix_group=str(group))
            generator.table.add(request)
    finished = []
    while generator.table.has_work:
        finished += generator.step()
    return finished


def rows_of(answers: list[tuple[SlotRequest, Completion]]) -> PackedRows:
    """As a worker seals them."""
    lengths = tuple(len(request.prompt) + len(it.token_ids) for request, it in answers)
    masks = [np.arange(n) >= len(it.prompt) for n, (it, _) in zip(lengths, answers, strict=True)]
    fields = {
        "input_ids": np.concatenate([[*q.prompt, *it.token_ids] for q, it in answers]),
        "loss_mask": np.concatenate(masks),
        "behavior_logprobs": np.concatenate(
            [[0.0] * len(q.prompt) + it.logprobs for q, it in answers]
        ),
        "versions": np.concatenate([[-1] * len(q.prompt) + it.versions for q, it in answers]),
    }
    if answers[0][1].routes is not None:
        fields["routed_experts"] = np.concatenate([it.routes for _, it in answers])
    values = {name: torch.from_numpy(np.asarray(it)) for name, it in fields.items()}
    advantages = tuple(1.0 if number % 2 else -1.0 for number in range(len(answers)))
    return PackedRows(values, lengths, advantages)


def without_routes(rows: PackedRows) -> PackedRows:
    fields = {name: it for name, it in rows.fields.items() if name != "routed_experts"}
    return replace(rows, fields=fields)


@pytest.fixture(scope="module")
def rows(experts: Path) -> PackedRows:
    """Of a generator that chooses otherwise in a tenth of the tokens of each layer."""
    model = hf.AutoModelForCausalLM.from_pretrained(experts, dtype=torch.float32).eval()
    for module in model.modules():
        if type(module).__name__ == "Qwen3MoeTopKRouter":
            choose_otherwise(module)
    return rows_of(sampled(model))


@pytest.mark.parametrize("kept", ["none", "layers", "selective"])
def test_mismatch_falls_to_that_of_a_dense_model(
    kept: str, experts: Path, rows: PackedRows, tmp_path: Path
) -> None:
    """Whatever backward computes again; and proximal log-probabilities are the sampler's."""
    dense = saved(tmp_path / "dense", hf.Qwen3Config(**SIZES))
    model = hf.AutoModelForCausalLM.from_pretrained(dense, dtype=torch.float32).eval()
    of_dense = rows_of(sampled(model, records_routes=False))
    loss, found = loss_of(PPOConfig()), dict[str, dict[str, float]]()
    with engines_on(experts) as build:
        settings = {"activation_checkpointing": kept, "max_tokens_per_micro_batch": 256}
        plain, engine = build(**settings), build(**settings, routing_replay=True)
        mask = rows.fields["loss_mask"]
        proximal = engine.forward(rows, "logprobs")[mask]
        found["dense"] = build(dense, **settings).update([of_dense], loss, step=0)
        found["plain"] = plain.update([without_routes(rows)], loss, step=0)
        found["replay"] = engine.update([rows], loss, step=0)
        gap = (proximal - rows.fields["behavior_logprobs"][mask]).abs().mean()
        assert gap <= 2 * found["dense"]["mismatch"]
    assert 0.03 < found["replay"]["routing_mismatch"] < 0.09  # one of two in a tenth of the tokens
    assert "routing_mismatch" not in found["plain"]
    assert found["plain"]["mismatch"] > 1e-3
    assert found["replay"]["mismatch"] <= 2 * found["dense"]["mismatch"] < 2e-6


def test_backward_goes_through_the_replayed_experts(experts: Path, rows: PackedRows) -> None:
    """The gradient norm is that of a float64 model whose routers choose as the sampler's did."""
    some = rows.take([0, 3])
    exact = hf.AutoModelForCausalLM.from_pretrained(
        experts, dtype=torch.float64, experts_implementation="eager"
    ).eval()
    routers, starts = Routers(exact), some.starts
    total = torch.zeros((), dtype=torch.float64)
    assert some.advantages is not None
    for start, length, advantage in zip(starts, some.lengths, some.advantages, strict=True):
        own = {name: it[start : start + length] for name, it in some.fields.items()}
        routers.given = own["routed_experts"]
        token_ids = own["input_ids"].long()
        logits = exact(input_ids=token_ids[None], use_cache=False).logits[0, :-1]
        logprobs = logits.log_softmax(-1).gather(1, token_ids[1:, None])[:, 0]
        total = total - advantage * logprobs[own["loss_mask"][1:]].sum()
    (total / some.fields["loss_mask"].sum()).backward()
    norm = torch.stack([it.grad.norm() for it in exact.parameters() if it.grad is not None]).norm()
    with engines_on(experts) as build:
        for kept in ("none", "layers", "selective"):
            engine = build(routing_replay=True, activation_checkpointing=kept)
            found = engine.update([some], loss_of(PPOConfig()), step=0)
            assert found["grad_norm"] == pytest.approx(float(norm), rel=1e-5)
            plain = build(activation_checkpointing=kept)
            other = plain.update([without_routes(some)], loss_of(PPOConfig()), step=0)
            assert abs(other["grad_norm"] - float(norm)) > 2e-4 * float(norm)


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "deepseek_v3", "qwen3_5_moe"])
def test_packed_and_padded_rows_go_through_drawn_experts(family: str, tmp_path: Path) -> None:
    """As each row does alone in the model's own forward; some tokens route by themselves."""
    lengths = (9, 1, 14, 5)
    folder = saved(tmp_path / family, FAMILIES[family]())
    model = hf.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    routers = Routers(model)
    sizes = routers.sizes
    drawn = torch.rand(sum(lengths), sizes.num_layers, sizes.num_experts)
    routes = drawn.topk(sizes.per_token).indices.to(torch.uint8)
    routes[::4] = 0
    rows = packed_rows(lengths, routed_experts=routes)
    with engines_on(folder) as build:
        engine = build(routing_replay=True)
        assert engine._model.abilities.packs == (family != "qwen3_5_moe")
        found = engine.forward(rows, "logprobs")
        other = engine.forward(without_routes(rows), "logprobs")
    assert (found - other).abs().max() > 1e-2
    for start, length in zip(rows.starts, lengths, strict=True):
        token_ids = rows.fields["input_ids"][start : start + length].long()
        routers.given = routes[start : start + length]
        with torch.no_grad():
            logits = model(input_ids=token_ids[None], use_cache=False).logits[0, :-1].double()
        expected = logits.log_softmax(-1).gather(1, token_ids[1:, None])[:, 0].float()
        own = found[start + 1 : start + length]
        torch.testing.assert_close(own, expected, rtol=0, atol=1e-4)


def changed(model: Any, seed: int) -> Any:
    other, generator = copy.deepcopy(model), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.05)
    return other


def test_answers_that_new_weights_interrupt_have_the_routes_of_each_token(experts: Path) -> None:
    """Each sampled token's log-probability was computed at the token before it, which went through
    the experts that the token's own version of the weights chooses there."""
    model = hf.AutoModelForCausalLM.from_pretrained(experts, dtype=torch.float32).eval()
    models = {0: copy.deepcopy(model), 4: changed(model, 1), 5: changed(model, 2)}
    generator, random = generator_of(model), np.random.default_rng(1)
    finished = list[tuple[SlotRequest, Completion]]()
    for step in range(200):
        if step % 2 == 0 and step < 40:
            prompt = random.integers(0, 40, 1 + step % 30)
            for number in range(3 if step % 4 == 0 else 1):
                length = len(prompt) + int(random.integers(1, 40))
                group = str(step) if step % 4 == 0 else None
                generator.table.add(
                    SlotRequest(10 * step + number, prompt, length, "length", prefix_group=group)
                )
        for at, version in ((17, 4), (45, 5)):
            if step == at:
                generator.update_weights(version, list(models[version].named_parameters()))
        if generator.table.has_work:
            finished += generator.step()
    assert not generator.table.has_work
    assert len({it.versions[-1] for _, it in finished}) == 3
    assert sum(len(set(it.versions)) > 1 for _, it in finished) >= 4
    assert generator.counters["shared_prompt_tokens"] > 0
    routers = {version: Routers(it) for version, it in models.items()}
    for request, it in finished:
        token_ids = torch.tensor([[*request.prompt, *it.token_ids]])
        of_version = dict[int, Any]()
        for version in set(it.versions):
            with torch.no_grad():
                models[version](input_ids=token_ids, use_cache=False)
            of_version[version] = routers[version].routes().numpy()
        versions = [it.versions[0]] * (len(request.prompt) - 1) + it.versions
        expected = [of_version[version][place] for place, version in enumerate(versions)]
        assert it.routes is not None
        assert not it.routes[-1].any()
        np.testing.assert_array_equal(np.sort(it.routes[:-1]), np.sort(expected))


async def test_a_row_of_two_turns_has_the_routes_of_both(experts: Path) -> None:
    """All tokens but the last one, through an episode's engine and the embedded one."""
    model = hf.AutoModelForCausalLM.from_pretrained(experts, dtype=torch.float32).eval()
    reference = copy.deepcopy(model)
    routers, transcript = Routers(reference), Transcript()
    sampling = GenerationConfig(max_new_tokens=9)
    async with running(model, max_context_tokens=MAX_CONTEXT, routing_replay=True) as engine:
        pool: Any = None
        episode = WorkerEpisodeEngine(engine, pool, "g", sampling, routes=routers.sizes.field)
        for context in ([3, 1, 4, 1, 5], [9, 2, 6]):
            transcript.add_context(context)
            answer = await episode.generate(transcript.input_ids)
            assert answer.routes is None
            transcript.add_completion(answer)
    [row] = episode.routes.with_routes([transcript.trajectory(1.0)])
    with torch.no_grad():
        reference(input_ids=torch.tensor([row.input_ids]), use_cache=False)
    found, expected = row.fields["routed_experts"], routers.routes().numpy()
    assert found.dtype == np.uint8
    assert len(found) == 26
    np.testing.assert_array_equal(np.sort(found[:-1]), np.sort(expected[:-1]))
    assert not found[-1].any()


def test_routes_of_another_model_are_refused(experts: Path, rows: PackedRows) -> None:
    """Other layers, other experts a token, and a number that no expert has."""
    routes = rows.fields["routed_experts"]
    beyond = routes.clone()
    beyond[5, 0, 0] = 8
    with engines_on(experts) as build:
        engine = build(routing_replay=True)
        for other, got in (
            (routes[:, :2], r"got up to 7 in \(2, 2\)"),
            (routes[..., [0, 1, 1]], r"got up to 7 in \(3, 3\)"),
            (beyond, r"got up to 8 in \(3, 2\)"),
        ):
            spoilt = replace(rows, fields={**rows.fields, "routed_experts": other})
            with pytest.raises(ValueError, match=rf"expected experts below 8 .*\(3, 2\).* {got}"):
                engine.forward(spoilt, "logprobs")
            with pytest.raises(ValueError, match=got):
                engine.update([spoilt], loss_of(PPOConfig()), step=0)


def test_a_rank_of_a_dense_model_replays_nothing(tmp_path: Path) -> None:
    dense = saved(tmp_path / "dense", hf.Qwen3Config(**SIZES))
    with (
        engines_on(dense) as build,
        pytest.raises(ModelError, match=r"actor\.routing_replay: expected a model with experts"),
    ):
        build(routing_replay=True)
