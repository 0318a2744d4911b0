"""Chromium, steered by its DevTools protocol: what a page shows, and what goes wrong there."""

from __future__ import annotations

import asyncio
import base64
import json
import shutil
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from aiohttp import ClientSession, ClientWebSocketResponse

CHROMIUM = shutil.which("chromium")
LIMIT_S = 60.0
AXE = Path(__file__).parents[1] / "browser" / "axe.min.js"
_CODES = {"Enter": 13, "Tab": 9, "Escape": 27}
_BAD = ("error", "warning", "assert")


class Tab:
    """A tab.

    Attributes:
        errors: what its console has said that is no mere information, and what was raised.
    """

    def __init__(self, socket: ClientWebSocketResponse) -> None:
        self.errors: list[str] = []
        self._socket = socket
        self._number = 0
        self._replies: dict[int, asyncio.Future[Any]] = {}
        self._loaded = asyncio.Event()
        self._hearing = asyncio.create_task(self._hear())

    async def call(self, method: str, **parameters: Any) -> Any:
        """The result of a method of the protocol."""
        self._number += 1
        reply = self._replies[self._number] = asyncio.get_running_loop().create_future()
        request = {"id": self._number, "method": method, "params": parameters}
        await self._socket.send_json(request)
        return await asyncio.wait_for(reply, LIMIT_S)

    async def open(self, address: str) -> None:
        """Goes to an address, anew."""
        self._loaded.clear()
        await self.call("Page.navigate", url="about:blank")
        await asyncio.wait_for(self._loaded.wait(), LIMIT_S)
        self._loaded.clear()
        await self.call("Page.navigate", url=address)
        await asyncio.wait_for(self._loaded.wait(), LIMIT_S)

    async def value(self, expression: str) -> Any:
        """The value of a JavaScript expression, awaited if it is a promise."""
        found = await self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    async def wait_for(self, expression: str) -> Any:
        """The first value of an expression that is true."""
        ends = time.monotonic() + LIMIT_S
        while not (found := await self.value(expression)):
            shown = await self.value("document.body.innerText")
            assert time.monotonic() < ends, f"{expression}: {self.errors}; it shows {shown:.2000}"
            await asyncio.sleep(0.05)
        return found

    async def press(self, *keys: str) -> None:
        """Presses keys one after another, wherever the focus is."""
        for key in keys:
            text = {"text": key} if len(key) == 1 else {}
            text |= {"text": "\r"} if key == "Enter" else {}
            known = {"key": key, "windowsVirtualKeyCode": _CODES.get(key, 0)}
            await self.call("Input.dispatchKeyEvent", type="keyDown", **known, **text)
            await self.call("Input.dispatchKeyEvent", type="keyUp", **known)

    async def complaints(self, *rules: str) -> list[str]:
        """What axe-core finds that keeps people from using what is shown, each with an example.

        Args: rules: of axe-core; none: all.
        """
        only = f"runOnly: {json.dumps(rules)}, " if rules else ""
        if not await self.value("typeof axe === 'object'"):
            await self.call("Runtime.evaluate", expression=AXE.read_text())
        found = await self.value(
            f"axe.run(document, {{{only}resultTypes: ['violations']}}).then(it => it.violations"
            ".filter(it => ['serious', 'critical'].includes(it.impact))"
            ".map(it => `${it.id}: ${it.nodes.length}, ${it.nodes[0].html} "
            "${it.nodes[0].failureSummary}`))"
        )
        return list(found)

    async def resize(self, width: int, height: int = 1200, *, is_dark: bool = False) -> None:
        """Gives the window a size in pixels, and the scheme of its colours."""
        await self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if is_dark else "light"}
        await self.call("Emulation.setEmulatedMedia", features=[scheme])

    async def picture(self) -> bytes:
        """What is seen, as a PNG."""
        shot = await self.call("Page.captureScreenshot", format="png")
        return base64.b64decode(shot["data"])

    async def _hear(self) -> None:
        async for message in self._socket:
            told = json.loads(message.data)
            if "id" in told:
                reply = self._replies.pop(told["id"])
                if "error" in told:
                    reply.set_exception(RuntimeError(str(told["error"])))
                else:
                    reply.set_result(told["result"])
            elif told["method"] == "Page.loadEventFired":
                self._loaded.set()
            else:
                self.errors += _errors_in(told["method"], told["params"])


def _errors_in(event: str, told: Any) -> list[str]:
    match event:
        case "Runtime.exceptionThrown":
            return [json.dumps(told["exceptionDetails"])]
        case "Log.entryAdded" if told["entry"]["level"] in _BAD:
            return [f"{told['entry']['text']} {told['entry'].get('url', '')}"]
        case "Runtime.consoleAPICalled" if told["type"] in _BAD:
            return [json.dumps(told["args"])]
    return []


@asynccontextmanager
async def browser_tab(folder: Path) -> AsyncIterator[Tab]:
    """A tab of a browser of its own, which is gone afterwards."""
    assert CHROMIUM is not None
    options = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage")
    options += ("--no-first-run", "--remote-debugging-port=0", f"--user-data-dir={folder}")
    process = await asyncio.create_subprocess_exec(
        CHROMIUM, *options, "about:blank", stderr=asyncio.subprocess.PIPE
    )
    try:
        assert process.stderr is not None
        line = b""
        async with asyncio.timeout(LIMIT_S):
            while not line.startswith(b"DevTools listening on "):
                line = await process.stderr.readline()
                assert line, "the browser has ended"
        host = line.decode().split("//")[1].split("/")[0]
        draining = asyncio.create_task(process.stderr.read())
        async with ClientSession() as session:
            pages: list[Any] = []
            async with asyncio.timeout(LIMIT_S):
                while not pages:  # it listens before it has opened one
                    async with session.get(f"http://{host}/json/list") as answer:
                        targets = await answer.json(content_type=None)
                    pages = [it for it in targets if it["type"] == "page"]
                    await asyncio.sleep(0.05)
            (page,) = pages
            async with session.ws_connect(page["webSocketDebuggerUrl"], max_msg_size=0) as socket:
                tab = Tab(socket)
                for domain in ("Page", "Runtime", "Log"):
                    await tab.call(f"{domain}.enable")
                yield tab
        draining.cancel()
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
