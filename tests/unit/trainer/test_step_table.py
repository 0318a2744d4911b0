from __future__ import annotations

import math

import pytest
from builders import make_step

from areal_sc.records.metrics import StepMetrics
from areal_sc.trainer.step_table import COLUMNS, StepTable, columns_of, named_values


def test_header_and_rows_at_80_columns() -> None:
    table = StepTable(80, total_steps=80)
    lines = [table.header(), *table.rows(make_step(1)), *table.rows(make_step(12, wait_s=2.0))]
    assert [line.plain for line in lines] == [
        " step reward   acc signal   len entropy   loss   stale   time bound",
        " 1/80  0.250 0.200    40% 15.62   1.250  0.012   0.9/4  0.50s train",
        "12/80  0.250 0.200    40% 15.62   1.250  0.012   0.9/4  0.50s roll",
    ]


def test_as_many_columns_are_shown_as_the_terminal_is_wide() -> None:
    for width, titles in {
        140: " step reward   acc signal   len entropy   loss   grad     kl   kl_b   stale stale_g "
        "lead slack gen/s trn/s   time bound",
        100: " step reward   acc signal   len entropy   loss   grad     kl   stale stale_g   time "
        "bound",
        60: "step reward   acc signal   len entropy   loss   time bound",
        40: "step reward   acc signal   len entropy",
        20: "step  reward    acc",
        12: "step  reward",
    }.items():
        assert StepTable(width, total_steps=80).header().plain == titles
    assert StepTable(40, 80).rows(make_step(7))[0].plain == "   7  0.250 0.200    40% 15.62   1.250"


def test_what_an_engine_does_not_report_is_a_dash() -> None:
    unknown = make_step(7, train={"loss": math.nan}, workflow={}, signal_share=None)
    (row,) = StepTable(60, total_steps=80).rows(unknown)
    assert row.plain == "   7  0.250     -      - 15.62       -    nan  0.50s train"


def test_several_rewards_are_shown_where_there_is_room() -> None:
    parts = {"reward/right": 0.5, "reward/length_of_the_answer": -40.0}
    step = make_step(7, workflow={"accuracy": 0.2, **parts})
    table = StepTable(130, 80, columns_of(step))
    assert table.header().plain.startswith(" step reward  right length_of_th   acc")
    assert table.rows(step)[0].plain.startswith(" 7/80  0.250  0.500       -40.00 0.200")
    assert StepTable(80, 80, columns_of(step)).rows(step) == StepTable(80, 80).rows(step)
    values = dict(named_values(step))
    assert values["reward/length_of_the_answer"] == -40.0


def test_plain_lines_have_every_column_and_what_was_lost() -> None:
    names = [name for column in COLUMNS for name in column.names]
    values = dict(named_values(make_step()))
    lost = [
        "cut_share",
        "masked_share",
        "wasted_share",
        "num_rejected_episodes",
        "rejected_episodes",
    ]
    assert list(values) == [*names, *lost]
    assert values["grad_norm"] == 0.61
    assert {values[name] for name in lost} == {None}
    values = dict(named_values(make_step(rejected_episodes={"timeout": 1, "rejected": 9})))
    assert values["num_rejected_episodes"] == 10
    assert values["rejected_episodes"] == "rejected x9, timeout x1"


def test_of_a_step_on_rows_of_a_data_set_nothing_is_shown_that_it_has_not() -> None:
    nothing = {"workflow": {}, "num_generated_tokens": 0, "num_rollout_workers": 0}
    nothing |= dict.fromkeys(("signal_share", "lead", "slack"))
    step = make_step(7, reward=math.nan, train={"loss": 2.5, "grad_norm": 0.5}, **nothing)
    told = {name: value for name, value in named_values(step) if value is not None}
    assert told.keys() == {"step", "loss", "grad_norm", "trained_tokens_per_s", "step_time_s"}
    table = StepTable(80, 80, columns_of(step))
    assert table.header().plain.split() == ["step", "loss", "grad", "trn/s", "time"]
    assert "nan" not in table.rows(step)[0].plain


@pytest.mark.parametrize("total_steps", [None, 9, 80, 100_000])
def test_no_line_is_longer_than_the_terminal_and_columns_stay_aligned(
    total_steps: int | None,
) -> None:
    steps = [
        make_step(1),
        make_step(
            9, accuracy=None, reward=-12.345, step_time_s=4000.0, rejected_episodes={"stale": 3}
        ),
        make_step(
            9,
            reward=123456.0,
            group_staleness_mean=123.4,
            group_staleness_max=840,
            num_masked_tokens=3000,
            num_wasted_tokens=2,
            rejected_episodes={"reward_error: KeyError at task.py:12": 12345},
            num_generated_tokens=10**9,
            sync_s=9.0,
        ),
    ]
    for width in range(4, 201):
        table = StepTable(width, total_steps)
        header = table.header()
        assert header.cell_len <= width
        titles = header.plain
        for step in steps:
            row, *causes = (line.plain for line in table.rows(step))
            assert len(causes) <= bool(step.rejected_episodes)
            for line in (row, *causes):
                assert len(line) <= width
                assert "\n" not in line
            if "time" in titles:  # right-aligned: a value ends below its title's last letter
                end = titles.index("time") + len("time")
                assert row[end - 1] in "sm"
                assert row[end : end + 1] in ("", " ")


def shown(width: int, step: StepMetrics) -> list[str]:
    return [line.plain for line in StepTable(width, 80).rows(step)]


def test_losses_are_shown_only_where_there_are_any() -> None:
    assert shown(120, make_step())[0].endswith("train")
    losses = make_step(
        num_masked_tokens=4000, num_wasted_tokens=8000, rejected_episodes={"stale": 2}
    )
    assert shown(140, losses)[0].endswith("train mask 50% waste 50%")
    assert shown(180, losses)[0].endswith("waste 50%  rej 2  stale x2")
    assert shown(80, losses)[0].endswith("train mask 50%")


def test_causes_of_rejections_are_told_on_a_line_of_their_own_where_they_do_not_fit() -> None:
    failing = make_step(
        rejected_episodes={"bad_reward: task.py:9": 1, "reward_error: KeyError at task.py:12": 3}
    )
    causes = "reward_error: KeyError at task.py:12 x3, bad_reward: task.py:9 x1"
    (line,) = shown(230, failing)
    assert line.endswith(f"train  rej 4  {causes}")
    line, below = shown(80, failing)
    assert line.endswith("train rej 4")
    assert below == f"      {causes}"
    assert shown(40, failing)[1] == "     reward_error: KeyError at task.py:…"
