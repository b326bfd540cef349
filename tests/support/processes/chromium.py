"""A headless Chromium, driven over the DevTools protocol with real clicks and keys."""

import base64
import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from websockets.sync.client import ClientConnection, connect

_START_S = 60.0
_WAIT_S = 20.0


class Page:
    """One tab: what it shows, and what it complained about or asked the network for."""

    def __init__(self, connection: ClientConnection) -> None:
        self._connection = connection
        self._next_id = 0
        self.errors: list[str] = []
        self.requests: list[str] = []
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: object) -> dict[str, Any]:
        """Send one command and return its result; events on the way are noted."""
        self._next_id += 1
        message = {"id": self._next_id, "method": method, "params": parameters}
        self._connection.send(json.dumps(message))
        while True:
            answer = json.loads(self._connection.recv(timeout=_WAIT_S))
            if answer.get("id") == self._next_id:
                assert "error" not in answer, f"{method}: {answer['error']}"
                result: dict[str, Any] = answer["result"]
                return result
            self._note(answer)

    def open(self, place: Path | str) -> None:
        """Open a file, or an address of a server."""
        self.call("Page.navigate", url=place if isinstance(place, str) else place.as_uri())
        self.wait("document.readyState === 'complete' && document.title !== 'megadapo report'")

    def js(self, expression: str) -> Any:
        """Return the value of a JavaScript expression."""
        result = self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    def wait(self, expression: str) -> None:
        """Wait until a JavaScript expression is true."""
        deadline = time.monotonic() + _WAIT_S
        while not self.js(expression):
            assert time.monotonic() < deadline, f"never true: {expression}; {self.errors}"
            time.sleep(0.05)

    def text(self, selector: str) -> str:
        return str(self.js(f"document.querySelector({json.dumps(selector)}).innerText"))

    def texts(self, selector: str) -> list[str]:
        found = f"[...document.querySelectorAll({json.dumps(selector)})]"
        return list(self.js(f"{found}.map((node) => node.innerText)"))

    def move(
        self, selector: str, *, x: float = 0.5, y: float = 0.5, scroll: bool = True
    ) -> tuple[float, float]:
        """Bring an element into view and the mouse over it, at shares of its size."""
        left, top, width, height = self.js(
            f"(() => {{ const node = document.querySelector({json.dumps(selector)});"
            f"if ({json.dumps(scroll)}) node.scrollIntoView({{ block: 'center' }});"
            "const box = node.getBoundingClientRect();"
            "return [box.left, box.top, box.width, box.height]; })()"
        )
        place = left + x * width, top + y * height
        self._mouse("mouseMoved", place)
        return place

    def click(self, selector: str) -> None:
        place = self.move(selector)
        self._mouse("mousePressed", place, button="left", clickCount=1)
        self._mouse("mouseReleased", place, button="left", clickCount=1)

    def drag(self, selector: str, start: float, end: float) -> None:
        """Drag over an element from one share of its width to another."""
        self._mouse("mousePressed", self.move(selector, x=start), button="left", clickCount=1)
        place = self.move(selector, x=end)
        self._mouse("mouseReleased", place, button="left", clickCount=1)

    def type(self, selector: str, text: str) -> None:
        self.click(selector)
        self.call("Input.insertText", text=text)

    def choose(self, selector: str, value: str) -> None:
        """Choose an option of a select element, as its own menu would."""
        node = f"document.querySelector({json.dumps(selector)})"
        self.js(
            f"{node}.value = {json.dumps(value)};"
            f"{node}.dispatchEvent(new Event('input', {{ bubbles: true }}))"
        )

    def prefer(self, scheme: str) -> None:
        """Set the system's colour scheme."""
        feature = {"name": "prefers-color-scheme", "value": scheme}
        self.call("Emulation.setEmulatedMedia", features=[feature])

    def resize(self, width: int, height: int, *, scale: int = 1) -> None:
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=scale,
            mobile=False,
        )

    def screenshot(self, path: Path, *, whole_page: bool = False) -> None:
        picture = self.call("Page.captureScreenshot", captureBeyondViewport=whole_page)
        path.write_bytes(base64.b64decode(picture["data"]))

    def _mouse(self, kind: str, place: tuple[float, float], **more: object) -> None:
        self.call("Input.dispatchMouseEvent", type=kind, x=place[0], y=place[1], **more)

    def _note(self, event: dict[str, Any]) -> None:
        method, details = event["method"], event["params"]
        if method == "Runtime.exceptionThrown":
            self.errors.append(json.dumps(details["exceptionDetails"]))
        elif method == "Runtime.consoleAPICalled" and details["type"] in ("error", "warning"):
            self.errors.append(json.dumps(details["args"]))
        elif method == "Log.entryAdded" and details["entry"]["level"] in ("error", "warning"):
            self.errors.append(details["entry"]["text"])
        elif method == "Page.javascriptDialogOpening":
            self.errors.append(f"dialog: {details['message']}")
            self._connection.send(
                json.dumps(
                    {"id": 0, "method": "Page.handleJavaScriptDialog", "params": {"accept": True}}
                )
            )
        elif method == "Network.requestWillBeSent":
            self.requests.append(details["request"]["url"])


@contextmanager
def chromium(profile: Path) -> Iterator[Page]:
    """Start Chromium with a fresh profile, and end it."""
    program = shutil.which("chromium")
    assert program is not None, "tests marked browser need chromium: apt-get install chromium"
    command = [
        program,
        "--headless=new",
        "--remote-debugging-port=0",
        f"--user-data-dir={profile}",
        "--no-first-run",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--hide-scrollbars",
        "about:blank",
    ]
    if os.geteuid() == 0:
        command.insert(1, "--no-sandbox")
    log = (profile / "chromium.log").open("wb")
    with log, subprocess.Popen(command, stdout=log, stderr=log) as process:
        try:
            with connect(_page_address(profile, process), max_size=2**28) as connection:
                yield Page(connection)
        finally:
            process.terminate()


def _page_address(profile: Path, process: subprocess.Popen[bytes]) -> str:
    """Return the websocket address of the first tab."""
    from urllib.request import urlopen

    port_file = profile / "DevToolsActivePort"
    deadline = time.monotonic() + _START_S
    while not port_file.exists() or not port_file.read_text().strip():
        assert process.poll() is None, (profile / "chromium.log").read_text(errors="replace")
        assert time.monotonic() < deadline, "chromium did not open its DevTools port"
        time.sleep(0.05)
    port = port_file.read_text().split()[0]
    with urlopen(f"http://127.0.0.1:{port}/json/list") as answer:
        targets = json.load(answer)
    return str(next(t["webSocketDebuggerUrl"] for t in targets if t["type"] == "page"))
