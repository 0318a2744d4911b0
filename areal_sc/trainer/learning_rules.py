"""What can be wrong with a run's learning: for each cause what it looks like, and what to change.

    a step, an evaluation ──► `Course`: means with their errors ──► `RULES` ──► one cause

Rules compare a run with itself: what is usual for an entropy or a reward differs from task to task.
A rule is a function of `Course`: it returns what it has seen, and None while that is within the
error of its numbers. `RULES` has causes before their consequences: the first one that speaks is
told alone, once while it holds. A run that has solved its task has neither signal nor entropy any
more; it is not told.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from statistics import NormalDist, fmean
from typing import Final

from areal_sc.config.schema import Dtype
from areal_sc.records.metrics import EvaluationResult, StepMetrics
from areal_sc.records.metrics_log import History
from areal_sc.records.trackers.base import Tracker
from areal_sc.trainer.learning_course import (
    MAX_STANDING,
    NUM_STEPS,
    SOLVED_ACCURACY,
    Course,
    Evaluated,
    Measured,
    mean,
    number,
)

NUM_STEPS_KEPT: Final = 2 * NUM_STEPS
"""Steps for which a rule that holds no more still counts: numbers waver about its limit."""

MAX_MISMATCH: Final = {Dtype.float32: 1000.0, Dtype.bfloat16: 2.0, Dtype.float16: 2.0}
"""How far trainer and sampler may differ in the mean about the same weights, in units of the noise
that the trainer has measured (`engines/rounding.py`). Rounding gave 0.3 to 1 in 16 bits. In float32
it gave 1.3, and ten times as much with a server whose kernels approximate."""

NUM_ERRORS: Final = 5.0
"""Standard errors beyond which a difference is told: windows of all steps are compared."""

NUM_ERRORS_OF_FEW: Final = 3.5
"""The same of what is compared seldom: of evaluations, for example."""

CHANCE: Final = 0.001
"""With which results that only waver show a fall: a limit grows with the pairs to choose from."""

MAYBE: Final = 2.0
"""Standard errors from which on a rule does not rely on there being no difference."""

MIN_SIGNAL: Final = 0.1
"""Share of groups with signal below which most of the generated tokens teach nothing."""

MANY_ANSWERS: Final = 8
"""Answers to a prompt from which on this holds."""

MIN_SIGNAL_OF_VARIETY: Final = 2 * MIN_SIGNAL
"""Share of groups with signal above which there was something that could be lost."""

MAX_LEFT: Final = 1 / 3
"""Share of the signal that is left at most where it is lost: pairs of answers have little."""

MAX_FALL: Final = 0.5
"""Share of the best mean reward that a healthy run does not lose: means of steps are that noisy."""

MIN_ENTROPY: Final = 0.05
"""Share of the first steps' entropy below which nothing new is tried any more."""

WIDE_KL: Final = 0.01
"""Nats a token by which a healthy step moves the policy at most; trust regions begin there."""

MAX_KL: Final = 0.5
"""Nats a token by which no step may move the policy, whatever becomes of it."""

MIN_STOPPED: Final = 0.5
"""Share of the answers that end by themselves where a limit of their length matters little."""

MIN_MOVES: Final = 20
"""Steps after which one can tell that nothing has moved."""

MANY_MOVES: Final = 100
"""Steps after which something has to show: with fewer one can wait for it."""

RISING_LR: Final = 1.3
"""Newest learning rate over the mean of all steps from which on it still rises."""

MIN_ENDED: Final = 30
"""Answers that ended by themselves and earned nothing, so that the length is not the cause."""

MIN_STEPS_OF_CHANCE: Final = 30
"""Steps in which a reward that can be learned shows it: it rises, or some prompts are easier."""

MAX_SHARE_OF_PROMPTS: Final = 0.05
"""Share of the rewards' variance that prompts explain at most where the reward is chance."""

