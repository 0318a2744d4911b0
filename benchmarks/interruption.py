"""Updates that interrupt running answers, against updates that wait for the longest of them.

    python benchmarks/interruption.py [--quick] [--json FILE] [--engine local sglang]

The same engine generates the same requests under `on_weight_update: interrupt` and under
`finish_running`, in turns. Everything else is as in training:

- batch: answers a training step. `eta`: answer number N (from 0) is admitted once
  N < (version + eta + 1) * batch, at most as many at a time as there are decode slots.
- training step i begins when i batches are finished and the update before is done; it lasts as long
  as the engine needs for `--train-share` of a batch without updates, measured beforehand. It ends
  with an update, and the next step may begin before the engine has the new weights.
- lengths are lognormal; no answer ends by itself. The trainer sleeps: it takes no CPU.

Answers a second count from the first admission to the end of the last batch. Interrupted answers
compute their keys and values again, which is `recomputed` (over the tokens sampled; LocalEngine
tells it). `interrupted_over_waiting` is the ratio of answers a second, median over the rounds, with
the smallest and the largest. AReaL (arXiv:2505.24298, figure 6) reports 1.12 and 1.17 for its
models of 1.5B and 7B parameters.

With a large batch an update is rare, and with a small one the engine is nearly always draining when
it waits: the ratio depends on the longest answer over the time between two updates, which is
printed as `tail`.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import random
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import qwen2_models
import report
import sglang_side
import torch
from transformers import AutoModelForCausalLM

from areal_sc.config.schema import (
    Device,
    Dtype,
    GenerationConfig,
    OnWeightUpdate,
    RolloutConfig,
    SGLangConfig,
    WeightUpdateConfig,
)
from areal_sc.engines.base import GenerationEngine
from areal_sc.engines.local.engine import LocalEngine
from areal_sc.engines.weight_group import NamedTensor

ENGINES = ("local", "sglang")
SIDES = (OnWeightUpdate.interrupt, OnWeightUpdate.finish_running)
MAX_PROMPT_TOKENS = 32
UPDATE_TIMES = ("update_drain_s", "update_stall_s")


@dataclass(frozen=True)
class Workload:
    """What is generated.

    Attributes:
        median_tokens, sigma, max_tokens: of the lognormal lengths.
        num_batches: of a timed run.
        slots: decode slots.
    """

    median_tokens: int
    sigma: float
    max_tokens: int
    num_batches: int
    slots: int

    def request(self, number: int) -> tuple[list[int], GenerationConfig]:
        """Prompt and sampling of one answer, the same in every run."""
        rng = random.Random(number)
        prompt = [
            rng.randrange(qwen2_models.NUM_WORDS)
            for _ in range(rng.randrange(4, MAX_PROMPT_TOKENS))
        ]
        length = round(self.median_tokens * rng.lognormvariate(0, self.sigma))
        return prompt, GenerationConfig(max_new_tokens=max(1, min(self.max_tokens, length)))


@dataclass(frozen=True)
class Cadence:
    """When weights change.

    Attributes:
        batch: answers a training step.
        train_s: a training step takes.
    """

    eta: int
    batch: int
    train_s: float


@dataclass(frozen=True)
class Outcome:
    """One run.

    Attributes:
        drain_s, stall_s: the engine's own counters, over all updates.
        recomputed: tokens computed again, over tokens sampled.
        longest_s: of an answer, from its request.
    """

    elapsed_s: float
    num_answers: int
    num_tokens: float
    num_updates: int
    drain_s: float
    stall_s: float
    recomputed: float
    longest_s: float

    @property
    def answers_per_s(self) -> float:
        return self.num_answers / self.elapsed_s

    @property
    def tail(self) -> float:
        """The longest answer over the time between two updates."""
        return self.longest_s * self.num_updates / self.elapsed_s


class TrainingRun:
    """One run: answers admitted by equation 3, and a trainer that takes them and sends weights.

    Consumes: finished answers. Waits for: answers of a batch, the training time, the update before.
    Unblocked by: the engine; an answer or an update that fails ends the run with its error.
    """

    def __init__(
        self,
        engine: GenerationEngine,
        workload: Workload,
        cadence: Cadence,
        versions: Mapping[int, Sequence[NamedTensor]],
    ) -> None:
        self._engine = engine
        self._workload = workload
        self._cadence = cadence
        self._versions = versions
        self._num_steps = 0
        self._num_finished = 0
        self._longest_s = 0.0
        self._changed = asyncio.Condition()

    async def run(self) -> Outcome:
        before = dict(self._engine.stats())
        start = time.perf_counter()
        admission = asyncio.create_task(self._admit())
        try:
            training = asyncio.create_task(self._train())
            await asyncio.wait({admission, training}, return_when=asyncio.FIRST_COMPLETED)
            if admission.done():
                training.cancel()
                admission.result()
            await training
            elapsed_s = time.perf_counter() - start
            after = self._engine.stats()
        finally:
            admission.cancel()
            await asyncio.gather(admission, return_exceptions=True)
        grown = {name: after[name] - before.get(name, 0) for name in after}
        num_tokens = grown["generated_tokens"]
        return Outcome(
            elapsed_s,
            self._workload.num_batches * self._cadence.batch,
            num_tokens,
            self._num_steps,
            *(grown[name] for name in UPDATE_TIMES),
            grown.get("recomputed_tokens", 0.0) / num_tokens,
            self._longest_s,
        )

    async def _admit(self) -> None:
        """Until cancelled."""
        slots = asyncio.Semaphore(self._workload.slots)
        async with asyncio.TaskGroup() as answers:
            for number in itertools.count():
                await self._until(lambda number=number: number < self._admissible)
                await slots.acquire()
                answer = answers.create_task(self._answer(number))
                answer.add_done_callback(lambda _: slots.release())

    @property
    def _admissible(self) -> int:
        return (self._num_steps + self._cadence.eta + 1) * self._cadence.batch

    async def _answer(self, number: int) -> None:
        prompt, sampling = self._workload.request(number)
        start = time.perf_counter()
        completion = await self._engine.generate(prompt, sampling)
        assert len(completion.token_ids) == sampling.max_new_tokens, completion.finish_reason
        self._longest_s = max(self._longest_s, time.perf_counter() - start)
        await self._change(finished=1)

    async def _train(self) -> None:
        update: asyncio.Task[None] | None = None
        for step in range(self._workload.num_batches):
            needed = (step + 1) * self._cadence.batch
            await self._until(lambda needed=needed: self._num_finished >= needed)
            if step == self._workload.num_batches - 1:
                break  # the last update would serve nobody
            await asyncio.sleep(self._cadence.train_s)
            if update is not None:
                await update
            update = asyncio.create_task(self._update(step))
            await self._change(steps=1)
        if update is not None:
            await update

    async def _update(self, step: int) -> None:
        async def source() -> Sequence[NamedTensor]:
            return self._versions[step % len(self._versions)]

        await self._engine.update_weights(self._engine.version + 1, source)

    async def _until(self, condition: Callable[[], bool]) -> None:
        async with self._changed:
            await self._changed.wait_for(condition)

    async def _change(self, *, finished: int = 0, steps: int = 0) -> None:
        async with self._changed:
            self._num_finished += finished
            self._num_steps += steps
            self._changed.notify_all()


async def compare(
    engine: GenerationEngine,
    config: RolloutConfig,
    workload: Workload,
    cadence: Cadence,
    versions: Mapping[int, Sequence[NamedTensor]],
    rounds: int,
) -> dict[OnWeightUpdate, list[Outcome]]:
    """Both sides in turns, the first of them changing."""
    outcomes: dict[OnWeightUpdate, list[Outcome]] = {side: [] for side in SIDES}
    for number in range(rounds):
        for side in SIDES if number % 2 == 0 else SIDES[::-1]:
            config.on_weight_update = side  # read by the engine at each update
            outcomes[side].append(await TrainingRun(engine, workload, cadence, versions).run())
            await until_idle(engine)
    return outcomes


async def until_idle(engine: GenerationEngine) -> None:
    """Returns when the answers that a run has left are ended."""
    async with asyncio.timeout(60):
        while is_busy(engine.stats()):  # noqa: ASYNC110 - a counter of the engine
            await asyncio.sleep(0.01)


def is_busy(stats: Mapping[str, float]) -> bool:
    """`occupied_places`: of SGLang's requests that nobody waits for any more."""
    return bool(stats["running_requests"] or stats.get("occupied_places"))


