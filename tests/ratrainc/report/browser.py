"""A headless Chromium that tests steer over its debugging pipe: real wheel turns, keys and clicks. It needs no package."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
NEEDS_BROWSER = [
    pytest.mark.everything,
    pytest.mark.skipif(BROWSER is None, reason="no chromium on the path"),
    pytest.mark.xdist_group("browser"),  # one browser at a time
]
OPTIONS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
)


class Tab:
    """One page, by the DevTools protocol: a message is JSON that ends with a zero byte."""

    def __init__(self, source: int, sink: int) -> None:
        self._source, self._sink = os.fdopen(source, "rb", 0), os.fdopen(sink, "wb", 0)
        self._number, self._held, self._session = 0, b"", None
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self.call("Page.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Call a method of the protocol; its result."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        self._sink.write(json.dumps(message).encode() + b"\0")
        while (answer := self._message()).get("id") != self._number:
            pass
        assert "error" not in answer, answer
        return answer["result"]

    def _message(self) -> dict[str, Any]:
        while b"\0" not in self._held:
            piece = self._source.read(1 << 20)
            assert piece, "the browser ended"
            self._held += piece
        text, self._held = self._held.split(b"\0", 1)
        return json.loads(text)

    def tell(self, script: str) -> Any:
        """What an expression gives, awaited where it is a promise."""
        answer = self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def open(
        self, address: str, width: int = 1400, height: int = 1000, scheme: str = "light", mark: str = "paintedMs"
    ) -> None:
        """Open a page of this size and wait until its charts are drawn, which the page marks."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self.call("Page.navigate", url="about:blank")
        self.call("Page.navigate", url=address)
        self.until(f"document.documentElement.dataset.{mark}")
        self.settle()

    def until(self, holds: str) -> None:
        """Wait until an expression holds."""
        check = f"(() => {{ try {{ return Boolean({holds}); }} catch {{ return false; }} }})()"
        loop = f"(async () => {{ for (let i = 0; i < 500; i++) {{ if ({check}) return true; await new Promise((d) => setTimeout(d, 10)); }} return false; }})()"
        assert self.tell(loop), holds

    def settle(self) -> None:
        """Wait until what was asked for is drawn."""
        self.tell(
            "new Promise((done) => setTimeout(() => requestAnimationFrame(() => requestAnimationFrame(done)), 250))"
        )

    def mouse(self, kind: str, x: float, y: float, **more: Any) -> None:
        """A mouse event at a place of the window."""
        self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, **more)

    def key(self, key: str, modifiers: int = 0) -> None:
        """Press a key that gives no text."""
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, modifiers=modifiers)

    def picture(self, path: Path) -> None:
        """A picture of the window."""
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot")["data"]))

    def close(self) -> None:
        """End the browser."""
        self._session = None
        self.call("Browser.close")
        self._source.close()
        self._sink.close()


@contextmanager
def tab(folder: Path) -> Iterator[Tab]:
    """A tab of a new browser, whose profile is in a folder."""
    assert BROWSER is not None
    (inner_source, sink), (source, inner_sink) = os.pipe(), os.pipe()
    # The browser reads commands at 3 and writes answers at 4.
    script = f'exec "$@" 3<&{inner_source} 4>&{inner_sink}'
    command = ["bash", "-c", script, "bash", BROWSER, *OPTIONS, "--remote-debugging-pipe", f"--user-data-dir={folder}"]
    with subprocess.Popen(
        command,
        pass_fds=(inner_source, inner_sink),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as process:
        os.close(inner_source)
        os.close(inner_sink)
        opened = Tab(source, sink)
        try:
            yield opened
        finally:
            opened.close()
            process.wait(timeout=20)