MIN_FALL_OF_EVALUATIONS: Final = 0.1
"""Share of its best result that an evaluation must lose before it is told."""

MAX_LEFT_BEHIND: Final = 0.5
"""Share of what training has gained that held-out prompts gain at least in a healthy run."""

FIRST_STEPS: Final = 3
"""Steps in which little has been learned yet."""

Rule = Callable[[Course], str | None]


def disagreement(course: Course) -> str | None:
    of_steps = (
        (number(it.train.get("mismatch")), number(it.train.get("mismatch_noise")))
        for it in course.newest
    )
    told = [pair for pair in of_steps if all(map(math.isfinite, pair))]
    if not told:
        return None
    found, noise = map(fmean, zip(*told, strict=True))
    limit = course.max_mismatch * noise
    if not found > limit:
        return None
    worst = max(course.newest, key=lambda it: it.train.get("mismatch_max", 0.0)).train
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


def skipped_updates(course: Course) -> str | None:
    skipped, made = (
        sum(it.train.get(name) or 0 for it in course.newest)
        for name in ("num_skipped_updates", "num_updates")
    )
    if not skipped > made:
        return None
    return (
        f"of the last {NUM_STEPS} steps' updates {skipped:.0f} were skipped and {made:.0f} "
        "made: gradients were not finite; take a smaller actor.optimizer.lr, or bfloat16"
    )


def one_answer_a_prompt(course: Course) -> str | None:
    """Without a critic or a baseline of the batch, such answers have no advantage."""
    name = "num_effective_tokens"
    trained = [it.train[name] for it in course.newest if name in it.train]
    if not course.is_alone() or not trained or any(trained):
        return None
    return (
        f"in the last {NUM_STEPS} steps each prompt had one answer, and no token an advantage: "
        "there is nothing to compare it with; raise rollout.group_size (8, say), look at "
        "rejected_episodes, or choose an actor.algorithm with a critic"
    )


def too_small_steps(course: Course) -> str | None:
    lr = number(course.newest[-1].train.get("lr"))
    rise, can_show = course.rise(), NUM_ERRORS * course.rise().error
    num_moves = max(MANY_MOVES, course.num_moves)
    reach = course.reach * course.reward_std() * num_moves / max(1, course.num_moves)
    if (
        course.num_moves < MIN_MOVES
        or lr > RISING_LR * course.mean_lr
        or not reach < can_show
        or abs(rise.value) > can_show
    ):
        return None
    now = "" if math.isnan(lr) else f" (now {lr:.2g})"
    return (
        f"the steps move nothing: {course.num_moves} of them, of {course.kl():.2g} nats a token; "
        f"{num_moves} such can raise the mean reward by {reach:.2g} at most, where the error of "
        f"its rise is {rise.error:.2g}: raise actor.optimizer.lr{now} ten times, and again, until "
        f"proximal_kl is between 1e-4 and {WIDE_KL:g}"
    )


def too_wide_steps(course: Course) -> str | None:
    if (kl := course.kl()) > MAX_KL:
        return (
            f"a step moves the policy by {kl:.2g} nats a token, where {WIDE_KL:g} is wide: a "
            "smaller actor.optimizer.lr, or fewer actor.ppo.num_minibatches"
        )
    min_had = 0.0 if course.widest_kl > MAX_KL else MIN_SIGNAL_OF_VARIETY
    had, has = course.signal(course.first[:FIRST_STEPS]), course.signal()
    lost = _lost_variety(course, had > min_had and has < min(MIN_SIGNAL, MAX_LEFT * had))
    if lost is None or not course.widest_kl > WIDE_KL:
        return None
    return (
        f"the steps were too wide, up to {course.widest_kl:.2g} nats a token in the mean of "
        f"{NUM_STEPS} (above {WIDE_KL:g} is wide), and the policy tries nothing new any more: "
        f"{lost}, at a mean reward of {course.reward()}: begin anew, or from a snapshot, with a "
        "smaller actor.optimizer.lr: a tenth, say"
    )


