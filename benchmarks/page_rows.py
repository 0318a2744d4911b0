"""Rows of a large run on the page: how long they take to read, filter, search and open.

reading     the records of all rows into the page's database, from nothing; then 1 % more rows
queries     each filter and order, and the first 50 rows of it, as JSON; none is asked twice
searches    until the first 50 rows are found, or all are searched: of a word that every tenth
            row has, of one that 50 rows have, and of one that none has
opening     rows drawn at random: their group with all texts, and the tokens of the row, as JSON

The text is that of Python's standard library, by a tokenizer of 32,768 byte pairs trained on it.
"""

from __future__ import annotations

import random
import resource
import statistics
import sysconfig
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np
import report
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from areal_sc.page.followed_run import FollowedRun
from areal_sc.page.row_index import Fate
from areal_sc.page.row_search import recorded_query
from areal_sc.records.blocks import block
from areal_sc.records.record_files import FilesOfProcess, Series
from areal_sc.records.recorded_rows import RecordedGroup, numbers_of, pack_group, pack_tokens
from areal_sc.run.run_folder import RunFolder
from areal_sc.system.json_lines import to_json

GROUP_SIZE = 8
PROMPT_TOKENS = 200
RARE, OFTEN = "Quetzalcoatl", "Popocatepetl"
QUERIES: tuple[dict[str, str], ...] = (
    {},
    {"sort": "-reward"},
    {"sort": "num_tokens"},
    {"sort": "-staleness", "worker": "rollout/1"},
    {"sort": "-group_reward", "reward": "0.25..0.75"},
    {"sort": "-metrics.accuracy", "metrics.length": "0.5.."},
    {"sort": "first_version", "version": "300..310"},
    {"sort": "step", "outcome": "rejected", "cause": "stale"},
    {"sort": "-time", "dataset": "0", "index": "17"},
)


@dataclass
class DrawnRow:
    """A row whose tokens are arrays."""

    input_ids: np.ndarray
    loss_mask: np.ndarray
    behavior_logprobs: np.ndarray
    versions: np.ndarray
    reward: float
    metrics: dict[str, float]
    returns: tuple[tuple[float, int], ...] = ()
    shaping: float = 0.0
    output: str = ""


def main() -> None:
    parser = report.make_parser(__doc__)
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--tokens", type=int, default=1400, help="of a row, with its prompt")
    parser.add_argument("--open", type=int, default=200, help="rows that are opened")
    arguments = report.parse(parser, rows=800, tokens=300, open=10)
    with TemporaryDirectory(prefix="areal-sc-benchmark-") as folder:
        metrics = measured(Path(folder), arguments.rows, arguments.tokens, arguments.open)
    settings = {"rows": arguments.rows, "tokens": arguments.tokens}
    report.print_metrics("Rows on the page", settings, metrics)
    report.write(metrics, arguments.json)


