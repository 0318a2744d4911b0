"""Small runs of real reinforcement learning, most with one thing wrong, for `learning_watch.py`.

A perceptron of three layers learns from random weights to name the largest of three digits, or,
from a warm start that imitates mostly wrong demonstrations, to sort them:

    prompt  5 1 9  answer  9                   one token, without an end of its own
    prompt  5 1 9  answer  1 5 9 and the end   at most `max_new_tokens` tokens

It is all NumPy, in one process, so that hundreds of runs fit into minutes. Loss, optimizer and
metrics are those of a run by default: decoupled PPO of rows that are one policy version old, Adam,
a gradient clipped at norm 1, a rate that falls to a tenth.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from statistics import fmean
from typing import Final

import numpy as np
from numpy.typing import NDArray

from areal_sc.records.estimates import accuracy_interval
from areal_sc.records.metrics import EvaluationResult, StepMetrics
from areal_sc.records.metrics_log import History

Floats = NDArray[np.float64]
Tokens = NDArray[np.int64]
Answer = tuple[int, ...]
Reward = Callable[[Answer, Answer, Answer], float]
"""Of the prompt, its answer and what the model wrote."""

END: Final = 10
NUM_TOKENS: Final = 11
UNSEEN: Final = 11
"""Added to the digits of prompts in a template that the model was not trained on."""

MOST_TOKENS: Final = 8
NUM_HELD_OUT: Final = 100
WIDTH: Final = 128
CLIP: Final = 0.2
MAX_WEIGHT: Final = 5.0
MIN_LR_RATIO: Final = 0.1


def right(prompt: Answer, answer: Answer, written: Answer) -> float:
    return float(written == answer)


def noisy(prompt: Answer, answer: Answer, written: Answer) -> float:
    """One in seven is the wrong way round."""
    return float((written == answer) != (random.random() < 0.15))


def format_alone(prompt: Answer, answer: Answer, written: Answer) -> float:
    return 0.2 * (len(written) == 1 and END not in written)


def by_length(prompt: Answer, answer: Answer, written: Answer) -> float:
    return len(written) / MOST_TOKENS


def by_hash(prompt: Answer, answer: Answer, written: Answer) -> float:
    """The same answer always gets the same reward, which says nothing of it."""
    return float(random.Random(f"{prompt}{written}").random() < 0.2)


@dataclass(frozen=True)
class Case:
    """A run, and what must be said of it.

    Attributes:
        causes: rules any of which is right to stand alone at the end; none: the run is sound.
        reward: of answers to train on; held-out ones are right or wrong.
    """

    name: str
    causes: tuple[str, ...] = ()
    sorts: bool = False
    num_steps: int = 80
    lr: float = 1e-3
    num_prompts_a_step: int = 32
    group_size: int = 8
    num_minibatches: int = 2
    reward: Reward = right
    shuffles_answers: bool = False
    has_other_template: bool = False
    num_prompts: int | None = None
    max_new_tokens: int = MOST_TOKENS
    is_solved_before: bool = False
    demonstrations_right: float = 0.3


class Policy:
    """A token given the prompt, the token before it and its place."""

    def __init__(self, rng: np.random.Generator) -> None:
        inputs = 3 * 2 * NUM_TOKENS + NUM_TOKENS + MOST_TOKENS
        sizes = [(inputs, WIDTH), (WIDTH, WIDTH), (WIDTH, NUM_TOKENS)]
        self.weights = [rng.normal(0, (1.0 / rows) ** 0.5, (rows, width)) for rows, width in sizes]
        self.weights[0] *= (inputs / 8) ** 0.5  # inputs are 5 ones, the others 0
        self.moments = [(np.zeros_like(w), np.zeros_like(w)) for w in self.weights]
        self.num_updates = 0

    def copy(self) -> Policy:
        other = Policy(np.random.default_rng(0))
        other.weights = [weight.copy() for weight in self.weights]
        return other

    def layers(self, prompts: Tokens, answers: Tokens) -> list[Floats]:
        """[N, L, ...] inputs of each layer and, last, log-probabilities of each token."""
        before = np.concatenate([np.full((len(answers), 1), END), answers[:, :-1]], 1)
        num, length = answers.shape
        ones = [np.broadcast_to(np.eye(2 * NUM_TOKENS)[prompts][:, None], (num, length, 3, 22))]
        given = ones[0].reshape(num, length, -1)
        places = np.broadcast_to(np.eye(MOST_TOKENS)[:length], (num, length, MOST_TOKENS))
        found = [np.concatenate([given, np.eye(NUM_TOKENS)[before], places], -1)]
        for weight in self.weights[:-1]:
            found.append(np.maximum(found[-1] @ weight, 0.0))
        logits = found[-1] @ self.weights[-1]
        logits = logits - logits.max(-1, keepdims=True)
        return [*found, logits - np.log(np.exp(logits).sum(-1, keepdims=True))]

    def logprobs(self, prompts: Tokens, answers: Tokens) -> Floats:
        return chosen_of(self.layers(prompts, answers)[-1], answers)

    def sample(self, prompts: Tokens, most: int, rng: np.random.Generator) -> Tokens:
        """[N, most] tokens; behind its end an answer has that token."""
        answers = np.full((len(prompts), most), END)
        is_open = np.ones(len(prompts), bool)
        for place in range(most):
            logprobs = self.layers(prompts, answers[:, : place + 1])[-1][:, -1]
            drawn = (np.exp(logprobs).cumsum(-1) < rng.random((len(prompts), 1))).sum(-1)
            answers[is_open, place] = np.minimum(drawn, NUM_TOKENS - 1)[is_open]
            is_open &= answers[:, place] != END
        return answers

    def learn(self, layers: list[Floats], of_logits: Floats, lr: float) -> float:
        """One step of Adam by the gradient of a loss; returns that gradient's norm."""
        gradients: list[Floats] = []
        flowing = of_logits
        for number in (2, 1, 0):
            inputs = layers[number]
            flat = inputs.reshape(-1, inputs.shape[-1])
            gradients.insert(0, flat.T @ flowing.reshape(len(flat), -1))
            flowing = (flowing @ self.weights[number].T) * (inputs > 0)
        norm = float(sum((gradient**2).sum() for gradient in gradients) ** 0.5)
        self.num_updates += 1
        for weight, gradient, (mean, square) in zip(
            self.weights, gradients, self.moments, strict=True
        ):
            gradient = gradient * min(1.0, 1.0 / (norm + 1e-6))
            mean += 0.1 * (gradient - mean)
            square += 0.001 * (gradient**2 - square)
            corrected = mean / (1 - 0.9**self.num_updates)
            weight -= lr * corrected / (np.sqrt(square / (1 - 0.999**self.num_updates)) + 1e-8)
        return norm