def cut_answers(course: Course) -> str | None:
    """They were cut from the first steps on, and nothing else explains what they earn."""
    before, now = (mean(of, _stopped) for of in (course.first, course.newest))
    if not (before < MIN_STOPPED and now < MIN_STOPPED) or course.is_solved():
        return None
    if all(it.answer_tokens <= 1 for it in course.newest):
        return None  # one token is meant to be the answer, without an end of its own
    ended = sum(_stopped(it) * it.num_rows for it in course.newest)
    if course.reward().value == 0 == course.reward_std() and ended >= MIN_ENDED:
        return None  # those that ended earned nothing, too
    if now == 0 < course.reward().value or _cut_ones_earn(course, now):
        return None
    if course.reward_std() and course.num_steps < MIN_MOVES:
        return None
    if course.rise().is_above(0.0, MAYBE):
        return None
    return (
        f"{1 - now:.0%} of the answers are cut at generation.max_new_tokens, {1 - before:.0%} "
        f"were at first, and the reward is {course.reward()}, {course.rise()} more than then: "
        "raise generation.max_new_tokens; if answers never end however long they may be, look at "
        "the prompt's template and the end token (`python -m areal_sc samples`)"
    )


def _cut_ones_earn(course: Course, ended: float) -> bool:
    """Whether rewards differ less than they would if answers that were cut had earned nothing.

    Of rewards that are 0 but for a share p the mean square is at least mean^2 / p.
    """
    reward, std = course.reward().value, course.reward_std()
    return ended > 0 and std**2 < reward**2 * (1 / ended - 1)


def endless_answers(course: Course) -> str | None:
    before, now = (mean(of, _stopped) for of in (course.first, course.newest))
    if not before >= MIN_STOPPED > 2 * now:
        return None
    return (
        f"{now:.0%} of the answers end by themselves, and {before:.0%} did at first: others "
        "are cut at generation.max_new_tokens; a reward that pays for length, or for answers "
        "that were cut, leads there: generation.cut_answers=wrong gives these none"
    )


def constant_reward(course: Course) -> str | None:
    if not course.signal() < MIN_SIGNAL or not _is_paid_alike(course):
        return None
    was_so = course.signal(course.first) < MIN_SIGNAL
    std, reward, accuracy = course.reward_std(), course.reward(), course.accuracy().value
    if course.is_solved() and (std > 0 or not was_so):
        return None
    if course.rise_of_late().is_above(0.0, MAYBE):
        return None
    since = "since the first step" if was_so else f"of the last {NUM_STEPS} steps"
    if std == 0:
        text = f"every answer {since} has the reward {reward.value:g}"
    else:
        text = (
            f"nearly every answer {since} has the same reward, in the mean {reward}: only "
            f"{course.signal():.0%} of the prompts had answers of different ones"
        )
    if accuracy >= SOLVED_ACCURACY:
        why = (
            "the reward may give this to any answer: try it with a wrong one; if answers are right "
            "indeed, the prompts are too easy"
        )
    elif reward.value <= std:  # few earn anything
        why = (
            "the reward does not find the answer in what the model writes (a parser, a template), "
            "or the prompts are too hard: look at `python -m areal_sc samples`; pay for parts of "
            "an answer, or take easier prompts"
        )
    else:
        why = (
            "the reward pays for the form of an answer, or for anything, and not for being right: "
            "look at `python -m areal_sc samples`, and pay more for right answers"
        )
    return f"{text}, which teaches nothing: {why}"


def too_easy(course: Course) -> str | None:
    accuracy, signal = course.accuracy(course.first), course.signal(course.first)
    if not accuracy.is_above(SOLVED_ACCURACY, 1.0) or not signal < MIN_SIGNAL_OF_VARIETY:
        return None
    if not course.is_solved() or not course.signal() < MIN_SIGNAL_OF_VARIETY:
        return None  # by now they are not
    return (
        f"the prompts are too easy: {accuracy} of the answers were right in the first {NUM_STEPS} "
        f"steps already, and {signal:.0%} of the prompts had answers of different rewards: take "
        "harder prompts, or rollout.choose_prompts=with_signal"
    )


