"""VisualDL's board in tests: started by ``python -m hapi.board``, asked over HTTP, and seen in headless Chromium."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.helpers.launching import Sandbox, wait_until

Point = tuple[int, float]


@dataclass
class Board:
    """A board that runs."""

    process: subprocess.Popen[str]
    url: str

    def get(self, path: str) -> Any:
        """The data that an address of the board's interface answers."""
        direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with direct.open(f"{self.url}/app/api/{path}", timeout=20) as answer:
            return json.load(answer)["data"]

    def tags(self, run: str) -> list[str]:
        """The tags of a run's curves, after reading what is new in its file."""
        self.get("component_tabs")
        found = self.get("scalar/tags")
        return dict(zip(found["runs"], found["tags"], strict=True)).get(run, [])

    def points(self, run: str, tag: str) -> list[Point]:
        """A curve's steps and values; empty as long as there is none. (To ask then would block the board for 4 s.)"""
        if tag not in self.tags(run):
            return []
        query = urllib.parse.urlencode({"run": run, "tag": tag})
        return points(self.get(f"scalar/list?{query}"))


def points(data: list[list[Any]]) -> list[Point]:
    """Steps and values of an answer of ``scalar/list``."""
    return [(step, float(value)) for _, step, value in data]


@contextlib.contextmanager
def board(box: Sandbox, logdir: str, *options: str, env: Mapping[str, str] | None = None) -> Iterator[Board]:
    """``python -m hapi.board``, once it has told its address. Ended at exit if it still runs."""
    process = box.start(
        [sys.executable, "-m", "hapi.board", logdir, *options], {"HOME": str(box.folder), **(env or {})}
    )
    try:
        yield Board(process, _address(process))
    finally:
        process.terminate()
        box.finish(process)


def _address(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    for line in process.stdout:
        if "http://" in line:
            return line[line.index("http://") : line.index("/app/scalar")]
    out, err = process.communicate()
    raise AssertionError(f"the board ended with code {process.returncode}\n{out}\n{err}")


def missing() -> str:
    """Why no browser can be started here; empty if one can."""
    programs = [name for name in ("chromium", "chromedriver") if shutil.which(name) is None]
    if importlib.util.find_spec("selenium") is None:
        programs.append("the package selenium")
    return f"needs {', '.join(programs)}" if programs else ""


class Browser:
    """A headless Chromium that keeps what its page was sent.

    Args:
        profile: An empty folder.
    """

    def __init__(self, profile: Path) -> None:
        from selenium import webdriver
        from selenium.webdriver.chrome.service import Service

        options = webdriver.ChromeOptions()
        options.binary_location = shutil.which("chromium") or ""
        flags = "headless no-sandbox disable-gpu disable-quic no-first-run disable-background-networking"
        for flag in [*flags.split(), "disable-component-update", "disable-sync", "hide-scrollbars"]:
            options.add_argument(f"--{flag}")
        options.add_argument(f"--user-data-dir={profile}")
        options.add_argument("--window-size=1400,900")
        options.set_capability("goog:loggingPrefs", {"performance": "ALL"})
        service = Service(shutil.which("chromedriver"), log_output=os.devnull)
        self.driver = webdriver.Chrome(options=options, service=service)
        self._requests: dict[str, str] = {}
        self.received: list[tuple[str, list[Point]]] = []

    def open(self, url: str) -> None:
        """Go to a page."""
        self.driver.get(url)

    def click(self, text: str) -> None:
        """Click the smallest element with exactly this text."""
        script = """
            const found = [...document.querySelectorAll('*')].filter(e => e.textContent.trim() === arguments[0]);
            if (found.length) found[found.length - 1].click();
            return found.length > 0;
        """
        wait_until(lambda: bool(self.driver.execute_script(script, text)), message=lambda: f"no {text!r} in the page")

    def press(self, icon: str) -> None:
        """Press one of the page's buttons that are pictures, such as ``refresh``."""
        script = """
            const found = document.getElementsByClassName('icon-' + arguments[0])[0];
            if (found) found.click();
            return Boolean(found);
        """
        wait_until(lambda: bool(self.driver.execute_script(script, icon)), message=lambda: f"no {icon!r}")

    def curves(self) -> list[tuple[str, list[Point]]]:
        """The answers to the page's own requests of curves so far: tag and points, in order of arrival."""
        for entry in self.driver.get_log("performance"):
            message = json.loads(entry["message"])["message"]
            params = message["params"]
            if message["method"] == "Network.responseReceived" and "/scalar/list" in params["response"]["url"]:
                query = urllib.parse.urlsplit(params["response"]["url"]).query
                self._requests[params["requestId"]] = urllib.parse.parse_qs(query)["tag"][0]
            elif message["method"] == "Network.loadingFinished" and params["requestId"] in self._requests:
                body = self.driver.execute_cdp_cmd("Network.getResponseBody", {"requestId": params["requestId"]})
                tag = self._requests.pop(params["requestId"])
                self.received.append((tag, points(json.loads(body["body"])["data"])))
        return self.received

    def hosts(self) -> set[str]:
        """The hosts that the page as it is now loaded something from."""
        script = "return performance.getEntriesByType('resource').map(e => new URL(e.name).hostname)"
        return set(self.driver.execute_script(script))

    def screenshot(self, path: str, width: int, height: int) -> None:
        """Save a picture of the page in a window of this size, in pixels."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        time.sleep(2)  # the charts take their new size in an animation
        self.driver.save_screenshot(path)

    def close(self) -> None:
        """End the browser and its driver."""
        self.driver.quit()


@contextlib.contextmanager
def browser(profile: Path) -> Iterator[Browser]:
    """A browser that is closed at exit."""
    opened = Browser(profile)
    try:
        yield opened
    finally:
        opened.close()
