"""Tasks that everybody must be able to do: by keyboard, on a phone, with a screen reader."""

from __future__ import annotations

import asyncio
from typing import Any

import orjson
import pytest
from playwright.async_api import Browser

from tests.node import JS, installed
from tests.server.console import play
from tests.server.console.browser import Watched, watched
from tests.server.console.play import MARKUP, Script, admin_page, answered, say, serve_version, sign_in
from tests.server.gateway.harness import ADMIN_KEY, KEYS, RunningGateway, new_key

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.broad]
FORMS = {
    "swap": "Roll back",
    "publish": "Publish a checkpoint",
    "release": "Start a release",
    "key": "Make a key",
    "revoke": "Revoke reader",
    "diff": "Diff of v1 to the active version",
}


@pytest.fixture(scope="module")
def axe(tmp_path_factory: pytest.TempPathFactory) -> str:
    """axe-core's script, installed as the lock file of tests/js says."""
    directory = tmp_path_factory.mktemp("axe")
    installed(JS, directory)
    return (directory / "node_modules" / "axe-core" / "axe.min.js").read_text()


async def violations(page: Watched, axe: str) -> list[str]:
    await page.page.evaluate(axe)
    found = await page.page.evaluate("axe.run(document, {resultTypes: ['violations']})")
    return [f"{v['id']}: {n['html']} {n['failureSummary']}" for v in found["violations"] for n in v["nodes"]]


@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_axe_finds_nothing(
    browser: Browser, gateway: RunningGateway, script: Script, axe: str, scheme: Any
) -> None:
    script.pieces = [(f"word{v} ", v) for v in range(1, 13)]  # every tint twice
    await asyncio.to_thread(play.put_versions, gateway, 2, 1)
    await serve_version(gateway, 2)
    await asyncio.to_thread(play.put_swaps, gateway)
    for step in (1, 2):
        point = {"step": step, "time": float(step), "reward": step / 4, "loss": 1.0}
        await asyncio.to_thread(gateway.store.put, KEYS.training_point(step), orjson.dumps(point))
    await new_key(gateway, name="reader", scopes=["viewer"])
    async with watched(browser, admin_page(gateway), color_scheme=scheme, reduced_motion="reduce") as page:
        await sign_in(page)
        await page.wait_text("#swaps", "done")
        await page.page.wait_for_selector("#reward svg path")
        await say(page)
        assert await violations(page, axe) == []
        for form, opener in FORMS.items():
            await page.page.get_by_role("button", name=opener, exact=True).click()
            assert await violations(page, axe) == [], form
            await page.page.locator(f"#{form}-close").click()
        page.check()
    async with watched(browser, f"{gateway.url}/console", color_scheme=scheme) as page:
        await say(page)
        assert await violations(page, axe) == []
        page.check()


async def test_all_of_it_is_done_by_keyboard(browser: Browser, gateway: RunningGateway, script: Script) -> None:
    await asyncio.to_thread(play.put_versions, gateway, 2, 1)
    await serve_version(gateway, 2)
    async with watched(browser, admin_page(gateway)) as page:
        keyboard = page.page.keyboard
        await keyboard.press("Tab")
        assert await page.page.evaluate("document.activeElement.textContent") == "Skip to the question"
        await keyboard.press("Tab")
        assert await page.page.evaluate("document.activeElement.id") == "key"
        await keyboard.type(ADMIN_KEY)
        await keyboard.press("Enter")
        await page.wait_text("#key-message", "The key works.")
        await page.wait_attribute("#throughput svg", "aria-label", "tokens/s")
        reached = await tab_through(page)
        for name in ("question", "send", "clear", "chat-log", "rollback", "summary", "a", "select"):
            assert name in reached
        await page.page.locator("#question").focus()
        await keyboard.type("first line")
        await keyboard.press("Shift+Enter")
        await keyboard.type("second line")
        await keyboard.press("Enter")
        await answered(page)
        assert script.bodies[0]["messages"][0]["content"] == "first line\nsecond line"
        page.check()


async def tab_through(page: Watched) -> set[str]:
    """Ids or tags of what Tab leads to, each with an outline that can be seen, until it leaves the page."""
    reached: set[str] = set()
    for _ in range(80):
        await page.page.keyboard.press("Tab")
        where, outline = await page.page.evaluate(
            "[document.activeElement.id || document.activeElement.localName,"
            " getComputedStyle(document.activeElement).outlineStyle]"
        )
        if where == "body":
            break
        assert outline != "none", where
        reached.add(where)
    return reached


async def test_a_phone_shows_all_without_scrolling_sideways(
    browser: Browser, gateway: RunningGateway, script: Script
) -> None:
    script.pieces = [("W" * 400, 1), (MARKUP, 2)]
    await asyncio.to_thread(play.put_swaps, gateway)
    for url in (admin_page(gateway), f"{gateway.url}/console"):
        async with watched(browser, url, viewport={"width": 320, "height": 640}) as page:
            if url.startswith(admin_page(gateway)):
                await sign_in(page)
                await page.wait_text("#swaps", "done")
                row = await page.page.locator("#swaps tbody tr").last.evaluate("row => row.offsetHeight")
                assert row < 100, "a cell that has to be scrolled to makes no row high"
                await page.page.get_by_role("button", name="Make a key").click()
                assert await page.page.locator("#key-dialog").evaluate("d => d.scrollWidth <= d.clientWidth")
                await page.page.locator("#key-close").click()
            await say(page)
            assert await page.page.evaluate("document.documentElement.scrollWidth") <= 320
            page.check()


async def test_a_screen_reader_is_told_in_sentences(public: Watched, script: Script) -> None:
    script.pieces = [(w, 1) for w in ("One ", "sentence", ". ", "And ", "an", "other ", "one", ".")]
    await say(public)
    said = await public.page.locator("#announcements p").all_text_contents()
    assert "".join(said).replace(" ", "") == "Onesentence.Andanotherone."
    assert len(said) <= 2  # not one for each token
    assert await public.page.get_attribute("#announcements", "aria-live") == "polite"
    assert await public.page.get_attribute("#chat-log", "aria-live") is None
