"""One prompt, one completion, one reward."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from areal_sc.config.schema import GenerationConfig
from areal_sc.errors import WorkflowError
from areal_sc.rewards.base import Reward, Score
from areal_sc.rewards.weighted import check_row, check_signatures, weighted_functions
from areal_sc.sources.pictures import IMAGES
from areal_sc.workflows.base import EpisodeEngine, GroupReward, Trajectory, Workflow
from areal_sc.workflows.text import OWN_ARGUMENTS, decode_completion, encode_chat, encode_text
from areal_sc.workflows.transcript import Transcript


class SingleTurnWorkflow(Workflow):
    """Samples one completion of the prompt and scores it.

    Args:
        reward: called with the whole row and the completion's text, without the stop token or
            string. Or several functions by name, each alone or with its weight: the reward is their
            weighted sum, and `reward/NAME` among the metrics is what each of them gave.
        generation: how to sample; None takes the run's `generation` section.
        use_chat_template: puts the prompt into the model's chat format; it may then also be a
            list of messages. If the last one is the assistant's, the answer goes on from there,
            and the reward sees what comes after it.
        chat_template_arguments: what the model's template reads beside the messages, by name, such
            as `{"enable_thinking": False}` or `{"tools": [...]}`.
        prompt_key: the row's key that holds the prompt.
        accuracy: which of several functions decides the metric `accuracy`; the first one, unless
            another one is named.
        group_reward: compares the answers to a prompt when all are there, see
            `Workflow.score_group`. With it the reward may be None.
    Raises: WorkflowError: the reward is none, `accuracy` is not the name of one of several, or
        `chat_template_arguments` would have no effect.
    """

    def __init__(
        self,
        reward: Reward | None,
        generation: GenerationConfig | None = None,
        use_chat_template: bool = False,
        prompt_key: str = "prompt",
        accuracy: str = "",
        chat_template_arguments: Mapping[str, Any] | None = None,
        group_reward: GroupReward | None = None,
    ) -> None:
        if reward is None and group_reward is None:
            raise WorkflowError("reward: expected one, or a group_reward in its place, got None")
        names = [] if reward is None else list(weighted_functions(reward))
        if accuracy and accuracy not in names:
            raise WorkflowError(
                f"accuracy: expected the name of one of several rewards ({', '.join(names)}), got "
                f"{accuracy!r}"
                if names
                else f"accuracy={accuracy!r} names one of several rewards, but there is one alone, "
                "which decides it"
            )
        arguments = dict(chat_template_arguments or {})
        if arguments and not use_chat_template:
            raise WorkflowError(
                "chat_template_arguments: use_chat_template=True is needed for them"
            )
        if own := OWN_ARGUMENTS & set(arguments):
            raise WorkflowError(
                f"chat_template_arguments: {', '.join(sorted(own))} follows from the messages"
            )
        self.chat_template_arguments = arguments
        self.reward = reward
        self.group_reward = group_reward
        self.generation = generation
        self.use_chat_template = use_chat_template
        self.prompt_key = prompt_key
        self.accuracy = accuracy or (names[0] if names else "")

    async def run_episode(self, prompt: dict[str, Any], engine: EpisodeEngine) -> Trajectory:
        """Its metrics are `accuracy`: 1 where the function that decides it gives 1 or more;
        `completion_tokens`; and `stopped`: 1 where the answer ended by itself. Without a reward of
        its own there is no `accuracy`.
        """
        transcript = Transcript()
        transcript.add_context(self._prompt_tokens(prompt, engine))
        completion = await engine.generate(transcript.input_ids, self.generation)
        transcript.add_completion(completion)
        text = decode_completion(engine.tokenizer, completion)
        reward, metrics = Score(0.0), dict[str, float]()
        if self.reward is not None:
            reward = await engine.score(self.reward, prompt, text)
            decisive = reward.parts[self.accuracy] if self.accuracy else reward
            metrics["accuracy"] = float(decisive >= 1.0)
        metrics["completion_tokens"] = float(len(completion.token_ids))
        metrics["stopped"] = float(completion.finish_reason == "stop")
        answer = text if self.scores_groups else ""
        return replace(transcript.trajectory(reward, metrics), answer=answer)

    def check(self) -> None:
        if self.reward is not None:
            check_signatures(self.reward)

    def check_row(self, row: Mapping[str, Any]) -> None:
        super().check_row(row)
        self._check_prompt(row)
        if self.reward is not None:
            check_row(self.reward, row)

    def _check_prompt(self, row: Mapping[str, Any]) -> None:
        if self.prompt_key not in row:
            raise WorkflowError(
                f"the dataset's row has no {self.prompt_key!r}, only {sorted(row)}; "
                "name the key with SingleTurnWorkflow(prompt_key=...)"
            )

    def _prompt_tokens(self, prompt: dict[str, Any], engine: EpisodeEngine) -> list[int]:
        self._check_prompt(prompt)
        content = prompt[self.prompt_key]
        if pictures := prompt.get(IMAGES):
            return engine.encode_pictures(
                pictures,
                content,
                use_chat_template=self.use_chat_template,
                chat_template_arguments=self.chat_template_arguments,
            )
        if self.use_chat_template:
            return encode_chat(engine.tokenizer, content, self.chat_template_arguments)
        if not isinstance(content, str):
            raise WorkflowError(
                f"the prompt is a {type(content).__name__}, expected a string; "
                "a list of messages needs use_chat_template=True"
            )
        return encode_text(engine.tokenizer, content)
