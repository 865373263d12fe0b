"""A real Chromium, and what a page may not do in it."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import Browser, BrowserContext, ConsoleMessage, Page, Request, Route, expect, sync_playwright

PHONE = (390, 844)
DESK = (1280, 900)
PATIENCE_MS = 15_000
"""How long a busy machine may take over what is expected."""
MISSING = "Chromium is missing: install it, for example apt-get install chromium"


@contextlib.contextmanager
def chromium() -> Iterator[Browser]:
    """The machine's Chromium without a window; the test is skipped where there is none."""
    path = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if path is None:
        pytest.skip(MISSING)
    expect.set_options(timeout=PATIENCE_MS)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()


@dataclass
class Visit:
    """One page of the console, and what was wrong with it."""

    page: Page
    context: BrowserContext
    artefacts: Path
    errors: list[str] = field(default_factory=list)
    """Exceptions and what the browser logged as errors; an answer that the page deals with is none."""
    elsewhere: list[str] = field(default_factory=list)
    """Requests that left the origin."""

    def shoot(self, name: str) -> Path:
        """A picture of the whole page at the present width."""
        self.artefacts.mkdir(parents=True, exist_ok=True)
        path = self.artefacts / f"{name}.png"
        self.page.screenshot(path=path, full_page=True, animations="disabled")
        return path

    def overflow(self) -> int:
        """Pixels by which the page is wider than its window."""
        script = "document.scrollingElement.scrollWidth - window.innerWidth"
        width: int = self.page.evaluate(script)
        return width


def answering(status: int, headers: dict[str, str], body: str) -> Callable[[Route], None]:
    """Answers a problem in the server's place."""

    def fulfill(route: Route) -> None:
        route.fulfill(status=status, headers=headers, content_type="application/problem+json", body=body)

    return fulfill


@contextlib.contextmanager
def visit(
    browser: Browser, url: str, artefacts: Path, size: tuple[int, int] = DESK, *, absent: Sequence[str] = ()
) -> Iterator[Visit]:
    """Open `url`; every error and every request to another origin is noted. `absent`: paths that answer 404."""
    width, height = size
    touch = width < 600
    context = browser.new_context(
        viewport={"width": width, "height": height},
        color_scheme="light",
        reduced_motion="reduce",
        has_touch=touch,
        timezone_id="UTC",
    )
    context.set_default_timeout(PATIENCE_MS)
    page = context.new_page()
    found = Visit(page, context, artefacts)
    origin = urlsplit(url)[:2]

    def on_request(request: Request) -> None:
        parts = urlsplit(request.url)
        if parts[:2] != origin and parts.scheme not in {"data", "about"}:
            found.elsewhere.append(request.url)

    def on_console(message: ConsoleMessage) -> None:
        # The browser logs every answer with an error status; the page says those in words.
        if message.type in {"error", "warning"} and "Failed to load resource" not in message.text:
            found.errors.append(message.text)

    page.on("request", on_request)
    page.on("console", on_console)
    page.on("pageerror", lambda error: found.errors.append(str(error)))
    gone = json.dumps({"title": "Not Found", "status": 404, "detail": "Not Found"})
    for path in absent:
        page.route(f"**{path}", answering(404, {}, gone))
    page.goto(url)
    try:
        yield found
    finally:
        context.close()
