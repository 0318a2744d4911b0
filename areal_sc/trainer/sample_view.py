"""Samples as a reader sees them on a terminal of any width."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

from rich.console import Console
from rich.text import Text

from areal_sc.records.samples import Place, Sample

_STYLES = {Place.best: "green", Place.worst: "red", Place.equal: "yellow"}
_INDENT = len("  prompt  ")


def sample_view(samples: Sequence[Sample], console: Console) -> Iterator[Text]:
    """The lines of samples with all of their texts; an empty one between groups."""
    groups = groupby(samples, key=lambda sample: (sample.step, sample.group))
    for number, (_, group) in enumerate(groups):
        if number:
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
