"""The letter-sorting job whose workers keep books of their own; a part of `chaos.py`.

    python chaos_run.py BOOKS --config configs/letter_sort.yaml ...      the user's script
    python chaos_run.py <run id> <SchedulerConfig as JSON>               an agent, started by it

The books are lines of JSON, appended by whoever did something when it was done, one file a process:

    begun-<pid>     a rollout worker has begun a group
    sealed-<pid>    a rollout worker has all rows of a group: each with its group, attempt, episode,
                    hash, and reward
    trained-<pid>   a rank has trained a row: the same, the policy version it began from, and in
                    which update of the step; `began` is when that was asked for
    rewards-<pid>   a reward process has judged an answer
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "examples"))

BOOKS: Final = "AREAL_SC_CHAOS_BOOKS"
"""Environment variable: the folder of the books."""


def note(book: str, records: list[dict[str, Any]]) -> None:
    """Appends lines to this process's book, all at once."""
    now = time.time()
    lines = [json.dumps({"time": now, "pid": os.getpid(), **record}) + "\n" for record in records]
    path = Path(os.environ[BOOKS]) / f"{book}-{os.getpid()}.jsonl"
    with path.open("a") as file:
        file.write("".join(lines))


def row_hash(input_ids: Any, logprobs: Any) -> str:
    """Of the tokens and the log-probabilities that they were sampled with: [T] each."""
    digest = hashlib.sha256(bytes(memoryview(input_ids.contiguous().numpy())))
    digest.update(bytes(memoryview(logprobs.contiguous().numpy())))
    return digest.hexdigest()[:16]


def booked_reward(prompt: Mapping[str, Any], completion: str) -> float:
    from letter_sort_task import letter_sort_reward

    value = letter_sort_reward(prompt, completion)
    note("rewards", [{"prompt": prompt["prompt"], "completion": completion, "value": value}])
    return value


def run_worker(spec_dict: dict[str, Any]) -> int:
    """A worker that keeps books; see `areal_sc.workers.entry`."""
    import torch

    from areal_sc.workers import entry, rank_updates
    from areal_sc.workers.rank import Rank
    from areal_sc.workers.rollout_worker import RolloutWorker

    play_group, close_group = RolloutWorker._play_group, RolloutWorker._close_group
    update = rank_updates.update

    async def booked_group(self: RolloutWorker, run: Any, group: Any) -> Any:
        note("begun", [{"group": group.group_id, "attempt": group.attempt}])
        return await play_group(self, run, group)

    def booked_close(
        self: RolloutWorker, run: Any, group: Any, row: Any, ended: Any, began: float
    ) -> Any:
        reply = close_group(self, run, group, row, ended, began)
        outcomes = [it.outcome for _, it in sorted(ended.items())]
        played = [row for rows in outcomes if isinstance(rows, list) for row in rows]
        records = []
        for row, given in zip(reply.batch.rows if reply.batch else (), played, strict=True):
            ids = torch.tensor(given.input_ids, dtype=torch.int32)
            logprobs = torch.tensor(given.behavior_logprobs, dtype=torch.float32)
            text = "".join(self.engine.tokenizer.convert_ids_to_tokens(ids.tolist()))
            records.append({**_record(row), "hash": row_hash(ids, logprobs), "text": text})
        note("sealed", records)
        return reply

    async def booked_update(rank: Rank, args: Any) -> dict[str, float]:
        if args.operation in rank.operations._noted:  # a repeat trains nothing
            return await update(rank, args)
        began = time.time()
        pulled = [await rank.plane.puller.pull(batch) for batch in args.batches]
        records = []
        for batch, rows in zip(args.batches, pulled, strict=True):
            start = 0
            for row, length in zip(batch.rows, rows.lengths, strict=True):
                fields = {name: it[start : start + length] for name, it in rows.fields.items()}
                ids, logprobs = fields["input_ids"], fields["behavior_logprobs"]
                start += length
                turns = {"turns": fields["turn"].unique().tolist()} if "turn" in fields else {}
                records.append(
                    {
                        **_record(row),
                        **turns,
                        "hash": row_hash(ids, logprobs),
                        "version": args.operation.version,
                        "lineage": args.operation.lineage,
                        "update": int(args.operation.which),
                        "rank": rank.number,
                        "began": began,
                    }
                )
        del pulled
        metrics = await update(rank, args)
        note("trained", records)
        return metrics

    RolloutWorker._play_group = booked_group  # type: ignore[method-assign]
    RolloutWorker._close_group = booked_close  # type: ignore[method-assign]
    rank_updates.update = booked_update
    return entry.run_worker(spec_dict)


def _record(row: Any) -> dict[str, Any]:
    return {
        "group": row.group_id,
        "attempt": row.attempt,
        "episode": row.episode,
        "length": row.sequence_length,
        "reward": row.reward,
    }


def start_workers_by(file: str) -> None:
    """Agents of the runs that this process starts are this program, which keeps books."""
    from areal_sc.config.schema import SchedulerConfig
    from areal_sc.run.run_folder import RunFolder
    from areal_sc.schedulers.local import LocalScheduler
    from areal_sc.trainer import run

    def booked_scheduler(config: SchedulerConfig, folder: RunFolder) -> LocalScheduler:
        command = (sys.executable, str(Path(file).resolve()))
        return LocalScheduler(config, folder, command=command)

    run.make_scheduler = booked_scheduler  # type: ignore[assignment]


def main(argv: list[str]) -> None:
    from letter_sort import Config, warm_start
    from letter_sort_task import LetterSortPrompts, letter_sort_reward

    from areal_sc import PPOTrainer, SingleTurnWorkflow, load_config
    from areal_sc.weights.tree import WeightTree

    start_workers_by(__file__)
    config = load_config(argv, Config, makes_model=True)
    if config.weight_update.has_changes:  # workers are taken for those of another node
        WeightTree._is_far = lambda *_: True  # type: ignore[method-assign]
    with PPOTrainer(config) as trainer:
        warm_start(config, trainer)
        trainer.fit(
            SingleTurnWorkflow(booked_reward),
            LetterSortPrompts(config.seed),
            evaluation_prompts=LetterSortPrompts(config.seed + 1_000_003),
            evaluation_workflow=SingleTurnWorkflow(letter_sort_reward),
        )


if __name__ == "__main__":
    if BOOKS in os.environ and not sys.argv[1].startswith("--"):
        from areal_sc.nodes import agent

        sys.exit(agent.main(target="chaos_run:run_worker"))
    from areal_sc import run_script

    sys.exit(run_script(main))
