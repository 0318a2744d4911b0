from __future__ import annotations

import io
import itertools
import os
import pty
import re
import shlex
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest
from builders import make_evaluation, make_step
from rich.console import Console

from areal_sc.records.metrics import summarize
from areal_sc.trainer.display import Display, LiveDisplay, make_display

ESCAPE = "\x1b"


def plain_console(width: int = 80) -> Console:
    ticks = itertools.count(0.0, 0.25)
    return Console(
        width=width, file=io.StringIO(), force_terminal=False, get_time=lambda: next(ticks)
    )


def live_console(width: int, monkeypatch: pytest.MonkeyPatch, term: str = "xterm") -> Console:
    monkeypatch.setenv("TERM", term)
    monkeypatch.delenv("NO_COLOR", raising=False)
    return Console(
        width=width, height=24, file=io.StringIO(), force_terminal=True, get_time=lambda: 100.0
    )


def shown(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def visible_lines(text: str) -> list[str]:
    """What a terminal would be asked to write, line by line, without control sequences."""
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)
    return re.split(r"\r\n|\n|\r", text)


def show_everything(console: Console, run_dir: Path) -> None:
    with closing(make_display(console, run_dir=run_dir, total_steps=80)) as display:
        with display.phase("start-up", 2, "workers") as phase:
            phase.advance(2)
        with display.phase("evaluation"):
            display.on_evaluation(make_evaluation("before"))
        steps = [make_step(i, rejected_episodes={"stale": i // 12}) for i in range(1, 31)]
        with display.phase("training", 80, "steps") as phase:
            for step in steps:
                display.on_step(step)
                phase.advance()
            display.warning("groups were trained up to 27 policy versions old, and that is a lot")
            display.note("a note with [bold]brackets[/bold] and \x1b[31mcolour\x1b[0m codes")
        evaluations = [
            make_evaluation("before"),
            make_evaluation("after", accuracy=0.94, reward=0.9, version_min=79, version_max=80),
            make_evaluation("greedy", accuracy=0.99, temperature=0.0),
        ]
        summary = summarize(
            steps,
            evaluations,
            wall_time_s=101.0,
            num_rows_trained=7680,
            num_rows_trained_twice=0,
            num_episodes_rejected=8,
        )
        display.on_finish(summary)


def test_output_that_is_no_terminal_gets_plain_lines(tmp_path: Path) -> None:
    console = plain_console(width=40)
    show_everything(console, tmp_path)
    text = shown(console)
    assert all(character.isprintable() or character == "\n" for character in text)
    lines = text.splitlines()
    assert lines[0] == f"INFO run_dir={tmp_path} total_steps=80"
    assert lines[1] == 'INFO phase=start-up begins="0/2 workers"'
    assert 'INFO phase=start-up ended="2/2 workers" duration_s=0.25' in lines
    assert (
        "INFO step=12/80 reward=0.25 accuracy=0.2 signal_share=0.4 answer_tokens=15.62 "
        "entropy=1.25 loss=0.0123 grad_norm=0.61 proximal_kl=0.00015 behavior_kl=0.02 "
        "token_staleness_mean=0.9 token_staleness_max=4 "
        "group_staleness_mean=1.3 group_staleness_max=9 lead=1.5 slack=0.3 "
        "generated_tokens_per_s=12000 trained_tokens_per_s=8000 step_time_s=0.5 "
        "bound=training num_rejected_episodes=1 "
        'rejected_episodes="stale x1"'
    ) in lines
    assert (
        "INFO evaluation=before step=0 accuracy=0.2 reward=0.2 num_prompts=64 temperature=1 "
        "version_min=0 version_max=0"
    ) in lines
    assert (
        'WARNING warning="groups were trained up to 27 policy versions old, and that is a lot"'
    ) in lines
    assert 'INFO note="a note with [bold]brackets[/bold] and colour codes"' in lines
    assert lines[-1].startswith(f"INFO finished={tmp_path} num_steps=30 wall_time_s=101 ")
    assert " greedy_accuracy_after=0.99 " in lines[-1]
    assert len([line for line in lines if line.startswith("INFO step=")]) == 30


def test_what_a_resumed_run_has_done_already_is_said() -> None:
    console = plain_console()
    display = make_display(console, run_dir=None, total_steps=80)
    with display.phase("training", 80, "steps", done=43) as phase:
        phase.advance()
    assert 'begins="43/80 steps"' in shown(console)
    assert 'ended="44/80 steps"' in shown(console)


def test_plain_phase_reports_quarters_only() -> None:
    console = plain_console()
    display = make_display(console)
    with display.phase("warm start", 400, "steps") as phase:
        for _ in range(400):
            phase.advance()
    assert shown(console).splitlines() == [
        'INFO phase="warm start" begins="0/400 steps"',
        'INFO phase="warm start" done="100/400 steps"',
        'INFO phase="warm start" done="200/400 steps"',
        'INFO phase="warm start" done="300/400 steps"',
        'INFO phase="warm start" ended="400/400 steps" duration_s=0.25',
    ]


@pytest.mark.parametrize("is_terminal", [False, True])
def test_an_interrupted_phase_says_how_far_it_came(
    is_terminal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    console = live_console(80, monkeypatch) if is_terminal else plain_console()

    def interrupted_run() -> None:
        with (
            closing(make_display(console)) as display,
            display.phase("training", 80, "steps") as phase,
        ):
            phase.advance(7)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted_run()
    text = shown(console)
    if is_terminal:
        assert "training: stopped after 7/80 steps in 0.00s" in visible_lines(text)
        assert text.count(ESCAPE + "[?25l") == text.count(ESCAPE + "[?25h") == 1  # the cursor
    else:
        assert 'INFO phase=training stopped="7/80 steps" duration_s=0.25' in text.splitlines()


def test_plain_text_that_the_output_cannot_encode() -> None:
    file = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    display = make_display(Console(file=file, force_terminal=False))
    display.note("réponse → ∞")
    assert isinstance(file.buffer, io.BytesIO)
    assert file.buffer.getvalue() == b'INFO note="r\\xe9ponse \\u2192 \\u221e"\n'


@pytest.mark.parametrize("width", [20, 32, 40, 60, 80, 120, 200])
def test_live_lines_are_never_longer_than_the_terminal(
    width: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    console = live_console(width, monkeypatch)
    show_everything(console, Path("runs/quickstart"))
    assert {len(line) for line in visible_lines(shown(console)) if len(line) > width} == set()


def test_live_display_at_80_columns(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "summary.json").touch()
    (tmp_path / "model").mkdir()
    console = live_console(80, monkeypatch)
    show_everything(console, Path("."))
    lines = [line.rstrip() for line in visible_lines(shown(console))]
    assert "12/80  0.250 0.200    40% 15.62   1.250  0.012   0.9/4  0.50s train rej 1" in lines
    header = " step reward   acc signal   len entropy   loss   stale   time bound"
    assert lines.count(header) == 2  # 30 rows, one header each 20
    assert "start-up: 2 workers in 0.00s" in lines
    assert "training: 30 steps in 0.00s" in lines
    assert any(line.startswith("evaluation before: accuracy 0.2,") for line in lines)
    assert "a note with [bold]brackets[/bold] and colour codes" in lines
    result = lines[lines.index("training: 30 steps in 0.00s") + 1 :]
    values = dict(line.split() for line in result if len(line.split()) == 2)
    assert (values["accuracy_before"], values["greedy_accuracy_after"]) == ("0.200", "0.990")
    assert (values["wall_time_s"], values["train_share"]) == ("1m41s", "80%")
    assert (values["num_rows_trained"], values["num_rows_trained_twice"]) == ("7,680", "0")
    assert "first_step_s" not in values
    assert result[-3].startswith("run folder")
    assert result[-2] == "in it       model, summary.json"


def test_bars_show_count_and_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setenv("TERM", "xterm")
    console = Console(
        width=80, height=24, file=io.StringIO(), force_terminal=True, get_time=lambda: now
    )
    display = make_display(console)
    with display.phase("training", 80, "steps") as phase:
        phase.advance(10)
        now = 30.0
        phase.advance(10)
        display._bars.refresh()  # type: ignore[attr-defined]
    shown_bar = r"training ━[━╸╺]* 20/80 0:00:30 03:00"
    lines = [line.rstrip() for line in visible_lines(shown(console))]
    assert any(re.fullmatch(shown_bar, line) for line in lines), lines


OUTAGES = ("rollout/1 ended with signal 9 (SIGKILL)", "train/0 hangs")


def test_an_outage_is_shown_at_once_and_as_long_as_it_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    display = make_display(live_console(60, monkeypatch))
    assert isinstance(display, LiveDisplay)

    def below_bars() -> list[str]:
        console = plain_console(60)
        console.print(*list(display._bars.get_renderables())[1:])
        return shown(console).splitlines()

    with display.phase("training", 80, "steps"):
        display.show_outages([OUTAGES[0]])
        assert below_bars() == [OUTAGES[0]]
        display.show_outages(OUTAGES)
        assert below_bars() == list(OUTAGES)
        display.show_outages([OUTAGES[1]])
        assert below_bars() == [OUTAGES[1]]
        display.show_outages([])
        assert below_bars() == [""]  # `print` without arguments


def test_plain_lines_tell_of_each_outage_once() -> None:
    console = plain_console()
    display = make_display(console)
    for outages in ([OUTAGES[0]], OUTAGES, [OUTAGES[1]], [], [OUTAGES[0]]):
        display.show_outages(outages)
    told = [OUTAGES[number] for number in (0, 1, 0)]
    assert shown(console).splitlines() == [f'WARNING warning="{outage}"' for outage in told]


def test_control_codes_do_not_reach_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    console = live_console(60, monkeypatch)
    display = make_display(console)
    with display.phase("start-up", 2, "workers"):
        display.note("first\x1b[2J")
        display.warning("second\x1b[2J")
    lines = [line.rstrip() for line in visible_lines(shown(console))]
    assert {"first", "warning: second"} <= set(lines)
    assert ESCAPE + "[2J" not in shown(console)


def test_a_dumb_terminal_gets_plain_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    assert type(make_display(live_console(80, monkeypatch, term="dumb"))) is Display
    assert type(make_display(live_console(80, monkeypatch))) is LiveDisplay


SCRIPT = """
from areal_sc.trainer.display import make_display
display = make_display()
with display.phase("training", 2, "steps") as phase:
    phase.advance()
    display.warning("careful")
display.close()
"""


def test_a_pipe_gets_plain_lines_even_under_force_color() -> None:
    environment = {**os.environ, "FORCE_COLOR": "1", "TERM": "xterm-256color"}
    result = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=environment, capture_output=True, check=True, timeout=60
    )
    assert ESCAPE not in result.stdout.decode()
    assert "WARNING warning=careful" in result.stdout.decode().splitlines()


@pytest.mark.parametrize(("variable", "value"), [("NO_COLOR", "1"), ("TERM", "dumb"), ("", "")])
def test_a_real_terminal(variable: str, value: str, tmp_path: Path) -> None:
    environment = {**os.environ, "TERM": "xterm-256color"}
    environment.pop("NO_COLOR", None)
    if variable:
        environment[variable] = value
    written = tmp_path / "typescript"
    program = shlex.join([sys.executable, "-c", SCRIPT])
    environment_before = dict(os.environ)
    with written.open("wb") as file:

        def copy(fd: int) -> bytes:
            try:
                data = os.read(fd, 4096)
            except OSError:  # how Linux tells that the other end has closed
                return b""
            file.write(data)
            return data

        os.environ.clear()
        os.environ.update(environment)
        try:
            status = pty.spawn(["/bin/sh", "-c", program], copy, lambda fd: b"")
        finally:
            os.environ.clear()
            os.environ.update(environment_before)
    assert status == 0
    text = written.read_text()
    colour = re.search(r"\x1b\[[0-9;]*3[0-7]m|38;", text)
    if variable == "TERM":
        assert ESCAPE not in text
    else:
        assert ESCAPE in text
        assert (colour is None) == (variable == "NO_COLOR")
