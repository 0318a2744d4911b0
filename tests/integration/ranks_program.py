"""Runs a training engine in several ranks and leaves what it did as files.

A program of its own, because ranks are forked, which is safe only from a process that has
imported torch and computed nothing with it. Called as `ranks_program.py FOLDER`; for each scenario
named in `FOLDER/scenarios.json` it writes `FOLDER/NAME-RANK.pt`.
"""

from __future__ import annotations

import gc
import importlib
import json
import math
import multiprocessing
import re
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from areal_sc.algorithms.loss_tokens import LossTokens
from areal_sc.algorithms.losses import Metric
from areal_sc.algorithms.named_loss import NamedLoss, loss_of
from areal_sc.config.lora_settings import LoraConfig
from areal_sc.config.parallel_settings import ParallelConfig, TrainEngineKind
from areal_sc.config.ppo_settings import PPOConfig
from areal_sc.config.schema import ActivationCheckpointing, ActorConfig, ModelHead, OptimizerConfig
from areal_sc.engines.base import AdapterBeginning
from areal_sc.engines.fsdp import packed_model
from areal_sc.engines.fsdp.engine import FSDPEngine
from areal_sc.engines.fsdp.optimizer import local_part
from areal_sc.engines.fsdp.packed_model import PackedModel
from areal_sc.engines.handles import make_actor
from areal_sc.engines.loss_scale import LossScale
from areal_sc.engines.training.rank_engine import RankEngine
from areal_sc.engines.training.updates.micro_batches import MicroBatch
from areal_sc.errors import ArealError, ModelError
from areal_sc.metadata import RowMetadata
from areal_sc.transport.packed_rows import PackedRows
from areal_sc.workers.entry import prepare_model_loading

RANK_TIMEOUT_S = 300.0


