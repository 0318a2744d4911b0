"""A training step on two ranks of tensor parallelism against a loop written by hand for it.

    python benchmarks/train_tensor_parallel.py [--quick] [--json FILE] [--engine megatron]

Two processes of one thread each, connected by gloo. The step is that of `train_throughput.py`:
log-probabilities of the trained tokens, then an update for each of two minibatches. The sides take
turns within the same processes; a ratio is the median of those of the rounds.

- engine: `actor.parallel: {data: 1, tensor: 2}`, without a controller. With `--engine megatron` the
  names of metrics begin with `megatron_`, and the tests' shim takes CUDA's place.
- handwritten: the loop of `train_handwritten.py` over a Hugging Face model whose layers are cut for
  it: heads and features by columns, then by rows, embeddings and output layer by the vocabulary.
  Maxima and sums of the logits' parts are reduced, not the logits.

Both sides must have the same log-probabilities at first, and gradients of the same norms.
"""

from __future__ import annotations

import os
import socket
import statistics
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import report
import torch
import torch.distributed as dist
import torch.nn.functional as F
from random_model_run import model_folder
from torch import multiprocessing, nn
from train_handwritten import HandwrittenLoop
from train_throughput import Step, actor_config
from train_workload import Workload, make_rows, minibatches_of, workloads
from transformers.utils import logging as hf_logging

from areal_sc.algorithms.named_loss import loss_of
from areal_sc.config.parallel_settings import TrainEngineKind
from areal_sc.config.schema import Dtype, ParallelConfig
from areal_sc.engines.handles import make_actor
from areal_sc.engines.megatron.machine import ON_CPU

NUM_RANKS = 2
SAME_LOGPROBS = 1e-4
SAME_NORM = 1e-3
LIMIT_S = 60.0


class _Enter(torch.autograd.Function):
    """Before layers cut by columns: the ranks' gradients are added up."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor) -> torch.Tensor:
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        grad = grad.clone()
        dist.all_reduce(grad)
        return grad


class _Leave(torch.autograd.Function):
    """After a layer cut by rows: the ranks' outputs are added up."""

    @staticmethod
    def forward(ctx: Any, partial: torch.Tensor) -> torch.Tensor:
        summed = partial.clone()
        dist.all_reduce(summed)
        return summed

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad


class _OfTokens(torch.autograd.Function):
    """Log-probabilities of tokens, and entropies, of this rank's part of the logits."""

    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, tokens: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        size = logits.shape[1]
        own = tokens - dist.get_rank() * size
        is_foreign = (own < 0) | (own >= size)
        own = own.masked_fill(is_foreign, 0)[:, None]
        peak = logits.amax(-1)
        dist.all_reduce(peak, dist.ReduceOp.MAX)
        gaps = logits - peak[:, None]
        exponentials = gaps.exp()
        of_tokens = gaps.gather(1, own)[:, 0].masked_fill(is_foreign, 0)
        sums = torch.stack([exponentials.sum(-1), (exponentials * gaps).sum(-1), of_tokens])
        dist.all_reduce(sums)
        total, weighed, of_tokens = sums
        ctx.save_for_backward(exponentials.div_(total[:, None]), own, is_foreign)
        entropy = total.log() - weighed / total
        ctx.mark_non_differentiable(entropy)
        return of_tokens - total.log(), entropy

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor, _: torch.Tensor) -> tuple[torch.Tensor, None]:
        probabilities, own, is_foreign = ctx.saved_tensors
        grad_logits = probabilities * -grad[:, None]
        grad_logits.scatter_add_(1, own, grad.masked_fill(is_foreign, 0)[:, None])
        return grad_logits, None


def own_part(parameter: nn.Parameter, dim: int) -> nn.Parameter:
    return nn.Parameter(parameter.detach().chunk(NUM_RANKS, dim)[dist.get_rank()].clone())


def cut(linear: Any, dim: int) -> None:
    """Leaves this rank its part of a layer, and of its bias."""
    linear.weight = own_part(linear.weight, dim)
    if linear.bias is not None:
        assert dim == 0
        linear.bias = own_part(linear.bias, 0)