def stalled(course: Course) -> str | None:
    late = _standing(course)
    if course.widest_kl > WIDE_KL or not late:
        return None  # the former is the likelier cause
    middle, right = len(late) // 2, course.accuracy(late).value
    has = max(course.signal(late[:middle]), course.signal(late[middle:]))
    # of the prompts that are solved nothing is to be had
    could_have = min(course.most_signal, 1.0 if math.isnan(right) else 1.0 - right)
    is_lost = course.most_signal > MIN_SIGNAL_OF_VARIETY and has < MAX_LEFT * could_have
    if (lost := _lost_variety(course, is_lost)) is None:
        return None
    return (
        f"learning has stalled for {len(late)} steps: {lost}, at a mean reward of "
        f"{course.reward()}: look at wrong answers (`python -m areal_sc samples --worst`), whether "
        "reference answers belong to their prompts, and prompts are too hard; a larger "
        "rollout.group_size, a smaller actor.optimizer.lr or a wider actor.ppo.clip_high keep more "
        "variety"
    )


def no_signal(course: Course) -> str | None:
    signal, newest = course.signal(), course.newest[-1]
    # two answers to a prompt differ a quarter as often as eight
    size = newest.num_rows / newest.num_groups if newest.num_groups else MANY_ANSWERS
    min_signal = MIN_SIGNAL * min(1.0, size / MANY_ANSWERS)
    if not signal < min_signal or course.is_solved() or not _standing(course):
        return None
    return (
        f"in the last {NUM_STEPS} steps {signal:.0%} of the prompts had answers of different "
        f"rewards, at a mean reward of {course.reward()}: the others teach nothing; look at "
        "`python -m areal_sc samples`, whether the reward can tell a good answer from a bad one, "
        "and whether prompts are either too hard or too easy; "
        "rollout.choose_prompts=with_signal draws the others more often"
    )


def fallen_reward(course: Course) -> str | None:
    now, best = course.reward(), course.best_reward
    fall = best - now
    if not fall.value > max(MAX_FALL * abs(best.value), NUM_ERRORS * fall.error):
        return None  # NaN: there are no rewards
    return (
        f"the reward has fallen to {now}, from {best} (means over {NUM_STEPS} steps): go back to a "
        "snapshot with a smaller actor.optimizer.lr, or a smaller rollout.max_staleness"
    )


def reward_by_chance(course: Course) -> str | None:
    """Neither training nor the choice of a prompt makes a difference to it."""
    rise, share = course.rise(), course.variance.prompts_share()
    if (
        course.num_steps < MIN_STEPS_OF_CHANCE
        or not course.signal() >= MIN_SIGNAL
        or course.reach < 1.0
        or not share.is_below(MAX_SHARE_OF_PROMPTS, MAYBE)
        or abs(rise.value) > NUM_ERRORS_OF_FEW * rise.error
        or course.is_solved()
    ):
        return None
    return (
        f"the reward looks like chance: it is {course.reward()} after {course.num_steps} steps, "
        f"{rise} more than at first, and prompts explain {share} of its variance, so that none is "
        "easier than others: score one answer twice, and look whether rewards or reference answers "
        "belong to their prompts (`python -m areal_sc samples`)"
    )


