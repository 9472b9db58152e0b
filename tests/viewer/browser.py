"""A headless Chromium that a test drives over its DevTools protocol."""

from __future__ import annotations

import base64
import contextlib
import importlib.util
import json
import shutil
import subprocess
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

FLAGS = (
    "--headless=new --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --disable-default-apps --remote-allow-origins=* "
    "--remote-debugging-port=0"
).split()


def chromium() -> str | None:
    """Where Chromium is, None if it is not installed."""
    return shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


def axe() -> str:
    """axe-core, a script that comes in a wheel; its package, which needs Playwright, is not imported."""
    package = importlib.util.find_spec("axe_playwright_python")
    assert package is not None, "axe-core is not installed: `make test-browser` installs it"
    assert package.origin is not None
    return Path(package.origin).with_name("axe.min.js").read_text("utf-8")


class Browser:
    """One page of a Chromium of its own; everything it keeps is removed at the end."""

    def __init__(self) -> None:
        from websockets.sync.client import connect

        program = chromium()
        assert program is not None, "Chromium is not installed: apt-get install chromium"
        self._number = 0
        self.problems: list[str] = []
        with contextlib.ExitStack() as ending:
            profile = Path(
                ending.enter_context(
                    tempfile.TemporaryDirectory(prefix="shoal-browser-", ignore_cleanup_errors=True)
                )
            )
            process = subprocess.Popen(
                [program, *FLAGS, f"--user-data-dir={profile}", "about:blank"],
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            ending.callback(_end, process)
            port = _wait(lambda: (profile / "DevToolsActivePort").read_text().split()[0], 60)
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/json/list") as answer:
                targets = json.load(answer)
            address = next(t["webSocketDebuggerUrl"] for t in targets if t["type"] == "page")
            self._socket = ending.enter_context(connect(address, max_size=2**28))
            self._ending = ending.pop_all()
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.send(f"{domain}.enable")

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *_: object) -> None:
        self._ending.close()

    def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        """One command and its answer; what the page complains of meanwhile is kept in `problems`."""
        self._number += 1
        self._socket.send(json.dumps({"id": self._number, "method": method, "params": parameters}))
        while True:
            said = json.loads(self._socket.recv(timeout=60))
            if said.get("method") == "Runtime.exceptionThrown":
                self.problems.append(json.dumps(said["params"]["exceptionDetails"])[:500])
            if said.get("method") == "Log.entryAdded" and said["params"]["entry"]["level"] == "error":
                self.problems.append(said["params"]["entry"]["text"])
            if said.get("id") == self._number:
                assert "error" not in said, said["error"]
                return dict(said["result"])

    def open(self, address: str) -> None:
        """Go to a page and wait until it and its script are there."""
        if "#" in address:
            self.open("about:blank")  # the same page with another place in it would not be loaded anew
        self.run("window.__old = true")
        self.send("Page.navigate", url=address)
        self.until("window.__old === undefined && document.readyState === 'complete'")

    def run(self, script: str) -> Any:
        """The value of an expression in the page."""
        answer = self.send(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True, userGesture=True
        )
        assert "exceptionDetails" not in answer, (script, answer["exceptionDetails"])
        return answer["result"].get("value")

    def until(self, script: str, seconds: float = 30) -> Any:
        """Wait until an expression is true, and give its value."""

        def ask() -> Any:
            try:
                return self.run(script)
            except AssertionError:  # the page is just changing
                return None

        return _wait(ask, seconds, script)

    def click(self, selector: str, text: str = "") -> None:
        """Click the first element of that kind, and with that text, that nothing covers."""
        find = f"""(() => {{
              for (const e of document.querySelectorAll({json.dumps(selector)})) {{
                if (!e.textContent.includes({json.dumps(text)})) continue;
                e.scrollIntoView({{block: "center", behavior: "instant"}});
                const box = e.getBoundingClientRect();
                const x = box.left + box.width / 2, y = box.top + box.height / 2;
                if (!e.contains(document.elementFromPoint(x, y))) continue;
                if (!e.click) return [x, y];
                setTimeout(() => e.click());
                return true;
              }}
            }})()"""
        place = self.until(find)
        if place is True:
            return
        self.run(
            "new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => setTimeout(done, 100))))"
        )
        place = self.until(find)  # the page may have moved meanwhile
        for kind in ("mousePressed", "mouseReleased"):  # a page ignores the mouse until it was painted
            self.send(
                "Input.dispatchMouseEvent",
                type=kind,
                x=place[0],
                y=place[1],
                button="left",
                clickCount=1,
                buttons=1,
            )

    def press(self, key: str) -> None:
        """Press a key."""
        event = f"new KeyboardEvent('keydown', {{key: {json.dumps(key)}, bubbles: true}})"
        self.run(f"document.body.dispatchEvent({event}), true")

    def size(self, width: int, height: int = 900, *, dark: bool = False) -> None:
        """The size of the window, and whether its user prefers dark pages."""
        self.send(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 600,
        )
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.send("Emulation.setEmulatedMedia", features=scheme)

    def broken_rules(self) -> list[str]:
        """What axe-core finds wrong with the accessibility of the page: rule, and element."""
        self.send("Runtime.evaluate", expression=axe())
        of_one = "v => v.nodes.map(n => `${v.id} ${n.target} ${n.html}`)"
        return list(self.run(f"axe.run().then(found => found.violations.flatMap({of_one}))"))

    def picture(self, path: Path, most: int = 2600) -> None:
        """The whole page as a PNG."""
        size = self.send("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": min(size["height"], most), "scale": 1}
        shot = self.send("Page.captureScreenshot", format="png", captureBeyondViewport=True, clip=clip)
        path.write_bytes(base64.b64decode(shot["data"]))


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(20)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _wait(ask: Any, seconds: float, what: str = "") -> Any:
    deadline = time.monotonic() + seconds
    while True:
        try:
            value = ask()
        except (OSError, IndexError):
            value = None
        if value:
            return value
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {seconds} s for {what}")
        time.sleep(0.05)
