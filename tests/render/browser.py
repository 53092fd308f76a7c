"""Chromium, headless, driven by Selenium: the browser of the system and its driver, not downloaded.

Where there is none the tests are skipped, unless JAXPRTOOL_BROWSER=required, as CI has it.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager

from selenium import webdriver
from selenium.webdriver.chrome.service import Service

#: None of it is asked of anyone else, and it runs as root in a container.
ARGUMENTS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--force-device-scale-factor=1",
)


def missing() -> str | None:
    """Why there is no browser to test with; None if there is one."""
    found = shutil.which("chromium"), shutil.which("chromedriver")
    if all(found) or os.environ.get("JAXPRTOOL_BROWSER") == "required":
        return None
    return "there is no chromium with a chromedriver"


@contextmanager
def chromium(width: int = 1400, height: int = 900) -> Iterator[webdriver.Chrome]:
    """A browser with a window of a size; it keeps what it logs."""
    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium") or "/usr/bin/chromium"
    for argument in (*ARGUMENTS, f"--window-size={width},{height}"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    service = Service(shutil.which("chromedriver") or "/usr/bin/chromedriver")
    driver = webdriver.Chrome(options=options, service=service)
    try:
        yield driver
    finally:
        driver.quit()
