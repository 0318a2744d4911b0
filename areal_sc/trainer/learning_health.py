"""Whether a run still learns: rules over the numbers of its steps, each told once while it holds.

    a step's record ──► the newest steps and the best ones ──► what is wrong, and what to change

Rules compare a run with itself: what is usual for an entropy or a reward differs from task to task.
A run that has solved its task also has no signal and no entropy any more; it is not told so.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable
from statistics import fmean
from typing import Final

from areal_sc.config.schema import Dtype
from areal_sc.records.metrics import EvaluationResult, StepMetrics
from areal_sc.records.metrics_log import History
from areal_sc.records.trackers.base import Tracker

NUM_STEPS: Final = 10
"""Steps that a rule looks at: fewer are noise, and more are told late."""

SOLVED_ACCURACY: Final = 0.9
"""Mean accuracy from which on missing signal and entropy are success."""

MIN_SIGNAL: Final = 0.1
"""Share of groups with signal below which most of the generated tokens teach nothing."""

MAX_FALL: Final = 0.5
"""Share of the best mean reward that a healthy run does not lose: means of steps are that noisy."""

NUM_ERRORS: Final = 5.0
"""Standard errors that a fall of the reward must be more than; many windows are compared."""

MIN_ENTROPY: Final = 0.05
"""Share of the first steps' entropy below which nothing new is tried any more."""

MAX_KL: Final = 0.5
"""Nats a token by which a step may move the policy; trust regions are 0.01 to 0.1."""

MIN_STOPPED: Final = 0.5
"""Share of the answers that ended by themselves at first and do so no more."""

MAX_MISMATCH: Final = {Dtype.float32: 1000.0, Dtype.bfloat16: 2.0, Dtype.float16: 2.0}
"""How far trainer and sampler may differ in the mean about the same weights, in units of the noise
that the trainer has measured (`engines/rounding.py`). Rounding gave 0.3 to 1 in 16 bits. In float32
it gave 1.3, and ten times as much with a server whose kernels approximate."""

MAX_EVALUATION_FALL: Final = 0.1
"""Share of its best result that an evaluation may lose while training rises."""


