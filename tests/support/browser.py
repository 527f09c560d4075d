"""A headless Chromium, spoken to over DevTools' pipe: no other program and no port is needed."""

from __future__ import annotations

import base64
import itertools
import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome")
PROGRAM = next((found for name in NAMES if (found := shutil.which(name))), None)
PATIENCE = 60.0
OVERFLOW = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
"""Pixels by which a page is wider than its window."""


class Browser:
    """One page. What it logs, throws and asks for is collected."""

    def __init__(self, write: int, read: int) -> None:
        self._write, self._read = write, read
        self._buffer = b""
        self._numbers = itertools.count(1)
        self._session = ""
        self.errors: list[str] = []
        self.requests: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        number = next(self._numbers)
        message: dict[str, Any] = {"id": number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._message()
            if answer.get("id") == number:
                assert "error" not in answer, answer["error"]
                result: dict[str, Any] = answer["result"]
                return result

    def _message(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            part = os.read(self._read, 1 << 20)
            assert part, "Chromium ended"
            self._buffer += part
        raw, _, self._buffer = self._buffer.partition(b"\0")
        message: dict[str, Any] = json.loads(raw)
        self._note(message.get("method", ""), message.get("params", {}))
        return message

    def _note(self, method: str, about: dict[str, Any]) -> None:
        if method == "Runtime.exceptionThrown":
            self.errors.append(str(about["exceptionDetails"]))
        elif method == "Runtime.consoleAPICalled" and about["type"] in ("error", "warning"):
            self.errors.append(str(about["args"]))
        elif method == "Log.entryAdded" and about["entry"]["level"] in ("error", "warning"):
            self.errors.append(str(about["entry"]))
        elif method == "Network.requestWillBeSent":
            self.requests.append(about["request"]["url"])

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression; promises are waited for."""
        answer = self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def until(self, expression: str) -> None:
        """Wait until an expression is true."""
        limit = time.monotonic() + PATIENCE
        while not self.evaluate(expression):
            assert time.monotonic() < limit, f"{expression} did not come true: {self.errors}"
            time.sleep(0.02)

    def open(self, page: Path | str) -> None:
        """Load a page of ours, from a file or an address, and wait until its charts are drawn."""
        self.errors.clear()
        self.requests.clear()
        self.call("Page.navigate", url="about:blank")  # or else a new hash alone loads nothing
        address = page if isinstance(page, str) else page.resolve().as_uri()
        self.requests.clear()
        self.call("Page.navigate", url=address)
        self.until("document.documentElement?.dataset.drawn !== undefined")

    def press(self, key: str, code: int, text: str = "") -> None:
        """A key of the keyboard, at what has the focus."""
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, text=text,
                      windowsVirtualKeyCode=code)  # fmt: skip

    def downloads(self, folder: Path) -> None:
        """Keep what pages download here."""
        self.call("Browser.setDownloadBehavior", behavior="allow", downloadPath=str(folder))

    def width(self, pixels: int, height: int = 900, scale: float = 1) -> None:
        mobile = pixels < 600
        self.call("Emulation.setDeviceMetricsOverride", width=pixels, height=height,
                  deviceScaleFactor=scale, mobile=mobile)  # fmt: skip

    def media(self, scheme: str, media: str = "") -> None:
        feature = {"name": "prefers-color-scheme", "value": scheme}
        self.call("Emulation.setEmulatedMedia", media=media, features=[feature])

    def picture(self, whole: bool = True) -> bytes:
        """A PNG of the page."""
        taken = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        return base64.b64decode(taken["data"])

    def paper(self) -> bytes:
        """A PDF of the page."""
        made = self.call(
            "Page.printToPDF", preferCSSPageSize=True, paperWidth=8.27, paperHeight=11.7
        )
        return base64.b64decode(made["data"])


@contextmanager
def chromium() -> Iterator[Browser]:
    """A browser that finds no host but this one, and leaves nothing behind."""
    assert PROGRAM is not None
    to_browser, from_browser = os.pipe(), os.pipe()
    with tempfile.TemporaryDirectory(
        prefix="corefed-chromium-", ignore_cleanup_errors=True
    ) as home:
        command = [
            PROGRAM, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
            "--no-first-run", "--disable-background-networking", "--disable-component-update",
            "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1", f"--user-data-dir={home}",
            "--remote-debugging-pipe", "about:blank",
        ]  # fmt: skip

        def place() -> None:  # DevTools' pipe is descriptors 3 (to it) and 4 (from it)
            ends = os.dup(to_browser[0]), os.dup(from_browser[1])
            os.dup2(ends[0], 3)
            os.dup2(ends[1], 4)

        process = subprocess.Popen(
            command, preexec_fn=place, close_fds=False, stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(to_browser[0])
        os.close(from_browser[1])
        try:
            yield Browser(to_browser[1], from_browser[0])
        finally:
            process.terminate()
            process.wait(PATIENCE)
            os.close(to_browser[1])
            os.close(from_browser[0])
