"""A headless Chromium, for pages that are tested as a reader sees them.

Skips if there is none, unless NEUMANN_REQUIRE_BROWSER=1 makes that a failure.
"""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


@contextmanager
def start_browser(profile: Path) -> Iterator[Any]:
    """A browser that logs its console and what it loads; its profile goes into this folder."""
    binary = shutil.which("chromium") or shutil.which("chromium-browser")
    driver = next(filter(os.path.exists, ("/usr/bin/chromedriver",)), None)
    driver = driver or shutil.which("chromedriver")
    if binary is None or driver is None:
        absent = "Chromium or its driver is not installed"
        if os.environ.get("NEUMANN_REQUIRE_BROWSER") == "1":
            pytest.fail(f"{absent}, and NEUMANN_REQUIRE_BROWSER=1")
        pytest.skip(absent)
    webdriver = pytest.importorskip("selenium.webdriver")
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = binary
    for flag in (*FLAGS, f"--user-data-dir={profile}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    # Without a named driver, selenium would look for one on the network.
    started = webdriver.Chrome(options=options, service=Service(driver))
    yield started
    started.quit()


def open_page(browser, path, *, width=1280, height=900, phone=False, dark=False):
    """Show a page as a screen of this size shows it."""
    scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})
    metrics = {"width": width, "height": height, "deviceScaleFactor": 2, "mobile": phone}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    browser.get(path.as_uri())
