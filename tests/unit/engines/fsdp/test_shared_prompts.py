"""Rows that share their first tokens train as rows that do not."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from builders import save_qwen2
from unit.engines.families import VOCABULARY, build

from areal_sc.algorithms.named_loss import NamedLoss, loss_of
from areal_sc.algorithms.shared_prefixes import share_prefixes
from areal_sc.config.lora_settings import LoraConfig
from areal_sc.config.ppo_settings import Aggregation, Level, PPOConfig
from areal_sc.config.schema import ActorConfig, ModelHead, OptimizerConfig
from areal_sc.engines.fsdp.engine import FSDPEngine
from areal_sc.engines.fsdp.packed_model import PackedModel
from areal_sc.metadata import RowMetadata
from areal_sc.transport.packed_rows import PackedRows

CPU = torch.device("cpu")
OF_THE_WAY = {"num_micro_batches", "num_computed_tokens", "shared_token_share"}


def random_rows(seed: int) -> list[torch.Tensor]:
    """Rows that part at up to six places; some begin others, and one may be alone."""
    chance = random.Random(seed)

    def draw(count: int) -> list[int]:
        return [chance.randrange(VOCABULARY) for _ in range(count)]

    rows = [draw(chance.randint(1, 12))]
    for _ in range(chance.randint(0, 9)):
        parent = chance.choice(rows)
        rows.append(parent[: chance.randint(0, len(parent))] + draw(chance.randint(1, 6)))
    rows.append(rows[0][: chance.randint(1, len(rows[0]))])
    return [torch.tensor(row) for row in rows]


@pytest.mark.parametrize("family", ["gpt_neox", "phi", "starcoder2", "gpt2"])
def test_log_probabilities_and_gradients_in_float64(family: str) -> None:
    """Of families whose norms compute in float64, too; with windows, and with learned positions."""
    model = PackedModel(build(family).double().eval(), chunk_tokens=64)
    head = model.causal_lm.get_output_embeddings()
    for seed in range(6):
        rows = random_rows(seed)
        input_ids, lengths = torch.cat(rows), list(map(len, rows))
        forest = share_prefixes([[row.numpy() for row in rows]], 1)
        assert forest is not None
        found = []
        for shares in (True, False):
            layout = model.layout(lengths, CPU)
            given, computed = input_ids, torch.arange(len(input_ids))
            if shares:
                layout = model.layout(forest.lengths, CPU, forest.parents)
                given = input_ids[torch.from_numpy(forest.token_index)]
                computed = torch.from_numpy(forest.computed_index)
            hidden = model.hidden_states(given, layout)[1][computed]
            logprobs = head(hidden).log_softmax(-1).gather(1, input_ids.roll(-1)[:, None])
            model.zero_grad()
            (logprobs[:, 0] * torch.arange(len(input_ids)).cos()).sum().backward()
            gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
            found.append([logprobs.detach(), *gradients])
        for one, other in zip(*found, strict=True):
            torch.testing.assert_close(one, other, atol=1e-9, rtol=1e-9)


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_qwen2(tmp_path_factory.mktemp("model"), max_position_embeddings=64)


def group_rows(seed: int, vocabulary: int) -> PackedRows:
    """Two groups of four, a longer turn that begins as one of them, and a row alone."""
    generator = torch.Generator().manual_seed(seed)

    def draw(count: int) -> torch.Tensor:
        return torch.randint(vocabulary, (count,), generator=generator)

    prompts = [draw(9), draw(5)]
    rows = [torch.cat([prompts[n // 4], draw(2 + n % 3)]) for n in range(8)]
    rows += [torch.cat([rows[1], draw(3)]), draw(7)]
    lengths = tuple(map(len, rows))
    num_tokens = sum(lengths)
    fields = {
        "input_ids": torch.cat(rows).int(),
        "loss_mask": torch.cat([torch.arange(length) >= 4 for length in lengths]),
        "behavior_logprobs": -3.4 + 0.5 * torch.rand(num_tokens, generator=generator),
        "proximal_logprobs": -3.4 + 0.5 * torch.rand(num_tokens, generator=generator),
        "values": torch.rand(num_tokens, generator=generator),
        "returns": torch.rand(num_tokens, generator=generator),
        "temperatures": torch.tensor([0.5, 1.0, 1.7])[torch.arange(num_tokens) % 3],
    }
    groups = (0, 0, 0, 0, 1, 1, 1, 1, 0, 2)
    metadata = tuple(
        RowMetadata(group, 0, length, float(number % 2), 0, (), number)
        for number, (group, length) in enumerate(zip(groups, lengths, strict=True))
    )
    advantages = torch.randn(len(rows), generator=generator).tolist()
    return PackedRows(fields, lengths, tuple(advantages), metadata)


def train(config: ActorConfig, min_saved: float, loss: NamedLoss) -> list[Any]:
    """What the model says of rows before, each update's metrics, and the weights after."""

    class Engine(FSDPEngine):
        _min_saved_tokens = min_saved

    engine = Engine(config)
    engine.initialize(0, 1, "")
    try:
        assert engine._model.abilities.shares
        vocabulary = engine._model.causal_lm.config.vocab_size
        rows = [group_rows(seed, vocabulary) for seed in range(4)]
        output = "logprobs" if config.head is ModelHead.lm else "values"
        said = engine.forward(replace(rows[0], advantages=None), output)
        metrics = [engine.update(rows[n : n + 2], loss, step=n) for n in (0, 2)]
        weights = {n: v.clone() for bucket in engine.gather_weights(10**6) for n, v in bucket}
        return [said, metrics, weights]
    finally:
        engine.close()


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"activation_checkpointing": "layers"},
        {"activation_checkpointing": "selective"},
        {"lora": LoraConfig(rank=2, alpha=4.0)},
        {"head": ModelHead.value},
        {"ppo": PPOConfig(ratio=Level.sequence, aggregation=Aggregation.sequence)},
        {"max_tokens_per_micro_batch": 18},
    ],
    ids=str,
)
def test_updates_are_those_of_rows_by_themselves(
    settings: dict[str, Any], model_folder: Path
) -> None:
    optimizer = OptimizerConfig(lr=1e-2, eps=1e-4, max_grad_norm=0.0, total_steps=10)
    config = ActorConfig(
        **{
            "path": str(model_folder),
            "device": "cpu",
            "max_tokens_per_micro_batch": 40,
            "logprob_chunk_tokens": 5,
            "seed": 0,
            "optimizer": optimizer,
            **settings,
        }
    )
    loss = loss_of(config.ppo)
    if config.head is ModelHead.value:
        loss = NamedLoss("value")
    shared = train(config, 1.0, loss)
    apart = train(config, math.inf, loss)
    torch.testing.assert_close(shared[0], apart[0], atol=1e-5, rtol=0)
    for one, other in zip(shared[1], apart[1], strict=True):
        assert 0 < one["shared_token_share"] < 1
        assert one["num_computed_tokens"] < other["num_computed_tokens"]
        assert one["num_micro_batches"] <= other["num_micro_batches"]
        for name in other.keys() - OF_THE_WAY:
            assert one[name] == pytest.approx(other[name], abs=1e-5, rel=1e-5), name
    for name, weight in apart[2].items():
        torch.testing.assert_close(shared[2][name], weight, atol=2e-5, rtol=0)


