"""The admin key: where it goes and where it never stays."""

from __future__ import annotations

import pytest
from playwright.async_api import Browser

from tests.server.console.browser import Watched, watched
from tests.server.console.play import admin_page, sign_in
from tests.server.gateway.harness import ADMIN_KEY, RunningGateway

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def test_the_key_travels_in_a_header_and_is_forgotten_with_the_page(console: Watched) -> None:
    asked = [r for r in console.requests if "/admin/" in r.url]
    assert asked
    for request in asked:
        assert (await request.all_headers())["authorization"] == f"Bearer {ADMIN_KEY}"
        assert "cookie" not in await request.all_headers()
    assert all(ADMIN_KEY not in request.url for request in console.requests)
    kept = "[...Object.values(localStorage), ...Object.values(sessionStorage), document.cookie].join()"
    assert ADMIN_KEY not in await console.page.evaluate(kept)
    assert await console.page.get_by_label("Admin key").input_value() == ""
    await console.page.reload()
    await console.wait_text("#key-message", "Type the admin key")


async def test_the_key_is_kept_for_the_tab_if_so_wished_until_it_is_forgotten(console: Watched) -> None:
    await console.page.get_by_label("keep it for this tab").check()
    await sign_in(console)
    await console.page.reload()
    await console.wait_text("#key-message", "The key works.")
    await console.page.get_by_role("button", name="Forget key").click()
    await console.wait_text("#key-message", "Type the admin key")
    await console.wait_text("#instances", "No instance")  # nothing it showed is left
    assert await console.page.evaluate("sessionStorage.length") == 0


async def test_a_wrong_key_shows_nothing_and_is_not_sent_again(browser: Browser, gateway: RunningGateway) -> None:
    async with watched(browser, admin_page(gateway)) as page:
        await page.page.get_by_label("Admin key").fill("wrong-wrong-wrong-wrong")
        await page.page.keyboard.press("Enter")
        await page.wait_text("#key-message", "[401 invalid_api_key]")
        await page.page.wait_for_timeout(500)  # two more rounds would have come by now
        asked = [r.url for r in page.requests if "/admin/" in r.url]
        assert asked
        assert len(asked) == len(set(asked)), "one round: each panel has asked once"
        assert await page.page.locator("#instances tbody tr").count() == 1
        assert "No instance" in await page.text("#instances")
        page.check()