def falling_evaluation(course: Course) -> str | None:
    rise = course.rise()
    if math.isnan(rise.value) or rise.is_below(0.0, NUM_ERRORS_OF_FEW):
        return None  # no rewards; or training falls as well, which is not about held-out prompts
    for family, results in course.evaluations().items():
        if (fallen := _fallen(results)) is None:
            continue
        best, last, num_last = fallen
        found = (
            f"the last {num_last} evaluations {_of(family)}gave {last}, after {best}, while the "
            f"reward of training has changed by {rise}"
        )
        if rise.is_above(0.0, NUM_ERRORS_OF_FEW):
            return f"{found}: {_BY_HEART}"
        return (
            f"{found}: what the reward pays is not what the evaluation measures; look whether "
            "rewards or reference answers belong to their prompts "
            "(`python -m areal_sc samples`)"
        )
    return None


def _fallen(results: Sequence[Evaluated]) -> tuple[Measured, Measured, int] | None:
    """The best result before some of the last ones, their mean and number, where that is less."""
    scores = [it.score for it in results]
    if len(scores) < 3:
        return None
    num_errors = -NormalDist().inv_cdf(CHANCE / math.comb(len(scores), 3))
    bests = list(accumulate(scores, lambda *two: max(two, key=lambda it: it.value)))
    values = accumulate(it.value for it in reversed(scores))
    errors = accumulate((it.error for it in reversed(scores)), math.hypot)
    sums = list(zip(values, errors, strict=True))  # of the newest one, two, ...
    for num_last in range(2, len(scores)):
        value, error = sums[num_last - 1]
        best, last = bests[-num_last - 1], Measured(value / num_last, error / num_last)
        fall = best - last
        if fall.value > max(MIN_FALL_OF_EVALUATIONS * best.value, num_errors * fall.error):
            return best, last, num_last
    return None


def by_heart(course: Course) -> str | None:
    """Where held-out prompts of any kind gain, the others may be of another subject."""
    found: list[str] = []
    for family, results in course.evaluations().items():
        if len(results) < 3:
            continue
        began = course.accuracy(course.first[:FIRST_STEPS])
        trained = _mean_of(it.trained for it in results[-2:]) - began
        held_out = _mean_of(it.score for it in results[-2:]) - results[0].score
        left = max(0.0, 1.0 - results[0].score.value)  # for these to gain
        behind = Measured(
            MAX_LEFT_BEHIND * min(trained.value, left) - held_out.value,
            math.hypot(MAX_LEFT_BEHIND * trained.error, held_out.error),
        )
        if not trained.is_above(0.0, NUM_ERRORS) or not behind.is_above(0.0, NUM_ERRORS_OF_FEW):
            return None
        found.append(
            f"the accuracy of training has risen by {trained}, that of held-out prompts "
            f"{_of(family)}by {held_out}: {_BY_HEART}, and whether these prompts ask for the same"
        )
    return found[0] if found else None


_BY_HEART: Final = (
    "it learns its prompts by heart, or to please the reward; take more prompts, an earlier model "
    "or a stricter reward, and look whether reference answers belong to their prompts"
)


RULES: Final[dict[str, Rule]] = {
    "disagreement": disagreement,
    "skipped updates": skipped_updates,
    "one answer a prompt": one_answer_a_prompt,
    "too small steps": too_small_steps,
    "too wide steps": too_wide_steps,
    "cut answers": cut_answers,
    "endless answers": endless_answers,
    "constant reward": constant_reward,
    "too easy": too_easy,
    "stalled": stalled,
    "no signal": no_signal,
    "falling evaluation": falling_evaluation,
    "by heart": by_heart,
    "fallen reward": fallen_reward,
    "reward by chance": reward_by_chance,
}
"""By name; a cause stands before what follows from it."""


def _lost_variety(course: Course, is_signal_lost: bool) -> str | None:
    """What tells that each prompt gets one kind of answer by now, and not a right one."""
    if course.is_solved():
        return None
    if is_signal_lost and not _is_paid_alike(course):
        return (
            f"{course.signal():.0%} of the prompts have answers of different rewards, and "
            f"{course.most_signal:.0%} had before"
        )
    before = mean(course.first, lambda it: number(it.train.get("entropy")))
    if not course.entropies or course.rises():
        return None
    now = fmean(course.entropies)
    if not now < MIN_ENTROPY * before:
        return None
    return f"the entropy is {now:.2g}, and was {before:.2g} at first"


