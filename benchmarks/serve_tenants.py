"""Tenants of a server of the Tinker API beside each other, on a real model with small batches.

    make real-model
    python benchmarks/serve_tenants.py --json serve_tenants.json
    python benchmarks/serve_tenants.py --quick                    two minutes

together   8 tenants, each with a model of rank 8 and 4 rows of 32 tokens a step, at the same time
           and one after the other: trained tokens a second, and the train rank's memory with one
           adapter and with all
resting    64 models at 8 places, each of which takes a step, and then another one: seconds of a
           step whose model has to wake, over those of one whose model has its place
flood      one tenant takes small steps alone, and beside one with 8 models that always asks for 32
           rows each. Its seconds a step, and those over a round: a forward pass and a step of all
           that the other one asks for at once
"""

from __future__ import annotations

import random
import shutil
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

import report
import tinker
from integration.serving import Served, served
from processes import resident_bytes
from tinker import types

MODEL: Final = Path(__file__).resolve().parents[1] / ".venv-models" / "SmolLM2-135M-Instruct"
PARTS: Final = ("together", "resting", "flood")
RANK: Final = 8
NUM_TENANTS: Final = 8
ROWS: Final = 4
FLOOD_ROWS: Final = 32
TOKENS: Final = 32
ADAM: Final = types.AdamParams(learning_rate=1e-4)


def rows_of(count: int, number: int) -> list[types.Datum]:
    chosen = random.Random(number)
    rows = []
    for _ in range(count):
        ids = [chosen.randrange(100, 40_000) for _ in range(TOKENS + 1)]
        inputs = {"target_tokens": ids[1:], "weights": [1.0] * TOKENS}
        prompt = types.ModelInput.from_ints(ids[:-1])
        rows.append(types.Datum(model_input=prompt, loss_fn_inputs=inputs))
    return rows


def step(model: tinker.TrainingClient, number: int, count: int = ROWS) -> float:
    """Seconds of a pass and an update, which are sent at the same time."""
    began = time.monotonic()
    passed = model.forward_backward(rows_of(count, number), "cross_entropy")
    update = model.optim_step(ADAM)
    passed.result()
    update.result()
    return time.monotonic() - began


def begun(client: tinker.ServiceClient, name: str) -> tinker.TrainingClient:
    return client.create_lora_training_client(base_model=name, rank=RANK).result()


def own_bytes(server: Served) -> float:
    """Of the train rank, without files that it shares."""
    return float(resident_bytes(server.run.worker_pid("train/0"))["private"])


def together(server: Served, name: str, num_steps: int) -> report.Metrics:
    tenants = [f"tenant{number}" for number in range(NUM_TENANTS)]
    models = [begun(server.client(tenants[0]), name)]
    step(models[0], 0)
    with_one = own_bytes(server)
    models += [begun(server.client(tenant), name) for tenant in tenants[1:]]

    def train(model: tinker.TrainingClient) -> None:
        for number in range(num_steps):
            step(model, number)

    for model in models:  # gets its place
        step(model, 0)
    with_all = own_bytes(server)
    with ThreadPoolExecutor(NUM_TENANTS) as pool:
        began = time.monotonic()
        list(pool.map(train, models))
        took_s = time.monotonic() - began
    began = time.monotonic()
    for model in models:
        train(model)
    alone_s = time.monotonic() - began
    num_tokens = len(models) * num_steps * ROWS * TOKENS
    return {
        "together_tokens_per_s": num_tokens / took_s,
        "one_after_the_other_tokens_per_s": num_tokens / alone_s,
        "speedup": alone_s / took_s,
        "one_adapter_bytes": with_one,
        "eight_adapters_bytes": with_all,
    }


def resting(server: Served, name: str, num_models: int) -> report.Metrics:
    client = server.client("tenant0")
    models = [begun(client, name) for _ in range(num_models)]
    first = [step(model, 0, 1) for model in models]
    waking = [step(model, 1, 1) for model in models]
    placed = [step(models[-1], number, 1) for number in range(8)]
    return {
        "models": float(num_models),
        "first_step_s": statistics.median(first),
        "waking_step_s": statistics.median(waking),
        "waking_step_worst_s": max(waking),
        "placed_step_s": statistics.median(placed),
        "wake_up_s": statistics.median(waking) - statistics.median(placed),
        "rank_bytes": own_bytes(server),
    }


def flood(server: Served, name: str, num_steps: int, num_models: int) -> report.Metrics:
    model = begun(server.client("tenant0"), name)
    other = server.client("tenant1")
    flooding = [begun(other, name) for _ in range(num_models)]
    step(model, 0)
    alone = [step(model, number) for number in range(num_steps)]
    is_over = threading.Event()

    def ask(model: tinker.TrainingClient) -> list[float]:
        seconds = []
        while not is_over.is_set():
            seconds.append(step(model, len(seconds), FLOOD_ROWS))
        return seconds

    with ThreadPoolExecutor(num_models) as pool:
        futures = [pool.submit(ask, model) for model in flooding]
        time.sleep(2 * max(alone))
        beside = [step(model, number) for number in range(num_steps)]
        is_over.set()
        rounds = [seconds for future in futures for seconds in future.result()]
    round_s = statistics.median(rounds)
    return {
        "alone_step_s": statistics.median(alone),
        "alone_step_worst_s": max(alone),
        "beside_step_s": statistics.median(beside),
        "beside_step_worst_s": max(beside),
        "round_s": round_s,
        "beside_over_round": statistics.median(beside) / round_s,
        "beside_worst_over_round": max(beside) / max(rounds),
    }


def main() -> None:
    parser = report.make_parser(__doc__)
    parser.add_argument("--model", type=Path, default=MODEL, help="folder; make real-model")
    parser.add_argument("--parts", choices=PARTS, nargs="+", default=list(PARTS))
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--models", type=int, default=64, help="that rest, or nearly all do")
    parser.add_argument("--flooding", type=int, default=8, help="models of the one that floods")
    arguments = report.parse(parser, steps=2, models=10, flooding=2)
    if not arguments.model.is_dir():
        parser.error(f"no model at {arguments.model}: make real-model")
    settings: Sequence[str] = (
        *(f"actor.lora.rank={RANK}", "actor.lora.alpha=16", f"actor.lora.places={NUM_TENANTS}"),
    )
    tenants = ",".join(f"tenant{number}" for number in range(NUM_TENANTS))
    name, records = arguments.model.name, dict[tuple[str | int, ...], report.Metrics]()
    measures = {
        "together": lambda server: together(server, name, arguments.steps),
        "resting": lambda server: resting(server, name, arguments.models),
        "flood": lambda server: flood(server, name, arguments.steps, arguments.flooding),
    }
    folder = Path(tempfile.mkdtemp(prefix="serve-tenants-"))
    try:
        for part in arguments.parts:
            with served(folder / part, arguments.model, *settings, tenants=tenants) as server:
                found = measures[part](server)
            report.print_metrics(part, {"rank": RANK, "rows": ROWS, "tokens": TOKENS}, found)
            records[part,] = found
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    report.write(report.flat(records), arguments.json)


if __name__ == "__main__":
    main()
