"""The protocol between a user's episode and the worker that runs it. No torch.

Who writes an episode also gets here what a reward and a dataset are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol

from areal_sc.config.schema import GenerationConfig
from areal_sc.engines.base import Completion
from areal_sc.metadata import TensorMetadata
from areal_sc.rewards.base import Reward, Score
from areal_sc.rewards.base import RewardFunction as RewardFunction
from areal_sc.rewards.base import declare_reward as declare_reward
from areal_sc.sources.prompts import Prompts as Prompts
from areal_sc.sources.reference import Referable
from areal_sc.system.sandbox.program import Ended, Limits, Program

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass
class Trajectory:
    """One row of an episode, token by token; T is at most `max_context_tokens`.

    Attributes:
        input_ids: [T] prompt and completion tokens, over all turns.
        loss_mask: [T] True on tokens that the policy sampled and that are trained.
        behavior_logprobs: [T] nats; 0 where `loss_mask` is False.
        versions: [T] policy version that sampled the token; -1 where `loss_mask` is False.
        temperatures: [T] that the token was sampled at, and is trained at; 1 where `loss_mask` is
            False. 0 (greedy) is for evaluations: a row with greedy tokens is not trained.
        reward: scalar, finite. That of a `Score` adds its parts to the metrics.
        metrics: numbers to be averaged and shown, e.g. {"accuracy": 1.0}.
        fields: values of each of `Workflow.fields`, by its name: [T, *shape], or [*shape] of one
            that is `per_row`.
    Raises: ValueError: a metric has the name of a part of the reward, and another value.
    """

    input_ids: Sequence[int]
    loss_mask: Sequence[bool]
    behavior_logprobs: Sequence[float]
    versions: Sequence[int]
    temperatures: Sequence[float]
    reward: float
    metrics: dict[str, float] = field(default_factory=dict)
    fields: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        parts = self.reward.metrics if isinstance(self.reward, Score) else {}
        for name, value in parts.items():
            if self.metrics.get(name, value) != value:
                raise ValueError(
                    f"metric {name!r} is {self.metrics[name]}, and the reward of that name gave "
                    f"{value}: give one of them another name"
                )
        self.metrics = {**self.metrics, **parts}


class EpisodeEngine(Protocol):
    """What an episode can do; given to it by the worker."""

    tokenizer: PreTrainedTokenizerBase
    max_context_tokens: int

    async def generate(
        self, input_ids: Sequence[int], sampling: GenerationConfig | None = None
    ) -> Completion:
        """Samples one completion; None samples as the run's `generation` section says.

        During an evaluation the worker replaces the temperature by that of the evaluation.
        Raises: WorkflowError: the prompt leaves no room in the context.
        """
        ...

    async def score(self, reward: Reward, prompt: Mapping[str, Any], completion: str) -> Score:
        """Runs the reward: an async one on the event loop, a sync one in a killable process.

        Several run beside each other, and give the weighted sum of their numbers.

        Raises: RewardError: one raised, returned no finite number, or passed its time limit.
            WorkflowError: it is no `Reward`.
        """
        ...

    async def run_code(
        self, code: str | Program, stdin: str = "", limits: Limits | None = None
    ) -> Ended:
        """Runs Python text, or a program of any language, in the worker's sandbox.

        Args: as of `RunCode`.
        Raises: SandboxError: it could not be run in several tries.
        """
        ...


class Workflow(Referable):
    """Base class of episodes. Subclasses are recorded by import path and constructor arguments.

    Attributes:
        fields: what its trajectories have beyond `TRAJECTORY_FIELDS`, by name: a loss, an advantage
            and a token function read it by that name. `rollout.field_bytes` gives it room.
    """

    fields: Mapping[str, TensorMetadata] = MappingProxyType({})

    async def run_episode(
        self, prompt: dict[str, Any], engine: EpisodeEngine
    ) -> Trajectory | Sequence[Trajectory] | None:
        """Plays one episode; called `group_size` times a prompt, concurrently.

        Returns: the trajectory; or a list of them, as an agent's calls give, each a row with a
            reward of its own; or None to reject the episode. The rows are trained all or none: one
            that cannot be used rejects the episode, as do more than `rollout.max_episode_tokens`
            tokens together.
        """
        raise NotImplementedError

    def check(self) -> None:
        """What can be said of it without a row; called in the script, before a run starts.

        Raises: WorkflowError: no episode can be played.
        """

    def check_row(self, row: Mapping[str, Any]) -> None:
        """What can be said of a row without a model; called in the script, before a run starts.

        Raises: WorkflowError: no episode can begin with it.
        """
