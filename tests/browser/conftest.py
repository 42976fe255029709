"""A real browser, driven as a person would use it: headless Chromium through ChromeDriver."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from selenium import webdriver
from selenium.webdriver.chrome.options import Options
from selenium.webdriver.chrome.service import Service

FLAGS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-quic"),
    "--window-size=1200,900",
)


class Browser:
    """A driver, and what the page that it has open did."""

    def __init__(self, driver: webdriver.Chrome) -> None:
        self.driver = driver

    def open(self, page: Path) -> None:
        self.driver.get(page.absolute().as_uri())

    def run(self, script: str, *arguments: Any) -> Any:
        """The value of a JavaScript expression; `arguments[0]` ... are what follows it."""
        return self.driver.execute_script(f"return {script}", *arguments)

    def settle(self) -> None:
        """Two frames later, what an input has caused is drawn."""
        self.driver.execute_async_script(
            "const done = arguments[0]; requestAnimationFrame(() => requestAnimationFrame(() => done()))"
        )

    def complaints(self) -> list[str]:
        """Errors and warnings of the console since it was last asked."""
        log = self.driver.get_log("browser")  # pyright: ignore[reportAttributeAccessIssue]
        return [entry["message"] for entry in log if entry["level"] in ("SEVERE", "WARNING")]

    def requests(self) -> list[str]:
        """What was asked of the network, or of the disk, since it was last asked."""
        log = self.driver.get_log("performance")  # pyright: ignore[reportAttributeAccessIssue]
        messages = [json.loads(entry["message"])["message"] for entry in log]
        sent = [message["params"] for message in messages if message["method"] == "Network.requestWillBeSent"]
        return [each["request"]["url"] for each in sent if not each["request"]["url"].startswith(("data:", "blob:"))]


@pytest.fixture(scope="session")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[webdriver.Chrome]:
    chromium, chromedriver = shutil.which("chromium"), shutil.which("chromedriver")
    if not (chromium and chromedriver):
        missing = " and ".join(
            name for name, found in (("chromium", chromium), ("chromedriver", chromedriver)) if not found
        )
        reason = f"no {missing} on this machine; on Debian: apt-get install chromium chromium-driver"
        if os.environ.get("HEADWAY_NEEDS_BROWSER"):
            pytest.fail(reason)
        pytest.skip(reason)
    options = Options()
    options.binary_location = chromium
    for flag in (*FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('profile')}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(executable_path=chromedriver))  # so it fetches none
    yield driver
    driver.quit()


@pytest.fixture
def browser(driver: webdriver.Chrome) -> Browser:
    return Browser(driver)
