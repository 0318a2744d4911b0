"""Adapters beside each other train on every mesh as each does alone in a float64 process."""

from __future__ import annotations

import json
import math
import os
import signal
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from integration.ranks import ALL, EIGHT, Results, load_program, run_ranks, save_model
from integration.run_process import LIMIT_S
from integration.test_weight_publication import controllers
from safetensors.torch import load_file
from torch.func import functional_call

from areal_sc import GRPOConfig, TrainController
from areal_sc.algorithms.named_loss import NamedLoss
from areal_sc.config.schema import OptimizerConfig
from areal_sc.engines.training.adapters.lora import new_values
from areal_sc.engines.training.learning_rate import learning_rate
from areal_sc.errors import ConfigError, ModelError
from areal_sc.schedulers.base import Scheduler
from areal_sc.serving.losses import GAINS, HIGH, LOSS, LOW, SAMPLED
from areal_sc.transport.packed_rows import PackedRows

PLACES, RANK, ALPHA = 4, 3, 6.0
TARGETS = ["q_proj", "k_proj", "o_proj", "up_proj", "down_proj"]
ADAPTERS = [  # of rows of each step; no one has a row of place 3 in the second
    [0, 2, 1, 1, 3, 0, 2, 2],
    [2, 1, 0, 0, 2, 1, 1, 0],
    [1, 0, 3, 2, 1, 3, 0, 2],
]
ROWS_OF_TWO = [[[0, 1, 4], [2, 3, 5, 6, 7]], [[], ALL], [[0, 2, 4, 6], [1, 3, 5, 7]]]
MESHES: dict[str, dict[str, Any]] = {
    "one": {},
    "few_tokens": {"max_tokens": 21, "min_saved": 1, "activation_checkpointing": "layers"},
    "dp2": {"parallel": {"data": 2}, "min_saved": 1, "snapshot_beside": "resumes"},
    "meets_once": {"parallel": {"data": 2}, "meets_once": True, "max_tokens": 21},
    "tp2": {"parallel": {"tensor": 2}, "activation_checkpointing": "selective"},
    "sequence2": {"parallel": {"sequence": 2}, "min_saved": 1},
    "nan": {"parallel": {"data": 2}, "min_saved": 1},
}


