"""How simulated workers behave: how long what they do takes, and how often it fails."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

Number = float | Callable[[random.Random], float]
"""The same one always, or one that is drawn."""


@dataclass
class Behavior:
    """How simulated workers behave.

    Attributes:
        generation_s: of one episode.
        completion_tokens: of one row.
        training_s: of one training step, and of one recomputation of log-probabilities.
        sealing_s: of one rank's seal of its weights.
        publication_s: of one worker's pull of the weights.
        evaluation_s: of one episode.
        agent_start_s: of an agent that is started again.
        latency_s: of one message, one way.
        reply_delay_s: what the reply of a finished group takes longer, while other messages of
            the worker overtake it.
        sweep_delay_s: the same, of the reply to a sweep.
        give_up_s: how long a group goes on that the worker was told to end.
        group_rejection: probability that all rows of a group are rejected.
        episode_rejection: the same, of each episode.
        episode_rows: that an episode has.
    """

    generation_s: Number = 1.0
    completion_tokens: Number = 8
    training_s: Number = 1.0
    sealing_s: Number = 0.01
    publication_s: Number = 0.1
    evaluation_s: Number = 1.0
    agent_start_s: Number = 1.0
    latency_s: float = 0.001
    reply_delay_s: Number = 0.0
    sweep_delay_s: Number = 0.0
    give_up_s: Number = 0.0
    group_rejection: float = 0.0
    episode_rejection: float = 0.0
    episode_rows: Number = 1
