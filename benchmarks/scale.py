"""Asynchronous against synchronous training on hundreds of devices, simulated.

    python benchmarks/scale.py [--quick] [--costs FILE.yaml] [--json FILE] [NAME=VALUE ...]

The real controllers, with their admission, staleness and ledger, run on virtual time; workers are
simulated, and take the time that `scale_costs.py` says. Any number of it can be set by a YAML or on
the command line: `devices=64 train=9000`.

The synchronous side (`max_staleness` 0) generates with all devices, then trains with all, and
changes from one to the other in no time. The asynchronous ones share the devices. `ideal` is the
slower side alone: the longer of training, and generation by servers that are always full and never
stopped. Staleness is that of trained tokens. The first eighth of the steps is left out.
"""

from __future__ import annotations

import logging
import statistics
import sys
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

import report
from costed_cluster import CostedCluster, costed_run
from omegaconf import OmegaConf
from scale_costs import Costs
from simulation.tasks import NamedWorkflow, NumberedPrompts
from simulation.virtual_loop import run_virtual

from areal_sc.config.schema import AdmissionMode
from areal_sc.controller.rollout.rollout_controller import RolloutController
from areal_sc.controller.rollout.staleness import StalenessStats
from areal_sc.controller.train.train_controller import TrainController
from areal_sc.records.metrics import StepMetrics
from areal_sc.trainer.steps import of_groups

MAX_WORKERS = 64
"""Each has as many servers as it takes."""
SENSITIVITY = ("turn_s", "turn_s_per_answer", "prefill", "load_s", "train", "publish_s")
ETAS = (1, 2, 4, 8)


@dataclass(frozen=True)
class Side:
    """One way to run the job; `max_staleness` 0 is synchronous."""

    max_staleness: int
    admission: AdmissionMode = AdmissionMode.eager


async def run(costs: Costs, side: Side, num_steps: int) -> list[StepMetrics]:
    """All steps of one simulated run; each server counts as a rollout worker."""
    is_sync = side.max_staleness == 0
    num_generating = costs.devices if is_sync else round(costs.devices * costs.generating_share)
    num_servers = num_generating // costs.server_devices
    num_workers = max(n for n in range(1, MAX_WORKERS + 1) if num_servers % n == 0)
    work = costed_run(
        costs,
        num_servers // num_workers,
        costs.devices if is_sync else costs.devices - num_generating,
        num_steps=num_steps,
        max_staleness=side.max_staleness,
        admission=side.admission,
        num_rollout_workers=num_workers,
    )
    async with work as (actor, rollout, cluster):
        return [step async for step in _steps(actor, rollout, cluster, num_steps)]


def simulate(costs: Costs, side: Side, num_steps: int) -> list[StepMetrics]:
    """As `run`, on virtual time."""
    return run_virtual(run(costs, side, num_steps), max_virtual_s=1e9, max_turns=1 << 40)


async def _steps(
    actor: TrainController, rollout: RolloutController, cluster: CostedCluster, num_steps: int
) -> Any:
    prompts, workflow = NumberedPrompts(1 << 20), NamedWorkflow()
    counters = cluster.counters()
    for number in range(1, num_steps + 1):
        began_s = cluster.now_s
        batch = await rollout.prepare_batch_async(prompts, workflow)
        formed_s = cluster.now_s
        await actor.ppo_update_async(actor.compute_advantages(batch))
        trained_s = cluster.now_s
        await actor.publish_weights_async(rollout)
        cluster.starts.clear()
        cluster.trained.clear()
        cluster.sealed_rows.clear()
        staleness = StalenessStats.of(batch.rows, batch.global_step)
        before, counters = counters, cluster.counters()
        yield StepMetrics(
            step=number,
            reward=0.5,
            group_staleness_mean=staleness.group_mean,
            group_staleness_max=staleness.group_max,
            token_staleness_mean=staleness.token_mean,
            token_staleness_max=staleness.token_max,
            lead=rollout.groups.admission.lead,
            num_rows=batch.total_batch_size,
            num_generated_tokens=int(counters["generated_tokens"] - before["generated_tokens"]),
            num_trained_tokens=staleness.num_tokens_trained,
            mean_sequence_length=batch.num_tokens / batch.total_batch_size,
            step_time_s=cluster.now_s - began_s,
            wait_s=formed_s - began_s,
            train_s=trained_s - formed_s,
            sync_s=cluster.now_s - trained_s,
            num_train_workers=cluster.training_devices,
            num_rollout_workers=len(cluster.all_servers),
            max_staleness=rollout.config.max_staleness,
            **of_groups(batch, before, counters),
            counters=counters,
        )


