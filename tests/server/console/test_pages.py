"""Rights of a page: with the admin key or without it, for the model that is chosen, and from another origin."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import orjson
import pytest
from playwright.async_api import Browser, Page, Route, expect

from tests.server.console.browser import TIMEOUT_MS, Watched, watched
from tests.server.console.play import Script, admin_page, put_versions, sign_in
from tests.server.gateway.harness import ADMIN_KEY, RunningGateway, new_key, running_gateway
from tests.server.gateway.upstream import Link, Received, Upstream, sending, upstream

pytestmark = pytest.mark.asyncio(loop_scope="session")


# the admin key: where it goes, and where it never stays


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
    panel, note = console.page.locator("#instances"), console.page.get_by_text("Type the admin key above")
    assert await panel.is_visible()
    assert not await note.is_visible()
    await console.page.reload()
    await expect(note).to_be_visible(timeout=TIMEOUT_MS)
    assert not await panel.is_visible(), "an empty table would say that nothing is there"


async def test_the_key_is_kept_for_the_tab_if_so_wished_until_it_is_forgotten(
    console: Watched, gateway: RunningGateway
) -> None:
    await asyncio.to_thread(put_versions, gateway, 2, 1)
    rollback = console.page.get_by_role("button", name="Roll back", exact=True)
    await expect(rollback).to_be_enabled(timeout=TIMEOUT_MS)
    await console.page.get_by_role("button", name="Forget key").click()
    await console.page.get_by_label("keep it for this tab").check()
    await sign_in(console)
    await expect(console.page.get_by_label("Admin key")).to_be_hidden(timeout=TIMEOUT_MS)
    await console.page.reload()
    await console.wait_text("#key-message", "The key works.")
    await console.page.get_by_role("button", name="Forget key").click()
    await console.wait_text("#key-message", "The chat works without")
    await console.wait_text("#instances", "No instance")  # nothing it showed is left
    await expect(rollback).to_be_hidden(timeout=TIMEOUT_MS)
    assert await console.page.locator("#rollback").is_disabled()
    assert await console.page.evaluate("sessionStorage.length") == 0


async def test_a_wrong_key_shows_nothing_and_is_not_sent_again(browser: Browser, gateway: RunningGateway) -> None:
    async with watched(browser, admin_page(gateway)) as page:
        await page.page.get_by_label("Admin key").fill("wrong-wrong-wrong-wrong")
        await page.page.keyboard.press("Enter")
        await page.wait_text("#key-message", "[401 invalid_api_key]")
        await page.wait_attribute("#key-message", "class", "^error$")
        await page.page.wait_for_timeout(500)  # two more rounds would have come by now
        asked = [r.url for r in page.requests if "/admin/" in r.url]
        assert asked
        assert len(asked) == len(set(asked)), "one round: each panel has asked once"
        assert await page.page.locator("#instances tbody tr").count() == 1
        assert not await page.page.locator("#instances").is_visible()
        assert await page.page.locator("#rollback").is_disabled()
        page.check()


async def test_a_key_that_is_revoked_takes_what_it_showed_along(console: Watched) -> None:
    refusal = {"error": {"message": "This key is revoked.", "code": "invalid_api_key"}}
    await console.page.route("**/admin/**", lambda route: route.fulfill(status=401, json=refusal))
    await console.wait_text("#key-message", "This key is revoked. [401 invalid_api_key]")
    await expect(console.page.locator("#instances")).to_be_hidden(timeout=TIMEOUT_MS)
    await expect(console.page.get_by_label("Admin key")).to_be_visible(timeout=TIMEOUT_MS)


async def test_a_wrong_key_is_told_when_it_is_typed_while_the_page_begins(
    browser: Browser, gateway: RunningGateway
) -> None:
    typed = asyncio.Event()

    async def later(route: Route) -> None:
        await typed.wait()
        await route.continue_()

    async with watched(browser, admin_page(gateway)) as page:
        await page.page.route("**/v1/models", later)
        await page.page.reload()
        await page.page.get_by_label("Admin key").fill("wrong-wrong-wrong-wrong")
        await page.page.keyboard.press("Enter")
        typed.set()
        await page.wait_text("#key-message", "[401 invalid_api_key]")


# the model that is chosen


async def test_a_model_is_chosen(browser: Browser, tmp_path: Path) -> None:
    file = tmp_path / "models.yaml"
    file.write_text("models: [{name: small}, {name: big}]\n")
    script = Script()
    async with upstream(script) as up:
        with running_gateway(tmp_path, model="", models=file, run_coordinator=False) as gateway:
            await asyncio.to_thread(gateway.register, up, "of-small", model="small")
            await asyncio.to_thread(gateway.register, up, "of-big", model="big")
            async with watched(browser, admin_page(gateway)) as page:
                await sign_in(page)
                await page.wait_text("#instances", "of-small")
                assert "of-big" not in await page.text("#instances")
                await page.page.select_option("#model-choice", "big")
                await page.wait_text("#instances", "of-big")
                assert "of-small" not in await page.text("#instances")
                await page.page.fill("#question", "hello")
                await page.page.click("#send")
                await page.wait_text("#chat-log", "Hello there.")
                assert script.bodies[-1]["model"] == "big"
                page.check()


# pages of other origins

ASK = """async ([url, key, path, body]) => {
  const headers = {"content-type": "application/json"};
  if (key) headers.authorization = `Bearer ${key}`;
  try {
    const options = body === null ? {headers} : {method: "POST", headers, body: JSON.stringify(body)};
    const answer = await fetch(url + path, options);
    const seen = Object.fromEntries(answer.headers);
    return {status: answer.status, body: await answer.json(), seen};
  } catch (error) {
    return {status: 0, error: String(error)};
  }
}"""
PLAIN = """async ([url, body]) => {
  try {
    await fetch(url + "/generate", {method: "POST", mode: "no-cors", body: JSON.stringify(body)});
  } catch (error) {
    return String(error);
  }
  return "sent";
}"""


async def instance(link: Link, asked: Received) -> None:
    if asked.method == "GET":
        await link.json()
        return
    extra = b"x-hotswap-weight-version: 1\r\n"
    await link.json(orjson.dumps({"model": orjson.loads(asked.body).get("model"), "choices": []}), extra=extra)


def posts(up: Upstream) -> list[Received]:
    """The requests that clients have sent: the gateway's own questions are no POSTs."""
    return [each for each in up.requests if each.method == "POST"]


