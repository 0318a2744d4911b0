"""`samples RUN_DIR`: what the model of a run read and wrote, also while the run goes on."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, groupby
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.text import Text

from areal_sc.commands.arguments import add_run_dir, number
from areal_sc.errors import CommandError
from areal_sc.page.followed_run import READ_S, FollowedRun
from areal_sc.page.row_search import recorded_query
from areal_sc.records.recorded_calls import recorded_text
from areal_sc.records.recorded_pictures import RecordedPicture
from areal_sc.records.samples import Place, Sample
from areal_sc.run.run_folder import check_is_folder
from areal_sc.trainer.evaluation.kept_answers import as_samples, read_answers

COMMAND: Final = dict(
    help="show what the model of a run writes",
    description="Shows prompts of a run with the best and the worst answer of the model to "
    "each, and their rewards: those of the newest step, unless --step or --last says "
    "otherwise. It reads the records of the run, which may go on meanwhile. Of a folder of "
    "`evaluate` it shows all answers.",
)

_OLD_FILE: Final = "samples.jsonl"
"""Earlier versions of areal_sc have kept the best and the worst answers there, one a line."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    add_run_dir(parser)
    above_0 = number("a number above 0", 1)
    parser.add_argument("--step", type=int, metavar="N", help="those of training step N")
    parser.add_argument("--last", type=above_0, metavar="N", help="the N newest answers")
    parser.add_argument(
        "--groups", type=above_0, default=2, metavar="N", help="prompts of each step; default: 2"
    )
    place = parser.add_mutually_exclusive_group()
    for word in (Place.best, Place.worst):
        place.add_argument(
            f"--{word}",
            dest="place",
            action="store_const",
            const=word,
            help=f"only the {word} answer to each prompt",
        )


def run(arguments: argparse.Namespace) -> None:
    """Raises: CommandError: there are no such samples. RunFolderError: they cannot be read."""
    run_dir: Path = arguments.run_dir.expanduser().absolute()
    check_is_folder(run_dir)
    answers = as_samples(read_answers(run_dir))
    steps = iter([answers]) if answers else _recorded(run_dir, arguments.step, arguments.groups)
    samples = chosen(steps, arguments.place, arguments.last)
    sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]  # it is a file
    console = Console()
    for part in sample_view(samples, console):
        console.print(part, highlight=False)


def chosen(
    steps: Iterable[Sequence[Sample]], place: Place | None, num_last: int | None
) -> list[Sample]:
    """The samples of the first step or, with `num_last`, so many of the newest ones.

    Args:
        steps: the samples of each, the newest step first.
        place: only such answers, and those of groups whose answers are equal.
    """
    found: list[Sample] = []
    for samples in steps:
        found = [it for it in samples if place is None or it.place in (place, Place.equal)] + found
        if num_last is None or len(found) >= num_last:
            break
    return found[-num_last:] if num_last else found


def _recorded(run_dir: Path, step: int | None, num_groups: int) -> Iterator[list[Sample]]:
    """The samples of each recorded step, or of one, the newest step first.

    Raises: CommandError: there are none. RunFolderError: they cannot be read.
    """
    run = FollowedRun(run_dir, run_dir.name)
    words = {"step": "1.." if step is None else str(step), "sort": "-step"}
    while not (told := run.read_rows(READ_S))["is_whole"]:
        share = told["num_read_bytes"] / max(1, told["num_bytes"])
        sys.stderr.write(f"the records are being read: {share:.0%}\n")
    rows = chain.from_iterable(run.every_recorded_row(recorded_query(words)))
    trained = (row for row in rows if row["outcome"] != "undone")
    steps = groupby(trained, key=lambda row: row["step"])
    first = next((_samples_of_step(of_step, num_groups) for _, of_step in steps), None)
    if first is None:
        raise CommandError(_why_none(run, run_dir, step))
    if not run.has_texts:
        raise CommandError(
            "the answers cannot be read without the tokenizer of the run's model: there is no "
            f"tokenizer.json in {', '.join(map(str, run.model_folders))}"
        )
    yield first
    for _, of_step in steps:
        yield _samples_of_step(of_step, num_groups)


