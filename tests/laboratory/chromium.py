"""Headless Chromium, driven through its own protocol over two pipes: nothing else is needed."""

import base64
import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


class Tab:
    """One page: commands of the protocol, and what the page has said on its console."""

    def __init__(self, reader: Any, writer: Any):
        self.reader, self.writer, self.count, self.session = reader, writer, 0, ""
        self.complaints: list[str] = []
        target = self("Target.createTarget", url="about:blank")["targetId"]
        attached = self("Target.attachToTarget", targetId=target, flatten=True)
        self.session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self(f"{domain}.enable")

    def __call__(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send a command; returns its result."""
        self.count += 1
        session = {"sessionId": self.session} if self.session else {}
        message = {"id": self.count, "method": method, "params": parameters, **session}
        self.writer.write(json.dumps(message).encode() + b"\0")
        self.writer.flush()
        while True:
            answer = self._next()
            if answer.get("id") == self.count:
                assert "error" not in answer, answer["error"]
                result: dict[str, Any] = answer["result"]
                return result

    def _next(self) -> dict[str, Any]:
        text = bytearray()
        while (byte := self.reader.read(1)) != b"\0":
            assert byte, "Chromium has ended"
            text += byte
        told: dict[str, Any] = json.loads(text)
        loud = told.get("method") in ("Runtime.exceptionThrown", "Log.entryAdded")
        if loud or told.get("params", {}).get("type") in ("error", "warning"):
            self.complaints.append(json.dumps(told["params"])[:2000])
        if told.get("method") == "Network.requestWillBeSent":
            url = told["params"]["request"]["url"]
            if not url.startswith(("file:", "about:", "data:")):
                self.complaints.append(url)
        return told

    def open(
        self, path: Path, width: int = 1400, height: int = 1000, *, dark: bool = False
    ) -> None:
        """Load a file, as a double click on it does."""
        phone = width < 600
        size = {"width": width, "height": height, "deviceScaleFactor": 2 if phone else 1}
        self("Emulation.setDeviceMetricsOverride", **size, mobile=phone)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self("Emulation.setEmulatedMedia", features=[scheme])
        self("Page.navigate", url=path.resolve().as_uri())
        while self.tell("document.readyState") != "complete":
            pass

    def tell(self, expression: str) -> Any:
        """The value of an expression in the page."""
        done = self("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in done, done["exceptionDetails"]
        return done["result"].get("value")

    def frame(self) -> None:
        """Wait until the page is drawn, and what that starts, such as scrolling, is done."""
        drawn = "new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))"
        self("Runtime.evaluate", expression=drawn, awaitPromise=True)

    def picture(self, *selectors: str) -> bytes:
        """A PNG of the page's whole width, from the first to the last of these elements."""
        self.frame()
        ends = self.tell(
            f"{json.dumps(selectors)}.map((x) => document.querySelector(x).getBoundingClientRect())"
            ".map(({top, bottom}) => [scrollY + top, scrollY + bottom])"
        )
        top, bottom = min(x for x, _ in ends) - 8, max(x for _, x in ends) + 8
        width = self.tell("innerWidth")
        clip = {"x": 0, "y": max(0, top), "width": width, "height": bottom - top, "scale": 1}
        given = {"clip": clip, "captureBeyondViewport": True}
        return base64.b64decode(self("Page.captureScreenshot", format="png", **given)["data"])

    def click(self, selector: str) -> None:
        """Press the mouse in the middle of an element, where that is visible."""
        place = self.tell(
            f"((element) => {{ element.scrollIntoView({{block: 'nearest', behavior: 'instant'}});"
            "const {x, y, width, height} = element.getBoundingClientRect();"
            "return {x: x + width / 2, y: y + Math.min(height / 2, 13)}; })"
            f"(document.querySelector({json.dumps(selector)}))"
        )
        for kind in ("mousePressed", "mouseReleased"):
            self("Input.dispatchMouseEvent", type=kind, button="left", clickCount=1, **place)

    def press(self, key: str, text: str = "") -> None:
        """Press a key, such as `Enter`; `text` is what it types."""
        code = {
            "Enter": 13,
            "Escape": 27,
            "ArrowLeft": 37,
            "ArrowUp": 38,
            "ArrowRight": 39,
            "ArrowDown": 40,
            "Tab": 9,
        }.get(key, 0)
        given = {"key": key, "windowsVirtualKeyCode": code, "text": text}
        self("Input.dispatchKeyEvent", type="keyDown", **given)
        self("Input.dispatchKeyEvent", type="keyUp", key=key)


@contextmanager
def chromium(user: Path) -> Iterator[Tab]:
    """A browser of its own, whose profile is in the folder `user`."""
    theirs, commands = os.pipe()
    answers, ours = os.pipe()
    options = "headless no-sandbox disable-gpu no-first-run disable-background-networking"
    options += " disable-component-update disable-sync remote-debugging-pipe"
    flags = " ".join(f"--{option}" for option in options.split())
    line = f'exec chromium {flags} --user-data-dir="$1" 3<&{theirs} 4>&{ours}'
    browser = subprocess.Popen(
        ["bash", "-c", line, "bash", str(user)], pass_fds=(theirs, ours), stderr=subprocess.DEVNULL
    )
    os.close(theirs)
    os.close(ours)
    try:
        with os.fdopen(answers, "rb") as reader, os.fdopen(commands, "wb") as writer:
            yield Tab(reader, writer)
    finally:
        browser.terminate()
        browser.wait()
