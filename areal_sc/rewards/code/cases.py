"""The tests of a problem, in the shapes that data sets have them. No torch.

    {"inputs": [...], "outputs": [...], "fn_name": ...}                TACO, APPS, DeepCoder
    [{"input": ..., "output": ..., "testtype": "functional"}, ...]     LiveCodeBench, Codeforces
    [{"input": ..., "output": ..., "type": "function_call", "fn_name": ...}, ...]    PrimeIntellect

each as JSON text, too. With a function's name, a test is a call: its input is a list of arguments,
or a text with an argument in JSON a line; then its output is JSON, too.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from decimal import Decimal
from typing import Any, Final

from areal_sc.rewards.code.compare import whole_number

MAX_CHARS: Final = 64 << 20
"""Most characters of a problem's tests as text; a worker has those of all its answers."""

_CALLS: Final = ("functional", "function_call")


@dataclass(frozen=True)
class Case:
    """One test.

    Attributes:
        stdin: the program's input; of a call, its arguments as a list in JSON.
        expected: outputs of which one is right: texts; of a call, values.
        function: its name; "": the program reads `stdin` and prints.
    """

    stdin: str
    expected: tuple[Any, ...]
    function: str = ""


def read_cases(tests: Any, function: str = "") -> list[Case]:
    """The tests in their order.

    Args: function: its name, where the tests are calls and do not name one.
    Raises: ValueError: they have no such shape, or one has no output.
    """
    if isinstance(tests, str):
        if len(tests) > MAX_CHARS:
            raise ValueError(f"expected at most {MAX_CHARS} characters, got {len(tests)}")
        try:
            tests = json.loads(tests)
        except RecursionError:
            raise ValueError("lists in lists, too deep to be read") from None
    match tests:
        case {"inputs": list(inputs), "outputs": list(outputs)}:
            if len(inputs) != len(outputs):
                raise ValueError(f"{len(inputs)} inputs, but {len(outputs)} outputs")
            function = tests.get("fn_name") or function
            cases = [
                _case(f"test {number}", *pair, function)
                for number, pair in enumerate(zip(inputs, outputs, strict=True))
            ]
        case list():
            cases = [_listed(f"test {n}", test, function) for n, test in enumerate(tests)]
        case _:
            raise ValueError(
                "expected a list of {input, output}, or {inputs: [...], outputs: [...]}, got "
                f"{type(tests).__name__}"
            )
    if not cases:
        raise ValueError("there are none")
    check_outputs(cases)
    return _unwrapped(cases)


def check_outputs(cases: list[Case]) -> None:
    """Raises: ValueError: a program that prints nothing would pass all of them."""
    if all(not case.function and not case.expected[0].strip() for case in cases):
        raise ValueError("all expected outputs are empty")


def function_of(metadata: Any) -> str:
    """The function that a row's `metadata` names, as LiveCodeBench's do; "": none."""
    if isinstance(metadata, str):
        try:
            metadata = json.loads(metadata)
        except (ValueError, RecursionError):  # metadata of another kind
            return ""
    name = metadata.get("func_name") if isinstance(metadata, Mapping) else None
    return str(name or "")


def longest(cases: list[Case], num: int) -> list[Case]:
    """The tests with the longest inputs, in their order."""
    chosen = sorted(range(len(cases)), key=lambda i: len(cases[i].stdin), reverse=True)[:num]
    return [cases[i] for i in sorted(chosen)]


def _listed(where: str, test: Any, function: str) -> Case:
    if not isinstance(test, Mapping) or "input" not in test:
        raise ValueError(f"{where}: expected input and output, got {test!r:.100}")
    kind = test.get("testtype") or test.get("type")
    named = test.get("fn_name") or function_of(test.get("metadata")) or function
    if kind in _CALLS and not named:
        raise ValueError(f"{where}: it is a call, but names no function (fn_name, or func_name)")
    is_call = kind in _CALLS or (not kind and test.get("fn_name"))
    return _case(where, test["input"], test.get("output"), named if is_call else "")


def _case(where: str, given: Any, expected: Any, function: str) -> Case:
    if expected is None:
        raise ValueError(f"{where}: it has no output")
    if not function:
        return Case(_text(where, given), (_text(where, expected),))
    if isinstance(given, str):
        try:
            given = [json.loads(line) for line in given.split("\n") if line.strip()]
            if isinstance(expected, str):
                expected = json.loads(expected, parse_int=whole_number)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{where}: expected arguments and output in JSON: {error}") from None
    if not isinstance(given, list):
        raise ValueError(f"{where}: expected a list of arguments, got {type(given).__name__}")
    return Case(json.dumps(given), (expected,), function)


def _text(where: str, value: Any) -> str:
    match value:
        case str():
            return value
        case bool() | float():
            return str(value)
        case int():
            return str(Decimal(value))  # which writes any number of digits
        case list():
            return "\n".join(_text(where, line) for line in value)
    raise ValueError(f"{where}: expected a text or a list of lines, got {type(value).__name__}")


def _unwrapped(cases: list[Case]) -> list[Case]:
    """Also without the list that TACO and PrimeIntellect have around the outputs of calls."""
    values = [case.expected[0] for case in cases if case.function]
    if not values or not all(isinstance(it, list) and len(it) == 1 for it in values):
        return cases
    return [
        replace(case, expected=(*case.expected, *case.expected[0])) if case.function else case
        for case in cases
    ]