class LearningHealth(Tracker):
    """Follows a run.

    Args:
        dtype: of the trainer's computation.

    Attributes:
        complaints: what is wrong, or was in one of the last steps, by the names of the rules.
    """

    def __init__(self, dtype: Dtype = Dtype.float32) -> None:
        self._max_mismatch = MAX_MISMATCH[dtype]
        self.complaints: dict[str, str] = {}
        self._untold: list[str] = []
        self._newest: deque[StepMetrics] = deque(maxlen=NUM_STEPS)
        self._first: tuple[StepMetrics, ...] = ()
        self._best_reward = -math.inf  # means over NUM_STEPS steps
        self._widest_kl = 0.0  # mean over those of NUM_STEPS steps that had tokens with signal
        self._squared_changes = 0.0  # of the reward from step to step, summed
        self._last_found: dict[str, int] = {}  # steps at which a rule held last
        self._num_steps = 0
        self._evaluations: dict[str, list[EvaluationResult]] = {}

    def remember(self, history: History) -> None:
        """What an earlier start of the run has recorded."""
        for metrics in history.steps:
            self.on_step(metrics)
        for result in history.evaluations:
            self.on_evaluation(result)

    def take_untold(self) -> list[str]:
        """What has gone wrong since this was asked last."""
        untold, self._untold = self._untold, []
        return untold

    def on_step(self, metrics: StepMetrics) -> None:
        """Judges the newest steps."""
        self._num_steps += 1
        if self._newest:
            self._squared_changes += (metrics.reward - self._newest[-1].reward) ** 2
        self._newest.append(metrics)
        if len(self._newest) < NUM_STEPS:
            return
        self._first = self._first or tuple(self._newest)
        self._best_reward = max(self._best_reward, _mean(self._newest, _reward))
        self._widest_kl = max(self._widest_kl, self._kl())
        for name, rule in self._rules().items():
            if text := rule():
                if name not in self.complaints:
                    self._untold.append(text)
                self.complaints[name] = text
                self._last_found[name] = self._num_steps
            elif self._num_steps - self._last_found.get(name, 0) >= NUM_STEPS:
                self.complaints.pop(name, None)

    def on_evaluation(self, result: EvaluationResult) -> None:
        """Greedy evaluations are others than those before, and are not compared with them."""
        family = result.name.rpartition("/")[0]
        if result.temperature:
            self._evaluations.setdefault(family, []).append(result)

    def _rules(self) -> dict[str, Callable[[], str | None]]:
        return {
            "no signal": self._no_signal,
            "fallen reward": self._fallen_reward,
            "no entropy": self._no_entropy,
            "wide steps": self._wide_steps,
            "disagreement": self._disagreement,
            "skipped updates": self._skipped_updates,
            "endless answers": self._endless_answers,
            "falling evaluation": self._falling_evaluation,
        }

    def _no_signal(self) -> str | None:
        shares = [it.signal_share for it in self._newest if it.signal_share is not None]
        if len(shares) < NUM_STEPS or sum(shares) / len(shares) >= MIN_SIGNAL or self._is_solved():
            return None
        reward = _mean(self._newest, _reward)
        if not any(shares) and all(it.reward == reward for it in self._newest):
            text = f"every answer of the last {NUM_STEPS} steps has the reward {reward:g}"
        else:
            text = (
                f"in the last {NUM_STEPS} steps {sum(shares) / len(shares):.0%} of the prompts had "
                f"answers of different rewards, at a mean reward of {reward:.3g}: the others teach "
                "nothing"
            )
        if self._widest_kl > MAX_KL:
            return (
                f"{text}, after steps that moved the policy by {self._widest_kl:.2g} nats a token: "
                "begin anew, or from a snapshot, with a smaller actor.optimizer.lr"
            )
        return (
            f"{text}; look at `python -m areal_sc samples`, whether the reward can tell a good "
            "answer from a bad one, and whether the prompts are neither too hard nor too easy"
        )

    def _fallen_reward(self) -> str | None:
        now, best = _mean(self._newest, _reward), self._best_reward
        # half the mean square of changes is the variance of a step, whatever the trend; the
        # difference of two means of steps has twice that of one
        change2 = self._squared_changes / (self._num_steps - 1)
        noise = NUM_ERRORS * math.sqrt(change2 / NUM_STEPS)
        if not best - now > max(MAX_FALL * abs(best), noise):  # NaN: there are no rewards
            return None
        return (
            f"the reward has fallen to {now:.3g}, from {best:.3g} (means over "
            f"{NUM_STEPS} steps): go back to a snapshot with a smaller actor.optimizer.lr, or a "
            "smaller rollout.max_staleness"
        )

    def _no_entropy(self) -> str | None:
        before, now = (_mean(of, _entropy) for of in (self._first, self._newest))
        if not now < MIN_ENTROPY * before or self._is_solved() or self._rises():
            return None
        return (
            f"the policy tries nothing new: its entropy is {now:.2g}, and was {before:.2g} at "
            "first: a smaller actor.optimizer.lr or a wider actor.ppo.clip_high keeps more of it"
        )

    def _wide_steps(self) -> str | None:
        kl = self._kl()
        if kl <= MAX_KL:
            return None
        return (
            f"a step moves the policy by {kl:.2g} nats a token: a smaller actor.optimizer.lr, or "
            "fewer actor.ppo.num_minibatches"
        )

    def _kl(self) -> float:
        """Mean over the newest steps that had tokens with signal; a ruined policy has none."""
        kl = _mean(self._newest, lambda it: _number(it.train.get("proximal_kl")))
        return 0.0 if math.isnan(kl) else kl

    def _disagreement(self) -> str | None:
        of_steps = (
            (_number(it.train.get("mismatch")), _number(it.train.get("mismatch_noise")))
            for it in self._newest
        )
        told = [pair for pair in of_steps if all(map(math.isfinite, pair))]
        if not told:
            return None
        found, noise = map(fmean, zip(*told, strict=True))
        limit = self._max_mismatch * noise
        if not found > limit:
            return None
        worst = max(self._newest, key=lambda it: it.train.get("mismatch_max", 0.0)).train
        of_worst = ""
        if "mismatch_max" in worst:
            of_worst = (
                f" (the worst one is token {worst['mismatch_token']:.0f}: "
                f"{worst['mismatch_sampler_logprob']:.3g} to the sampler, "
                f"{worst['mismatch_trainer_logprob']:.3g} to the trainer)"
            )
        return (
            "training and generation disagree: of tokens that were sampled by the very weights "
            f"that the step began from, log-probabilities differ by {found:.2g} nats in the "
            f"mean{of_worst}, where rounding explains {limit:.2g}: look for weights or "
            "a KV cache in fewer bits, another chat template or model on a server of your own, "
            "sampling that is cut (top_p, top_k); with a 16-bit dtype "
            "rollout.float32_output_layer=true rounds less"
        )

    def _skipped_updates(self) -> str | None:
        of_steps = [it.train for it in self._newest]
        skipped, made = (
            sum(step.get(name) or 0 for step in of_steps)
            for name in ("num_skipped_updates", "num_updates")
        )
        if not skipped > made:
            return None
        return (
            f"of the last {NUM_STEPS} steps' updates {skipped:.0f} were skipped and {made:.0f} "
            "made: gradients were not finite; take a smaller actor.optimizer.lr, or bfloat16"
        )

    def _endless_answers(self) -> str | None:
        before, now = (_mean(of, _stopped) for of in (self._first, self._newest))
        if not before >= MIN_STOPPED > 2 * now:
            return None
        return (
            f"{now:.0%} of the answers end by themselves, and {before:.0%} did at first: others "
            "are cut at generation.max_new_tokens; a reward that pays for length, or for answers "
            "that were cut, leads there: generation.cut_answers=wrong gives these none"
        )

    def _falling_evaluation(self) -> str | None:
        has_risen = self._best_reward == _mean(self._newest, _reward)
        for family, results in self._evaluations.items():
            scores = [it.reward if it.accuracy is None else it.accuracy for it in results]
            if len(scores) < 3 or not has_risen:
                continue
            best = max(scores)
            if best > 0 and all(it < (1 - MAX_EVALUATION_FALL) * best for it in scores[-2:]):
                return (
                    f"the last two evaluations {f'of {family} ' if family else ''}gave "
                    f"{scores[-2]:.3g} and {scores[-1]:.3g}, after {best:.3g}, while the reward of "
                    "training rises: it learns its prompts by heart, or to please the reward; take "
                    "an earlier model, more prompts or a stricter reward"
                )
        return None

    def _is_solved(self) -> bool:
        """Whether there is little left to learn; without an accuracy: whether it has learned."""
        accuracy = _mean(self._newest, lambda it: _number(it.accuracy))
        return self._rises() if math.isnan(accuracy) else accuracy >= SOLVED_ACCURACY

    def _rises(self) -> bool:
        """Whether the newest mean reward is above all of the first steps."""
        return _mean(self._newest, _reward) > max(map(_reward, self._first))


def _reward(metrics: StepMetrics) -> float:
    return metrics.reward


def _entropy(metrics: StepMetrics) -> float:
    return _number(metrics.train.get("entropy"))


def _stopped(metrics: StepMetrics) -> float:
    return _number(metrics.workflow.get("stopped"))


def _mean(steps: Iterable[StepMetrics], of: Callable[[StepMetrics], float]) -> float:
    """Over the steps in which it was measured; NaN: in none."""
    measured = [value for value in map(of, steps) if not math.isnan(value)]
    return fmean(measured) if measured else math.nan


def _number(value: float | None) -> float:
    """NaN in place of None: not measured, or no number in the record of an earlier start."""
    return math.nan if value is None else value
