"""Chromium without a window, driven by its own protocol over a pair of pipes: no port, and no library between."""

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

_WAIT = 60.0
_COMMAND = (
    "chromium",
    "--headless",
    "--no-sandbox",  # tests run as root
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-extensions",
    "--disable-background-networking",
    "--disable-component-update",
    "--no-first-run",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
)
_COMPLAINTS = (
    "Log.entryAdded",
    "Runtime.exceptionThrown",
    "Runtime.consoleAPICalled",
    "Page.javascriptDialogOpening",
)
_KEYS = {"Tab": 9, "Enter": 13, "Escape": 27, "ArrowUp": 38, "ArrowDown": 40}


class Browser:
    """One page of a running browser."""

    def __init__(self, reader: int, writer: int) -> None:
        self._reader, self._writer = reader, writer
        self._number, self._pending = 0, b""
        self._session = ""
        self.events: list[dict[str, Any]] = []
        target = next(each for each in self("Target.getTargets")["targetInfos"] if each["type"] == "page")
        self._session = self("Target.attachToTarget", targetId=target["targetId"], flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self(f"{domain}.enable")

    def __call__(self, method: str, **parameters: Any) -> dict[str, Any]:
        """A command of the protocol, and its result."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self._writer, data) :]
        while True:
            found = self._read()
            if found.get("id") == self._number:
                assert "error" not in found, (method, found["error"])
                return dict(found["result"])

    def _read(self) -> dict[str, Any]:
        end = time.monotonic() + _WAIT
        while b"\0" not in self._pending:
            ready, _write, _error = select.select([self._reader], [], [], max(0.0, end - time.monotonic()))
            assert ready, "the browser does not answer"
            data = os.read(self._reader, 1 << 20)
            assert data, "the browser has ended"
            self._pending += data
        line, _nul, self._pending = self._pending.partition(b"\0")
        found: dict[str, Any] = json.loads(line)
        if "method" in found:
            self.events.append(found)
        return found

    def evaluate(self, expression: str) -> Any:
        """The value of an expression of JavaScript; a promise is waited for."""
        found = self("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def open(self, file: Path, view: str = "", *, width: int = 1280, dark: bool = False) -> None:
        """Load a page at a width, in the light or the dark scheme."""
        self.resize(width, 900)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self("Emulation.setEmulatedMedia", features=[scheme])
        self("Page.navigate", url="about:blank")
        self.events.clear()
        self("Page.navigate", url=f"{file.as_uri()}{f'#{view}' if view else ''}")
        self._until_loaded()

    def _until_loaded(self) -> None:
        end = time.monotonic() + _WAIT
        while self.evaluate("document.readyState + location.protocol") != "completefile:":
            assert time.monotonic() < end, "the page is not loaded"
            time.sleep(0.01)
        self.painted()

    def go(self, view: str) -> None:
        """Another view of the page."""
        self.evaluate(f"location.hash = {json.dumps(f'#{view}')}")
        self.painted()

    def painted(self) -> None:
        """Wait until what was done is to be seen."""
        self.evaluate("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")

    def resize(self, width: int, height: int) -> None:
        """The size of the window."""
        self("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def picture(self, *, whole: bool = True, most: int = 1400) -> bytes:
        """A PNG of the page, or of what the window shows of it."""
        width = self.evaluate("innerWidth")
        if whole:
            self.resize(width, min(most, self.evaluate("document.body.offsetHeight")))
            self.painted()
        return base64.b64decode(self("Page.captureScreenshot", format="png")["data"])

    def press(self, key: str) -> None:
        """A key, as a person presses it."""
        code = _KEYS.get(key, 0)
        text = {"Enter": "\r"}.get(key, key if len(key) == 1 else "")
        fields: dict[str, Any] = {"key": key, **({"windowsVirtualKeyCode": code} if code else {})}
        self("Input.dispatchKeyEvent", type="keyDown", **fields, **({"text": text} if text else {}))
        self("Input.dispatchKeyEvent", type="keyUp", **fields)

    def complaints(self) -> list[str]:
        """What the console holds: errors, warnings, violations of the page's policy, dialogs."""
        self.evaluate("1")  # what was said before is here with the answer
        return [json.dumps(each["params"])[:300] for each in self.events if each["method"] in _COMPLAINTS]

    def requests(self) -> list[str]:
        """What the page asked for since it was opened."""
        self.evaluate("1")
        sent = (each["params"] for each in self.events if each["method"] == "Network.requestWillBeSent")
        urls = [str(each["request"]["url"]) for each in sent]
        return [url for url in urls if url != "about:blank"]


@contextlib.contextmanager
def browser(profile: Path) -> Iterator[Browser]:
    """Start one, and end it."""
    assert shutil.which(_COMMAND[0]), "missing tool: chromium (package chromium)"
    (to_read, to_write), (from_read, from_write) = os.pipe(), os.pipe()
    # It talks on the descriptors 3 and 4, whatever ours are.
    script = f'exec "$@" 3<&{to_read} 4>&{from_write}'
    arguments = [*_COMMAND, f"--user-data-dir={profile}", "about:blank"]
    process = subprocess.Popen(
        ["bash", "-c", script, "bash", *arguments],
        pass_fds=(to_read, from_write),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    os.close(to_read)
    os.close(from_write)
    try:
        yield Browser(from_read, to_write)
    finally:
        process.terminate()
        process.wait(_WAIT)
        os.close(to_write)
        os.close(from_read)
