"""What generation and training cost on accelerators: the model of `scale.py`, as numbers and rules.

A *server* is the devices that hold the model once for generation. Its running answers get their
tokens in turns; one turn takes `turn_s + turn_s_per_answer * n`, with n of them running: reading
the weights, and reading the answers' keys and values. Further ones wait. New weights stop it for
`load_s`, and for computing the keys and values of all its running answers anew, at `prefill` tokens
a second. Answers that begin have their prompt computed at once, for nothing.

A training step takes `tokens / (devices * train)` seconds and `step_s`; the recomputation of
log-probabilities is part of `train`. Weights arrive `publish_s` after the step, and generation goes
on until then.
"""

from __future__ import annotations

import asyncio
import heapq
import random
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from areal_sc.engines.servers.places import BusyTime


@dataclass
class Costs:
    """The job, the devices and what they do in a second; any of it can be set by a YAML.

    The defaults are a model of 7.6 billion parameters in bfloat16 on devices of 80 GB, 3.3 TB/s
    and 990 TFLOP/s: 4.6 ms to read the weights, and twice that with all else of a turn; 57 kB of
    keys and values a token, 5,000 of them an answer; half of the peak for prefill; 0.35 of it for
    training, which is 7,600 tokens a second, and a third more work for log-probabilities and
    attention.

    Attributes:
        devices, generating_share: of all devices; the synchronous side uses all in each phase.
        prompts, answers: a training step is made of `prompts * answers` rows.
        median_tokens, sigma, max_tokens: of an answer, lognormal and cut off.
        prompt_tokens: of a prompt.
        server_devices, server_answers: of a server, and how many answers it runs at one time.
        turn_s, turn_s_per_answer, prefill, load_s: see above; prefill in tokens a second.
        train: tokens a second and device.
        step_s, publish_s: see above.
    """

    devices: int = 512
    generating_share: float = 0.75
    prompts: int = 512
    answers: int = 16
    median_tokens: float = 6000.0
    sigma: float = 0.9
    max_tokens: int = 27_648
    prompt_tokens: int = 500
    server_devices: int = 1
    server_answers: int = 256
    turn_s: float = 0.009
    turn_s_per_answer: float = 0.0001
    prefill: float = 32_000.0
    load_s: float = 1.0
    train: float = 5000.0
    step_s: float = 2.0
    publish_s: float = 3.0

    def draw_length(self, rng: random.Random) -> int:
        """Tokens of one answer."""
        drawn = self.median_tokens * rng.lognormvariate(0.0, self.sigma)
        return max(1, min(self.max_tokens, round(drawn)))

    def training_s(self, num_tokens: int, num_devices: int) -> float:
        return self.step_s + num_tokens / (num_devices * self.train)

    def least_generation_s(self, num_tokens: float, num_servers: int) -> float:
        """Of so many tokens by servers that are always full and never stopped."""
        turn_s = self.turn_s + self.turn_s_per_answer * self.server_answers
        return num_tokens * turn_s / (self.server_answers * num_servers)


class Server:
    """Generates answers; all that run get their tokens at the same pace.

    The pace changes with each answer that begins or ends, so progress is counted in turns: an
    answer ends when the server has made as many turns as it has tokens.

    Attributes:
        busy: how long it had answers, and how many.
        num_tokens: of answers that ended.
        num_updates, num_recomputed_tokens: of weights, and what was computed anew for them.
        load_s, recompute_s: that updates have stopped it.
    """

    def __init__(self, costs: Costs) -> None:
        self.busy = BusyTime(_now_s)
        self.num_tokens = 0
        self.num_updates = 0
        self.num_recomputed_tokens = 0.0
        self.load_s = self.recompute_s = 0.0
        self._costs = costs
        self._turns = 0.0
        self._at_s = 0.0
        self._stopped_until_s = 0.0
        self._running: list[tuple[float, int, float, Callable[[Spans], None]]] = []
        self._waiting: list[tuple[int, Callable[[Spans], None]]] = []
        self._sum_begun = 0.0  # of the turns at which running answers began
        self._num = 0
        self._versions: list[tuple[float, int]] = [(0.0, 0)]  # turns from which on; version
        self._timer: asyncio.TimerHandle | None = None

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_answers(self) -> int:
        """That run or wait."""
        return len(self._running) + len(self._waiting)

    def add(self, num_tokens: int, on_end: Callable[[Spans], None]) -> None:
        """An answer begins, or waits; `on_end` gets the versions of its tokens."""
        self._waiting.append((num_tokens, on_end))
        self._go_on()

    def update(self, version: int) -> None:
        """New weights: the server stops, and goes on under them."""
        self._pass_time()
        costs, num = self._costs, len(self._running)
        num_tokens = num * (costs.prompt_tokens + self._turns) - self._sum_begun
        self.num_updates += 1
        self.num_recomputed_tokens += num_tokens
        self.load_s += costs.load_s
        self.recompute_s += num_tokens / costs.prefill
        self._stopped_until_s = _now_s() + costs.load_s + num_tokens / costs.prefill
        self._versions.append((self._turns, version))
        self._go_on()

    def _go_on(self) -> None:
        """Ends what has ended, begins what has room, and looks again at the next end."""
        self._pass_time()
        self.busy.note_running(len(self._running))
        while self._running and self._running[0][0] <= self._turns + 1e-6:
            _, _, begun, on_end = heapq.heappop(self._running)
            num_tokens = round(self._turns - begun)
            self.num_tokens += num_tokens
            self._sum_begun -= begun
            on_end(self._spans(begun))
        while self._waiting and len(self._running) < self._costs.server_answers:
            num_tokens, on_end = self._waiting.pop(0)
            self._num += 1
            heapq.heappush(
                self._running, (self._turns + num_tokens, self._num, self._turns, on_end)
            )
            self._sum_begun += self._turns
        self.busy.note_running(len(self._running))
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._running:
            left_s = (self._running[0][0] - self._turns) * self._turn_s
            begins_s = max(_now_s(), self._stopped_until_s)
            self._timer = asyncio.get_running_loop().call_at(begins_s + left_s, self._go_on)

    def _pass_time(self) -> None:
        now_s = _now_s()
        if self._running:
            passed_s = now_s - max(self._at_s, min(now_s, self._stopped_until_s))
            self._turns += passed_s / self._turn_s
        self._at_s = now_s

    @property
    def _turn_s(self) -> float:
        return self._costs.turn_s + self._costs.turn_s_per_answer * len(self._running)

    def _spans(self, begun: float) -> Spans:
        """(version, number of tokens) of an answer that ends now."""
        first = bisect_right(self._versions, (begun, 1 << 62)) - 1
        edges = [begun, *(at for at, _ in self._versions[first + 1 :]), self._turns]
        versions = [version for _, version in self._versions[first:]]
        counts = [round(end) - round(start) for start, end in pairwise(edges)]
        spans = [(v, n) for v, n in zip(versions, counts, strict=True) if n > 0]
        return spans or [(versions[-1], 1)]


Spans = Sequence[tuple[int, int]]


def _now_s() -> float:
    return asyncio.get_running_loop().time()