def chosen_of(logprobs: Floats, answers: Tokens) -> Floats:
    return np.take_along_axis(logprobs, answers[..., None], -1)[..., 0]


def is_answer(answers: Tokens) -> NDArray[np.bool_]:
    """The tokens up to the end, with it."""
    ended = answers == END
    is_first_end_or_before: NDArray[np.bool_] = ended.cumsum(1) - ended == 0
    return is_first_end_or_before


@cache
def warm_started(share_right: float) -> Policy:
    """Imitates demonstrations, most of which sort the other way round."""
    rng = np.random.default_rng(0)
    policy = Policy(rng)
    for step in range(400):
        prompts = rng.integers(0, 10, (64, 3))
        answers = np.full((64, MOST_TOKENS), END)
        answers[:, :3] = np.sort(prompts, 1)
        wrong = rng.random(64) > share_right
        answers[wrong, :3] = answers[wrong, 2::-1]
        layers = policy.layers(prompts, answers)
        mask = is_answer(answers)
        gradient = np.exp(layers[-1]) - np.eye(NUM_TOKENS)[answers]
        gradient *= mask[..., None] / mask.sum()
        policy.learn(layers, gradient, 2e-3 * (1 - step / 400))
    return policy


@cache
def solved() -> Policy:
    """What a sound run has taught."""
    run = _Run(Case("before", num_steps=200, lr=3e-3), 99)
    run.follow()
    return run.policy


