"""A real browser for tests: headless Chromium, driven over a pipe in its own protocol, by the standard library alone.

    with Browser() as browser:
        page = browser.open(path, width=390)
        assert page.value("document.title") == "..."

``page.requests`` holds the requests of a page for anything but its own file, ``page.complaints`` its errors and
warnings.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
ANSWER_S = 30.0


def find_chromium() -> str | None:
    return next((path for name in NAMES if (path := shutil.which(name)) is not None), None)


@contextlib.contextmanager
def browser_or_skip() -> Iterator[Browser]:
    """A browser, for a fixture; without Chromium its tests are skipped, and fail where CI=true."""
    if find_chromium() is None:
        if os.environ.get("CI") == "true":
            pytest.fail("Chromium is not installed: apt-get install chromium")
        pytest.skip("Chromium is not installed")
    with Browser() as browser:
        yield browser


class Browser:
    """Chromium with a profile of its own, from ``__enter__`` until ``__exit__``."""

    def __init__(self) -> None:
        command = find_chromium()
        assert command is not None, "Chromium is not installed: apt-get install chromium"
        self._command = command
        self._number = 0
        self._events: list[dict[str, Any]] = []
        self._unread = b""

    def __enter__(self) -> Self:
        self._folder = tempfile.TemporaryDirectory(prefix="gradsync-browser-", ignore_cleanup_errors=True)
        to_browser, self._requests = os.pipe()
        self._answers, from_browser = os.pipe()

        def move_pipes() -> None:  # Chromium reads from descriptor 3 and writes to 4
            ends = os.dup(to_browser), os.dup(from_browser)
            os.dup2(ends[0], 3)
            os.dup2(ends[1], 4)

        options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe", "--no-first-run"]
        options += ["--disable-dev-shm-usage", "--disable-background-networking", "--disable-component-update"]
        self._process = subprocess.Popen(
            [self._command, *options, f"--user-data-dir={self._folder.name}", "about:blank"],
            pass_fds=(3, 4),
            preexec_fn=move_pipes,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_browser)
        os.close(from_browser)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        with contextlib.suppress(Exception):
            self.ask("Browser.close")
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(5.0)
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait(5.0)
        os.close(self._requests)
        os.close(self._answers)
        self._folder.cleanup()

    def open(self, path: Path, *, width: int = 1280, height: int = 900, dark: bool = False) -> Page:
        """Show a file as a screen of this size would; returns when it is drawn."""
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        session = self.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        page = Page(self, session)
        for domain in ("Page", "Runtime", "Log", "Network"):
            page.ask(f"{domain}.enable")
        page.ask(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        page.ask("Emulation.setEmulatedMedia", features=[scheme])
        page.ask("Page.navigate", url=path.absolute().as_uri())
        deadline = time.monotonic() + ANSWER_S
        while page.value("document.readyState") != "complete" or page.value("location.href") == "about:blank":
            assert time.monotonic() < deadline, f"{path} was not drawn in time"
            time.sleep(0.02)
        return page

    def ask(self, method: str, session: str | None = None, **params: Any) -> dict[str, Any]:
        """Send one command; returns its answer."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if session is not None:
            message["sessionId"] = session
        os.write(self._requests, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + ANSWER_S
        while True:
            answer = self._next(deadline)
            if answer.get("id") == self._number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return dict(answer["result"])
            self._events.append(answer)

    def events(self, session: str) -> list[dict[str, Any]]:
        return [event for event in self._events if event.get("sessionId") == session]

    def _next(self, deadline: float) -> dict[str, Any]:
        while b"\0" not in self._unread:
            ready, _, _ = select.select([self._answers], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, "the browser does not answer"
            read = os.read(self._answers, 1 << 20)
            assert read, "the browser has ended"
            self._unread += read
        message, _, self._unread = self._unread.partition(b"\0")
        return dict(json.loads(message))


class Page:
    """One page that is shown."""

    def __init__(self, browser: Browser, session: str) -> None:
        self._browser = browser
        self._session = session

    def ask(self, method: str, **params: Any) -> dict[str, Any]:
        return self._browser.ask(method, self._session, **params)

    def value(self, expression: str) -> Any:
        """Evaluate a JavaScript expression in the page."""
        answer = self.ask("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def move_to(self, selector: str) -> None:
        """Put the mouse on the middle of an element."""
        self.value(f"document.querySelector({json.dumps(selector)}).scrollIntoView({{block: 'center'}})")
        x, y = self._middle(selector)
        self.ask("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def click(self, selector: str) -> None:
        self.move_to(selector)
        x, y = self._middle(selector)
        for kind in ("mousePressed", "mouseReleased"):
            self.ask("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def _middle(self, selector: str) -> tuple[float, float]:
        box = f"(() => {{ const b = document.querySelector({json.dumps(selector)}).getBoundingClientRect();"
        x, y = self.value(box + " return [b.x + b.width / 2, b.y + b.height / 2]; })()")
        return float(x), float(y)

    def screenshot(self, path: Path) -> None:
        """The whole page, as a PNG."""
        shot = self.ask("Page.captureScreenshot", captureBeyondViewport=True, format="png")
        path.write_bytes(base64.b64decode(shot["data"]))

    @property
    def requests(self) -> list[str]:
        """The URLs that the page requested, except files and data URLs."""
        self.value("0")  # all events before this answer have been read
        urls = [
            event["params"]["request"]["url"]
            for event in self._browser.events(self._session)
            if event["method"] == "Network.requestWillBeSent"
        ]
        return [url for url in urls if not url.startswith(("file:", "data:"))]

    @property
    def complaints(self) -> list[str]:
        """Errors and warnings of the console, and uncaught exceptions."""
        self.value("0")
        found = []
        for event in self._browser.events(self._session):
            params = event["params"]
            if event["method"] == "Runtime.exceptionThrown":
                found.append(str(params["exceptionDetails"]))
            elif event["method"] == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning"):
                found.append(str(params["args"]))
            elif event["method"] == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
                found.append(params["entry"]["text"])
        return found
