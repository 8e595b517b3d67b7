"""The console in a real Chromium on a real engine: a swap in the middle of an answer, its row, and the way back."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from playwright.async_api import Browser, expect
from playwright.async_api import TimeoutError as PlaywrightTimeout

from tests.live import LiveServer
from tests.server.console.browser import TIMEOUT_MS, Watched, watched
from tests.server.console.play import ask, sign_in

pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="session")]
LONG = "900"  # tokens: long enough for a swap to come in the middle
PAUSE = "/pause?ttl_s=300"


@pytest_asyncio.fixture(loop_scope="session")
async def console(browser: Browser, live: LiveServer) -> AsyncIterator[Watched]:
    async with watched(browser, f"{live.processes.admin_url}/console") as page:
        yield page
        page.check()


async def ask_for(page: Watched, tokens: str) -> None:
    await page.page.get_by_label("Tokens at most").fill(tokens)
    await ask(page, "go on")


async def order(live: LiveServer, path: str) -> None:
    answer = await asyncio.to_thread(live.admin.post, path)
    assert answer.status_code == 200, answer.text


@contextlib.asynccontextmanager
async def begun(console: Watched, live: LiveServer, version: int) -> AsyncIterator[None]:
    """An answer of which the page shows a beginning by `version`. No engine generates meanwhile, or it would end."""
    await order(live, PAUSE)
    try:
        await ask_for(console, LONG)
        beginning = console.page.locator(f"#chat-log .run[data-version=v{version}]")
        while not await beginning.count():
            await order(live, "/resume")
            await order(live, PAUSE)
            with contextlib.suppress(PlaywrightTimeout):
                await beginning.wait_for(timeout=500)
        yield
    finally:
        await order(live, "/resume")


async def test_a_swap_in_the_middle_of_an_answer_is_seen_and_undone(
    console: Watched, live: LiveServer, checkpoints: dict[str, Path]
) -> None:
    first = await asyncio.to_thread(live.push, checkpoints["say-1"])
    second = await asyncio.to_thread(live.push, checkpoints["say-2"])
    await sign_in(console, live.processes.admin_key)
    await console.wait_text("#active", f"v{second}")
    async with begun(console, live, second):
        rollback = console.page.get_by_role("button", name="Roll back", exact=True)
        await console.wait_text("#rollback-note", f"to v{first}")
        await rollback.click()
        await console.page.locator("#swap-go").click()
        await console.wait_text("#swap-result", f"v{first} serves")
        await console.page.locator("#swap-close").click()
    await console.page.locator(f"#chat-log .run[data-version=v{first}]").wait_for()
    await console.wait_text("#chat-log .facts", f"written by v{second}, v{first}")
    await console.wait_text("#active", f"v{first}")
    await console.wait_text("#legend", f"v{first} ")
    assert f"v{second} " in await console.text("#legend")
    tints = await console.page.locator("#chat-log .run").evaluate_all(
        "runs => runs.map(run => getComputedStyle(run).backgroundColor)"
    )
    assert len(tints) == len(set(tints)) == 2
    texts = await console.page.locator("#chat-log .run").all_text_contents()
    assert [set(re.findall(r"w\d+", text)) for text in texts] == [{"w102"}, {"w101"}]  # what each version always says
    await check_row(console, first, second)


async def check_row(page: Watched, version: int, before: int) -> None:
    newest = page.page.locator("#swaps tbody tr").first
    shown = newest.locator("th, td").nth(1)  # the row of the swap before it names this version too
    await expect(shown).to_contain_text(f"v{version}", timeout=TIMEOUT_MS)
    cells = (await newest.inner_text()).split("\t")
    assert cells[1:5] == [f"v{version}", f"v{before}", "done", "together"]
    stall, prepare, commit = map(float, cells[5:8])
    assert stall > 0
    assert prepare >= 0
    assert commit >= 0
    assert cells[8] == "fingerprint verified"
    assert re.match(r"\S+ \(stall [\d.]+ ms", cells[9])
    label = await page.page.locator("#timeline svg").get_attribute("aria-label") or ""
    assert f"v{version} done" in label


async def test_the_fleet_and_the_throughput_are_those_of_the_engine(console: Watched, live: LiveServer) -> None:
    await sign_in(console, live.processes.admin_key)
    record = await asyncio.to_thread(live.instance)
    row = console.page.locator("#instances tbody tr").first
    await expect(row).to_contain_text(record["fingerprint"][:10], timeout=TIMEOUT_MS)
    await expect(row).to_contain_text("SERVING", timeout=TIMEOUT_MS)
    await ask_for(console, LONG)
    label = re.compile(r"tokens/s: now .* between [\d.]+ and [1-9]")
    await expect(console.page.locator("#throughput svg")).to_have_attribute("aria-label", label, timeout=TIMEOUT_MS)


async def test_the_public_page_streams_from_the_engine(browser: Browser, live: LiveServer) -> None:
    active = await asyncio.to_thread(live.active)
    async with watched(browser, f"{live.url}/console") as page:
        await page.wait_text("#model", live.name)
        await ask_for(page, "5")
        await page.wait_text("#chat-log .facts", "ended by length")
        facts = await page.text("#chat-log .facts")
        assert f"written by v{active}" in facts
        assert "5 tokens" in facts
        assert f"prompt read by v{active}" in facts
        page.check()