def _standing(course: Course) -> list[StepMetrics]:
    """The newer half of the run's steps, if the reward is no higher in them than before; else none.

    Learning that stands for a few steps often goes on: it has to stand as long as it has learned.
    """
    num = min(max(2 * NUM_STEPS, course.num_steps // 2), MAX_STANDING)
    if len(course.recent) < num + NUM_STEPS:
        return []
    rises = (course.rise_of_late(it).is_above(0.0, MAYBE) for it in (NUM_STEPS, num))
    return [] if any(rises) else [*course.recent][-num:]


def _is_paid_alike(course: Course) -> bool:
    """Whether nearly all answers earn the same, and not those of each prompt something else."""
    if course.reward_std() == 0:  # in records of an earlier areal_sc: means of steps do not differ
        has_fallen = course.best_reward.value > course.reward().value
        return course.signal(course.first) < MIN_SIGNAL or not has_fallen
    is_right = course.accuracy().value
    has_never_learned = course.signal(course.first) < MIN_SIGNAL and is_right < MIN_SIGNAL
    return has_never_learned or course.has_lost_spread() or not course.differs_by_prompt()


def _stopped(metrics: StepMetrics) -> float:
    return number(metrics.workflow.get("stopped"))


def _mean_of(numbers: Iterable[Measured]) -> Measured:
    its = list(numbers)
    return Measured(fmean(it.value for it in its), math.hypot(*(it.error for it in its)) / len(its))


def _of(family: str) -> str:
    return f"of {family} " if family else ""


class LearningHealth(Tracker):
    """Follows a run.

    Args:
        dtype: of the trainer's computation.
    """

    def __init__(self, dtype: Dtype = Dtype.float32) -> None:
        self._course = Course(MAX_MISMATCH[dtype])
        self._num_evaluations = 0
        self._cause: tuple[str, str] | None = None  # a rule, and what it has seen
        self._last_seen = 0  # the step at which it spoke last
        self._untold: list[str] = []

    @property
    def complaints(self) -> dict[str, str]:
        """The most likely cause of what is wrong, by the name of its rule.

        It stands until it has not been seen for `NUM_STEPS_KEPT` steps.
        """
        return {} if self._cause is None else dict([self._cause])

    def remember(self, history: History) -> None:
        """Judges what is new in the records of a run, each evaluation after its step."""
        for metrics in history.steps[self._course.num_steps :]:
            self._remember_evaluations(history, metrics.step)
            self.on_step(metrics)
        if history.steps:
            self._remember_evaluations(history, history.steps[-1].step + 1)

    def _remember_evaluations(self, history: History, before_step: int) -> None:
        for result in history.evaluations[self._num_evaluations :]:
            if result.step >= before_step:
                return
            self.on_evaluation(result)

    def take_untold(self) -> list[str]:
        """What has gone wrong since this was asked last."""
        untold, self._untold = self._untold, []
        return untold

    def on_step(self, metrics: StepMetrics) -> None:
        """Judges the newest steps."""
        self._course.add_step(metrics)
        self._judge()

    def on_evaluation(self, result: EvaluationResult) -> None:
        """Judges held-out prompts beside the training so far."""
        self._num_evaluations += 1
        self._course.add_evaluation(result)
        self._judge()

    def _judge(self) -> None:
        now = self._course.num_steps
        if now < NUM_STEPS:
            return
        if now - self._last_seen >= NUM_STEPS_KEPT:
            self._cause = None
        for name, rule in RULES.items():
            before = None if self._cause is None else self._cause[0]
            if text := rule(self._course):
                if name != before:
                    self._untold.append(text)
                self._cause, self._last_seen = (name, text), now
                return
            if name == before:
                return  # what follows from it may still be seen
