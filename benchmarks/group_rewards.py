"""What rewards of a whole group teach: an order of the answers, and the majority as the label.

    python benchmarks/group_rewards.py [--quick] [--json FILE] [--seeds 0 1 2]

Sorting letters, from one warm start a seed, which sorts about one prompt in seven. No answer has a
reward of its own but in the steps that are named; values are accuracies on 256 held-out prompts.

right: each answer's own reward, 1 or 0, for --steps; what the others are held against.
ranking: a group's answers are put in the order of how many first letters are right; the best gets
    1, the worst 0.
majority: --label-steps by their own rewards, until most answers of some groups agree; from there
    on what most of them say is right, where at least half say it. Groups of 32, half the rate.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
from typing import Any, Final

import report
from letter_sort_job import HELD_OUT_SEED, LetterSortJob, Workers, letter_sort_job, training_steps
from letter_sort_task import LetterSortPrompts, letter_sort_reward

from areal_sc import SingleTurnWorkflow, Trajectory
from areal_sc.rewards.majority import MajorityLabel
from areal_sc.sources.reference import Referable

MODEL: Final = dict(hidden_size=96, num_layers=3, ffn_size=256)
LENGTHS: Final = dict(median_letters=7.0, sigma_letters=0.6)
KINDS: Final[dict[str, dict[str, object]]] = {
    "right": {},
    "ranking": {},
    "majority": {
        "rollout__group_size": 32,
        "rollout__train_batch_groups": 8,
        "actor__ppo__num_minibatches": 2,
        "actor__optimizer__lr": 2e-4,
    },
}
"""Settings of each: a label wants many answers, and as some are wrong, a lower rate."""


class Letters(Referable):
    """A reward that knows no right answer: it says what an answer says."""

    def __call__(self, prompt: dict[str, Any], completion: str) -> float:
        return 0.0

    def vote(self, completion: str) -> str | None:
        return completion or None


async def in_order(prompt: dict[str, Any], trajectories: Sequence[Trajectory]) -> list[float]:
    """1 for the answers with the most first letters that are right, 0 for those with the fewest."""

    def num_right(answer: str) -> int:
        pairs = zip(answer, prompt["answer"], strict=False)
        return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))

    found = [num_right(it.answer) for it in trajectories]
    places = sorted(set(found))
    return [places.index(it) / max(1, len(places) - 1) for it in found]


def measured(workers: Workers, seed: int) -> float:
    """Accuracy on held-out prompts, by the newest weights."""
    workers.rollout.wait_for_weights()
    held_out = LetterSortPrompts(seed + HELD_OUT_SEED, **LENGTHS)
    workflow = SingleTurnWorkflow(letter_sort_reward)
    return workers.rollout.evaluate(held_out, workflow, num_prompts=256).reward


def play(
    job: LetterSortJob, kind: str, seed: int, num_steps: int, num_label_steps: int
) -> report.Metrics:
    """One run."""
    own = SingleTurnWorkflow(letter_sort_reward)
    groups = {
        "right": own,
        "ranking": SingleTurnWorkflow(None, group_reward=in_order),
        "majority": SingleTurnWorkflow(None, group_reward=MajorityLabel(Letters(), min_share=0.5)),
    }
    before = num_label_steps if kind == "majority" else 0
    total_steps = num_steps + before
    settings = {"actor__optimizer__schedule": "constant", **KINDS[kind]}
    config = job.config(seed=seed, total_steps=total_steps, **settings)
    prompts = LetterSortPrompts(seed, **LENGTHS)
    with job.workers(config) as workers:
        for _ in training_steps(workers, before, prompts, own):
            pass
        began = measured(workers, seed)
        for _ in training_steps(workers, num_steps, prompts, groups[kind]):
            pass
        return {"accuracy_before": began, "accuracy_after": measured(workers, seed)}


def main() -> None:
    parser = report.make_parser(__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--only", nargs="+", choices=KINDS, default=list(KINDS), metavar="KIND")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument(
        "--label-steps", type=int, default=25, help="before a majority is the label"
    )
    parser.add_argument("--warm-steps", type=int, default=600)
    arguments = report.parse(parser, seeds=[0], steps=2, label_steps=1, warm_steps=20)
    records: dict[tuple[str | int, ...], report.Metrics] = {}
    with letter_sort_job(arguments.warm_steps) as job:
        for seed in arguments.seeds:
            job.warm_start(seed, MODEL, LENGTHS)
            for kind in arguments.only:
                found = play(job, kind, seed, arguments.steps, arguments.label_steps)
                records[kind, seed] = found
                report.say(f"{kind} seed={seed} accuracy_after={found['accuracy_after']:.3f}")
                report.write(report.flat(records), arguments.json)
    settings = {"steps": arguments.steps, "label_steps": arguments.label_steps}
    report.print_records("Rewards of groups", settings, ("kind", "seed"), records)


if __name__ == "__main__":
    main()
