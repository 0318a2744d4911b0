"""Why an episode is not trained: plain data, which travels from the worker to the controller."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any, Final

from msgspec import Struct
from msgspec.structs import replace

from areal_sc.errors import (
    AgentError,
    ConfigError,
    NeverWorks,
    PromptTooLong,
    RewardError,
    WorkflowError,
)
from areal_sc.user_code import Raised, describe, first_of, last_frames, place_of, text_of

_MAX_MESSAGE_CHARS: Final = 1000
_MAX_PROMPT_CHARS: Final = 120


class RejectionKind(StrEnum):
    """What went wrong with an episode.

    reward_error: the reward raised.
    bad_reward: it is NaN, infinite, or no number.
    reward_timeout: the reward took longer than `rollout.reward_timeout_s`.
    reward_process_died: its process ended while it ran.
    agent_error: the agent raised.
    agent_timeout: it took longer than `agents.episode_timeout_s`, again when it was alone, or
        outside.
    agent_died: its process ended while it ran, again when it was alone.
    agent_no_call: it ended, and had no answer of the model.
    agent_idle: an agent outside claimed it, and did nothing for `agents.idle_timeout_s`.
    agent_rejected: the agent outside that claimed it has rejected it.
    dataset_error: the row of the dataset cannot be read.
    prompt_error: the prompt cannot be used.
    prompt_too_long: it leaves no room for an answer, and is left out.
    timeout: the episode took longer than `rollout.group_timeout_s`.
    too_long: its rows have more tokens than are allowed.
    workflow_error: the workflow raised, or returned what cannot be trained.
    rejected: the workflow returned None.
    worker_died: the worker died again and again while it ran.
    """

    reward_error = "reward_error"
    bad_reward = "bad_reward"
    reward_timeout = "reward_timeout"
    reward_process_died = "reward_process_died"
    agent_error = "agent_error"
    agent_timeout = "agent_timeout"
    agent_died = "agent_died"
    agent_no_call = "agent_no_call"
    agent_idle = "agent_idle"
    agent_rejected = "agent_rejected"
    dataset_error = "dataset_error"
    prompt_error = "prompt_error"
    prompt_too_long = "prompt_too_long"
    timeout = "timeout"
    too_long = "too_long"
    workflow_error = "workflow_error"
    rejected = "rejected"
    worker_died = "worker_died"


class Rejection(Struct, frozen=True, array_like=True):
    """Why one episode is not trained.

    Attributes:
        error_type: class of the exception, "" if nothing was raised.
        place: `file.py:line` of the user's code that is to blame, "" if that is not known.
        frames: the last frames of the traceback, "" if nothing was raised.
        prompt_index: row of the dataset.
        prompt: how that row begins.
        log: path of the log that has the rest.
    """

    kind: RejectionKind
    message: str
    error_type: str = ""
    place: str = ""
    frames: str = ""
    prompt_index: int = -1
    prompt: str = ""
    log: str = ""

    @property
    def cause(self) -> str:
        """What is counted: `reward_error: KeyError at task.py:12`; a run has few different ones."""
        where = " at ".join(part for part in (self.error_type, self.place) if part)
        return f"{self.kind}: {where}" if where else str(self.kind)

    def describe(self) -> str:
        """All of it, for people; several lines where there is a traceback."""
        text = f"{self.cause}: {self.message}"
        if self.prompt_index >= 0:
            text += f"; prompt {self.prompt_index}"
        if self.prompt:
            text += f": {self.prompt}"
        if self.log:
            text += f"; more in {self.log}"
        return "\n".join(filter(None, (text, self.frames.rstrip())))

    def of_prompt(self, index: int, row: Mapping[str, Any] | None, log: str) -> Rejection:
        """With the dataset's row, None where it cannot be read; and fit for every terminal."""
        return replace(
            self,
            message=_shown(self.message),
            frames=_shown(self.frames),
            prompt_index=index,
            prompt="" if row is None else _shown(_short_prompt(row)),
            log=log,
        )

    @classmethod
    def of(cls, error: BaseException) -> Rejection:
        """The rejection of an episode whose workflow raised; a RewardError knows its own place."""
        error = first_of(error)
        message = describe(error)[:_MAX_MESSAGE_CHARS]
        if isinstance(error, RewardError) and type(error) in (RewardError, AgentError):
            # a class of the user's may lack attributes
            place = error.place
            if type(error) is RewardError:  # which a workflow may have raised
                place = place or place_of(error)
            text = text_of(error)[:_MAX_MESSAGE_CHARS]
            return cls(kind_of(error), text, error.error_type, place, error.frames)
        if isinstance(error, PromptTooLong):
            return cls(RejectionKind.prompt_too_long, text_of(error))
        if isinstance(error, WorkflowError) and not isinstance(error, RewardError):
            return cls(RejectionKind.prompt_error, message)
        return cls.raised(RejectionKind.workflow_error, message, error)

    @classmethod
    def of_episode(cls, raised: Raised, limit_s: float) -> Rejection:
        """The rejection of an episode that raised, or took longer than `rollout.group_timeout_s`.

        Args:
            limit_s: that setting, in seconds.
        Raises: NeverWorks, ConfigError: what it raised, as no other episode would do better.
        """
        if isinstance(error := first_of(raised.error), NeverWorks | ConfigError):
            raise error
        if not raised.is_late:
            return cls.of(error)
        why = f"the episode took longer than group_timeout_s={limit_s:g} s"
        where = place_of(raised.error)
        return cls(RejectionKind.timeout, why, place=where, frames=last_frames(raised.error))

    @classmethod
    def raised(cls, kind: RejectionKind, message: str, error: BaseException) -> Rejection:
        """The rejection of code which raised this."""
        return cls(kind, message, type(error).__name__, place_of(error), last_frames(error))


def kind_of(error: RewardError) -> RejectionKind:
    """The kind of a RewardError; the user's code may raise one of any."""
    return RejectionKind.__members__.get(str(error.kind), RejectionKind.reward_error)


def describe_counts(counts: Mapping[str, int]) -> str:
    """Every cause with its number of episodes, the most frequent one first; "none"."""
    ordered = sorted(counts.items(), key=lambda item: -item[1])
    return ", ".join(f"{cause} x{count}" for cause, count in ordered) or "none"


def _short_prompt(row: Mapping[str, Any]) -> str:
    """How a row of a dataset begins, on one line."""
    text = text_of(row.get("prompt", dict(row)), repr)
    return text if len(text) <= _MAX_PROMPT_CHARS else f"{text[:_MAX_PROMPT_CHARS]}..."


def _shown(text: str) -> str:
    """Without what neither a terminal nor UTF-8 should get: models sample such characters, too."""
    return "".join(c if c.isprintable() or c == "\n" else ascii(c)[1:-1] for c in text)
