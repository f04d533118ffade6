"""Starting Debian's Chromium under Playwright."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator

from playwright.sync_api import Browser, sync_playwright


@contextlib.contextmanager
def chromium() -> Iterator[Browser]:
    """Give a headless Chromium. Raises FileNotFoundError if it is not installed."""
    path = shutil.which("chromium")
    if path is None:
        raise FileNotFoundError("chromium is missing: apt-get install chromium")
    flags = ["--no-sandbox"] if os.geteuid() == 0 else []  # Chromium's sandbox refuses root
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=flags)
        yield browser
        browser.close()
