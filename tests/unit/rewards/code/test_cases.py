"""Tests of problems in the shapes of public data sets; the rows are written by hand."""

from __future__ import annotations

import json
from typing import Any

import pytest

from areal_sc.rewards.code.cases import Case, function_of, longest, read_cases

TACO = {"inputs": ["3\n1 2 3\n", "1\n5\n"], "outputs": ["6\n", "5\n"]}
TACO_CALL = {"fn_name": "add", "inputs": [[1, 2], [[3], "x"]], "outputs": [[3], [[4]]]}
LIVE = [
    {"input": "2\n4 4\n", "output": "8\n", "testtype": "stdin", "metadata": {"func_name": None}},
]
LIVE_CALL = [
    {"input": '[1, 2]\n"ab"', "output": "[2, 1]", "testtype": "functional"},
    {"input": '[]\n""', "output": "[]", "testtype": "functional"},
]
PRIME = [{"type": "stdin_stdout", "fn_name": None, "input": "1\n", "output": "2\n"}]
PRIME_CALL = [{"type": "function_call", "fn_name": "f", "input": [[1]], "output": [2]}]
CODEFORCES = [{"input": "1 2", "output": "3"}]


@pytest.mark.parametrize(
    ("tests", "cases"),
    [
        (TACO, [Case("3\n1 2 3\n", ("6\n",)), Case("1\n5\n", ("5\n",))]),
        (
            {"inputs": [["3", "1 2 3"]], "outputs": [["6", "7"]]},  # a list of lines
            [Case("3\n1 2 3", ("6\n7",))],
        ),
        (LIVE, [Case("2\n4 4\n", ("8\n",))]),
        (PRIME, [Case("1\n", ("2\n",))]),
        (CODEFORCES, [Case("1 2", ("3",))]),
        (PRIME_CALL, [Case("[[1]]", ([2], 2), "f")]),
    ],
)
def test_each_shape_is_read_as_objects_and_as_json(tests: Any, cases: list[Case]) -> None:
    assert read_cases(tests) == cases
    assert read_cases(json.dumps(tests)) == cases


def test_outputs_may_be_numbers_of_any_length() -> None:
    digits = "1" + "0" * 5000
    printed = {"inputs": ["5000"], "outputs": [10**5000]}
    assert read_cases(printed) == [Case("5000", (digits,))]
    called = {"inputs": ["5000"], "outputs": [digits], "fn_name": "power"}
    assert read_cases(called) == [Case("[5000]", (10**5000,), "power")]


def test_outputs_of_calls_may_have_a_list_around_them() -> None:
    assert read_cases(TACO_CALL) == [
        Case("[1, 2]", ([3], 3), "add"),
        Case('[[3], "x"]', ([[4]], [4]), "add"),
    ]
    pairs = {**TACO_CALL, "outputs": [[3], [4, 5]]}  # the second one shows that they have none
    assert [case.expected for case in read_cases(pairs)] == [([3],), ([4, 5],)]


def test_a_call_of_live_code_bench_is_named_by_the_row() -> None:
    name = function_of('{"func_name": "rotate"}')
    assert name == function_of({"func_name": "rotate"}) == "rotate"
    assert read_cases(json.dumps(LIVE_CALL), name) == [
        Case('[[1, 2], "ab"]', ([2, 1],), "rotate"),
        Case('[[], ""]', ([],), "rotate"),
    ]
    own = [{**LIVE_CALL[0], "metadata": {"func_name": "turn"}}]
    assert read_cases(own)[0].function == "turn"
    assert read_cases(LIVE, name)[0].function == ""  # a program, whatever the row names
    for other in (None, {"func_name": None}, "{}", "{level 3}", "[" * 100_000, "3", ["x"]):
        assert function_of(other) == ""


@pytest.mark.parametrize(
    ("tests", "message"),
    [
        ("no JSON", "Expecting value"),
        ("[" * 100_000, "too deep"),
        (None, "got NoneType"),
        ({"inputs": ["1"]}, "got dict"),
        ([], "there are none"),
        ({"inputs": [], "outputs": []}, "there are none"),
        ({"inputs": ["1", "2"], "outputs": ["1"]}, "2 inputs, but 1 outputs"),
        ([{"input": "1"}], "test 0: it has no output"),
        ([{"output": "1"}], "test 0: expected input and output"),
        (["1"], "test 0: expected input and output, got '1'"),
        ([*CODEFORCES, {"input": "1", "output": None}], "test 1: it has no output"),
        ([{"input": "1", "output": " \n"}], "all expected outputs are empty"),
        ([{"input": {"a": 1}, "output": "1"}], "test 0: expected a text or a list of lines"),
        (LIVE_CALL, r"test 0: it is a call, but names no function"),
        ({**TACO_CALL, "inputs": [1, 2]}, "test 0: expected a list of arguments, got int"),
        ([{**LIVE_CALL[0], "fn_name": "f", "input": "x"}], "test 0: expected arguments and output"),
    ],
)
def test_what_cannot_be_read_is_told(tests: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_cases(tests)


def test_more_text_than_a_worker_should_hold_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("areal_sc.rewards.code.cases.MAX_CHARS", 30)
    with pytest.raises(ValueError, match="at most 30 characters, got 33"):
        read_cases(json.dumps(CODEFORCES))


def test_the_longest_inputs_are_chosen_in_their_order() -> None:
    cases = [Case("1" * size, ("1",)) for size in (3, 1, 5, 2, 5)]
    assert [len(case.stdin) for case in longest(cases, 3)] == [3, 5, 5]
    assert longest(cases, 9) == cases