async def batch_seconds(engine: GenerationEngine, workload: Workload, batch: int) -> float:
    """To generate a batch when nothing is updated; the first run warms up."""
    never = Cadence(eta=1_000_000, batch=batch, train_s=0.0)
    short = Workload(
        workload.median_tokens,
        workload.sigma,
        workload.max_tokens,
        max(1, 4 * workload.slots // batch),
        workload.slots,
    )
    for _ in range(2):
        start = time.perf_counter()
        await Unchanged(engine, short, never, {}).run()
        elapsed_s = time.perf_counter() - start
        await until_idle(engine)
    return elapsed_s / short.num_batches


class Unchanged(TrainingRun):
    """Generates without training steps and updates."""

    async def _train(self) -> None:
        needed = self._workload.num_batches * self._cadence.batch
        await self._until(lambda: self._num_finished >= needed)


@asynccontextmanager
async def started(
    name: str, config: RolloutConfig, model_folder: Path
) -> AsyncIterator[GenerationEngine]:
    """The engine of this name; LocalEngine or one SGLang server."""
    if name == "sglang":
        async with sglang_side.serving(config) as engine:
            yield engine
        return
    local = LocalEngine(config)
    await local.start()
    try:
        yield local
    finally:
        await local.close()


def read_versions(model_folder: Path) -> dict[int, list[NamedTensor]]:
    """Two sets of weights of one scale."""
    model = AutoModelForCausalLM.from_pretrained(model_folder)
    tensors = [(name, p.detach()) for name, p in model.named_parameters()]
    return {0: tensors, 1: [(name, -tensor) for name, tensor in tensors]}


async def measure(
    name: str,
    size: str,
    workload: Workload,
    etas: Sequence[int],
    batches: Sequence[int],
    train_share: float,
    rounds: int,
    sglang_python: Path,
) -> dict[Cadence, dict[OnWeightUpdate, list[Outcome]]]:
    with tempfile.TemporaryDirectory(prefix="areal-sc-model-") as folder:
        model_folder = Path(folder) / "model"
        max_context_tokens = workload.max_tokens + MAX_PROMPT_TOKENS
        qwen2_models.write_folder(model_folder, qwen2_models.SHAPES[size], torch.float32)
        versions = read_versions(model_folder)
        config = RolloutConfig(
            path=str(model_folder),
            dtype=Dtype.float32,
            device=Device.cpu,
            max_running_sequences=workload.slots,
            max_context_tokens=max_context_tokens,
            num_threads=1,
            seed=0,
            sglang=SGLangConfig(python=str(sglang_python)),
            weight_update=WeightUpdateConfig(),
        )
        results = {}
        async with started(name, config, model_folder) as engine:
            for batch in batches:
                train_s = train_share * await batch_seconds(engine, workload, batch)
                for eta in etas:
                    cadence = Cadence(eta, batch, train_s)
                    results[cadence] = await compare(
                        engine, config, workload, cadence, versions, rounds
                    )
    return results


def ratios_of(outcomes: Mapping[OnWeightUpdate, Sequence[Outcome]]) -> list[float]:
    """Interrupted over waiting, of each round."""
    pairs = zip(*(outcomes[side] for side in SIDES), strict=True)
    return [one.answers_per_s / other.answers_per_s for one, other in pairs]


def print_results(
    name: str,
    settings: Mapping[str, object],
    results: Mapping[Cadence, Mapping[OnWeightUpdate, Sequence[Outcome]]],
) -> None:
    rows = []
    for cadence, outcomes in results.items():
        ratios = ratios_of(outcomes)
        for side in SIDES:

            def median(value: Callable[[Outcome], float], side: OnWeightUpdate = side) -> float:
                return statistics.median(map(value, outcomes[side]))  # noqa: B023 - used here

            ratio = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
            rows.append(
                (
                    cadence.eta,
                    cadence.batch,
                    cadence.train_s,
                    str(side),
                    median(lambda o: o.answers_per_s),
                    median(lambda o: o.num_tokens / o.elapsed_s),
                    median(lambda o: o.elapsed_s / max(o.num_updates, 1)),
                    median(lambda o: o.tail),
                    median(lambda o: o.drain_s / o.elapsed_s),
                    median(lambda o: o.recomputed),
                    ratio if side == SIDES[0] else "",
                )
            )
    report.print_table(
        f"Interrupted against waiting: {name}",
        settings,
        (
            *("eta", "batch", "train s", "on_weight_update", "answers/s", "tokens/s"),
            *("s per update", "tail", "draining", "recomputed", "ratio"),
        ),
        rows,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    report.add_arguments(parser)
    sglang_side.add_arguments(parser)
    parser.add_argument(
        "--engine", nargs="+", choices=ENGINES, default=["local"], help="default local"
    )
    parser.add_argument("--size", choices=tuple(qwen2_models.SHAPES), default="1m")
    parser.add_argument("--etas", nargs="+", type=int, help="default 1 4, quick 1")
    parser.add_argument(
        "--batches", nargs="+", type=int, help="answers a step (default 32 128, quick 8)"
    )
    parser.add_argument("--slots", type=int, help="decode slots (default 32, quick 8)")
    parser.add_argument("--median-tokens", type=int, default=32, help="default 32")
    parser.add_argument("--sigma", type=float, default=0.8, help="of the lengths (default 0.8)")
    parser.add_argument("--max-tokens", type=int, help="of an answer (256, quick 64)")
    parser.add_argument("--steps", type=int, help="training steps a run (default 12, quick 3)")
    parser.add_argument("--train-share", type=float, default=0.8, help="default 0.8")
    parser.add_argument("--rounds", type=int, help="runs a side (default 3, quick 1)")
    arguments = parser.parse_args()
    if "sglang" in arguments.engine:
        sglang_side.check_python(parser, arguments.sglang_python)
    torch.set_num_threads(1)
    load = os.getloadavg()[0]
    quick = arguments.quick
    workload = Workload(
        arguments.median_tokens,
        arguments.sigma,
        arguments.max_tokens or (64 if quick else 256),
        (arguments.steps or (3 if quick else 12)) + 1,
        arguments.slots or (8 if quick else 32),
    )
    rounds = arguments.rounds or (1 if quick else 3)
    settings = {
        "rounds": rounds,
        "model": arguments.size,
        "slots": workload.slots,
        "lengths": f"median {workload.median_tokens}, sigma {workload.sigma}, "
        f"at most {workload.max_tokens}",
        "steps": workload.num_batches - 1,
        "threads": 1,
        "load of the machine beforehand": f"{load:.1f}",
    }
    metrics: dict[str, tuple[float, str]] = {}
    for name in arguments.engine:
        results = asyncio.run(
            measure(
                name,
                arguments.size,
                workload,
                arguments.etas or ([1] if quick else [1, 4]),
                arguments.batches or ([8] if quick else [32, 128]),
                arguments.train_share,
                rounds,
                arguments.sglang_python,
            )
        )
        print_results(name, settings, results)
        for cadence, outcomes in results.items():
            key = f"{name}_interrupted_over_waiting_eta{cadence.eta}_batch{cadence.batch}"
            metrics[key] = (statistics.median(ratios_of(outcomes)), "ratio")
    report.write(metrics, arguments.json)


if __name__ == "__main__":
    main()
