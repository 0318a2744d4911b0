"""A model learns to search before it answers, in Search-R1's protocol (arXiv:2503.09516).

    make real-model    # writes the model to .venv-models/SmolLM2-135M-Instruct
    python examples/recipes/search.py --config configs/search.yaml

The model writes `<search>words</search>`, gets the best passages between `<information>` tags, and
answers between `<answer>` tags. The passages tell of people who do not exist, so that nothing but
a search finds the answer. They are ranked by BM25 in the worker's own process.
"""

from __future__ import annotations

import random
import re
import sys
from collections import Counter
from functools import cache
from math import log
from typing import Any

from tagged_turns import TaggedTurns

from areal_sc import GRPOConfig, PPOTrainer, load_config, run_script

FIRST = ["Ada", "Boris", "Clara", "Dmitri", "Elena", "Felix", "Greta", "Hugo", "Ines", "Jonas"]
LAST = ["Abel", "Brunner", "Castell", "Dorn", "Engel", "Grau", "Hollis", "Krall", "Lunt", "Novak"]
CITIES = ["Lisbon", "Oslo", "Vienna", "Prague", "Dublin", "Athens", "Warsaw", "Madrid", "Cairo"]
JOBS = ["baker", "pilot", "painter", "nurse", "lawyer", "farmer", "tailor", "sailor", "miner"]
QUESTIONS = {
    "city": "In which city was {name} born?",
    "job": "What was the profession of {name}?",
    "year": "In which year was {name} born?",
}
NUM_HELD_OUT = 64

INSTRUCTION = """\
Search for facts with <search> and </search>. What is found comes between <information> and \
</information>. Then answer with one word between <answer> and </answer>.

Question: In which city was Zoe Quist born?
<search>Zoe Quist born</search>
<information>Zoe Quist was born in Turin in 1903 and worked as a singer.</information>
<answer>Turin</answer>

Question: {question}
"""


@cache
def people() -> dict[str, dict[str, str]]:
    """What is true of each person; the same in every process."""
    draw = random.Random(0)
    return {
        f"{first} {last}": {
            "city": draw.choice(CITIES),
            "job": draw.choice(JOBS),
            "year": str(draw.randint(1850, 1990)),
        }
        for first in FIRST
        for last in LAST
    }


def questions() -> list[dict[str, Any]]:
    """A row for each person and fact, in an order that is always the same."""
    rows = [
        {"prompt": question.format(name=name), "answer": facts[kind]}
        for name, facts in people().items()
        for kind, question in QUESTIONS.items()
    ]
    return random.Random(0).sample(rows, len(rows))


class BM25:
    """Passages by how well they fit a query (Robertson and Zaragoza, 2009; k1 = 1.5, b = 0.75)."""

    def __init__(self, passages: list[str]) -> None:
        self.passages = passages
        self.counts = [Counter(words_of(passage)) for passage in passages]
        self.mean_length = sum(map(Counter.total, self.counts)) / len(passages)
        self.num_with = Counter(word for counts in self.counts for word in counts)

    def best(self, query: str, number: int) -> list[str]:
        """The passages of the highest scores; none that shares no word with the query."""
        scores = [self._score(set(words_of(query)), counts) for counts in self.counts]
        order = sorted(range(len(scores)), key=lambda place: -scores[place])
        return [self.passages[place] for place in order[:number] if scores[place] > 0]

    def _score(self, query: set[str], counts: Counter[str]) -> float:
        length = 0.25 + 0.75 * counts.total() / self.mean_length
        total = 0.0
        for word in query & counts.keys():
            rarity = log(1 + (len(self.counts) + 0.5) / (self.num_with[word] + 0.5))
            total += rarity * counts[word] * 2.5 / (counts[word] + 1.5 * length)
        return total


def words_of(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())


@cache
def corpus() -> BM25:
    """The passages, indexed once in each worker."""
    return BM25(
        [
            f"{name} was born in {facts['city']} in {facts['year']} and worked as a {facts['job']}."
            for name, facts in people().items()
        ]
    )


class Search(TaggedTurns):
    """Questions that are answered after a search.

    Args:
        num_passages: that a search finds.
    """

    ask_tag = "search"
    result_tag = "information"

    def __init__(self, max_uses: int = 2, num_passages: int = 1) -> None:
        super().__init__(max_uses)
        self.num_passages = num_passages

    async def text_of(self, question: str) -> str:
        return INSTRUCTION.format(question=question)

    async def use(self, asked: str) -> str:
        return " ".join(corpus().best(asked, self.num_passages)) or "nothing"


def main(argv: list[str]) -> None:
    config = load_config(argv, GRPOConfig)
    rows = questions()
    PPOTrainer(config).fit(Search(), rows[NUM_HELD_OUT:], evaluation_prompts=rows[:NUM_HELD_OUT])


if __name__ == "__main__":
    sys.exit(run_script(main))
