"""Episodes whose model asks between one pair of tags, reads a result, and answers between another.

Plain text for models whose chat template knows no tools; `search.py` and `mcp_tool.py` derive from
it. `generation.stop` has both end tags, so that a turn ends where something is to be done.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

from areal_sc import Trajectory, Workflow
from areal_sc.workflows.base import EpisodeEngine
from areal_sc.workflows.text import decode_completion, encode_text
from areal_sc.workflows.transcript import Transcript


class TaggedTurns(Workflow):
    """Up to `max_uses` uses of a tool, and the answer; 1 where it is the prompt's, else 0.

    What the model has read is never trained, only what it wrote.
    """

    ask_tag = "tool"
    result_tag = "result"

    def __init__(self, max_uses: int = 2) -> None:
        self.max_uses = max_uses

    @abstractmethod
    async def text_of(self, question: str) -> str:
        """What the model gets: how to use the tool, an example, the question."""

    @abstractmethod
    async def use(self, asked: str) -> str:
        """What the tool says to what the model wrote between the tags."""

    async def run_episode(
        self, prompt: dict[str, Any], engine: EpisodeEngine
    ) -> list[Trajectory] | None:
        transcript, num_uses, answer = Transcript(), 0, ""
        first = await self.text_of(prompt["prompt"])
        transcript.add_context(encode_text(engine.tokenizer, first))
        while True:
            completion = await engine.generate(transcript.input_ids)
            transcript.add_completion(completion)
            written = decode_completion(engine.tokenizer, completion)
            tag, _, text = written.strip().partition(">")
            if completion.finish_reason != "stop":
                break
            if tag == "<answer":
                answer = text.strip()
                break
            if tag != f"<{self.ask_tag}" or num_uses == self.max_uses:
                break  # nothing is paid for another form
            num_uses += 1
            result = f"\n<{self.result_tag}>{await self.use(text)}</{self.result_tag}>\n"
            transcript.add_context(encode_text(engine.tokenizer, result, begins=False))
        reward = float(answer.lower() == prompt["answer"].lower())
        metrics = {"accuracy": reward, "uses": num_uses, "answered": float(bool(answer))}
        return [transcript.trajectory(reward, metrics)]
