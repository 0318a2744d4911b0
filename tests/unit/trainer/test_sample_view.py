"""What a reader sees of samples."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Sequence
from types import SimpleNamespace

import pytest
from rich.cells import cell_len
from rich.console import Console
from sample_rows import sample
from unit.trainer.conftest import shown as shown_by

from areal_sc.records.metrics import StepMetrics
from areal_sc.records.samples import Place, Sample
from areal_sc.trainer.display import make_display
from areal_sc.trainer.run import Run
from areal_sc.trainer.sample_view import sample_view

QUESTION = "How many letters does the word strawberry have, and why?\nThink before you answer. "
LONG = [
    sample(12, prompt=QUESTION * 3, answer="It has ten letters. " * 30),
    sample(12, prompt=QUESTION * 3, answer="草莓" * 300, place=Place.worst, reward=0.0),
]


def shown(samples: Sequence[Sample], width: int) -> str:
    console = Console(width=width, file=io.StringIO(), force_terminal=False)
    for part in sample_view(samples, console):
        console.print(part, highlight=False)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_a_group_has_its_prompt_once_and_each_answer_with_its_numbers() -> None:
    worst = sample(12, place=Place.worst, reward=0.0, answer="3$", first_version=9, staleness=2)
    assert shown([sample(12), worst, sample(13, place=Place.equal, metrics={})], 80) == (
        "step 12, group 3: mean reward 0.25\n"
        "  prompt  3,8>\n"
        "  best    8$\n"
        "          reward 1, accuracy 1, completion_tokens 5, 9 tokens, version 11,\n"
        "          staleness 0\n"
        "  worst   3$\n"
        "          reward 0, accuracy 1, completion_tokens 5, 9 tokens, version 9 to 11,\n"
        "          staleness 2\n"
        "\n"
        "step 13, group 3: reward 1 for every answer\n"
        "  prompt  3,8>\n"
        "  equal   8$\n"
        "          reward 1, 9 tokens, version 12, staleness 0\n"
    )


def test_empty_lines_keep_their_label() -> None:
    text = shown([sample(prompt="", answer="\n\n8", metrics={})], 80)
    assert text.splitlines()[1:5] == ["  prompt", "  best", "", "          8"]


@pytest.mark.parametrize("width", [60, 100, 200])
def test_all_of_a_long_text_is_shown_on_every_width(width: int) -> None:
    text = shown(LONG, width)
    assert max(map(cell_len, text.splitlines())) <= width
    assert text.count("草莓") + len(re.findall(r"草\s+莓", text)) == 300
    assert text.count("letters.") == 30
    assert text.count("strawberry") == 3


def test_what_a_model_writes_does_not_steer_the_terminal() -> None:
    text = shown([sample(answer="\x1b[2Jred\r\x07[bold]\ud800\u202e")], 80)
    assert "\\x1b[2Jred\\r\\x07[bold]\\ud800\\u202e" in text
    assert "\x1b" not in text


@pytest.mark.parametrize("width", [60, 100, 200])
def test_the_live_display_shows_the_newest_samples_below_the_bars(
    width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    console = Console(width=width, height=24, file=io.StringIO(), force_terminal=True)
    display = make_display(console, total_steps=80)
    with display.phase("training", 80, "steps"):
        display.show_samples([sample(11)])
        display.show_samples(LONG)
        paper = Console(width=width, file=io.StringIO())
        paper.print(*display._bars.get_renderables())  # type: ignore[attr-defined]
    display.close()
    assert isinstance(paper.file, io.StringIO)
    lines = paper.file.getvalue().splitlines()
    assert max(map(cell_len, lines)) <= width
    text = "\n".join(lines)
    assert "training" in text
    assert "step 11" not in text
    assert "step 12, group 3" in text
    assert text.index("strawberry") < text.index("It has ten") < text.index("草莓")
    assert text.count("…") >= 2
    assert len(lines) <= 12  # so that steps stay in view on a terminal of 24 lines


def test_plain_output_has_a_line_a_sample() -> None:
    console = Console(width=60, file=io.StringIO(), force_terminal=False)
    make_display(console).show_samples([sample(answer="8\n$")])
    assert isinstance(console.file, io.StringIO)
    line = 'INFO sample=best step=1 reward=1 prompt=3,8> answer="8\\n$"\n'
    assert console.file.getvalue() == line


def test_a_run_shows_each_samples_once_and_only_on_request(
    run: Run, make_step: Callable[..., StepMetrics]
) -> None:
    def told(newest: tuple[Sample, ...]) -> str:
        run._tell_step(SimpleNamespace(newest_samples=newest), make_step())  # type: ignore[arg-type]
        return shown_by(run)

    samples = (sample(4, answer="first"), sample(4, group=9, answer="of another group"))
    assert "sample=" not in told(samples)
    run.config.samples.show = True
    assert "sample=" not in told(())
    assert told(samples).count("sample=best step=4 reward=1 prompt=3,8> answer=first") == 1
    assert told(samples).count("sample=best") == 1
    assert told((sample(5),)).count("sample=best") == 2
