"""The user's values between processes: what arrives is equal to what was given. No torch.

A row of a dataset, an argument of a constructor and a call of a reward leave the process that made
them as what JSON can hold. None, bool, str, float, lists, integers of 64 bits and dicts with str
keys stand for themselves; everything else is a dict with the tag "$", which says what it is. Types
are compared exactly: a subclass, an `OrderedDict` or an `IntEnum` say, would come back as its base,
so it is refused, as everything is that has no tag. Decoding makes values of these types and nothing
else.

    from_wire(to_wire({"span": (1, 2)}))    {"span": {"$": "tuple", "items": [1, 2]}} on the way
"""

from __future__ import annotations

import json
import math
import reprlib
from collections.abc import Callable, Iterable
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from pathlib import Path
from types import NoneType
from typing import Any, Final
from zoneinfo import ZoneInfo

import numpy as np

MAX_DEPTH: Final = 100
"""Lists and dicts in one another; both ends read them by recursion."""

MALFORMED: Final = (ValueError, TypeError, KeyError)
"""What `from_json` and `from_wire` raise for what `to_json` and `to_wire` did not make."""

NameObject = Callable[[Any], dict[str, Any] | None]
"""Gives the tagged form of a value, before this module does; None: it has none for it."""


def _timedelta_text(value: timedelta) -> str:
    return f"{value.days} {value.seconds} {value.microseconds}"


def _datetime_text(value: datetime) -> str:
    """`2024-01-05 12:00:00+01:00`; or the local time and the name of the zone behind it."""
    zone = value.tzinfo.key if isinstance(value.tzinfo, ZoneInfo) else None
    return f"{value.replace(tzinfo=None)} in {zone}" if zone else str(value)


def _datetime_of(text: str) -> datetime:
    local, _, zone = text.partition(" in ")
    value = datetime.fromisoformat(local)
    return value.replace(tzinfo=ZoneInfo(zone)) if zone else value


_AS_THEY_ARE: Final = frozenset([NoneType, bool, float, str])
_COLLECTIONS: Final[dict[str, Callable[[Iterable[Any]], Any]]] = {
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
}
_BY_TEXT: Final[dict[type, tuple[str, Callable[[Any], str], Callable[[str], Any]]]] = {
    int: ("int", hex, lambda text: int(text, 16)),  # above 64 bits, as decimals have a limit
    complex: ("complex", repr, complex),
    bytes: ("bytes", bytes.hex, bytes.fromhex),
    date: ("date", str, date.fromisoformat),
    time: ("time", str, time.fromisoformat),
    datetime: ("datetime", _datetime_text, _datetime_of),
    timedelta: ("timedelta", _timedelta_text, lambda text: timedelta(*map(int, text.split()))),
    Decimal: ("decimal", str, Decimal),
    type(Path()): ("path", str, Path),
}
"""Type -> its tag, the text that stands for a value, and the value of a text."""
_OF_TEXT: Final = {tag: of_text for tag, _, of_text in _BY_TEXT.values()}