@asynccontextmanager
async def page_of(browser: Browser) -> AsyncIterator[Page]:
    """A page that another server has given out: one of this machine, under another port."""
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/html\r\nconnection: close\r\n\r\n"
    async with upstream(sending(head + b"<!doctype html><title>elsewhere</title>")) as site:
        context = await browser.new_context()
        context.set_default_timeout(TIMEOUT_MS)
        page = await context.new_page()
        await page.goto(f"http://localhost:{site.port}/")
        try:
            yield page
        finally:
            await context.close()


async def ask(page: Page, gateway: RunningGateway, key: str, path: str, body: Any) -> dict[str, Any]:
    found: dict[str, Any] = await page.evaluate(ASK, [gateway.url, key, path, body])
    return found


BODY = {"model": "toy", "prompt": "a"}


async def test_an_allowed_page_asks_with_its_key_and_reads_the_answer(browser: Browser, tmp_path: Path) -> None:
    async with upstream(instance) as up, page_of(browser) as page:
        origin = await page.evaluate("location.origin")
        with running_gateway(tmp_path, run_coordinator=False, allowed_origins=(origin,)) as gateway:
            gateway.register(up)
            _, line = await new_key(gateway, limits={"requests_per_min": 2})
            key = line.split()[-1]
            answer = await ask(page, gateway, key, "/v1/completions", BODY)
            assert (answer["status"], answer["body"]["model"]) == (200, "toy")
            assert answer["seen"]["x-hotswap-weight-version"] == "1"
            assert answer["seen"]["x-ratelimit-remaining-requests"] == "1"
            for given, path, body, status in (
                ("", "/v1/completions", BODY, 401),
                (key, "/v1/completions", {"prompt": 1}, 200),
                (key, "/v1/completions", BODY, 429),
                (key, "/v1/feedback", {"id": "x", "rating": "up"}, 429),
                (key, "/readyz", None, 200),
            ):
                answer = await ask(page, gateway, given, path, body)
                assert answer["status"] == status, (path, answer)
                assert "request_id" in str(answer) or answer["seen"]["x-request-id"]
            assert (await ask(page, gateway, key, "/admin/weights", None))["status"] == 0, "nothing of the admin port"


async def test_another_page_reads_nothing_and_without_keys_does_nothing(browser: Browser, tmp_path: Path) -> None:
    with running_gateway(tmp_path, run_coordinator=False, allowed_origins=("https://else.example",)) as gateway:
        async with gateway.instance(instance) as up, page_of(browser) as page:
            _, line = await new_key(gateway)
            answer = await ask(page, gateway, line.split()[-1], "/v1/completions", BODY)
            assert answer["status"] == 0, "its browser has asked, and was not told that it may"
            assert not posts(up)


async def test_a_foreign_page_cannot_post_to_an_open_gateway(browser: Browser, tmp_path: Path) -> None:
    with running_gateway(tmp_path, run_coordinator=False) as gateway:
        async with gateway.instance(instance) as up:
            context = await browser.new_context()
            context.set_default_timeout(TIMEOUT_MS)
            page = await context.new_page()
            await page.route("http://evil.example/", lambda route: route.fulfill(body="<title>evil</title>"))
            await page.goto("http://evil.example/")
            await page.evaluate(PLAIN, [gateway.url, {"prompt": "a"}])
            assert (await ask(page, gateway, "", "/generate", {"prompt": "a"}))["status"] == 0
            assert not posts(up)
            await context.close()
            async with page_of(browser) as own:
                answer = await ask(own, gateway, "", "/v1/completions", BODY)
                assert answer["status"] == 200, "a page of this machine may, and reads the answer"
