"""What each client's program does: a question, a call of the tool, and the answer."""

from __future__ import annotations

QUESTION = "key c"
PARAMETERS = {
    "type": "object",
    "properties": {"key": {"type": "string"}},
    "required": ["key"],
    "additionalProperties": False,
}
DESCRIPTION = "Gives the digit that belongs to a key."


def look_up(key: str) -> str:
    return {"a": "4", "b": "9", "c": "7"}.get(key, "none")
