"""The Python program that calls one function of an answer and prints what it returned. No torch.

It knows the arguments, which it reads, and no expected value. What the answer prints goes to
standard error; its value leaves as JSON, so only plain data is compared. An answer that writes the
value itself gains nothing: it has to be the right one.
"""

from __future__ import annotations

from typing import Final

_PROGRAM: Final = """\
import json, os, sys

value_out = os.dup(1)
os.dup2(2, 1)
sys.setrecursionlimit(50_000)
arguments = json.load(sys.stdin)
names = {{"__name__": "answer"}}
exec({imports!r}, names)
exec(compile({code!r}, "answer.py", "exec"), names)
owner = names["Solution"]() if "Solution" in names else None
call = getattr(owner, {function!r}, None) or names[{function!r}]
value = json.dumps(call(*arguments), default=lambda it: it.tolist())
with open(value_out, "w") as file:
    file.write(value)
os._exit(0)
"""

_IMPORTS: Final = """\
from bisect import *
from collections import *
from copy import *
from functools import *
from heapq import *
from itertools import *
from math import *
from operator import *
from string import *
from typing import *
from builtins import *
import bisect, collections, copy, functools, heapq, itertools, json, math, operator, os, random
import re, string, sys
"""
"""Names that answers use without an import, as on LeetCode; `pow` and the like stay Python's."""


def call_program(code: str, function: str) -> str:
    """Python text: reads a JSON list of arguments, and prints the value as JSON.

    The function is a method of the class `Solution`, if the code has one with it.
    """
    return _PROGRAM.format(imports=_IMPORTS, code=code, function=function)
