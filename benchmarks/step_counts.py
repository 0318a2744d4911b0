"""What a training step asks of a GPU, counted on a CPU, and what share of its peak follows.

    python benchmarks/step_counts.py [--quick] [--json FILE] [--before CHECKOUT] [--only PART ...]

Nothing is timed, and no GPU is needed. Each part is a process of its own.

- kernels: over the pretended device of the tests, narrow models of 2 and of 4 layers: kernels of a
  layer and micro-batch, forward and backward; those beside layers; waits of the host in an update.
- experts: the same of models with experts.
- graphs: layers under torch.compile, rows of random lengths over several updates: graph breaks,
  compiled calls of a layer in a forward pass, graphs, sizes of micro-batches. `kernels` there are
  operations of the graphs that torch's compiler cannot fuse with others (products, attention), and
  the runs of others between them, which it makes one or two kernels of each.
- flops: fake tensors of the real sizes, rows of random lengths: floating-point operations of
  micro-batches, forward and backward, over those of the model: 6 N a token, N parameters of layers
  that are used for it, and of the output layer for trained tokens; and attention to the tokens
  before. What is computed twice, or for padding, makes the difference.
- ranks: eight ranks of a fake process group, fake tensors of the real sizes, an update of four full
  micro-batches: collectives, and bytes that a rank receives by them, where ranks meet in each
  micro-batch, and where they meet once. The share of micro-batches that are empty: random lengths,
  as the controller shares rows out.
- batching: 512 rows whose lengths differ by ten, in micro-batches of at most 32,768 tokens: filled
  by tokens as here; of as many rows as fit whatever their lengths; and these rows padded to the
  longest one. Micro-batches, and tokens computed over those of the rows.
- start: how often the last layer of a streamed model is read before the first step.

`--before` counts the same in another checkout. The forecast of a share of the peak has two limits:
the host, `LAUNCH_S` for each kernel, and the device, as measured on an H100; at 7B less what is not
computed twice any more, with `actor.activation_checkpointing=selective`.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PARTS = ("kernels", "experts", "graphs", "flops", "ranks", "batching", "start")
NUM_RANKS, NUM_MICRO_BATCHES = 8, 4
MAX_TOKENS = 8192


class Sizes(NamedTuple):
    """Of a model, as its configuration names them."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    vocab_size: int


