"""Debian's Chromium, headless, driven by Playwright; and what a page of the console did besides what was looked at."""

from __future__ import annotations

import re
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from playwright.async_api import Browser, BrowserContext, Page, Request, async_playwright, expect

from tests.lacking import lacking

ROOT = Path(__file__).parents[3]
TIMEOUT_MS = 90_000  # a condition that comes true is seen at once; this is for loaded machines
# The admin page looks at the fleet once a second.
HURRIED = "const later = window.setTimeout; window.setTimeout = (work, ms, ...more) => later(work, ms / 5, ...more);"


def executable() -> str:
    """Chromium's path: the one on PATH, or what scripts/debian.sh unpacked. Skips the test, or fails it on CI."""
    unpacked = ROOT / ".venv" / "chromium" / "run"
    found = shutil.which("chromium") or (str(unpacked) if unpacked.exists() else None)
    return found or lacking("there is no Chromium; run scripts/debian.sh")


@asynccontextmanager
async def chromium() -> AsyncIterator[Browser]:
    """A headless browser; no sandbox, for containers and root have none to give."""
    async with async_playwright() as playwright:
        arguments = ["--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu"]
        browser = await playwright.chromium.launch(executable_path=executable(), args=arguments, timeout=TIMEOUT_MS)
        try:
            yield browser
        finally:
            await browser.close()


@dataclass
class Watched:
    """A page, and all that must not happen in it. `check` fails if any of it did."""

    page: Page
    origin: str
    requests: list[Request] = field(default_factory=list)
    elsewhere: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)

    def check(self) -> None:
        assert not self.elsewhere, f"requests left the origin: {self.elsewhere}"
        assert not self.faults, self.faults
        for request in self.requests:
            assert "key" not in urlsplit(request.url).query

    async def text(self, selector: str) -> str:
        return (await self.page.text_content(selector)) or ""

    async def wait_text(self, selector: str, text: str) -> None:
        await expect(self.page.locator(selector)).to_contain_text(text, timeout=TIMEOUT_MS)

    async def wait_attribute(self, selector: str, name: str, pattern: str) -> None:
        """`pattern` is a regular expression, found anywhere in the attribute."""
        await expect(self.page.locator(selector)).to_have_attribute(name, re.compile(pattern), timeout=TIMEOUT_MS)


@asynccontextmanager
async def watched(browser: Browser, url: str, **settings: Any) -> AsyncIterator[Watched]:
    """A new page on `url`; `settings` are the browser context's. Requests that would leave the origin are stopped."""
    context: BrowserContext = await browser.new_context(**settings)
    context.set_default_timeout(TIMEOUT_MS)
    await context.add_init_script(HURRIED)
    page = await context.new_page()
    parts = urlsplit(url)
    seen = Watched(page, f"{parts.scheme}://{parts.netloc}")

    def on_request(request: Request) -> None:
        seen.requests.append(request)
        if not request.url.startswith((seen.origin + "/", "data:", "blob:")):
            seen.elsewhere.append(request.url)

    page.on("request", on_request)
    page.on("pageerror", lambda error: seen.faults.append(str(error)))
    page.on("console", lambda m: seen.faults.append(m.text) if _is_fault(m.type, m.text) else None)
    page.on("dialog", lambda dialog: seen.faults.append(f"a dialog: {dialog.message}"))
    await context.route(lambda target: not target.startswith(seen.origin + "/"), lambda route: route.abort())
    try:
        await page.goto(url)
        yield seen
    finally:
        await context.close()


def _is_fault(kind: str, text: str) -> bool:
    """Chromium notes every answer that is no success as an error; those are looked at where they are expected."""
    return kind == "error" and not text.startswith("Failed to load resource: the server responded with a status of")
