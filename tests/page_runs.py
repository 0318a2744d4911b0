"""Run folders that a page shows, made at once: rows of text that a tokenizer of bytes reads."""

from __future__ import annotations

import random
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from ledger_history import History, a_run
from msgspec import structs
from recorded_groups import add_trained, played, recorder_of
from sample_rows import sample
from tokenizers import Tokenizer, decoders, models

from areal_sc.records.metrics import StepMetrics
from areal_sc.records.metrics_log import MetricsLog
from areal_sc.records.recorded_rows import RecordedRejection
from areal_sc.run.run_folder import RunFolder
from areal_sc.system.disk import Disk
from areal_sc.system.json_lines import JsonLines
from areal_sc.workflows.trajectory import Trajectory

EVIL = "<script>document.title='evil'</script><img src=x onerror='document.title=1'>\u202e\x1b[2J"
SYSTEM = "<|im_start|>user\nHow many letters has strawberry? " + EVIL + "<|im_end|>\n"
CALL = '<tool_call>{"name": "python", "arguments": {"code": "len(\'strawberry\')"}}</tool_call>'
RESULT = "<tool_response>10</tool_response>\n"

CONFIG = """\
actor:
  dtype: float32
  ppo:
    loss: policy_gradient
    clip_center: proximal
    behavior_weight: token
    behavior_weight_bound: mask
    behavior_weight_floor: 0.0
    behavior_weight_cap: 1.5
    max_second_moment: .inf
    max_behavior_kl: .inf
"""

Part = tuple[str | bytes, int]
"""A text, and the version that sampled it; -1: it was given."""


def tokenizer() -> Tokenizer:
    """A token a byte."""
    alphabet = {f"<0x{number:02X}>": number for number in range(256)}
    made = Tokenizer(models.WordLevel(alphabet))
    made.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    return made


def row(*parts: Part, reward: float = 0.5) -> Trajectory:
    ids, mask, versions = list[int](), list[bool](), list[int]()
    for text, version in parts:
        content = text.encode() if isinstance(text, str) else text
        ids += content
        mask += [version >= 0] * len(content)
        versions += [version] * len(content)
    logprobs = [-0.25 if it else 0.0 for it in mask]
    return Trajectory(ids, mask, logprobs, versions, [1.0] * len(ids), reward, {"accuracy": reward})


async def make_run(folder: RunFolder, *, num_groups: int = 3) -> None:
    """A run with measured steps, an event, a sample, a journal, spans, and rows of an agent.

    Of a group the first answer has two rows that part after the tool's answer; the second one is
    of one turn. Group 1 has an answer that was rejected.
    """
    with folder:
        folder.open(config_text=CONFIG)
    with closing(MetricsLog(folder.metrics_path, clock=lambda: 1003.0)) as log:
        for step in (1, 2):
            log.on_step(measured(step))
        log.event("workers_restarted", workers=["rollout/0"], cause=EVIL)
    with closing(JsonLines(folder.samples_path)) as lines:
        lines.append(sample(1, group=0, num_tokens=40, reward=0.5, answer=EVIL))
    history = History(Disk(), folder.ledger)
    a_run(history)
    await history.journal.close()
    (folder.path / "model").mkdir()
    tokenizer().save(str(folder.path / "model" / "tokenizer.json"))
    recorder = recorder_of(folder.path)
    for number in range(num_groups):
        add_group(recorder, number)
    recorder.add_span("episode", 1000.0, 2.0, lane=0, about="0.0.0")
    recorder.add_span("generation", 1000.0, 1.5, lane=0, about="0.0.0", versions=(0, 1))
    recorder.add_span("the reward " + EVIL, 1001.5, 0.5, lane=0, about="0.0.0")
    recorder.add_span("updating weights", 1000.5, 0.25, versions=(1, 1))
    recorder.close()
    its = groups([0])[0].episodes  # type: ignore[attr-defined]
    lengths = {(e, n): sum(row.loss_mask) for e, rows in its.items() for n, row in enumerate(rows)}
    add_trained(folder.path, 0, lengths)


def add_group(recorder: object, number: int) -> None:
    for group in groups([number]):
        recorder.add_group(group)  # type: ignore[attr-defined]


def groups(numbers: Sequence[int]) -> list[object]:
    made = []
    for number in numbers:
        rng = random.Random(number)
        begun: list[Part] = [(SYSTEM, -1), (f"I count. {CALL}", 3), (RESULT, -1)]
        agent = [
            row(*begun, (f"It has ten letters, {number}.", 4), reward=1.0),
            row(*begun, ("Wait: is that right?", 4), ("Yes.", -1), (" Ten.", 5), reward=1.0),
        ]
        plain = row((SYSTEM, -1), (f"Nine of {number}, Straße €.", rng.choice([3, 4])), reward=0.0)
        rejected = (RecordedRejection("reward_error", EVIL, 1),) if number == 1 else ()
        its = played(number, agent, [plain], rejected=rejected)
        group = structs.replace(its.group, began=1000.5 + number)
        made.append(type(its)(group, its.episodes))
    return made


def measured(step: int) -> StepMetrics:
    return StepMetrics(
        step=step,
        reward=0.5,
        group_staleness_mean=0.0,
        group_staleness_max=0,
        token_staleness_mean=0.0,
        token_staleness_max=0,
        num_rows=8,
        num_generated_tokens=100,
        num_trained_tokens=100,
        step_time_s=2.0,
        wait_s=1.0,
        train_s=0.5,
        sync_s=0.25,
        mean_sequence_length=20.0,
        num_train_workers=1,
        train={},
    )


def damage(records: Path) -> None:
    """A bit of each file is flipped, and the end of every second one is torn off."""
    for number, path in enumerate(sorted(records.iterdir())):
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content[: -5 if number % 2 else None])
