"""The protocol between a user's episode and the worker that runs it. No torch.

Who writes an episode also gets here what a reward and a dataset are.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Protocol

from areal_sc.config.schema import GenerationConfig, RolloutConfig
from areal_sc.errors import WorkflowError
from areal_sc.rewards.base import RUN_CODE, Reward, Score, is_async, may_run_code, name_of
from areal_sc.rewards.base import RewardFunction as RewardFunction
from areal_sc.rewards.base import declare_reward as declare_reward
from areal_sc.sources.prompts import Prompts as Prompts
from areal_sc.sources.reference import Referable
from areal_sc.system.sandbox.program import Ended, Limits, Program
from areal_sc.token_fields import TensorMetadata
from areal_sc.workflows.chat import ChatTurn, Conversation, OnText
from areal_sc.workflows.chat_turn import TokenEngine
from areal_sc.workflows.trajectory import Trajectory as Trajectory


class AgentSession(Protocol):
    """An address at which an agent finds the model, as if it were OpenAI's.

    Attributes:
        base_url: for the clients of OpenAI; those of Anthropic want it without `/v1`.
        api_key: of this session alone.
    """

    base_url: str
    api_key: str

    def trajectories(
        self,
        reward: float | Mapping[str, float],
        *,
        discount: float = 1.0,
        metrics: Mapping[str, float] | None = None,
    ) -> list[Trajectory]:
        """The rows of all calls whose answers were delivered: each sampled token is trained once.

        Args:
            reward: of the episode, which its last call gets. Or by the name of the model in a call,
                for agents of several roles: the last call of each. Or by the id of an answer.
            discount: of the reward, for each call before that.
            metrics: of each row, beside `agent/calls` and what else the session has counted.
        Raises: WorkflowError: a reward is of no call.
        """


@dataclass(frozen=True)
class AgentReturn:
    """How an agent ended.

    Attributes:
        reward: a number, or several by name; `AgentSession.trajectories` takes it.
        output: what it wrote to standard output and error; of much, the end.
    """

    reward: float | dict[str, float]
    output: str


class EpisodeEngine(TokenEngine, Protocol):
    """What an episode can do; given to it by the worker.

    Attributes:
        is_evaluation: the episode is of an evaluation, and is not trained.
    """

    is_evaluation: bool

    async def chat(
        self,
        conversation: Conversation,
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        stop: str | Sequence[str] | None = None,
        sampling: GenerationConfig | None = None,
        on_text: OnText | None = None,
    ) -> ChatTurn:
        """Samples the next answer of a conversation, and adds it there.

        Args:
            tools: what the model may call, as `{"type": "function", "function": {...}}`.
            stop: strings that end the answer, in place of `generation.stop`.
            sampling: None samples as the run's `generation` section says.
            on_text: called with pieces of the message's content while it is sampled; joined, they
                are its beginning. What may still become a call, reasoning or a stop string is held
                back. What it raises ends the call, and is raised here.
        Raises: WorkflowError: the model has no chat template, or it refuses the messages; or the
            last one is the assistant's. PromptTooLong: the first prompt leaves no room.
        """

    def encode_pictures(
        self,
        pictures: Sequence[bytes],
        prompt: Any,
        *,
        use_chat_template: bool = True,
        chat_template_arguments: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Tokens of a prompt with pictures, for `generate`, which then gets the pictures, too.

        Args:
            pictures: `prompt["images"]` of the row that the episode is of: others cannot be given.
            prompt: a list of messages; or a text, which without the chat template has a marker for
                each picture, `<image>` or the model's own.
        Raises: WorkflowError: there are other pictures than markers, or one is damaged. NeverWorks:
            the model reads no pictures.
        """

    def open_session(
        self,
        *,
        rows: str = "merge",
        history: str = "template",
        max_turns: int = 0,
        chat_template_arguments: Mapping[str, Any] | None = None,
    ) -> AbstractAsyncContextManager[AgentSession]:
        """An address for an agent that runs on this machine, until the block ends.

        Its calls are sampled as the run's `generation` section says; an agent may only shorten
        them.

        Args:
            rows: `merge`: each way from the first call of a conversation to its last is a row;
                `per_call`: each call; `longest`: one row, and what is not in it is not trained.
            history, chat_template_arguments: see `Conversation`.
            max_turns: most calls; 0: any number.
        Raises: WorkflowError: a setting is none of those; or kept answers are rescored.
        """

    async def run_agent(
        self, agent: Any, row: Mapping[str, Any], session: AgentSession, *, is_alone: bool = False
    ) -> AgentReturn:
        """Runs an agent in a process that can be killed, until it returns.

        Args:
            agent: see `AgentWorkflow`.
            is_alone: no other episode is in its process.
        Raises: AgentError: it raised, returned no finite number, took longer than
            `agents.episode_timeout_s`, or its process ended. WorkflowError: the row cannot be given
            to it.
        """

    async def await_agent(
        self, row: Mapping[str, Any], session: AgentSession
    ) -> float | Mapping[str, float]:
        """Offers the session to agents outside, at the run's address, until one has rewarded it.

        The workflow's `waits_outside` is True.

        Args:
            row: what the agent is told with the session; JSON holds it.
        Returns: the reward, for `AgentSession.trajectories`.
        Raises: AgentError: the agent has rejected the episode, or came to `agents.idle_timeout_s`
            or `agents.episode_timeout_s`. WorkflowError: the row is no JSON, or the episode is of
            an evaluation.
        """

    async def score(self, reward: Reward, prompt: Mapping[str, Any], completion: str) -> Score:
        """Runs the reward: an async one on the event loop, a sync one in a killable process.

        Several run beside each other, and give the weighted sum of their numbers.

        Raises: RewardError: one raised, returned no finite number, or passed its time limit.
            WorkflowError: it is no `Reward`.
        """

    async def run_code(
        self, code: str | Program, stdin: str = "", limits: Limits | None = None
    ) -> Ended:
        """Runs Python text, or a program of any language, in the worker's sandbox.

        Args: those of `RunCode`.
        Raises: SandboxError: it could not be run in several tries.
        """


