"""How benchmarks name what they measured."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def report(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import report

    return report


@pytest.mark.parametrize(
    ("name", "unit"),
    [
        ("tcp_1mib_gb_per_s", "GB/s"),
        ("tcp_cpu_s_per_gb", "s/GB"),
        ("one_row_pulls_per_s", "1/s"),
        ("dynamic_tokens_per_s", "tokens/s"),
        ("tcp_wire_bytes_per_byte", "ratio"),
        ("controller_resident_bytes_per_row", "B"),
        ("heartbeat_256_cpu_percent", "%"),
        ("same_host_map_ms", "ms"),
        ("noop_rpc_p50_us", "us"),
        ("pull_stall_s", "s"),
        ("tcp_vs_bare_pyzmq", "ratio"),
        ("letters", "ratio"),  # not seconds: the unit is a word of its own
    ],
)
def test_the_end_of_a_name_is_the_unit(report: ModuleType, name: str, unit: str) -> None:
    assert report.unit_of(name) == unit


def test_records_become_metrics_of_their_case(report: ModuleType, tmp_path: Path) -> None:
    records = {("1m", "pull"): {"stall_s": 0.5}, ("1m", "disk"): {"stall_s": 2.0}}
    report.write(report.flat(records), tmp_path / "metrics.json")
    assert json.loads((tmp_path / "metrics.json").read_text()) == {
        "1m_pull_stall_s": {"value": 0.5, "unit": "s"},
        "1m_disk_stall_s": {"value": 2.0, "unit": "s"},
    }


def test_given_arguments_win_over_quick_ones(
    report: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("signal.signal", lambda *_: None)
    monkeypatch.setattr("sys.argv", ["benchmark", "--quick", "--rounds", "5"])
    parser = report.make_parser("A benchmark.")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--slots", type=int, default=32)
    arguments = report.parse(parser, rounds=1, slots=8)
    assert (arguments.rounds, arguments.slots) == (5, 8)
