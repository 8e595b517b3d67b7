"""A page of another origin asks the gateway, in a real browser: what it may read, and what foreign pages may not do."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import orjson
import pytest
from playwright.async_api import Browser, Page

from tests.server.gateway.harness import RunningGateway, new_key, running_gateway
from tests.server.gateway.upstream import Link, Received, Upstream, upstream

pytestmark = pytest.mark.asyncio(loop_scope="module")

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
async def page_of(browser: Browser, html: bytes = b"<!doctype html><title>elsewhere</title>") -> AsyncIterator[Page]:
    """A page that another server has given out: one of this machine, under another port."""

    async def give(link: Link, _: Received) -> None:
        head = b"HTTP/1.1 200 OK\r\ncontent-type: text/html\r\ncontent-length: %d\r\n\r\n"
        await link.send(head % len(html) + html)

    async with upstream(give) as site:
        context = await browser.new_context()
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
    async with upstream(instance) as up, page_of(browser) as page:
        with running_gateway(tmp_path, run_coordinator=False, allowed_origins=("https://else.example",)) as gateway:
            gateway.register(up)
            _, line = await new_key(gateway)
            answer = await ask(page, gateway, line.split()[-1], "/v1/completions", BODY)
            assert answer["status"] == 0, "its browser has asked, and was not told that it may"
            assert not posts(up)


async def test_a_foreign_page_cannot_post_to_an_open_gateway(browser: Browser, tmp_path: Path) -> None:
    async with upstream(instance) as up:
        with running_gateway(tmp_path, run_coordinator=False) as gateway:
            gateway.register(up)
            context = await browser.new_context()
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