class UnfitValue(ValueError):
    """A value that another process would get as another one.

    Attributes:
        path: of the value within what was given, such as `['span'][1]`.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.path = ""

    def located(self, where: str) -> str:
        """The message. Args: where: what was given."""
        return (
            f"{where}{self.path} {self}, so it cannot be sent to workers: use None, bools, "
            "numbers, text, bytes, dates, NumPy values, and lists, tuples, sets and dicts of "
            "these, all of these very types and of no subclass"
        )


def is_missing(value: Any) -> bool:
    """Whether a cell holds nothing: None, or the NaN that pandas writes there."""
    return value is None or (isinstance(value, float) and math.isnan(value))


def to_json(wire: Any) -> bytes:
    """The JSON text of what `to_wire` has made."""
    # surrogates: half of a pair may stand in text that was cut
    return json.dumps(wire, ensure_ascii=False).encode(errors="surrogatepass")


def from_json(content: bytes) -> Any:
    """Inverse of `to_json`. Raises: ValueError: it is no JSON."""
    return json.loads(content.decode(errors="surrogatepass"))


def to_wire(value: Any, name_object: NameObject | None = None, depth: int = 0) -> Any:
    """What JSON can hold of a value.

    Raises: UnfitValue: it would not come back equal.
    """
    kind = type(value)
    if kind in _AS_THEY_ARE or (kind is int and value.bit_length() < 64):
        return value
    if depth > MAX_DEPTH:
        raise UnfitValue(f"is more than {MAX_DEPTH} levels deep, or contains itself")
    if kind is list or kind is tuple:
        items = []
        for number, item in enumerate(value):
            try:
                items.append(to_wire(item, name_object, depth + 1))
            except UnfitValue as error:
                error.path = f"[{number}]{error.path}"
                raise
        return items if kind is list else {"$": "tuple", "items": items}
    if kind is set or kind is frozenset:
        keys = [_key(item, name_object, depth + 1) for item in value]
        return {"$": kind.__name__, "items": sorted(keys, key=json.dumps)}
    if kind is dict:
        return _dict_to_wire(value, name_object, depth)
    wire = name_object(value) if name_object is not None else None
    wire = wire or _text_to_wire(value) or _numpy_to_wire(value)
    if wire is None:
        name = f"{kind.__module__}.{kind.__qualname__}".removeprefix("builtins.")
        shown = reprlib.repr(value)  # of which no length and no error of the user's is known
        raise UnfitValue(f"is {shown}, a {name}, which would not arrive as it is")
    return wire


def from_wire(wire: Any, make_object: Callable[[dict[str, Any]], Any] | None = None) -> Any:
    """Inverse of `to_wire`.

    Args:
        make_object: gives the value of a tagged form that this module does not know.
    Raises: one of MALFORMED: it is not what `to_wire` made.
    """
    if isinstance(wire, list):
        return [from_wire(item, make_object) for item in wire]
    if not isinstance(wire, dict):
        return wire
    tag = wire.get("$")
    if tag is None:
        return {key: from_wire(item, make_object) for key, item in wire.items()}
    if tag == "dict":
        pairs = wire["items"]
        return {from_wire(key, make_object): from_wire(item, make_object) for key, item in pairs}
    if tag in _COLLECTIONS:
        return _COLLECTIONS[tag](from_wire(item, make_object) for item in wire["items"])
    if tag in _OF_TEXT:
        return _OF_TEXT[tag](wire[tag])
    if tag == "numpy":
        return _numpy_of(wire)
    if make_object is None:
        raise ValueError(f"a value of unknown kind {tag!r}")
    return make_object(wire)


def _dict_to_wire(
    value: dict[Any, Any], name_object: NameObject | None, depth: int
) -> dict[str, Any]:
    is_plain = all(type(key) is str for key in value) and "$" not in value
    pairs = []
    for key, item in value.items():
        wire = key if is_plain else _key(key, name_object, depth + 1)
        try:
            pairs.append([wire, to_wire(item, name_object, depth + 1)])
        except UnfitValue as error:
            error.path = f"[{key!r}]{error.path}"
            raise
    return dict(pairs) if is_plain else {"$": "dict", "items": pairs}


def _key(key: Any, name_object: NameObject | None, depth: int) -> Any:
    """The form of a dict's key or a set's item, which is looked up: NaN is equal to no other."""
    if not _is_equal_to_itself(key):
        raise UnfitValue(f"has the key {key!r}, which is not equal to itself")
    return to_wire(key, name_object, depth)


def _is_equal_to_itself(key: Any) -> bool:
    parts = key if isinstance(key, tuple | frozenset) else ()
    return bool(key == key) and all(map(_is_equal_to_itself, parts))


def _text_to_wire(value: Any) -> dict[str, Any] | None:
    kind = type(value)
    if kind not in _BY_TEXT:
        return None
    tag, to_text, of_text = _BY_TEXT[kind]
    text = to_text(value)
    if hasattr(value, "tzinfo") and repr(of_text(text)) != repr(value):
        return None  # a zone that has a name, or the second of an hour that comes twice
    return {"$": tag, tag: text}


def _numpy_to_wire(value: Any) -> dict[str, Any] | None:
    """A scalar, or an array of those."""
    if not isinstance(value, np.generic | np.ndarray) or value.dtype.hasobject:
        return None
    shape = list(value.shape) if isinstance(value, np.ndarray) else None
    array = np.asarray(value)  # of an item size above 0, also of an empty text
    wire = {"$": "numpy", "dtype": array.dtype.str, "shape": shape, "bytes": array.tobytes().hex()}
    back = _numpy_of(wire)
    return wire if type(back) is type(value) and back.dtype == value.dtype else None


def _numpy_of(wire: dict[str, Any]) -> Any:
    # not np.ndarray(), which takes bytes for the addresses of objects
    array = np.frombuffer(bytes.fromhex(wire["bytes"]), wire["dtype"]).reshape(wire["shape"] or ())
    return array[()] if wire["shape"] is None else array.copy()
