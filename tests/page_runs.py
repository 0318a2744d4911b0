"""Run folders that a page shows, made at once: rows of text that a tokenizer of bytes reads."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from contextlib import closing
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import chat_templates as templates
from builders import make_step
from ledger_history import History, a_run
from msgspec import structs
from recorded_groups import add_span, add_trained, played, recorder_of
from tokenizers import AddedToken, Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from areal_sc.agents.rows import AgentRows, rows_of
from areal_sc.config.schema import GenerationConfig
from areal_sc.engines.base import Completion
from areal_sc.records.metrics import StepMetrics
from areal_sc.records.metrics_log import MetricsLog
from areal_sc.records.recorded_rows import RecordedRejection
from areal_sc.run.run_folder import RunFolder
from areal_sc.system.disk import Disk
from areal_sc.workflows.chat_format import Message
from areal_sc.workflows.chat_turn import NextTurn, PastTurns, TurnNode
from areal_sc.workflows.trajectory import Trajectory

EVIL = "<script>document.title='evil'</script><img src=x onerror='document.title=1'>\u202e\x1b[2J"
QUESTION = "How many letters has strawberry? " + EVIL
SYSTEM = f"<|im_start|>user\n{QUESTION}<|im_end|>\n"
CODE = "len('strawberry')  # </pre><script>document.title='evil'</script>"
PYTHON = {"type": "function", "function": {"name": "python", "parameters": {}}}
END = "<|im_end|>"

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
    """A token a byte, and one that ends an answer."""
    alphabet = {f"<0x{number:02X}>": number for number in range(256)}
    made = Tokenizer(models.BPE(vocab=alphabet, merges=[], byte_fallback=True))
    made.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    made.add_tokens([AddedToken(END, special=True)])
    return made


@cache
def chat_engine() -> Any:
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer(), eos_token=END)
    made.chat_template = templates.QWEN
    end = made.convert_tokens_to_ids(END)
    return SimpleNamespace(tokenizer=made, end_token_ids=(end,))


def answered(
    after: TurnNode | None, messages: Sequence[Message], said: str, version: int
) -> TurnNode:
    """A call of the model, as a session of an agent has it."""
    engine = chat_engine()
    settings = {"history": PastTurns.template, "arguments": {}, "model": "counter"}
    turn = NextTurn(engine, after, messages, [PYTHON], GenerationConfig(), **settings)
    ids = engine.tokenizer.encode(said + END)
    return turn.node(Completion(ids, [-0.25] * len(ids), [version] * len(ids), "stop", 1.0), 0)


def agent_rows(number: int) -> list[Trajectory]:
    """An agent that calls a tool; with its result two conversations go on."""
    begun: list[Message] = [{"role": "user", "content": QUESTION}]
    call = json.dumps({"name": "python", "arguments": {"code": CODE}})
    first = answered(None, begun, f"I count.\n<tool_call>\n{call}\n</tool_call>", 3)
    begun += [first.turn.message, first.turn.tool_calls[0].answer(f"10 {EVIL}")]
    counted = answered(first, begun, f"It has ten letters, {number}.", 4)
    doubted = answered(first, begun, "Wait: is that right?", 4)
    more = [*begun, doubted.turn.message, {"role": "user", "content": "Yes."}]
    nodes = [first, counted, doubted, answered(doubted, more, "Ten.", 5)]
    return rows_of(nodes, dict.fromkeys(nodes, 1.0), AgentRows.merge, {"accuracy": 1.0})


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
    """A run with measured steps, an event, a journal, spans, and rows of an agent.

    Of a group the first answer has two rows that part after the tool's answer; the second one is
    of one turn. Group 1 has an answer that was rejected.
    """
    with folder:
        folder.open(config_text=CONFIG)
    with closing(MetricsLog(folder.metrics_path, clock=lambda: 1003.0)) as log:
        for step in (1, 2):
            log.on_step(measured(step))
        log.event("workers_restarted", workers=["rollout/0"], cause=EVIL)
    history = History(Disk(), folder.ledger)
    a_run(history)
    await history.journal.close()
    (folder.path / "model").mkdir()
    tokenizer().save(str(folder.path / "model" / "tokenizer.json"))
    recorder = recorder_of(folder.path)
    for number in range(num_groups):
        add_group(recorder, number)
    add_span(recorder, "episode", 1000.0, 2.0, lane=0, about="0.0.0")
    add_span(recorder, "generation", 1000.0, 1.5, lane=0, about="0.0.0", versions=(0, 1))
    add_span(recorder, "the reward " + EVIL, 1001.5, 0.5, lane=0, about="0.0.0")
    add_span(recorder, "updating weights", 1000.5, 0.25, versions=(1, 1))
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
        plain = row((SYSTEM, -1), (f"Nine of {number}, Straße €.", rng.choice([3, 4])), reward=0.0)
        rejected = (RecordedRejection("reward_error", EVIL, 1),) if number == 1 else ()
        its = played(number, agent_rows(number), [plain], rejected=rejected)
        group = structs.replace(its.group, began=1000.5 + number)
        made.append(type(its)(group, its.episodes))
    return made


def measured(step: int) -> StepMetrics:
    times = {"step_time_s": 2.0, "wait_s": 1.0, "train_s": 0.5, "sync_s": 0.25}
    return make_step(step, mean_sequence_length=20.0, num_train_workers=1, train={}, **times)


def damage(records: Path) -> None:
    """A bit of each file is flipped, and the end of every second one is torn off."""
    for number, path in enumerate(sorted(records.iterdir())):
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content[: -5 if number % 2 else None])
