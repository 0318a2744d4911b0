"""A server of the Model Context Protocol over its standard streams, with one tool: `multiply`.

What `mcp_tool.py` talks to; any other server takes its place. One message a line, in JSON-RPC 2.0
(modelcontextprotocol.io, version 2025-06-18).
"""

from __future__ import annotations

import json
import sys
from typing import Any

TOOLS = [
    {
        "name": "multiply",
        "description": "The product of two integers.",
        "inputSchema": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
        },
    }
]


def answer_to(method: str, params: dict[str, Any]) -> dict[str, Any]:
    """Raises: LookupError: there is no such method or tool."""
    if method == "initialize":
        return {
            "protocolVersion": params["protocolVersion"],
            "capabilities": {"tools": {}},
            "serverInfo": {"name": "calculator", "version": "1"},
        }
    if method == "tools/list":
        return {"tools": TOOLS}
    if method == "tools/call":
        if params["name"] != "multiply":
            raise LookupError(params["name"])
        is_error = False
        try:
            text = str(int(params["arguments"]["a"]) * int(params["arguments"]["b"]))
        except (KeyError, TypeError, ValueError):
            text, is_error = "expected the integers a and b", True
        return {"content": [{"type": "text", "text": text}], "isError": is_error}
    raise LookupError(method)


def main() -> None:
    for line in sys.stdin:  # ends with the process that asks
        asked = json.loads(line)
        if "id" not in asked:
            continue  # a notification
        reply: dict[str, Any] = {"jsonrpc": "2.0", "id": asked["id"]}
        try:
            reply["result"] = answer_to(asked["method"], asked.get("params", {}))
        except LookupError as error:
            reply["error"] = {"code": -32601, "message": f"unknown: {error}"}
        print(json.dumps(reply), flush=True)


if __name__ == "__main__":
    main()