def measured(folder: Path, num_rows: int, num_tokens: int, num_opened: int) -> dict[str, float]:
    run_folder = RunFolder(folder / "run")
    with run_folder:
        run_folder.open(config_text="actor:\n  dtype: float32\n")
    tokenizer, text = text_tokens(1 << 20 if num_rows < 10_000 else 1 << 23)
    (run_folder.path / "model").mkdir()
    tokenizer.save(str(run_folder.path / "model" / "tokenizer.json"))
    record(run_folder.records, tokenizer, text, range(num_rows // GROUP_SIZE), num_tokens)
    report.say("the rows are recorded")
    run = FollowedRun(run_folder.path, "run", folder / "cache")
    read, _ = timed(lambda: run.read_rows(1e9))
    metrics = {"read_s": read.wall, "read_cpu_s": read.cpu}
    metrics["database_bytes"] = sum(it.stat().st_size for it in (folder / "cache").iterdir())
    metrics["records_bytes"] = sum(it.stat().st_size for it in run_folder.records.iterdir())
    fates = {
        (group, 0): Fate("rejected", None, "stale") if group % 50 == 0 else trained_by(group)
        for group in range(num_rows // GROUP_SIZE)
    }
    metrics["fates_s"] = timed(lambda: run.index.note_fates(fates))[0].wall
    more = range(num_rows // GROUP_SIZE, num_rows // GROUP_SIZE + max(1, num_rows // 800))
    record(run_folder.records, tokenizer, text, more, num_tokens)
    again = FollowedRun(run_folder.path, "run", folder / "cache")
    metrics["read_more_s"] = timed(lambda: again.read_rows(1e9))[0].wall
    queries = [timed(lambda words=words: asked(again, words))[0] for words in QUERIES]
    metrics |= summed_up("query", queries)
    for name, wanted in (("every_tenth", OFTEN), ("fifty", RARE), ("none", "no such words")):
        took, found = timed(lambda wanted=wanted: searched(again, wanted))
        metrics[f"search_{name}_s"], metrics[f"search_{name}_cpu_s"] = took
        metrics[f"search_{name}_rows"] = found
    metrics |= opened(again, num_rows, num_opened)
    kibi = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    metrics["resident_most_bytes"] = 1024.0 * kibi
    return metrics


def text_tokens(num_bytes: int) -> tuple[Tokenizer, np.ndarray]:
    """A tokenizer, and the tokens of much text."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("**/*.py"))
    random.Random(0).shuffle(files)
    texts, total = list[str](), 0
    for path in files:
        texts.append(path.read_text(errors="replace"))
        total += len(texts[-1])
        if total > num_bytes:
            break
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=32_768, show_progress=False, initial_alphabet=alphabet, special_tokens=["<end>"]
    )
    tokenizer.train_from_iterator(texts, trainer)
    encoded = tokenizer.encode_batch(texts, add_special_tokens=False)
    return tokenizer, np.concatenate([np.asarray(it.ids, np.int32) for it in encoded])


def record(
    folder: Path, tokenizer: Tokenizer, text: np.ndarray, groups: Sequence[int], num_tokens: int
) -> None:
    """Groups as two workers record them."""
    words = {name: np.asarray(tokenizer.encode(f" {name}").ids) for name in (RARE, OFTEN)}
    rng = np.random.default_rng(groups[0])
    num_rows = len(groups) * GROUP_SIZE
    num_rare = min(50, num_rows) if groups[0] == 0 else 0
    rare = set(rng.choice(num_rows, num_rare, replace=False).tolist())
    writers = [FilesOfProcess(folder, f"rollout/{it}", 4 << 30) for it in range(2)]
    with closing(writers[0]), closing(writers[1]):
        for place, group in enumerate(groups):
            prompt = drawn(rng, text, PROMPT_TOKENS)
            version = group // 32
            rows = []
            for episode in range(GROUP_SIZE):
                number = place * GROUP_SIZE + episode
                ids = np.concatenate([prompt, drawn(rng, text, num_tokens - PROMPT_TOKENS)])
                for name, has in ((RARE, number in rare), (OFTEN, number % 10 == 0)):
                    if has:
                        at = int(rng.integers(PROMPT_TOKENS, num_tokens - 20))
                        ids[at : at + len(words[name])] = words[name]
                rows.append(row_of(rng, ids, version))
            head = RecordedGroup(
                worker=f"rollout/{group % 2}",
                group=group,
                attempt=0,
                dataset=0,
                index=group % 4096,
                prompt=f"row {group % 4096} of the data",
                admitted_version=version,
                began=1e9 + group,
                took_s=20.0,
                rows=tuple(numbers_of(row, it, 0) for it, row in enumerate(rows)),
            )
            content = block(pack_group(head), pack_tokens(rows))
            writers[group % 2].append(Series.rows, content)


def drawn(rng: np.random.Generator, text: np.ndarray, num_tokens: int) -> np.ndarray:
    begin = int(rng.integers(len(text) - num_tokens))
    return text[begin : begin + num_tokens]


def row_of(rng: np.random.Generator, ids: np.ndarray, version: int) -> DrawnRow:
    mask = np.arange(len(ids)) >= PROMPT_TOKENS
    versions = np.where(mask, version + (np.arange(len(ids)) > int(rng.integers(len(ids)))), -1)
    logprobs = np.where(mask, -rng.exponential(0.5, len(ids)), 0.0)
    reward = float(rng.integers(5)) / 4
    metrics = {"accuracy": reward, "length": float(rng.random()), "stopped": 1.0}
    return DrawnRow(ids, mask, logprobs, versions, reward, metrics)


def trained_by(group: int) -> Fate:
    return Fate("trained", group // 32 + 3, "")


class Took(NamedTuple):
    """Seconds that passed, and CPU seconds of this process, which a busy machine tells, too."""

    wall: float
    cpu: float


def timed(call: Callable[[], Any]) -> tuple[Took, Any]:
    began_s, begun_cpu_s = time.perf_counter(), time.process_time()
    found = call()
    return Took(time.perf_counter() - began_s, time.process_time() - begun_cpu_s), found


def summed_up(name: str, took: Sequence[Took]) -> dict[str, float]:
    """In milliseconds."""
    return {
        f"{name}_median_ms": 1e3 * statistics.median(it.wall for it in took),
        f"{name}_worst_ms": 1e3 * max(it.wall for it in took),
        f"{name}_median_cpu_ms": 1e3 * statistics.median(it.cpu for it in took),
        f"{name}_worst_cpu_ms": 1e3 * max(it.cpu for it in took),
    }


def asked(run: FollowedRun, words: dict[str, str], at: int = 0, limit: int = 50) -> Any:
    found = run.recorded_rows(recorded_query(words), at, limit)
    to_json(found)
    return found


def searched(run: FollowedRun, wanted: str) -> float:
    """Searches until 50 rows are found or all are searched; returns how many are found."""
    num_found, at = 0, 0
    while at is not None and num_found < 50:
        found = asked(run, {"text": wanted}, at, 50 - num_found)
        num_found, at = num_found + len(found["rows"]), found["next"]
    return float(num_found)


def opened(run: FollowedRun, num_rows: int, num_opened: int) -> dict[str, float]:
    rng = random.Random(1)
    times = []
    for _ in range(num_opened):
        group, episode = rng.randrange(num_rows // GROUP_SIZE), rng.randrange(GROUP_SIZE)
        took, found = timed(
            lambda group=group, episode=episode: (
                to_json(run.recorded(group)),
                to_json(run.tokens(group, 0, episode, 0)),
            )
        )
        assert len(found[1]) > 1000
        times.append(took)
    return summed_up("open", times)


if __name__ == "__main__":
    main()