SHAPES = {
    "0.5B": Sizes(896, 4864, 24, 14, 2, 151_936),
    "7B": Sizes(3584, 18_944, 28, 28, 4, 152_064),
}
EXPERTS = Sizes(2048, 6144, 48, 32, 4, 151_936)
OF_EXPERTS = {
    **{"head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8},
    **{"moe_intermediate_size": 768, "tie_word_embeddings": False},
}
"""Of a layer of 30B-A3B, beside its other sizes."""
NARROW = Sizes(32, 48, 2, 4, 2, 64)


OF_FAMILIES: dict[str, dict[str, Any]] = {
    "Qwen2": {},
    "Qwen3Moe": {"head_dim": 8, "num_experts": 4, "moe_intermediate_size": 16},
    "GptOss": {"head_dim": 8, "num_local_experts": 4},
    "DeepseekV3": {
        **{"n_routed_experts": 4, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 0},
        **{"q_lora_rank": 16, "kv_lora_rank": 16, "moe_intermediate_size": 16},
        **{"qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8},
        **{"num_key_value_heads": 4},
    },
}
"""What narrow models have beside their sizes."""


def write_model(folder: Path, sizes: Sizes, family: str = "Qwen2") -> str:
    """A folder with random weights."""
    import torch
    import transformers as hf

    torch.manual_seed(0)
    further = OF_FAMILIES[family] | ({} if family == "Qwen2" else {"num_experts_per_tok": 2})
    config = getattr(hf, f"{family}Config")(**sizes._asdict() | further)
    hf.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    (folder / "tokenizer_config.json").write_text("{}")
    return str(folder)


def random_lengths(count: int, seed: int, median: float, most: int) -> list[int]:
    generator = random.Random(seed)
    drawn = (int(median * generator.lognormvariate(0, 0.6)) for _ in range(count))
    return [min(most, max(2, length)) for length in drawn]


def make_rows(lengths: list[int], vocabulary: int) -> Any:
    """Rows whose first quarter is the prompt."""
    import torch

    from areal_sc.transport.packed_rows import PackedRows

    total = sum(lengths)
    fields = {
        "input_ids": torch.arange(total, dtype=torch.int32) % vocabulary,
        "loss_mask": torch.cat([torch.arange(n) >= max(1, n // 4) for n in lengths]),
        "behavior_logprobs": torch.full((total,), -4.0),
        "proximal_logprobs": torch.full((total,), -4.0),
        "versions": torch.zeros(total, dtype=torch.int32),
        "temperatures": torch.ones(total),
    }
    return PackedRows(fields, tuple(lengths), tuple((-1.0) ** n for n in range(len(lengths))))


def engine_of(model: str, max_tokens: int, **settings: Any) -> Any:
    """One rank in bfloat16."""
    from areal_sc.config.schema import ActorConfig, Dtype
    from areal_sc.engines.fsdp.engine import FSDPEngine

    config = ActorConfig(
        path=model,
        device="cpu",
        dtype=Dtype.bfloat16,
        max_tokens_per_micro_batch=max_tokens,
        **settings,
    )
    engine = FSDPEngine(config)
    engine.initialize(0, 1, "")
    return engine


def kernels() -> dict[str, float]:
    """See the module."""
    return kernels_of("Qwen2")


def experts() -> dict[str, float]:
    """See the module."""
    found = dict[str, float]()
    for family in ("Qwen3Moe", "GptOss", "DeepseekV3"):
        for key, value in kernels_of(family).items():
            found[f"{key}_{family}"] = value
    return found


def kernels_of(family: str) -> dict[str, float]:
    """Of narrow models; see the module."""
    import pretended_device
    import torch
    from device_counter import DeviceCounter

    from areal_sc.algorithms.named_loss import loss_of

    if torch._C._get_privateuse1_backend_name() != pretended_device.DEVICE_TYPE:
        pretended_device.install()
    rows = make_rows(random_lengths(8, 0, 12, 30), NARROW.vocab_size)
    found: dict[int, tuple[Counter[str], int, int]] = {}
    for num_layers in (2, 4):
        with tempfile.TemporaryDirectory() as folder:
            sizes = NARROW._replace(num_hidden_layers=num_layers)
            engine = engine_of(write_model(Path(folder), sizes, family), 32)
            loss = loss_of(engine.config.ppo)
            engine.update([rows], loss, step=0)
            with DeviceCounter() as counter:
                num_micro_batches = engine.update([rows], loss, step=1)["num_micro_batches"]
            engine.close()
        counts = counter.counts
        waits = counts.syncs.total() + counts.blocking_copies.total()
        found[num_layers] = counts.kernels, int(num_micro_batches), waits
    (two, count, waits), (four, _, _) = found[2], found[4]
    of_layer = (four.total() - two.total()) / 2 / count
    return {
        "kernels_a_layer": of_layer,
        "kernels_beside_layers": two.total() / count - 2 * of_layer,
        "waits_an_update": float(waits),
    }


def graphs() -> dict[str, float]:
    """See the module."""
    import torch
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd

    import areal_sc.engines.fsdp.packed_model as subject
    from areal_sc.algorithms.named_loss import loss_of

    calls, sizes, kernels_of = Counter[str](), set[int](), list[int]()

    def backend(graph: Any, inputs: Any) -> Any:
        def compiler(graph: Any, _: Any) -> Any:
            kernels_of.append(num_kernels(graph.graph))
            return make_boxed_func(graph)

        compiled = aot_autograd(fw_compiler=compiler)(graph, inputs)

        def call(*arguments: Any) -> Any:
            calls["compiled"] += 1
            return compiled(*arguments)

        return call

    subject.COMPILER = backend
    with tempfile.TemporaryDirectory() as folder:
        engine = engine_of(write_model(Path(folder), NARROW), 512, compile_layers=True)
        loss = loss_of(engine.config.ppo)
        plain = engine._micro_batch

        def noting(*arguments: Any) -> Any:
            batch = plain(*arguments)
            sizes.add(len(batch.input_ids))
            calls["layers"] += NARROW.num_hidden_layers
            return batch

        engine._micro_batch = noting
        num_graphs = 0
        for step in range(6):
            rows = make_rows(random_lengths(20, step, 60, 400), NARROW.vocab_size)
            engine.update([rows], loss, step=step)
            if step == 0:
                num_graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        engine.close()
    counters = torch._dynamo.utils.counters
    return {
        "graph_breaks": float(sum(counters["graph_break"].values())),
        "compiled_calls_a_layer": calls["compiled"] / calls["layers"],
        "graphs_after_first_step": float(counters["stats"]["unique_graphs"] - num_graphs),
        "sizes": float(len(sizes)),
        "compiled_kernels_a_layer": float(sum(kernels_of[:2])),
    }


def num_kernels(graph: Any) -> int:
    """Operations that are not fused, and runs of others that depend on each other between them."""
    import torch

    alone = ("mm", "addmm", "bmm", "packed_attention", "packed_attention_backward", "_grouped_mm")
    # the last operation that is not fused before each node: nodes behind the same one are one run
    depth: dict[Any, int] = {}
    singles, runs = 0, set[int]()
    for node in graph.nodes:
        before = max((depth.get(it, 0) for it in node.all_input_nodes), default=0)
        depth[node] = before
        if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
            continue
        if node.target.overloadpacket.__name__ in alone:
            singles += 1
            depth[node] = before + 1
        elif not node.target.is_view:
            runs.add(before)
    return singles + len(runs)


def flops() -> dict[str, float]:
    """See the module."""
    import torch
    import transformers as hf
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.utils.flop_counter import FlopCounterMode

    from areal_sc.algorithms import packing, vocabulary_sums
    from areal_sc.engines.fsdp.packed_model import PackedModel
    from areal_sc.sizing import output_layer

    vocabulary_sums.FUSED_DEVICES = frozenset({"cpu"})  # as on a GPU
    vocabulary_sums._cannot_compile = True
    is_few = hasattr(packing, "padded_size")
    if is_few:
        from areal_sc.engines.training.packed_attention import COMPILED_NAME
    pack = packing.pack_full_micro_batches if is_few else packing.pack_micro_batches
    lengths = random_lengths(160, 0, 400, 2048)
    packed = pack(lengths, MAX_TOKENS)
    found: dict[str, float] = {}
    for name, sizes in SHAPES.items():
        counted: dict[int, int] = {}  # by the number of layers: each further one does the same
        for num_layers in (1, 2):
            mode = FakeTensorMode(allow_non_fake_inputs=True)
            with mode:
                config = hf.Qwen2Config(**sizes._replace(num_hidden_layers=num_layers)._asdict())
                causal_lm = hf.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
            chunk = output_layer.chunk_tokens(0, sizes.vocab_size, "cuda", 80 << 30)
            kept = {"kept_tokens": output_layer.kept_tokens(chunk, "cuda")} if is_few else {}
            model = PackedModel(causal_lm.eval(), chunk_tokens=chunk, **kept)
            if is_few:  # one operation a layer, not one a row
                model.packed_attention = COMPILED_NAME
                model.abilities = model.abilities
            counted[num_layers] = 0
            for rows in packed:
                taken = [lengths[row] for row in rows]
                if is_few:
                    padding = packing.padded_size(sum(taken), MAX_TOKENS) - sum(taken)
                    taken += [padding] if padding else []
                asked = _asked(lengths, rows)
                layout = model.layout(taken, torch.device("cpu"))
                with mode, FlopCounterMode(display=False, custom_mapping=_causal(taken)) as counter:
                    ids = torch.zeros(sum(taken), dtype=torch.int64)
                    places = torch.zeros(asked, dtype=torch.int64)
                    logprobs, entropy = model(ids, layout, places, places, None)
                    (logprobs + entropy).sum().backward()
                counted[num_layers] += counter.get_total_flops()
        of_layer = counted[2] - counted[1]
        total = counted[1] + (sizes.num_hidden_layers - 1) * of_layer
        found[f"flops_over_model_{name}"] = total / model_flops(sizes, lengths)
        found[f"model_flops_a_token_{name}"] = model_flops(sizes, lengths) / sum(lengths)
    return found


def _asked(lengths: list[int], rows: list[int]) -> int:
    return sum(lengths[row] - max(1, lengths[row] // 4) for row in rows)


def model_flops(sizes: Sizes, lengths: list[int]) -> float:
    """Forward and backward, without what is computed again."""
    width = sizes.hidden_size
    keys = width * sizes.num_key_value_heads // sizes.num_attention_heads
    layer = 2 * width * (width + keys) + 3 * width * sizes.intermediate_size
    of_layers = sizes.num_hidden_layers * layer * sum(lengths)
    of_head = width * sizes.vocab_size * _asked(lengths, list(range(len(lengths))))
    pairs = sum(length * (length + 1) / 2 for length in lengths)
    return 6.0 * (of_layers + of_head) + 12.0 * sizes.num_hidden_layers * width * pairs


def _causal(rows_now: list[int]) -> dict[Any, Any]:
    """Formulas of attention that skips what comes later: two products forward, four backward.

    The kernel of a GPU computes one of the two again in the backward pass; that is not counted.

    Args: rows_now: tokens of each row that goes through the model.
    """
    import torch

    from areal_sc.engines.training import packed_attention

    def of_rows(query: Any, lengths: Any) -> int:
        pairs = sum(length * (length + 1) / 2 for length in lengths)
        return int(2 * 2 * query.shape[1] * query.shape[-1] * pairs)

    def forward(query: Any, *_: Any, **__: Any) -> int:
        return query.shape[0] * of_rows(query, [query.shape[2]])

    def backward(_grad: Any, query: Any, *_: Any, **__: Any) -> int:
        return 2 * forward(query)

    def packed(query: Any, *_: Any, **__: Any) -> int:
        return of_rows(query, rows_now)

    def packed_backward(_grad: Any, query: Any, *_: Any, **__: Any) -> int:
        return 2 * packed(query)

    def added(_total: Any, left: Any, right: Any, *_: Any, **__: Any) -> int:
        return 2 * left.shape[0] * left.shape[1] * right.shape[1]

    aten, ours = torch.ops.aten, torch.ops.areal_sc
    formulas: dict[Any, Any] = {
        aten.addmm_: added,
        aten._scaled_dot_product_flash_attention_for_cpu: forward,
        aten._scaled_dot_product_flash_attention_for_cpu_backward: backward,
    }
    if hasattr(packed_attention, "COMPILED_NAME"):
        formulas |= {ours.packed_attention: packed, ours.packed_attention_backward: packed_backward}
    for formula in formulas.values():
        formula._get_raw = True
    return formulas


def ranks() -> dict[str, float]:
    """See the module."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    import areal_sc.engines.fsdp.vocabulary as subject
    from areal_sc.sizing import output_layer

    dist.init_process_group("fake", rank=0, world_size=NUM_RANKS, store=FakeStore())
    pieces = output_layer.piece_bytes("cuda", 80 << 30)
    subject.piece_bytes = lambda *_: pieces  # as on a GPU
    found = share_of_empty()
    for name, sizes in SHAPES.items() | {"30B-A3B": EXPERTS}.items():
        for meets_once in (False, True):
            one, two = (collectives(sizes, num, meets_once=meets_once) for num in (1, 2))
            for key, value in one.items():
                total = value + (sizes.num_hidden_layers - 1) * (two[key] - value)
                found[f"{key}_{name}{'_once' if meets_once else ''}"] = total
    return found


def collectives(sizes: Sizes, num_layers: int, *, meets_once: bool) -> dict[str, float]:
    """Number of an update, and GB that a rank receives; see the module."""
    import torch
    import transformers as hf
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed.device_mesh import DeviceMesh
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    import areal_sc.engines.fsdp.model as loading
    from areal_sc.config.schema import ActorConfig, Dtype, ParallelConfig
    from areal_sc.engines.fsdp.cuts import CutParts
    from areal_sc.engines.fsdp.packed_model import PackedModel
    from areal_sc.engines.training.packed_attention import COMPILED_NAME, PackedLayout
    from areal_sc.engines.training.process_group import ProcessGroups
    from areal_sc.engines.training.streamed_layers import decoder_layers

    num_bytes = list[int]()

    class Counter(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, _: Any, args: Any = (), named: Any = None) -> Any:
            if func.namespace == "c10d":
                tensors = [it for it in tree_leaves(args) if isinstance(it, torch.Tensor)]
                num_bytes.append(max(it.nbytes for it in tensors))
            return func(*args, **(named or {}))

    parallel = ParallelConfig(data=NUM_RANKS)
    config = ActorConfig(
        path="", dtype=Dtype.bfloat16, max_tokens_per_micro_batch=MAX_TOKENS, parallel=parallel
    )
    device = torch.device("cpu")
    groups = ProcessGroups.join(0, NUM_RANKS, "", device, parallel, hosted=None, is_needed=True)
    layout = PackedLayout.of([MAX_TOKENS // 8] * 8, device, sizes.hidden_size)
    # numbers of ranks have to be real, and the parameters have their memory
    loading.take_memory = lambda *_: None
    mesh = DeviceMesh.from_group(groups.rows.torch_group, "cpu", mesh_dim_names=("rows",))
    loading.DeviceMesh = SimpleNamespace(from_group=lambda *_, **__: mesh)
    with FakeTensorMode(allow_non_fake_inputs=True):
        kind = hf.Qwen3MoeConfig if sizes is EXPERTS else hf.Qwen2Config
        further = OF_EXPERTS if sizes is EXPERTS else {}
        settings = kind(**sizes._replace(num_hidden_layers=num_layers)._asdict(), **further)
        causal_lm = hf.AutoModelForCausalLM.from_config(settings, dtype=torch.float32).eval()
        model = PackedModel(causal_lm, chunk_tokens=4096, kept_tokens=16_384)
        model.packed_attention = COMPILED_NAME
        model.abilities = model.abilities
        parts = CutParts.of_one_rank(causal_lm)
        loading._spread(model, decoder_layers(causal_lm), parts, config, groups)
        if meets_once and hasattr(model, "meet_once"):
            model.meet_once()
        with Counter(), model.computing():
            for number in range(1, NUM_MICRO_BATCHES + 1):
                if hasattr(model, "begin_micro_batch"):
                    model.begin_micro_batch(is_last=number == NUM_MICRO_BATCHES)
                ids = torch.zeros(MAX_TOKENS, dtype=torch.int64)
                logprobs, entropy = model(
                    ids, layout, ids[: MAX_TOKENS // 2], ids[: MAX_TOKENS // 2], None
                )
                (logprobs + entropy).sum().backward()
    received = sum(num_bytes) * (NUM_RANKS - 1) / NUM_RANKS
    return {"collectives": float(len(num_bytes)), "received_gb": received / 1e9}


def share_of_empty() -> dict[str, float]:
    """Micro-batches without rows, over all, in thirty updates of each of four kinds of rows.

    Where ranks meet once, a rank without any rows has one.
    """
    from areal_sc.algorithms.packing import pack_full_micro_batches
    from areal_sc.metadata import BatchMetadata, RowMetadata

    num_all = num_empty = num_idle = 0
    for count, median in ((512, 400), (128, 1000), (64, 3000), (24, 6000)):
        for seed in range(30):
            lengths = random_lengths(count, seed, median, MAX_TOKENS)
            rows = tuple(
                RowMetadata(row, 0, length, 0.0, 0, (), 0) for row, length in enumerate(lengths)
            )
            parts = BatchMetadata("rows", 0, (), rows).partition(NUM_RANKS)
            shares = [[lengths[row] for row in part] for part in parts]
            most = max(len(pack_full_micro_batches(it, MAX_TOKENS)) for it in shares)
            packed = [len(pack_full_micro_batches(it, MAX_TOKENS, most)) for it in shares]
            num_all += most * NUM_RANKS
            num_empty += most * NUM_RANKS - sum(packed)
            num_idle += packed.count(0)
    return {
        "empty_micro_batches": num_empty / num_all,
        "empty_micro_batches_once": num_idle / num_all,
    }


def batching() -> dict[str, float]:
    """See the module."""
    from areal_sc.algorithms.packing import pack_full_micro_batches, padded_size

    most, longest = 32_768, 16_000
    generator = random.Random(0)
    lengths = [int(longest / 10 ** generator.random()) for _ in range(512)]
    packed = [sum(lengths[row] for row in rows) for rows in pack_full_micro_batches(lengths, most)]
    by_tokens = [padded_size(num_tokens, most) for num_tokens in packed]
    each = most // longest
    equal = [lengths[at : at + each] for at in range(0, len(lengths), each)]
    by_rows = [sum(rows) for rows in equal]
    padded = [max(rows) * len(rows) for rows in equal]
    sides = {"by_tokens": by_tokens, "by_rows": by_rows, "by_rows_padded": padded}
    assert all(max(sizes) <= most for sizes in sides.values())
    found: dict[str, float] = {}
    for name, sizes in sides.items():
        found[f"micro_batches_{name}"] = float(len(sizes))
        found[f"computed_tokens_{name}"] = sum(sizes) / sum(lengths)
    return found


def start() -> dict[str, float]:
    """See the module."""
    import functools

    from areal_sc.config.schema import ActorConfig
    from areal_sc.engines.fsdp.ability_probe import probe_abilities
    from areal_sc.engines.fsdp.packed_model import PackedModel
    from areal_sc.engines.training.causal_lm import build_without_parameters
    from areal_sc.engines.training.stored_weights import open_weights
    from areal_sc.engines.training.streamed_layers import stream_layers

    with tempfile.TemporaryDirectory() as name:
        folder = Path(write_model(Path(name), NARROW._replace(num_hidden_layers=8)))
        weights, reads = open_weights(ActorConfig(path=str(folder))), Counter[str]()

        def read(names: Any) -> Any:
            names = list(names)
            reads.update(names)
            return weights.read(names)

        causal_lm = build_without_parameters(folder)
        fill = functools.partial(stream_layers, read=read, num_ranks=8)
        fill(causal_lm)
        probe_abilities(PackedModel(causal_lm, chunk_tokens=1024), 64, fill)
    return {"reads_of_a_layer": float(max(n for key, n in reads.items() if "layers.7." in key))}


def count(part: str, checkout: Path) -> dict[str, float]:
    """What a part counts in a checkout."""
    path = os.pathsep.join(map(str, (checkout, checkout / "tests")))
    finished = subprocess.run(
        [sys.executable, __file__, "--part", part],
        env=os.environ | {"PYTHONPATH": path, "PYTHONWARNINGS": "ignore"},
        capture_output=True,
        text=True,
        check=False,
    )
    if finished.returncode:
        raise RuntimeError(f"{part} of {checkout} failed:\n{finished.stderr[-2000:]}")
    found: dict[str, float] = json.loads(finished.stdout.splitlines()[-1])
    return found


LAUNCH_S = 0.691 / (4 * 5315)
"""Seconds of the host for a kernel: an H100's step of four micro-batches, where that was the limit.
"""
PEAK = 989e12
BUSY_S = 0.297 / 30_248
"""Seconds that it was busy for a token of 0.5B, with compiled layers."""
SHARE_OF_7B = 0.315
"""Of the peak, that it reached with eight layers of 7B, where the device was the limit."""
FLOPS_OF_7B = 4 / 3
"""Operations over those of the model, in that step: all of the forward pass was computed twice."""


def forecast(found: dict[str, float]) -> dict[str, float]:
    """The share of the peak at 0.5B, by the host and by the device; see the module."""
    layers = SHAPES["0.5B"].num_hidden_layers
    each = found.get("compiled_kernels_a_layer", found["kernels_a_layer"])
    of_host = LAUNCH_S * (layers * each + found["kernels_beside_layers"]) / MAX_TOKENS
    of_model = found["model_flops_a_token_0.5B"] / PEAK
    return {
        "forecast_share_by_host_0.5B": of_model / of_host,
        "forecast_share_by_device_0.5B": of_model / BUSY_S,
        "forecast_share_by_device_7B": SHARE_OF_7B * FLOPS_OF_7B / found["flops_over_model_7B"],
    }


def main() -> None:
    sys.path.insert(0, str(Path(__file__).parent))
    import report

    parser = report.make_parser(__doc__)
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)
    parser.add_argument("--only", choices=PARTS, nargs="*", default=PARTS, help="parts to count")
    parser.add_argument("--before", type=Path, metavar="CHECKOUT", help="count there, too")
    arguments = parser.parse_args()
    if arguments.part:
        print(json.dumps(globals()[arguments.part]()))
        return
    parts = ("start",) if arguments.quick else arguments.only
    places = {"now": ROOT} | ({"before": arguments.before} if arguments.before else {})
    records: dict[tuple[str | int, ...], report.Metrics] = {}
    for name, checkout in places.items():
        for part in parts:
            report.say(f"{name}: {part}")
            try:
                counts = count(part, checkout.resolve())
            except RuntimeError as error:
                if name == "now":
                    raise
                report.say(f"{name} lacks what is counted: {error}")
                continue
            for key, value in counts.items():
                records.setdefault((key,), {})[name] = value
    for name in places:
        found = {str(key[0]): values[name] for key, values in records.items() if name in values}
        if {"kernels", "flops"} <= set(parts):
            for key, value in forecast(found).items():
                records.setdefault((key,), {})[name] = value
    report.print_records("Counts of a training step", {}, ("count",), records)
    report.write(report.flat(records), arguments.json)


if __name__ == "__main__":
    main()