def measure(costs: Costs, side: Side, num_steps: int) -> report.Metrics:
    """Means over the steps but the first eighth."""
    began_s = time.process_time()
    steps = simulate(costs, side, num_steps)
    window = steps[max(1, num_steps // 8) :]
    passed_s = sum(step.step_time_s for step in window)
    num_tokens = statistics.mean(step.num_rows * step.mean_sequence_length for step in window)
    num_training = costs.devices - round(costs.devices * costs.generating_share)
    num_servers = round(costs.devices * costs.generating_share) // costs.server_devices
    ideal_s = max(
        costs.training_s(round(num_tokens), num_training),
        costs.least_generation_s(num_tokens, num_servers),
    )
    s_per_step = passed_s / len(window)
    report.say(f"{side.admission}, bound {side.max_staleness}: {s_per_step:.0f} s a step")
    return {
        "s_per_step": s_per_step,
        "ideal_share": ideal_s / s_per_step,
        "wait_share": sum(step.wait_s for step in window) / passed_s,
        "token_staleness_mean": statistics.mean(step.token_staleness_mean for step in window),
        "group_staleness_max": max(step.group_staleness_max for step in window),
        "lead": statistics.mean(step.lead for step in window),
        "simulation_s": time.process_time() - began_s,
    }


def compare(costs: Costs, num_steps: int) -> dict[tuple[str | int, ...], report.Metrics]:
    """All sides; `sync_over` is how many times faster than the synchronous one they are."""
    sides = [Side(0), *map(Side, ETAS), Side(max(ETAS), AdmissionMode.just_in_time)]
    records: dict[tuple[str | int, ...], report.Metrics] = {}
    for side in sides:
        record = measure(costs, side, num_steps)
        sync_s = next(iter(records.values()), record)["s_per_step"]
        record["sync_over"] = sync_s / record["s_per_step"]
        records[side.admission.value, f"eta{side.max_staleness}"] = record
    return records


def sensitivity(costs: Costs, num_steps: int) -> dict[tuple[str | int, ...], report.Metrics]:
    """The same of just in time, with each cost 30 % smaller and larger."""
    records = {}
    for name in SENSITIVITY:
        for factor in (0.7, 1.3):
            changed = replace(costs, **{name: factor * asdict(costs)[name]})
            sync = measure(changed, Side(0), num_steps)
            ours = measure(changed, Side(max(ETAS), AdmissionMode.just_in_time), num_steps)
            record = {"sync_over": sync["s_per_step"] / ours["s_per_step"]}
            record |= {key: ours[key] for key in ("ideal_share", "token_staleness_mean")}
            records[name, f"x{factor}"] = record
    return records


def main() -> None:
    parser = report.make_parser(__doc__)
    parser.add_argument("--costs", type=Path, help="a YAML with numbers of `Costs`")
    parser.add_argument("changes", nargs="*", help="numbers of `Costs`, NAME=VALUE")
    arguments = parser.parse_args()
    settings = OmegaConf.structured(Costs)
    if arguments.costs is not None:
        settings = OmegaConf.merge(settings, OmegaConf.load(arguments.costs))
    settings = OmegaConf.merge(settings, OmegaConf.from_dotlist(arguments.changes))
    if arguments.quick:
        settings = OmegaConf.merge(settings, {"devices": 16, "prompts": 8, "answers": 2})
    logging.disable(logging.WARNING)  # that nothing ends for a minute
    costs = OmegaConf.to_object(settings)
    assert isinstance(costs, Costs)
    num_steps, few_steps = (8, 4) if arguments.quick else (100, 24)
    records = compare(costs, num_steps)
    report.print_records("Hundreds of devices", asdict(costs), ("admission", "eta"), records)
    metrics = report.flat(records)
    changed = sensitivity(costs, few_steps)
    report.print_records("Other costs", {"steps": few_steps}, ("cost", "factor"), changed)
    report.write(metrics | report.flat(changed), arguments.json)


if __name__ == "__main__":
    main()