def _samples_of_step(rows: Iterable[dict[str, Any]], num_groups: int) -> list[Sample]:
    """Those of at most `num_groups` groups, at even distances: of old groups and of young ones."""
    groups: dict[int, list[dict[str, Any]]] = {}
    for row in sorted(rows, key=lambda row: (row["group"], row["episode"], row["row"])):
        groups.setdefault(row["group"], []).append(row)
    of_groups = [*groups.values()]
    num_groups = min(num_groups, len(of_groups))
    picked = [of_groups[i * len(of_groups) // num_groups] for i in range(num_groups)]
    return [sample for group in picked for sample in _best_and_worst(group)]


def _best_and_worst(group: Sequence[dict[str, Any]]) -> list[Sample]:
    """The first row of a group whose rewards are all the same, else the best and the worst one."""
    best = max(group, key=lambda row: row["reward"])
    worst = min(group, key=lambda row: row["reward"])
    if best["reward"] == worst["reward"]:
        return [_sample(best, Place.equal)]
    return [_sample(best, Place.best), _sample(worst, Place.worst)]


def _sample(row: dict[str, Any], place: Place) -> Sample:
    told = {name: row[name] for name in Sample.__struct_fields__ if name in row}
    texts = {name: recorded_text(row[name]) for name in ("prompt", "answer")}
    pictures = tuple(str(RecordedPicture(**it)) for it in row["pictures"])
    return Sample(**{**told, **texts, "place": place, "pictures": pictures})


def _why_none(run: FollowedRun, run_dir: Path, step: int | None) -> str:
    ends = [
        run.recorded_rows(recorded_query({"step": "1..", "sort": sort}), 0, 1)["rows"]
        for sort in ("step", "-step")
    ]
    if step is not None and all(ends):
        first, last = (rows[0]["step"] for rows in ends)
        return f"there are no samples of step {step}, only of steps from {first} to {last}"
    if (run_dir / _OLD_FILE).exists():
        return (
            f"{run_dir} has no records of trained rows: an earlier areal_sc kept answers in its "
            f"{_OLD_FILE}, which has a JSON object a line"
        )
    return (
        f"there are no samples in {run_dir}: the run has not begun its first training step, or "
        "what it recorded is lost or gone (records.max_bytes)"
    )


_STYLES = {Place.best: "green", Place.worst: "red", Place.equal: "yellow"}
_INDENT = len("  prompt  ")


def sample_view(samples: Sequence[Sample], console: Console) -> Iterator[Text]:
    """The lines of samples with all of their texts; an empty one between groups."""
    groups = groupby(samples, key=lambda sample: (sample.step, sample.group))
    for place, (_, group) in enumerate(groups):
        if place:
            yield Text()
        yield from _group_view(list(group), console)


def _group_view(samples: Sequence[Sample], console: Console) -> Iterator[Text]:
    """The lines of samples of one group: a headline, the prompt, the answers; none is too wide."""
    first = samples[0]
    headline = Text(f"step {first.step}, group {first.group}: ", style="bold")
    if first.place is Place.equal:
        headline.append(f"reward {first.reward:.4g} for every answer", style="not bold")
    else:
        headline.append(f"mean reward {first.group_reward:.4g}", style="not bold")
    headline.truncate(console.width, overflow="ellipsis")
    yield headline
    prompt = None
    for sample in samples:
        if sample.prompt != prompt:  # an agent's rows have prompts of their own
            prompt = sample.prompt
            yield from _labelled("prompt", "dim", prompt, console)
            for picture in sample.pictures:
                yield from _labelled("picture", "dim", picture, console)
        style = _STYLES[sample.place]
        yield from _labelled(sample.place, style, sample.answer, console)
        if sample.output:
            yield from _labelled("output", "dim", sample.output, console)
        yield from _labelled("", "", _numbers(sample), console)


def _labelled(label: str, style: str, text: str, console: Console) -> Iterator[Text]:
    """A text beside its label."""
    width = max(console.width - _INDENT, 1)
    text_style = "" if label else "dim"
    for line in Text(_printable(text), text_style).wrap(console, width, overflow="fold"):
        labelled = Text.assemble((f"  {label}".ljust(_INDENT), style), line)
        labelled.rstrip()
        yield labelled
        label = ""


def _printable(text: str) -> str:
    """Characters that would steer the terminal are shown by their escapes: a model writes any."""
    return "".join(c if c.isprintable() or c in "\n\t" else ascii(c)[1:-1] for c in text)


def _numbers(sample: Sample) -> str:
    versions = f"version {sample.first_version}"
    if sample.last_version != sample.first_version:
        versions += f" to {sample.last_version}"
    return ", ".join(
        [
            f"reward {sample.reward:.4g}",
            *(f"{_printable(name)} {value:.4g}" for name, value in sample.metrics.items()),
            f"{sample.num_tokens} tokens",
            versions,
            f"staleness {sample.staleness}",
        ]
    )
