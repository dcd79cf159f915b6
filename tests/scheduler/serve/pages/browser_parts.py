"""A real headless Chromium, driven by WebDriver."""

from __future__ import annotations

import base64
import json
import shutil
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

DRIVER, CHROMIUM = shutil.which("chromedriver"), shutil.which("chromium")
IS_INSTALLED = DRIVER is not None and CHROMIUM is not None
START_SECONDS = 60
ARGUMENTS = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"]


class Browser:
    def __init__(self, driver_url: str) -> None:
        options = {"args": ARGUMENTS, "binary": CHROMIUM}
        wanted = {
            "browserName": "chrome",
            "goog:chromeOptions": options,
            "goog:loggingPrefs": {"browser": "ALL"},
            "unhandledPromptBehavior": "ignore",  # an alert must stay until it is seen
        }
        made = _asked(f"{driver_url}/session", {"capabilities": {"alwaysMatch": wanted}})
        self._url = f"{driver_url}/session/{made['sessionId']}"

    def show(self, width: int, height: int = 900, is_dark: bool = False) -> None:
        self.cdp("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        self.cdp("Emulation.setScrollbarsHidden", hidden=True)  # otherwise they take room on a phone's screen
        scheme = {"name": "prefers-color-scheme", "value": "dark" if is_dark else "light"}
        self.cdp("Emulation.setEmulatedMedia", features=[scheme])

    def open(self, url: str) -> None:
        _asked(f"{self._url}/url", {"url": url})

    def run(self, script: str, *args: object) -> Any:
        return _asked(f"{self._url}/execute/sync", {"script": script, "args": args})

    def cdp(self, command: str, **parameters: object) -> Any:
        """Send a command of the browser's own protocol."""
        return _asked(f"{self._url}/goog/cdp/execute", {"cmd": command, "params": parameters})

    def picture(self, is_whole: bool = False) -> bytes:
        data = self.cdp("Page.captureScreenshot", format="png", captureBeyondViewport=is_whole)["data"]
        return base64.b64decode(data)

    def complaints(self) -> list[str]:
        """Return new console messages, such as violated policies."""
        return [entry["message"] for entry in _asked(f"{self._url}/se/log", {"type": "browser"})]

    def close(self) -> None:
        _asked(self._url, None, "DELETE")


@contextmanager
def browsing() -> Iterator[Browser]:
    with subprocess.Popen([str(DRIVER), "--port=0"], stdout=subprocess.PIPE, text=True) as process:
        try:
            port = next(line.split()[-1].rstrip(".") for line in process.stdout if "successfully on port" in line)
            browser = Browser(f"http://127.0.0.1:{port}")
            yield browser
            browser.close()
        finally:
            process.terminate()


def _asked(url: str, body: object, method: str = "POST") -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"}, method=method)
    try:
        with urllib.request.urlopen(request, timeout=START_SECONDS) as response:
            return json.loads(response.read())["value"]
    except urllib.error.HTTPError as error:
        with error:
            raise AssertionError(error.read().decode()) from None
