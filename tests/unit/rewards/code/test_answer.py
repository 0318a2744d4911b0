"""Which code block of an answer is its program."""

from __future__ import annotations

import pytest

from areal_sc.rewards.code.answer import CodeBlock, last_program

A, B = "print('a')", "print('b')"


@pytest.mark.parametrize(
    ("completion", "code"),
    [
        (f"```python\n{A}\n```", A),
        (f"First:\n```python\n{A}\n```\nBetter:\n```python\n{B}\n```\nDone.", B),
        (f"```py\n{A}\n```", A),
        (f"```py3\n{A}\n```", A),
        (f"<answer>```python\n{A}\n```</answer>", A),
        (f"```python\n{A}\n```<|im_end|>", A),
        (f"```Python3 title=main.py\n{A}\n```", A),
        (f"```\n{A}\n```", A),
        (f"~~~python\n{A}\n~~~", A),
        (f"```python\n{A}\n```\nIt prints\n```\na\n```", A),  # the last one is no program
        (f"```python\n{A}\n```\n```bash\npython main.py\n```", A),
        (f"1. So:\n   ```python\n   if x:\n       {A}\n   ```", f"if x:\n    {A}"),
        (f"````python\ntext = '''\n```\n'''\n{A}\n````", f"text = '''\n```\n'''\n{A}"),
        ("```python\ntext = '\x0b\u2028'\n```", "text = '\x0b\u2028'"),
        (f"Write ```x``` so:\n```x = 1```\n```python\n{A}\n```", A),
        (f"```python\r\n{A}\r\n```\r\n", f"{A}\r"),
        (f"```python\n{A}\n```\n```python\nprint(", A),  # the second one was cut
        (f"```python\n{A}\n```\n```python\n\n```", A),  # the second one is empty
        (f"<think>```python\n{B}\n```</think>```python\n{A}\n```", A),
        (f"```python\n{B}\n```</think>\n```python\n{A}\n```", A),
    ],
)
def test_it_is_the_last_closed_block_in_python(completion: str, code: str) -> None:
    block = last_program(completion)
    assert block is not None
    assert block.code == code


@pytest.mark.parametrize(
    "completion",
    [
        "",
        A,
        f"```python\n{A}",
        "```python\n```",
        f"``python\n{A}\n``",
        f"```rust\n{A}\n```",
        f"````python\n{A}\n```",
        f"<think>\n```python\n{A}\n```",
        f"```python\n{A}\n```\n</think>\nI do not know.",
    ],
)
def test_an_answer_may_have_none(completion: str) -> None:
    assert last_program(completion) is None


def test_another_language_has_to_be_known() -> None:
    completion = f"```python\n{A}\n```\n```C++\nint main() {{}}\n```"
    assert last_program(completion, ["c++"]) == CodeBlock("c++", "int main() {}")
    assert last_program(completion, ["rust"]) == CodeBlock("python", A)


def test_the_time_is_linear_in_the_answer() -> None:
    """A million lines, most of them fences; a scan for each would take hours."""
    assert last_program("~~~a\n```b\n" * 500_000) is None