def minibatches(name: str) -> list[dict[str, Any]]:
    has_two = "data" in MESHES[name].get("parallel", {})
    return [
        {
            "lengths": EIGHT,
            "rows": ROWS_OF_TWO[step] if has_two else [ALL],
            "adapters": ADAPTERS[step],
            "prompt": 3,
            **({"spoils": 1} if name == "nan" and step == 1 else {}),
        }
        for step in range(3)
    ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("beside")
    sizes = {"vocab_size": 31, "hidden_size": 32, "num_hidden_layers": 2, "head_dim": 8}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    config = hf.Qwen3Config(**sizes, **heads, intermediate_size=51, tie_word_embeddings=True)
    save_model(folder / "model", config)
    return folder


@pytest.fixture(scope="module")
def results(folder: Path) -> Results:
    lora = {"rank": RANK, "alpha": ALPHA, "targets": TARGETS, "places": PLACES}
    scenarios = {
        name: {
            "model": str(folder / "model"),
            "world_size": 2 if "parallel" in settings else 1,
            "lora": lora,
            "steps": [],
            "minibatches": [],
            "logprob_lengths": [[5, 9], [4]],
            "adapters": minibatches(name),
            **settings,
        }
        for name, settings in MESHES.items()
    }
    return run_ranks(folder, scenarios)


class Alone:
    """One adapter in float64: W + (B A) alpha / r, a row at a time, full logits, torch's AdamW."""

    def __init__(self, folder: Path, seed: int, rank: int = RANK) -> None:
        model = hf.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()
        self.model = model
        self.base = {name: p.detach() for name, p in model.named_parameters()}
        self.layers = [n for n, _ in model.named_modules() if n.rpartition(".")[2] in TARGETS]
        self.rank = rank
        self.values = {}
        for layer in self.layers:
            outputs, inputs = self.base[f"{layer}.weight"].shape
            for own, shape in (("lora_A", (rank, inputs)), ("lora_B", (outputs, rank))):
                values = new_values(f"{layer}.{own}", shape, seed).double()
                self.values[f"{layer}.{own}"] = values.requires_grad_()
        self.adamw = torch.optim.AdamW(self.values.values(), lr=1.0, weight_decay=0.01)

    def logprobs(self, row: torch.Tensor) -> torch.Tensor:
        changed = {
            f"{layer}.weight": self.base[f"{layer}.weight"]
            + ALPHA / self.rank * self.values[f"{layer}.lora_B"] @ self.values[f"{layer}.lora_A"]
            for layer in self.layers
        }
        logits = functional_call(self.model, self.base | changed, (row[None],)).logits[0, :-1]
        return (logits / 0.9).log_softmax(-1).gather(1, row[1:, None])[:, 0]

    def step(self, rows: PackedRows, settings: OptimizerConfig, step: int) -> float:
        self.adamw.zero_grad()
        total = torch.zeros((), dtype=torch.float64)
        for index in range(rows.num_rows):
            fields = {name: it[1:] for name, it in rows.take([index]).fields.items()}
            logprobs = self.logprobs(rows.take([index]).fields["input_ids"])
            weights = fields["proximal_logprobs"].double().exp() * fields["loss_mask"]
            total = total - (logprobs * weights).sum()
        total.backward()
        limit = settings.max_grad_norm or math.inf
        norm = torch.nn.utils.clip_grad_norm_(self.values.values(), limit)
        group = self.adamw.param_groups[0]
        group["lr"], group["eps"] = learning_rate(settings, step), settings.eps
        self.adamw.step()
        return float(norm)


@pytest.fixture(scope="module")
def alone(folder: Path) -> dict[str, Any]:
    """Adapters before the last step and after it, the norms of each step, log-probabilities."""
    program = load_program()
    config = program.actor_config(
        {"model": str(folder / "model"), "lora": {"rank": RANK, "places": PLACES}}
    )
    settings = program.optimizers_of(config)
    adapters = [Alone(folder / "model", place) for place in range(PLACES)]
    norms: list[dict[int, float]] = []
    first: list[dict[str, torch.Tensor]] = []
    logprobs: list[torch.Tensor] = []
    for step, minibatch in enumerate(minibatches("one")):
        rows = program.make_minibatch(step, 0, minibatch)
        if step == 2:
            first = [{n: it.detach().clone() for n, it in one.values.items()} for one in adapters]
            adapters[0] = deepcopy(adapters[2])
            adapters[1] = Alone(folder / "model", 7, rank=2)
        norms.append({})
        for place, adapter in enumerate(adapters):
            chosen = [row for row, it in enumerate(minibatch["adapters"]) if it == place]
            if chosen:
                norms[-1][place] = adapter.step(rows.take(chosen), settings[place], step)
    for row, place in enumerate(minibatch["adapters"]):
        its = rows.take([row]).fields
        found = adapters[place].logprobs(its["input_ids"]).detach()
        logprobs.append(torch.cat([torch.zeros(1), found]) * its["loss_mask"])

    return {
        "first": first,
        "last": [{n: it.detach() for n, it in one.values.items()} for one in adapters],
        "norms": norms,
        "logprobs": logprobs,
    }


def saved(folder: Path) -> dict[str, torch.Tensor]:
    stored = load_file(folder / "adapter_model.safetensors")
    prefix, suffix = "base_model.model.", ".weight"
    return {n.removeprefix(prefix).removesuffix(suffix): it for n, it in stored.items()}


def farthest(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    assert found.keys() == expected.keys()
    return max(float((found[n].double() - expected[n].double()).abs().max()) for n in found)


@pytest.mark.parametrize("name", [name for name in MESHES if name != "nan"])
def test_each_place_is_that_of_a_float64_process(
    name: str, results: Results, alone: dict[str, Any], folder: Path
) -> None:
    for rank in results[name]:
        assert "error" not in rank, rank.get("error")
        for step, metrics in enumerate(rank["stats"]):
            expected = alone["norms"][step]
            told = {int(k[10:]): v for k, v in metrics.items() if k.startswith("grad_norm_")}
            assert told == pytest.approx(expected, rel=1e-5)
    for when in ("first", "last"):
        for place in range(PLACES):
            found = saved(folder / name / f"{when}_{place}")
            assert farthest(found, alone[when][place]) < 1e-6
    data_ranks = minibatches(name)[2]["rows"]
    for chosen, rank in zip(data_ranks, results[name], strict=False):
        expected = torch.cat([alone["logprobs"][row] for row in chosen])
        assert (rank["logprobs"][0] - expected).abs().max() < 1e-5


def test_a_place_of_a_smaller_rank_is_that_adapter(results: Results, folder: Path) -> None:
    assert results["one"]
    of_place = folder / "one" / "last_1"
    settings = json.loads((of_place / "adapter_config.json").read_text())
    assert (settings["r"], settings["lora_alpha"]) == (2, ALPHA)
    assert {min(it.shape) for it in saved(of_place).values()} == {2}
    state = load_file(of_place / "optimizer.safetensors")
    assert state.pop("step") == 1
    assert {min(it.shape) for it in state.values()} == {2}
    paths = [folder / "one" / f"first_{it}" / "optimizer.safetensors" for it in range(PLACES)]
    assert [load_file(path)["step"] for path in paths] == [2, 2, 2, 1]


def test_a_loss_that_is_no_number_leaves_the_other_places_as_without_it(
    results: Results, folder: Path
) -> None:
    assert results["nan"][0]["stats"][1].keys() >= {"grad_norm_0", "grad_norm_2"}
    assert "grad_norm_1" not in results["nan"][0]["stats"][1]
    for place in range(PLACES):
        for file in ("adapter_model", "optimizer"):
            found, expected = (
                load_file(folder / name / f"first_{place}" / f"{file}.safetensors")
                for name in ("nan", "dp2")
            )
            is_same = all(torch.equal(found[name], expected[name]) for name in expected)
            assert is_same is (place != 1), (place, file)


def given_rows(place: int, count: int) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(place)
    rows = []
    for number in range(count):
        tokens = torch.randint(3, 20, (5 + number,), generator=generator).tolist()
        zeros = dict.fromkeys((SAMPLED, LOSS, LOW, HIGH), 0.0)
        of_each = {"loss_mask": 1, GAINS: 1.0, **zeros}
        lists = {name: [value] * len(tokens) for name, value in of_each.items()}
        rows.append({"input_ids": tokens, **lists})
    return rows


class Tenants:
    """Three places, that change hands; a rank may die before each call, or in the midst of it."""

    def __init__(self, actor: TrainController, folder: Path, *, are_killed: bool) -> None:
        self.actor = actor
        self.folder = folder
        self.rows = [row for place in range(3) for row in given_rows(place, 3)]
        self._are_killed = are_killed
        self.num_calls = 0

    def call(self, name: str, *args: Any, **named: Any) -> Any:
        method = getattr(self.actor, f"{name}_async")
        kills_before, kills_in = self.num_calls % 3 == 0, self.num_calls % 3 == 1
        member = self.actor.fleet.members[self.num_calls % 2]
        self.num_calls += 1
        if self._are_killed and kills_before:
            os.kill(member.worker.pid, signal.SIGKILL)
        under_way = self.actor._submit(method(*args, **named))
        if self._are_killed and kills_in:
            os.kill(member.worker.pid, signal.SIGKILL)
        return under_way.result(LIMIT_S)

    def update(self, *places: int, advances: bool = True) -> dict[str, float]:
        indices = [3 * place + number for place in places for number in range(3)]
        settings = {place: OptimizerConfig(lr=1e-2 / (1 + place)) for place in places}
        loss = NamedLoss("areal_sc.serving.losses:summed")
        of_rows = [index // 3 for index in indices]
        named = {"advances": advances, "optimizer": settings, "adapters": of_rows}
        metrics: dict[str, float] = self.call("update_rows", self.rows, indices, loss, **named)
        return metrics

    def run(self) -> dict[str, bytes]:
        """Content of the files that are left."""
        self.call("fill_adapter", 1, seed=5)
        self.update(0, 1)
        self.call("save_adapter", 1, self.folder / "given", with_optimizer=True)
        self.update(0)
        self.call("fill_adapter", 2, self.folder / "given", with_optimizer=True)
        self.call("fill_adapter", 1, rank=2, seed=6)
        self.update(1, 2, advances=False)
        self.call("fill_adapter", 0, seed=8)
        self.call("save_adapter", 0, self.folder / "new", with_optimizer=True)
        told = self.update(0, 1, 2)
        assert told.keys() >= {"grad_norm_0", "grad_norm_1", "grad_norm_2"}
        places = [number // 3 for number in range(9)]
        scores = self.call("score_rows", self.rows, range(9), per_token=True, adapters=places)
        for place in range(3):
            self.call("save_adapter", place, self.folder / f"{place}", with_optimizer=True)
        assert self.actor.version == 3
        files = (path for path in sorted(self.folder.glob("*/*")) if path.is_file())
        left = {str(path.relative_to(self.folder)): path.read_bytes() for path in files}
        return left | {"scores": repr((scores, told)).encode()}


def test_ranks_that_die_between_calls_or_in_them_leave_each_place_as_it_would_be(
    tiny_config: Callable[..., GRPOConfig], scheduler: Scheduler, tmp_path: Path
) -> None:
    config = tiny_config("actor.parallel.data=2", "actor.lora={rank: 4, alpha: 8, places: 3}")
    with controllers(config, scheduler) as (actor, rollout):
        expected = Tenants(actor, tmp_path / "undisturbed", are_killed=False).run()
        assert len({content for name, content in expected.items() if "adapter_model" in name}) == 5
        with pytest.raises(ConfigError, match="places: expected 1 to publish weights, got 3"):
            actor.publish_weights(rollout)
        with pytest.raises(ConfigError, match=r"place of an adapter: expected 0 to 2 .* got 3"):
            actor.fill_adapter(3)
        with pytest.raises(ConfigError, match=r"rank of an adapter: expected 1 to 4 .* got 5"):
            actor.fill_adapter(1, rank=5)
        with pytest.raises(ModelError, match="expected an adapter of rank 3, got 4"):
            actor.fill_adapter(1, tmp_path / "undisturbed" / "given", rank=3)
        actor.load_snapshot(0)
        num_restarts = actor._recovery.num_restarts
        assert Tenants(actor, tmp_path / "killed", are_killed=True).run() == expected
        assert actor._recovery.num_restarts >= num_restarts + 6
