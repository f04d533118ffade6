"""A real server with a control key, and pages in a headless Chromium. Run by `make test-ui`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from e2e.server import Server

KEY = "control-key"
FLAGS = ("--max-num-seqs", "8", "--num-gpu-blocks-override", "2048")
LOAD_FAILED = "Failed to load resource"  # Chromium's words for a status of 400 or more, and for a refused connection


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker("browser")


@pytest.fixture(scope="session")
def ui_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    key = tmp_path_factory.mktemp("keys") / "control"
    key.write_text(KEY)
    with Server("--control-key", str(key), *FLAGS) as server:
        server.http.headers["authorization"] = f"Bearer {KEY}"
        yield server


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    from acceptance.screenshot import chromium

    with chromium() as browser:
        yield browser


@pytest.fixture
def open_page(browser: Any, ui_server: Server) -> Iterator[Callable[..., Any]]:
    """Return a function that opens /ui with a key. The test fails if a page logs an error, or if it asks another host
    than the servers that the test names. tolerated: words of an error that the test causes."""
    pages, errors, asked, allowed, expected = [], [], set(), {ui_server.url}, {LOAD_FAILED}

    def open_page(key: str = KEY, others: tuple[str, ...] = (), tolerated: str = LOAD_FAILED) -> Any:
        page = browser.new_page(viewport={"width": 1280, "height": 900})
        pages.append(page)
        page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("request", lambda request: asked.add(request.url))
        page.add_init_script(f"sessionStorage.setItem('key ', '{key}')")
        allowed.update(others)
        expected.add(tolerated)
        page.goto(f"{ui_server.url}/ui" + "".join(f"{'&' if i else '?'}server={url}" for i, url in enumerate(others)))
        return page

    yield open_page
    for page in pages:
        page.close()
    ui_server.post("/v1/reset", {})
    ui_server.post("/v1/resume", {"hold_id": "operator"})
    assert [error for error in errors if not any(words in error for words in expected)] == []
    assert {url for url in asked if not url.startswith((*(f"{one}/" for one in allowed), "data:"))} == set()