def test_no_micro_batch_computes_more_tokens_than_it_may(model_folder: Path) -> None:
    """Where a group has more, it is computed in parts; what is counted is what is computed."""
    seen = list[tuple[int, int]]()

    class Engine(FSDPEngine):
        _min_saved_tokens = 3.0

        def _micro_batch(self, batch: Any, number: int) -> Any:
            made = super()._micro_batch(batch, number)
            seen.append((len(made.input_ids), batch.num_computed_tokens[number]))
            return made

    config = ActorConfig(path=str(model_folder), device="cpu", max_tokens_per_micro_batch=17)
    engine = Engine(config)
    engine.initialize(0, 1, "")
    rows = group_rows(0, 30)
    engine.forward(replace(rows, advantages=None), "logprobs")
    engine.close()
    assert all(found == planned <= 17 for found, planned in seen)
    assert sum(found for found, _ in seen) < rows.num_tokens
    assert len(seen) < len(rows.lengths)


def test_rows_of_few_tokens_do_not_share(model_folder: Path) -> None:
    """The runs of a tiny model cost more than the few tokens that they save."""
    engine = FSDPEngine(ActorConfig(path=str(model_folder), device="cpu"))
    position = engine.initialize(0, 1, "")
    assert position.min_saved_tokens == engine._min_saved_tokens  # the controller goes by it
    fewest = math.ceil(engine._min_saved_tokens)
    for length, shares in ((fewest - 1, False), (fewest, True)):
        generator = torch.Generator().manual_seed(0)
        prompt = torch.randint(30, (length,), generator=generator)
        input_ids = torch.cat([prompt, torch.tensor([1, 2]), prompt, torch.tensor([3])])
        is_trained = torch.arange(len(input_ids)) == len(input_ids) - 1
        is_trained[length] = True
        rows = PackedRows(
            {"input_ids": input_ids, "loss_mask": is_trained}, (length + 2, length + 1)
        )
        (batch,) = engine._plan([rows], lambda rows: rows.fields["loss_mask"])
        assert (sum(batch.num_computed_tokens) < rows.num_tokens) == shares
    engine.close()
