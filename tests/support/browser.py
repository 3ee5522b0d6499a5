"""Drives a headless Chromium through a pipe: the DevTools protocol, without a package or a port."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

BINARY = next(
    (
        path
        for name in ("chromium", "chromium-browser", "google-chrome")
        if (path := shutil.which(name))
    ),
    "",
)
FLAGS = [
    *(
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-quic",
        "--no-first-run",
        "--disable-sync",
    ),
    *("--disable-background-networking", "--disable-component-update", "--disable-dev-shm-usage"),
    *("--hide-scrollbars", "--remote-debugging-pipe"),
]


class Page:
    """A page: what it logs, what it requests, and what a script in it returns."""

    def __init__(self, process: subprocess.Popen[bytes], to: int, back: int) -> None:
        self.process, self.to, self.back = process, to, back
        self.messages: list[str] = []  # errors and warnings of the console, and exceptions
        self.requests: list[str] = []
        self._number, self._rest, self._loaded, self._session = 0, b"", False, ""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)[
            "sessionId"
        ]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Sends a command and returns its result. Raises AssertionError for its error, or after 30 s."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        os.write(
            self.to,
            json.dumps(message | ({"sessionId": self._session} if self._session else {})).encode()
            + b"\0",
        )
        while (answer := self._next()).get("id") != self._number:
            pass
        assert "error" not in answer, answer
        return answer["result"]

    def _next(self) -> dict[str, Any]:
        deadline = time.monotonic() + 30
        while b"\0" not in self._rest:
            assert select.select([self.back], [], [], max(0, deadline - time.monotonic()))[0], (
                "the browser hangs"
            )
            part = os.read(self.back, 1 << 20)
            assert part, "the browser has ended"
            self._rest += part
        line, _, self._rest = self._rest.partition(b"\0")
        message: dict[str, Any] = json.loads(line)
        values = message.get("params", {})
        match message.get("method"):
            case "Page.loadEventFired":
                self._loaded = True
            case "Runtime.exceptionThrown":
                self.messages.append(
                    str(values["exceptionDetails"].get("exception", {}).get("description"))
                )
            case "Runtime.consoleAPICalled":
                self.messages.append(str([argument.get("value") for argument in values["args"]]))
            case "Log.entryAdded":
                self.messages.append(values["entry"]["text"])
            case "Network.requestWillBeSent":
                self.requests.append(values["request"]["url"])
        return message

    def open(
        self,
        url: str,
        width: int = 1280,
        height: int = 900,
        dark: bool = False,
        touch: bool = False,
    ) -> None:
        """Loads a page in a window of this size, and waits until it has drawn."""
        self.messages.clear(), self.requests.clear()
        size = {
            "width": width,
            "height": height,
            "deviceScaleFactor": 2 if touch else 1,
            "mobile": touch,
        }
        self.call("Emulation.setDeviceMetricsOverride", **size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self._loaded = False
        # a change of the fragment alone would not load it again
        self.call("Page.navigate", url="about:blank")
        self.call("Page.navigate", url=url)
        deadline = time.monotonic() + 30
        while self.run("document.documentElement?.dataset.ready") != "yes":
            assert time.monotonic() < deadline, self.messages
            time.sleep(0.05)
        self.requests = [
            request for request in self.requests if request not in ("about:blank", url)
        ]

    def run(self, script: str) -> Any:
        """The value of an expression in the page."""
        result = self.call(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def press(self, key: str, code: int, text: str = "") -> None:
        more = {"text": text} if text else {}
        for kind in ("keyDown", "keyUp"):
            self.call(
                "Input.dispatchKeyEvent",
                type=kind,
                key=key,
                code=key,
                windowsVirtualKeyCode=code,
                **more,
            )
            more = {}

    def screenshot(self, path: Path, whole: bool = True) -> None:
        content = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)[
            "data"
        ]
        path.write_bytes(base64.b64decode(content))

    def pdf(self) -> bytes:
        return base64.b64decode(self.call("Page.printToPDF", printBackground=True)["data"])


@contextlib.contextmanager
def browser(profile: Path) -> Iterator[Page]:
    """Opens a page of a new browser whose profile is in an empty folder."""
    commands, answers = os.pipe(), os.pipe()

    def connect() -> None:  # the browser reads from descriptor 3 and writes to 4
        low, high = os.dup2(commands[0], 103), os.dup2(answers[1], 104)
        os.dup2(low, 3), os.dup2(high, 4)

    process = subprocess.Popen(
        [BINARY, *FLAGS, f"--user-data-dir={profile}"],
        preexec_fn=connect,
        pass_fds=(3, 4, commands[0], answers[1]),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(commands[0]), os.close(answers[1])
    try:
        yield Page(process, commands[1], answers[0])
    finally:
        process.kill()
        process.wait(10)
        os.close(commands[1]), os.close(answers[0])