GroupReward = Callable[[dict[str, Any], Sequence[Trajectory]], Awaitable[Sequence[float]]]
"""An `async` function of a prompt and its answers, as `Workflow.score_group` says."""


class Workflow(Referable):
    """Base class of episodes. Subclasses are recorded by import path and constructor arguments.

    Attributes:
        group_reward: gives the episodes of a prompt their rewards together; None: each has its own.
        fields: what its trajectories have beyond `TRAJECTORY_FIELDS`, by name: a loss, an advantage
            and a token function read it by that name.
        waits_outside: its episodes wait for agents outside, as long as it takes. So
            `rollout.group_timeout_s` does not end them, and the run has an address for such agents.
        pictures_of_rows: each row may have pictures of its own, as those of agents' messages; else
            all rows of a group have those of its row of data, which are stored once.
    """

    fields: Mapping[str, TensorMetadata] = MappingProxyType({})
    waits_outside: bool = False
    pictures_of_rows: bool = False
    group_reward: GroupReward | None = None

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

    async def score_group(
        self, prompt: dict[str, Any], trajectories: Sequence[Trajectory]
    ) -> Sequence[float] | None:
        """Rewards of the episodes of one prompt, when all have ended; on the event loop.

        What it raises, or gives that is no list of finite numbers, rejects all of them. So does
        taking longer than `rollout.reward_timeout_s`.

        Args:
            trajectories: the last row of each episode that was not rejected, in their order. Its
                `reward` is what the episode gave, its `answer` the text that the policy wrote last.
                Of an evaluation it is one alone.
        Returns: the reward of each, which takes the place of the one before: `it.reward + x` adds
            to it. What the last row's reward gains each row and each return of the episode gains. A
            `Score` may say which part of it is shaping, and its parts. None: rewards stay. The
            parts that a reward had before are only measured, unless the `Score` names their weights
            (`it.weights`). What is added to `it.reward`, or taken from it, leaves its shaping.
        """
        return await self.group_reward(prompt, trajectories) if self.group_reward else None

    def group_voter(self, prompt: Mapping[str, Any]) -> RewardFunction | None:
        """The reward whose `vote` is to tell what the answers of a group say, before it is scored.

        It does so in a killable process, for each answer that is not alone and has no vote. None:
        nobody asks.
        """
        voter: RewardFunction | None = getattr(self.group_reward, "voter", None)
        return voter

    @property
    def scores_groups(self) -> bool:
        """Whether `score_group` is to be called."""
        is_own = type(self).score_group is not Workflow.score_group
        return is_own or self.group_reward is not None

    def runs_code(self) -> bool:
        """Whether its episodes may run code of a model: then a run first tries the sandbox.

        As far as can be seen: a method names `run_code`, or an attribute is a reward that asks for
        it. Where a tool elsewhere does, override this.
        """
        methods = (it for kind in type(self).__mro__ for it in vars(kind).values())
        codes = (code for it in methods if (code := getattr(it, "__code__", None)))
        return any(RUN_CODE in code.co_names for code in codes) or any(
            map(may_run_code, vars(self).values())
        )

    def check(self) -> None:
        """What can be said of it without a row; called in the script, before a run starts.

        Raises: WorkflowError: no episode can be played.
        """

    def check_group_reward(self) -> None:
        """Raises: WorkflowError: what scores groups is not `async`."""
        for what in (self.score_group, self.group_reward):
            if what is not None and not is_async(what):
                raise WorkflowError(
                    f"{name_of(what)}: expected `async def`, since it runs on the event loop of a "
                    "worker; what computes for long belongs into the reward of an episode"
                )

    def check_settings(self, config: RolloutConfig) -> None:
        """Checks it against the run's settings; called in the script, like `check`.

        Raises: WorkflowError, ConfigError: no episode can be played.
        """

    def check_row(self, row: Mapping[str, Any]) -> None:
        """What can be said of a row without a model; called in the script, before a run starts.

        A group's reward that has a `check_row` is asked.

        Raises: WorkflowError: no episode can begin with it.
        """
        if check := getattr(self.group_reward, "check_row", None):
            check(row)