class TensorParallelLoop(HandwrittenLoop):
    """Qwen2 with tied embeddings, on two ranks."""

    def load(self, folder: Path, dtype: torch.dtype) -> Any:
        model = super().load(folder, dtype)
        enter = lambda _module, _inputs, hidden: _Enter.apply(hidden)  # noqa: E731
        leave = lambda _module, _inputs, partial: _Leave.apply(partial)  # noqa: E731
        for layer in model.model.layers:
            attention, mlp = layer.self_attn, layer.mlp
            for linear in (attention.q_proj, attention.k_proj, attention.v_proj):
                cut(linear, 0)
            for linear in (mlp.gate_proj, mlp.up_proj):
                cut(linear, 0)
            for linear in (attention.o_proj, mlp.down_proj):
                cut(linear, 1)
                linear.register_forward_hook(leave)
            layer.input_layernorm.register_forward_hook(enter)
            layer.post_attention_layernorm.register_forward_hook(enter)
        embeddings = model.model.embed_tokens
        embeddings.weight = model.lm_head.weight = own_part(embeddings.weight, 0)
        size = len(embeddings.weight)

        def look_up(tokens: torch.Tensor) -> torch.Tensor:
            own = tokens - dist.get_rank() * size
            is_foreign = (own < 0) | (own >= size)
            found = F.embedding(own.masked_fill(is_foreign, 0), embeddings.weight)
            summed: torch.Tensor = _Leave.apply(  # type: ignore[no-untyped-call]
                found.masked_fill(is_foreign[..., None], 0)
            )
            return summed

        embeddings.forward = look_up
        return model

    def of_tokens(
        self, hidden: torch.Tensor, tokens: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        logits = self.model.lm_head(_Enter.apply(hidden))  # type: ignore[no-untyped-call]
        logprobs, entropy = _OfTokens.apply(logits, tokens)  # type: ignore[no-untyped-call]
        return logprobs, entropy

    def clip(self) -> torch.Tensor:
        """By the norm of all gradients; those of the norms' weights are on every rank."""
        gradients = [(parameter, parameter.grad) for parameter in self.masters]
        copied = {id(p) for name, p in self.model.named_parameters() if "norm" in name}
        squares = [torch.zeros(()), torch.zeros(())]
        for parameter, grad in gradients:
            assert grad is not None
            squares[id(parameter) in copied] += grad.square().sum()
        dist.all_reduce(squares[0])
        norm = (squares[0] + squares[1]).sqrt()
        factor = (1.0 / (norm + 1e-6)).clamp(max=1.0)
        torch._foreach_mul_([grad for _, grad in gradients if grad is not None], factor)
        return norm


def engine_step(
    kind: TrainEngineKind,
    workload: Workload,
    model: Path,
    address: str,
    rank: int,
    grad_norms: list[float],
) -> Step:
    """That of the engine; the ranks have met when this returns.

    Args:
        grad_norms: gets that of each update.
    """
    config = actor_config(workload, model, "cpu")
    config.engine, config.parallel = kind, ParallelConfig(tensor=NUM_RANKS)
    engine = make_actor(config).build()
    engine.initialize(rank, NUM_RANKS, address)
    rows, loss = make_rows(workload), loss_of(config.ppo)

    def step() -> torch.Tensor:
        proximal = engine.forward(rows, "logprobs")
        dist.broadcast(proximal, 0)  # as the other ranks of a model group pull them
        known = replace(rows, fields={**rows.fields, "proximal_logprobs": proximal})
        for part in minibatches_of(rows):
            grad_norms.append(engine.update([known.take(part)], loss, step=0)["grad_norm"])
        return proximal

    return step


def run_rank(
    rank: int,
    kind: TrainEngineKind,
    workload: Workload,
    model: Path,
    address: str,
    rounds: int,
    found: Any,
) -> None:
    torch.set_num_threads(1)
    hf_logging.disable_progress_bar()
    of_engine: list[float] = []
    steps = {"engine": engine_step(kind, workload, model, address, rank, of_engine)}
    by_hand = TensorParallelLoop(workload, model, "cpu", torch.float32)
    steps["handwritten"] = by_hand.step
    times: dict[str, list[float]] = {side: [] for side in steps}
    for number in range(rounds + 2):
        logprobs = {}
        for side in sorted(steps, reverse=number % 2 == 1):
            dist.barrier()
            begun_s = time.perf_counter()
            logprobs[side] = steps[side]()
            times[side].append(time.perf_counter() - begun_s)
        difference = float((logprobs["engine"] - logprobs["handwritten"]).abs().max())
        if number == 0 and difference > SAME_LOGPROBS:
            raise SystemExit(f"log-probabilities differ by {difference:.1e}")
        norms = of_engine[-1], float(by_hand.grad_norm)
        if abs(norms[0] - norms[1]) > SAME_NORM * norms[1]:
            raise SystemExit(f"the gradients' norm is {norms[0]:g}, by hand {norms[1]:g}")
    if rank == 0:
        found.put({side: seconds[2:] for side, seconds in times.items()})


def measure(kind: TrainEngineKind, workload: Workload, rounds: int) -> report.Metrics:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    context = multiprocessing.get_context("spawn")
    found = context.Queue()
    with model_folder(workload.shape, Dtype.float32) as model:
        words = kind, workload, model, address, rounds, found
        ranks = multiprocessing.spawn(run_rank, words, NUM_RANKS, join=False)
        while not ranks.join():
            pass
        times = found.get(timeout=LIMIT_S)
    ratios = [
        theirs / ours for ours, theirs in zip(times["engine"], times["handwritten"], strict=True)
    ]
    metrics = {"tensor2_step_vs_handwritten": statistics.median(ratios)}
    for side, seconds in times.items():
        metrics[f"{side}_tokens_per_s"] = workload.num_tokens / statistics.median(seconds)
    return metrics


def main() -> None:
    parser = report.make_parser(__doc__)
    parser.add_argument("--engine", type=TrainEngineKind, default=TrainEngineKind.fsdp)
    arguments = parser.parse_args()
    if arguments.engine == TrainEngineKind.megatron:
        os.environ[ON_CPU] = "1"
    workload, rounds = workloads(quick=arguments.quick)[0], 1 if arguments.quick else 9
    metrics = measure(arguments.engine, workload, rounds)
    if arguments.engine == TrainEngineKind.megatron:
        metrics = {f"{arguments.engine}_{name}": value for name, value in metrics.items()}
    settings = {"rows": len(workload.lengths), "tokens": workload.num_tokens, "rounds": rounds}
    report.print_metrics(f"Two ranks, {workload.name}", settings, metrics)
    report.write(metrics, arguments.json)


if __name__ == "__main__":
    main()
