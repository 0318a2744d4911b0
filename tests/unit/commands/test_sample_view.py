"""What a reader sees of samples."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence

import pytest
from rich.cells import cell_len
from rich.console import Console
from sample_rows import sample

from areal_sc.commands.samples import sample_view
from areal_sc.records.samples import Place, Sample

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


def test_pictures_are_named_behind_their_prompt() -> None:
    told = sample(12, pictures=("PNG, 32 x 32 pixels, 310 bytes", "JPEG, 9 x 8 pixels, 99 bytes"))
    lines = shown([told, sample(12, place=Place.worst, pictures=told.pictures)], 80).splitlines()
    assert lines[1:4] == [
        "  prompt  3,8>",
        "  picture PNG, 32 x 32 pixels, 310 bytes",
        "  picture JPEG, 9 x 8 pixels, 99 bytes",
    ]
    assert sum("picture" in line for line in lines) == 2


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