def make_rows(seed: int, lengths: list[int], vocabulary: int) -> PackedRows:
    """Rows whose first third is the prompt; values as a slightly stale policy leaves them."""
    generator = torch.Generator().manual_seed(seed)
    num_tokens = sum(lengths)
    loss_mask = torch.cat(
        [torch.arange(length) >= max(1, length // 3) for length in lengths]
        or [torch.zeros(0, dtype=torch.bool)]
    )
    return PackedRows(
        {
            "input_ids": torch.randint(vocabulary, (num_tokens,), generator=generator),
            "loss_mask": loss_mask,
            "behavior_logprobs": -3.4 + 0.4 * torch.rand(num_tokens, generator=generator),
            "proximal_logprobs": -3.4 + 0.4 * torch.rand(num_tokens, generator=generator),
            "versions": torch.randint(3, (num_tokens,), generator=generator, dtype=torch.int32),
            "temperatures": torch.full((num_tokens,), 0.9),
        },
        tuple(lengths),
        tuple(torch.randn(len(lengths), generator=generator).tolist()),
    )


def with_routes(rows: PackedRows, sizes: list[int]) -> PackedRows:
    """Routes drawn at random: other experts than the model would choose. Some are not known.

    Args:
        sizes: layers, experts of each, and those of a token.
    """
    layers, experts, per_token = sizes
    generator = torch.Generator().manual_seed(rows.num_tokens)
    drawn = torch.rand(rows.num_tokens, layers, experts, generator=generator)
    routes = drawn.topk(per_token).indices.to(torch.uint8)
    routes[::5] = 0
    return replace(rows, fields={**rows.fields, "routed_experts": routes})


def make_minibatch(step: int, index: int, minibatch: dict[str, Any]) -> PackedRows:
    """All rows of a minibatch; `unrewarded` names those whose advantage is 0.

    So many first tokens as `prompt` says are the same in all rows that have them, and twice as many
    in every other one.
    `answers` has the trained tokens of each answer of a row: the first one has the row's advantage,
    each further one -0.5 times that of the one before, and the last of several 0.
    """
    rows = make_rows(100 * step + index, minibatch["lengths"], 30)
    share_prompts(rows, minibatch.get("prompt", 0))
    if "routes" in minibatch:
        rows = with_routes(rows, minibatch["routes"])
    unrewarded = minibatch.get("unrewarded", [])
    advantages = (0.0 if row in unrewarded else a for row, a in enumerate(rows.advantages or ()))
    rows = replace(rows, advantages=tuple(advantages), metadata=make_metadata(rows, minibatch))
    return with_answers(rows, minibatch["answers"]) if "answers" in minibatch else rows


def share_prompts(rows: PackedRows, num_tokens: int) -> None:
    each = torch.split(rows.fields["input_ids"], list(rows.lengths))
    longest = max(each, key=len).clone() if each else torch.zeros(0)
    for row, token_ids in enumerate(each):
        count = min(len(token_ids), num_tokens * (1 + row % 2))
        token_ids[:count] = longest[:count]


def with_answers(rows: PackedRows, answers: list[list[int]]) -> PackedRows:
    metadata = [
        msgspec.structs.replace(row, returns=tuple((0.0, size) for size in sizes))
        for row, sizes in zip(rows.metadata or (), answers, strict=True)
    ]
    advantages: list[float | tuple[float, ...]] = []
    for value, sizes in zip(rows.advantages or (), answers, strict=True):
        assert isinstance(value, float)
        of_answers = [value * (-0.5) ** number for number in range(len(sizes))]
        if len(sizes) > 1:
            of_answers[-1] = 0.0
        advantages.append(tuple(of_answers) or value)
    return replace(rows, metadata=tuple(metadata), advantages=tuple(advantages))


def make_metadata(rows: PackedRows, minibatch: dict[str, Any]) -> tuple[RowMetadata, ...] | None:
    """Groups and episodes as the minibatch names them, and some rewards."""
    if "groups" not in minibatch:
        return None
    each = zip(minibatch["groups"], minibatch["episodes"], rows.lengths, strict=True)
    return tuple(
        RowMetadata(group, 0, length, 0.5 * index - 1, 0, (), episode)
        for index, (group, episode, length) in enumerate(each)
    )


def row_loss(tokens: LossTokens) -> tuple[torch.Tensor, dict[str, Metric]]:
    """GSPO's clipped ratio of whole sequences, and means of each kind, of rewarded rows."""
    rows = tokens.rows
    log_ratio = tokens.logprobs - tokens.fields["proximal_logprobs"]
    # arXiv:2507.18071, eq. 14
    sequence = rows.spread(rows.mean(log_ratio)).detach() + tokens.logprobs
    ratio = (sequence - tokens.logprobs.detach()).exp()
    advantages = tokens.fields["advantages"]
    gains = torch.minimum(ratio * advantages, ratio.clamp(0.9, 1.2) * advantages)
    of_rewards = rows.spread(rows.reward) * tokens.logprobs
    late = tokens.logprobs * rows.position / rows.spread(rows.num_tokens)
    loss = (
        -tokens.mean(gains, "sequence")
        - 0.3 * tokens.mean(of_rewards, "episode")
        - 0.2 * tokens.mean(late, "prompt")
        - 0.1 * tokens.mean(tokens.entropy, "token")
    )
    counts = tokens.counts
    shares = torch.tensor([counts.sequences, counts.episodes, counts.prompts], dtype=torch.float32)
    return loss, {
        "counts": Metric.max(shares @ torch.tensor([10000.0, 100.0, 1.0])[:, None]),
        "sequence_ratio": Metric.mean(ratio),
    }


class WeighedEngine(FSDPEngine):
    """Notes the bytes of all tensors at the start of each micro-batch."""

    def __init__(self, config: ActorConfig) -> None:
        super().__init__(config)
        self.tensor_bytes: list[int] = []

    def _micro_batch(self, *args: Any) -> MicroBatch:
        self.tensor_bytes.append(count_tensor_bytes())
        return super()._micro_batch(*args)


class UserLoss:
    """A loss that treats a share of the rows, or a micro-batch without tokens, as a user's may."""

    kinds = ("sparse", "names", "constant", "nan", "floats", "raises", "empty", "mixed", "plain")

    def __init__(self, kind: str, share: int) -> None:
        self.kind = kind
        self.share = share

    def __call__(self, tokens: LossTokens) -> tuple[torch.Tensor, Any]:
        logprobs = tokens.logprobs
        value = -logprobs.sum() / tokens.num_loss_tokens
        match self.kind:
            case "sparse":
                return value, {"seen": Metric.sum(logprobs > -99)} if len(logprobs) else {}
            case "names":
                return value, {f"of_share_{self.share}": Metric.max(logprobs.exp())}
            case "constant" if not len(logprobs):
                return torch.zeros(()), {}
            case "mixed":
                kind = Metric.sum if self.share else Metric.max
                return value, {"seen": kind(logprobs.exp())}
            case "nan" if self.share == 1:
                return value * math.nan, {"odd": Metric(torch.tensor(math.nan), "mean", 1.0)}
            case "floats" if self.share == 1:
                return value, {"seen": 0.5}
            case "raises" if self.share == 1:
                raise KeyError("no such thing")
            case "empty":
                return value + 0 * logprobs.max(), {}  # which there is none of
        return value, {}


def squared_error(tokens: LossTokens) -> tuple[torch.Tensor, dict[str, Metric]]:
    """Mean over the trained tokens of (value - target)^2; the target is any field."""
    squares = (tokens.predicted_values - tokens.fields["behavior_logprobs"]).square()
    return squares.sum() / tokens.num_loss_tokens, {"value_error": Metric.mean(squares)}


def with_adapters(rows: PackedRows, places: list[int], *, spoils: int = -1) -> PackedRows:
    """Rows of these places, with weights of the tokens; those of one place are no numbers."""
    lengths = torch.tensor(rows.lengths, dtype=torch.int64)
    adapter = torch.tensor(places, dtype=torch.float32).repeat_interleave(lengths)
    weights = rows.fields["proximal_logprobs"].exp().masked_fill(adapter == spoils, math.nan)
    return replace(rows, fields={**rows.fields, "adapter": adapter, "weights": weights})


def weighted_sum(tokens: LossTokens) -> tuple[torch.Tensor, dict[str, Metric]]:
    return -(tokens.fields["weights"] * tokens.logprobs).sum(), {}


def optimizers_of(config: ActorConfig) -> dict[int, OptimizerConfig]:
    """Of each place others."""
    return {
        place: replace(config.optimizer, lr=1e-3 / (1 + place), eps=1e-4, max_grad_norm=0.5 * place)
        for place in range(config.lora.places)
    }


def train_beside(
    engine: RankEngine, steps: list[list[PackedRows]], folder: Path, snapshot: str
) -> dict[str, Any]:
    """Adapters beside each other, of which two are filled before the last step."""
    result: dict[str, Any] = {"stats": []}
    settings = optimizers_of(engine.config)

    def save(name: str) -> None:
        for place in settings:
            of_place = folder / f"{name}_{place}"
            engine.begin_save_adapter(place, of_place, with_optimizer=True).result(60)

    for place in settings:
        engine.fill_adapter(place, AdapterBeginning(seed=place))
    *first, last = steps
    for step, minibatches in enumerate(first):
        if step == 1 and snapshot:
            engine.begin_snapshot(folder / "snapshot").result(60)
        result["stats"].append(
            engine.update(minibatches, weighted_sum, step=step, optimizers=settings)
        )
    save("first")
    engine.fill_adapter(0, AdapterBeginning(str(folder / "first_2"), with_optimizer=True))
    engine.fill_adapter(1, AdapterBeginning(rank=2, seed=7))
    if snapshot == "resumes":
        engine.begin_snapshot(folder / "filled").result(60)
        engine.fill_adapter(1, AdapterBeginning(seed=9))
        engine.load_snapshot(folder / "filled")
    step = len(first)
    result["stats"].append(engine.update(last, weighted_sum, step=step, optimizers=settings))
    result["logprobs"] = [engine.forward(rows, "logprobs") for rows in last]
    save("last")
    return result


def try_user_losses(
    engine: RankEngine, minibatches: list[PackedRows], share: int
) -> dict[str, dict[str, float] | str]:
    """What each kind of loss ends in, and whether it has changed weights."""
    outcomes: dict[str, dict[str, float] | str] = {}
    for kind in UserLoss.kinds:
        before = whole_weights(engine)
        try:
            outcomes[kind] = engine.update(minibatches, UserLoss(kind, share), step=3)
        except ArealError as error:
            outcomes[kind] = f"{type(error).__name__}: {error}"
        after = whole_weights(engine).items()
        outcomes[f"{kind} moves"] = {
            "most": max(float((values - before[name]).abs().max()) for name, values in after)
        }
    return outcomes


def whole_weights(engine: RankEngine) -> dict[str, torch.Tensor]:
    """Copies, as every rank gathers them; in small buckets."""
    return {name: v.cpu().clone() for bucket in engine.gather_weights(5000) for name, v in bucket}


def devices_of(engine: FSDPEngine) -> dict[str, set[str]]:
    """Where each kind of tensor lies that is there between two steps, and what is published."""
    model, moments = engine._model.causal_lm, engine._optimizer.moments().values()
    tensors = {
        "parameters": model.parameters(),
        "moments": [values for kinds in moments for values in kinds.values()],
        "buffers": model.buffers(),
        "published": (values for bucket in engine.gather_weights(5000) for _, values in bucket),
    }
    return {kind: {values.device.type for values in each} for kind, each in tensors.items()}


def parts_of(engine: FSDPEngine) -> dict[str, torch.Tensor]:
    """Copies of what this rank has of the float32 parameters."""
    named = engine._model.causal_lm.named_parameters()
    return {name: local_part(parameter.detach()).clone() for name, parameter in named}


def count_tensor_bytes() -> int:
    """Memory of all tensors of this process that Python, or a parameter's gradient, refers to."""
    gc.collect()
    tensors = [found for found in gc.get_objects() if issubclass(type(found), torch.Tensor)]
    tensors += [tensor.grad for tensor in tensors if tensor.is_leaf and tensor.grad is not None]
    parts = [getattr(tensor, "_local_tensor", tensor) for tensor in tensors]
    storages = {part.untyped_storage().data_ptr(): part.untyped_storage() for part in parts}
    return sum(storage.nbytes() for storage in storages.values())


class WithoutMemory(TorchDispatchMode):
    """No tensor gets memory of its own in this thread."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if isinstance(found, torch.Tensor):
            known = {v.untyped_storage().data_ptr() for v in args if isinstance(v, torch.Tensor)}
            if found.untyped_storage().data_ptr() not in known:
                raise MemoryError(f"no memory for {func}")
        return found


def fail_to_read() -> None:
    """Lets Megatron-core's ranks raise an error without words when they read the model."""

    def read(_: ActorConfig) -> None:
        raise MemoryError

    importlib.import_module("areal_sc.engines.training.loading").open_weights = read  # type: ignore[attr-defined]


def swap_gate_and_up() -> None:
    """Makes Megatron-core's ranks put these weights where the others belong."""
    state: Any = importlib.import_module("areal_sc.engines.megatron.state").MegatronState
    names = {"gate_proj": "up_proj", "up_proj": "gate_proj"}
    write = state.write

    def write_swapped(self: Any, kind: str, name: str, values: torch.Tensor) -> None:
        write(self, kind, re.sub("|".join(names), lambda found: names[found[0]], name), values)

    state.write = write_swapped


def spoil_last_layer(model: str) -> None:
    """Ranks get a weight of the last layer the wrong way round."""
    num_layers = json.loads((Path(model) / "config.json").read_text())["num_hidden_layers"]
    last = f"layers.{num_layers - 1}.mlp.down_proj.weight"
    module: Any = importlib.import_module("areal_sc.engines.training.loading")
    receive = module.receive_part

    def receive_spoilt(target: torch.Tensor, source: Any, name: str, *others: Any) -> None:
        is_spoilt = source is not None and name.endswith(last)
        receive(target, source.flip(1) if is_spoilt else source, name, *others)

    module.receive_part = receive_spoilt


def spoil_exchange() -> None:
    """Ranks of a sequence group put the tokens of the others in the wrong order."""
    module: Any = importlib.import_module("areal_sc.engines.training.sequence_parallel")
    exchange = module._exchange
    module._exchange = lambda parts, group: exchange(parts, group).flip(0)


def swap_ranks() -> None:
    """The first two ranks of a tensor group have each other's part of one projection."""
    parts: Any = importlib.import_module("areal_sc.engines.fsdp.cuts").CutParts
    box = parts.box

    def swapped(self: Any, name: str, rank: int | None = None) -> Any:
        own = self.rank if rank is None else rank
        is_swapped = name.endswith("layers.0.self_attn.o_proj.weight") and own < 2
        return box(self, name, 1 - own if is_swapped else own)

    parts.box = swapped


def lose_bias() -> None:
    """The bias of one layer's queries is not there."""
    module: Any = importlib.import_module("areal_sc.engines.training.loading")
    receive = module.receive_part

    def receive_less(target: torch.Tensor, source: Any, name: str, *others: Any) -> None:
        receive(target, source, name, *others)
        if name.endswith("layers.0.self_attn.q_proj.bias"):
            target.zero_()

    module.receive_part = receive_less


def lose_sum() -> None:
    """What the ranks of a tensor group compute of one layer's attention is not added up."""
    module: Any = importlib.import_module("areal_sc.engines.fsdp.tensor_parallel")
    rowwise = module.rowwise

    def alone(linear: Any, spread: Any, group: Any, inputs: torch.Tensor) -> torch.Tensor:
        num_outputs, num_inputs = linear.weight.shape
        if num_outputs == num_inputs * group.size:  # attention's, not the MLP's
            return torch.nn.functional.linear(inputs, linear.weight)
        summed: torch.Tensor = rowwise(linear, spread, group, inputs)
        return summed

    module.rowwise = alone


def lose_files_later() -> None:
    """Rank 0 has read the files, and cannot read them again."""
    weights: Any = importlib.import_module("areal_sc.engines.training.stored_weights").StoredWeights
    read, name = weights.read, "model.layers.1.mlp.up_proj.weight"

    def read_before(self: Any, names: list[str]) -> Any:
        if names == [name]:  # alone: when the ranks are filled
            raise ModelError(f"{name} is gone")
        return read(self, names)

    weights.read = read_before


SPOILT: dict[str, Callable[[str], None]] = {
    "files": lambda _: lose_files_later(),
    "last layer": spoil_last_layer,
    "exchange": lambda _: spoil_exchange(),
    "order of ranks": lambda _: swap_ranks(),
    "bias": lambda _: lose_bias(),
    "sum": lambda _: lose_sum(),
}
"""By the folder of the model."""


def actor_config(scenario: dict[str, Any]) -> ActorConfig:
    return ActorConfig(
        engine=TrainEngineKind(scenario.get("engine", "fsdp")),
        path=scenario["model"],
        device="cpu",
        dtype=scenario.get("dtype", "float32"),
        max_tokens_per_micro_batch=scenario.get("max_tokens", 64),
        activation_checkpointing=ActivationCheckpointing(
            scenario.get("activation_checkpointing", "none")
        ),
        activation_offload=scenario.get("activation_offload", False),
        cpu_offload=scenario.get("cpu_offload", False),
        compile_layers=scenario.get("compile_layers", False),
        routing_replay=scenario.get("routing_replay", False),
        logprob_chunk_tokens=scenario.get("chunk_tokens", 7),
        seed=0,
        head=ModelHead(scenario.get("head", "lm")),
        lora=LoraConfig(**scenario.get("lora", {})),
        parallel=ParallelConfig(**scenario.get("parallel", {})),
        optimizer=OptimizerConfig(
            lr=1e-3,
            eps=1e-6,
            weight_decay=0.01,
            max_grad_norm=0.5,
            schedule="linear",
            warmup_steps=2,
            total_steps=10,
        ),
        ppo=PPOConfig(behavior_weight_cap=1.2),
    )


def run_rank(
    name: str, scenario: dict[str, Any], folder: Path, rank: int, world_size: int, address: str
) -> None:
    torch.set_num_threads(1)
    if scenario.get("fails_to_read"):
        fail_to_read()
    is_weighed = scenario.get("weighed", False)
    if "min_saved" in scenario:
        PackedModel.min_saved_tokens = lambda *_: scenario["min_saved"]  # type: ignore[method-assign]
    config = actor_config(scenario)
    if scenario.get("swaps_gate_and_up"):
        swap_gate_and_up()
    if "spoilt" in scenario:
        SPOILT[scenario["spoilt"]](scenario["model"])
    if scenario.get("pretends_device"):
        sys.path.insert(0, str(Path(__file__).parents[1]))
        importlib.import_module("pretended_device").install()
    packed_model.COMPILER = "aot_eager"  # inductor takes minutes here
    engine = WeighedEngine(config) if is_weighed else make_actor(config).build()
    if address == "" and rank == 0:
        address = engine.create_rendezvous()
        (folder / f"{name}.address.part").write_text(address)
        (folder / f"{name}.address.part").rename(folder / f"{name}.address")
    result: dict[str, Any] = {"stats": []}
    try:
        share = engine.initialize(rank, world_size, address).data_rank
        if "loss_scale" in scenario:
            engine._optimizer.loss_scale = LossScale(scenario["loss_scale"])
        if scenario.get("meets_once"):
            engine._model.meet_once()
        rows = make_rows(99, scenario.get("logprob_lengths", [[5, 9], [4]])[share], 30)
        for output in ("logprobs",) if config.head is ModelHead.lm else ("values", "scores"):
            result[output] = engine.forward(rows, output)

        if "save_first" in scenario:
            engine.begin_save_hf(Path(scenario["save_first"]), is_staged=False).result(60)

        def minibatches_of(step: int) -> list[PackedRows]:
            return [
                make_minibatch(step, index, minibatch).take(minibatch["rows"][share])
                for index, minibatch in enumerate(scenario["minibatches"])
                if minibatch.get("step", step) == step
            ]

        losses = {
            "of ppo": loss_of(engine.config.ppo),
            "rows": row_loss,
            "values": squared_error,
            "pairs": NamedLoss("bradley_terry"),
        }

        def train_step(step: int) -> dict[str, float]:
            return engine.update(
                minibatches_of(step),
                losses[scenario.get("loss", "of ppo")],
                step=step,
                min_token_version=scenario.get("min_token_version"),
            )

        if "adapters" in scenario:
            steps = list[list[PackedRows]]()
            for step, it in enumerate(scenario["adapters"]):
                spoils = it.get("spoils", -1)
                rows = with_adapters(make_minibatch(step, 0, it), it["adapters"], spoils=spoils)
                steps.append([rows.take(it["rows"][share])])
            snapshot = scenario.get("snapshot_beside", "")
            result |= train_beside(engine, steps, folder / name, snapshot)
        for step in scenario["steps"]:
            before = count_tensor_bytes() if is_weighed else 0
            result["stats"].append(train_step(step))
            if config.compile_layers:
                counters = importlib.import_module("torch._dynamo.utils").counters
                result.setdefault("num_graphs", []).append(counters["stats"]["unique_graphs"])
            if isinstance(engine, WeighedEngine):
                result["held_bytes"] = [count - before for count in engine.tensor_bytes]
                engine.tensor_bytes.clear()
            if step == scenario.get("snapshot_after"):
                engine.begin_snapshot(Path(scenario["snapshot"])).result()
        if "without_memory" in scenario:
            with WithoutMemory() if rank == scenario["without_memory"] else nullcontext():
                begun = engine.begin_snapshot(folder / name)
            result["failure"] = str(begun.exception())
        if "save_hf" in scenario:
            engine.begin_save_hf(Path(scenario["save_hf"])).result(60)
        result["weights"] = whole_weights(engine)
        if scenario.get("user_losses"):
            result["user_losses"] = try_user_losses(engine, minibatches_of(0), share)
        if isinstance(engine, FSDPEngine):
            result["devices"] = devices_of(engine)
            result["parts"] = parts_of(engine)
        for path in scenario.get("resumes", []):
            engine.load_snapshot(Path(path))
            stats = train_step(scenario["resumes_step"])
            result[path] = whole_weights(engine)
            if "loss_scale" in scenario:
                result |= {f"{path} stats": stats, f"{path} parts": parts_of(engine)}
    except (ArealError, ValueError) as error:
        result["error"] = f"{type(error).__name__}: {error}"
    torch.save(result, folder / f"{name}-{rank}.pt")
    engine.close()


def run_scenario(name: str, scenario: dict[str, Any], folder: Path) -> None:
    context = multiprocessing.get_context("fork")
    world_size = scenario["world_size"]
    ranks = []
    address = ""
    for rank in range(world_size):
        process = context.Process(
            target=run_rank, args=(name, scenario, folder, rank, world_size, address)
        )
        process.start()
        ranks.append(process)
        if rank == 0 and world_size > 1:
            address = wait_for_address(folder / f"{name}.address", process)
    for process in ranks:
        process.join(RANK_TIMEOUT_S)
        if process.exitcode != 0:
            for other in ranks:
                other.kill()
            raise SystemExit(f"{name}: a rank ended with exit code {process.exitcode}")


def wait_for_address(path: Path, process: multiprocessing.process.BaseProcess) -> str:
    while not path.exists():
        process.join(0.01)  # also the pause between two looks
        if process.exitcode is not None:
            raise SystemExit(f"rank 0 ended with exit code {process.exitcode}")
    return path.read_text()


def import_what_ranks_need() -> None:
    """Once, and not in each rank."""
    importlib.import_module("transformers.models.qwen2.modeling_qwen2")
    prepare_model_loading()


def import_what_compiles() -> None:
    """Once: torch imports 600 modules when it first compiles. No backward pass starts threads."""
    utils = importlib.import_module("torch._dynamo.utils")
    torch.compile(torch.nn.Linear(1, 1), backend="aot_eager")(torch.ones(1, 1))
    torch._dynamo.reset()
    utils.counters.clear()


def main(folder: Path) -> None:
    scenarios = json.loads((folder / "scenarios.json").read_text())
    import_what_ranks_need()
    if any(scenario.get("engine") == "megatron" for scenario in scenarios.values()):
        importlib.import_module("areal_sc.engines.megatron.engine")  # seconds, in each rank
    if any("compile_layers" in scenario for scenario in scenarios.values()):
        import_what_compiles()
    for name, scenario in scenarios.items():
        run_scenario(name, scenario, folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
