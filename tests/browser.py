"""Debian's Chromium without a screen, for tests that open a page."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

FLAGS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--hide-scrollbars",
)  # fmt: skip


def require_browser() -> tuple[str, str]:
    """Paths of browser and driver; without them the test is skipped with a notice."""
    browser = shutil.which("chromium") or shutil.which("chromium-browser")
    driver = shutil.which("chromedriver")
    if not browser or not driver:
        pytest.skip("no chromium and chromedriver here: the report was not opened in a browser")
    pytest.importorskip(
        "selenium", reason="selenium is not installed: the report was not opened in a browser"
    )
    return browser, driver


@contextmanager
def open_browser(profile: Path) -> Iterator[Any]:
    """A browser with an empty profile that logs everything pages write to the console."""
    browser, driver = require_browser()
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = browser
    for flag in (*FLAGS, f"--user-data-dir={profile}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    window = webdriver.Chrome(options=options, service=Service(executable_path=driver))
    try:
        yield window
    finally:
        window.quit()


def set_screen(window: Any, width: int, height: int, theme: str) -> None:
    """A screen of exactly this many CSS pixels, light or dark."""
    size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
    window.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    media = {"features": [{"name": "prefers-color-scheme", "value": theme}]}
    window.execute_cdp_cmd("Emulation.setEmulatedMedia", media)


def screenshot(window: Any, path: Path) -> None:
    """The whole page, however long."""
    import base64

    shot = window.execute_cdp_cmd("Page.captureScreenshot", {"captureBeyondViewport": True, "format": "png"})
    path.write_bytes(base64.b64decode(shot["data"]))