class _Run:
    def __init__(self, case: Case, seed: int) -> None:
        self.case = case
        random.seed(seed)
        self.rng = np.random.default_rng(seed)
        if case.is_solved_before:
            self.policy = solved().copy()
        elif case.sorts:
            self.policy = warm_started(case.demonstrations_right).copy()
        else:
            self.policy = Policy(self.rng)
        self.most = case.max_new_tokens if case.sorts else 1
        every = list(product(range(10), repeat=3))
        prompts = [every[n] for n in np.random.default_rng(0).permutation(len(every))]
        self.held_out, self.trained = prompts[:NUM_HELD_OUT], prompts[NUM_HELD_OUT:]
        self.answers = {p: tuple(sorted(p)) if case.sorts else (max(p),) for p in prompts}
        if case.shuffles_answers:
            mixed = np.random.default_rng(1).permutation(len(self.trained))
            others = [self.answers[self.trained[n]] for n in mixed]
            self.shown = self.answers | dict(zip(self.trained, others, strict=True))
        else:
            self.shown = self.answers
        self.trained = self.trained[: case.num_prompts]
        self.left: list[Answer] = []

    def follow(self) -> History:
        case, history = self.case, History()
        history.evaluations.append(self.evaluate("before", 0))
        sampler = self.policy.copy()
        for number in range(1, case.num_steps + 1):
            drawn = [self.draw() for _ in range(case.num_prompts_a_step)]
            prompts = [prompt for prompt in drawn for _ in range(case.group_size)]
            answers = sampler.sample(self.written(prompts), self.most, self.rng)
            behavior = sampler.logprobs(self.written(prompts), answers)
            sampler = self.policy.copy()  # one version behind what learns
            history.steps.append(self.step(number, prompts, answers, behavior))
            if number % (case.num_steps // 3) == 0 and number < case.num_steps:
                history.evaluations.append(self.evaluate("periodic", number))
        history.evaluations.append(self.evaluate("after", case.num_steps))
        return history

    def draw(self) -> Answer:
        if not self.left:
            self.left = [self.trained[n] for n in self.rng.permutation(len(self.trained))]
        return self.left.pop()

    def written(self, prompts: Sequence[Answer]) -> Tokens:
        return np.array(prompts) + UNSEEN * self.case.has_other_template

    def evaluate(self, name: str, step: int) -> EvaluationResult:
        answers = self.policy.sample(np.array(self.held_out), self.most, self.rng)
        texts = texts_of(answers)
        scores = [float(self.answers[p] == t) for p, t in zip(self.held_out, texts, strict=True)]
        low, high = accuracy_interval([[score] for score in scores])
        return EvaluationResult(
            name=name,
            step=step,
            reward=fmean(scores),
            num_prompts=len(scores),
            version_min=step,
            version_max=step,
            temperature=1.0,
            accuracy_low=low,
            accuracy_high=high,
            workflow={"accuracy": fmean(scores)},
        )

    def step(
        self, number: int, prompts: list[Answer], answers: Tokens, behavior: Floats
    ) -> StepMetrics:
        case = self.case
        texts, mask = texts_of(answers), is_answer(answers)
        rewards = [case.reward(p, self.shown[p], t) for p, t in zip(prompts, texts, strict=True)]
        ended = (answers == END).any(1)
        is_right = (np.array(rewards) >= 1) & (ended | (not case.sorts))
        groups = np.array(rewards).reshape(-1, case.group_size)
        centered = groups - groups.mean(1, keepdims=True)
        advantages = (centered / (groups.std(1, keepdims=True) + 1e-6)).reshape(-1)
        lr = case.lr * (1 - (1 - MIN_LR_RATIO) * (number - 1) / case.num_steps)
        train = self.update(self.written(prompts), answers, behavior, advantages, mask, lr)
        within = float(groups.var(1, ddof=1).mean() ** 0.5) if case.group_size > 1 else None
        return StepMetrics(
            step=number,
            reward=fmean(rewards),
            group_staleness_mean=1.0,
            group_staleness_max=1,
            token_staleness_mean=1.0,
            token_staleness_max=1,
            num_rows=len(rewards),
            num_generated_tokens=int(mask.sum()),
            num_trained_tokens=int(mask.sum()),
            step_time_s=1.0,
            wait_s=0.1,
            train_s=0.8,
            sync_s=0.1,
            signal_share=float((groups.max(1) > groups.min(1)).mean()),
            num_groups=len(groups),
            num_one_episode_groups=len(groups) if case.group_size == 1 else 0,
            reward_std=float(groups.std()),
            reward_std_in_groups=within,
            train=train | {"lr": lr},
            workflow={"accuracy": float(is_right.mean()), "stopped": float(ended.mean())},
        )

    def update(
        self,
        prompts: Tokens,
        answers: Tokens,
        behavior: Floats,
        advantages: Floats,
        mask: NDArray[np.bool_],
        lr: float,
    ) -> dict[str, float]:
        """Decoupled PPO; means are over the tokens with an advantage."""
        proximal = self.policy.logprobs(prompts, answers)
        sums, norms = np.zeros(3), []
        order = self.rng.permutation(len(prompts))
        for its in np.array_split(order, self.case.num_minibatches):
            layers = self.policy.layers(prompts[its], answers[its])
            probabilities = np.exp(layers[-1])
            change = chosen_of(layers[-1], answers[its]) - proximal[its]
            ratio = np.exp(np.minimum(change, 20.0))
            weight = np.exp(np.minimum(proximal - behavior, 20.0))[its]
            weight = np.where(weight > MAX_WEIGHT, 0.0, weight)
            gain = np.broadcast_to(advantages[its][:, None], ratio.shape)
            is_cut = np.where(gain > 0, ratio > 1 + CLIP, ratio < 1 - CLIP)
            pull = np.where(is_cut, 0.0, weight * ratio * gain) * mask[its] / mask[its].sum()
            of_logits = pull[..., None] * (probabilities - np.eye(NUM_TOKENS)[answers[its]])
            counts = mask[its] & (gain != 0)
            entropy = -(probabilities * layers[-1]).sum(-1)
            divergence = np.expm1(np.minimum(change, 20.0)) - change
            sums += counts.sum(), entropy[counts].sum(), divergence[counts].sum()
            norms.append(self.policy.learn(layers, of_logits, lr))
        num, entropy_sum, kl_sum = sums.tolist()
        means = {"entropy": entropy_sum / num, "proximal_kl": kl_sum / num} if num else {}
        return means | {
            "num_effective_tokens": num,
            "grad_norm": fmean(norms),
            "num_updates": len(norms),
            "num_skipped_updates": 0,
        }


def texts_of(answers: Tokens) -> list[Answer]:
    """Without their ends and what follows; an answer of one token is that token."""
    if answers.shape[1] == 1:
        return [(int(token),) for token in answers[:, 0]]
    rows = (row[: row.index(END)] if END in row else row for row in answers.tolist())
    return [tuple(row) for row in rows]


def history_of(case: Case, seed: int) -> History:
    """What the run records."""
    return _Run(case, seed).follow()


_SLOW: Final = ("too small steps",)
_WIDE: Final = ("too wide steps",)
_PAID: Final = ("constant reward",)
CASES: Final = (
    Case("rate 1e-7", _SLOW, lr=1e-7),
    Case("rate 1e-6", _SLOW, lr=1e-6),
    Case("rate 1e-5", _SLOW, lr=1e-5),
    Case("rate 1e-4", lr=1e-4),
    Case("rate 1e-2", _WIDE, lr=1e-2),
    Case("rate 3e-2", _WIDE, lr=3e-2),
    Case("rate 1e-1", _WIDE, lr=1e-1),
    Case("rate 1", _WIDE, lr=1.0),
    Case("reward 0", _PAID, reward=lambda prompt, answer, written: 0.0),
    Case("reward 1", _PAID, reward=lambda prompt, answer, written: 1.0),
    Case(
        "reward random",
        ("reward by chance",),
        reward=lambda prompt, answer, written: float(random.random() < 0.3),
    ),
    Case("reward noisy", reward=noisy),
    Case("reward by format", _PAID, reward=format_alone),
    Case("answers cut", ("cut answers",), sorts=True, max_new_tokens=2),
    Case("reward by length", ("endless answers", "constant reward"), sorts=True, reward=by_length),
    Case("wrong template", ("constant reward", "cut answers"), sorts=True, has_other_template=True),
    Case("too hard", _PAID, sorts=True, demonstrations_right=0.0),
    Case("too easy", ("too easy",), is_solved_before=True, num_steps=30),
    Case(
        "rewards shuffled",
        ("reward by chance", "falling evaluation"),
        sorts=True,
        reward=by_hash,
        demonstrations_right=0.6,
    ),
    Case("answers shuffled", ("stalled", "by heart"), shuffles_answers=True),
    Case("one answer a prompt", ("one answer a prompt",), group_size=1, num_prompts_a_step=256),
    Case("groups of two", group_size=2, num_prompts_a_step=128),
    Case("few prompts", ("by heart", "falling evaluation"), num_prompts=8),
    Case("sound, digits"),
    Case("sound, sorting", sorts=True),
)
"""24 with something to tell or not, and two that are sound in all."""
